"""tools/merge.py: its shares, what it equals, and that other programs open its file."""

import random
import re
from pathlib import Path

import pytest
import torch
from tools import merge, runs

import eval as evaluation
import train
from schedules import DECAY_SHAPES, constant, decay
from test_readme import PAGES
from test_train import flags


@pytest.mark.parametrize("shape", DECAY_SHAPES)
def test_shares_are_those_of_a_loop_and_sum_to_1(shape):
    tokens = sorted(random.Random(0).sample(range(1000), 9))
    c = merge.shares(tokens, shape)
    for j in range(1, 9):  # updates between two checkpoints are in all later checkpoints
        middle = (tokens[j - 1] + tokens[j]) / 2
        factor = DECAY_SHAPES[shape]((middle - tokens[0]) / (tokens[-1] - tokens[0]))
        assert sum(c[j:]) == pytest.approx(factor, abs=1e-14)
    assert sum(c) == pytest.approx(1, abs=1e-14) and merge.SHAPES.keys() == DECAY_SHAPES.keys()


@pytest.mark.parametrize("shape", DECAY_SHAPES)
def test_merged_is_decayed_under_sgd_with_fixed_gradients(shape):
    gradients = torch.randn(50, 7, dtype=torch.double)
    lr = decay(constant(0.1), 50, 20, shape)
    trunk, decayed = torch.zeros(2, 7, dtype=torch.double)
    Path("run").mkdir()
    runs.write_json(Path("run/config.json"), dict(total_tokens=50, decay_tokens=0))
    for n, gradient in enumerate(gradients, 1):  # a step is a token
        trunk, decayed = trunk - 0.1 * gradient, decayed - lr(n - 0.5) * gradient
        saved = dict(config={}, tokens=n, model={"w": trunk}, stages=[])
        runs.write_checkpoint(Path(f"run/ckpt/{n:03}.pt"), saved)
    assert merge.main(["run", f"--shape={shape}", "--last=0.4"]) == 0
    merged = runs.read_checkpoint(Path("run/merged.pt"))["model"]["w"]
    torch.testing.assert_close(merged, decayed, rtol=1e-13, atol=1e-14)


def test_eval_and_branch_open_the_merged_weights(corpus_path, capsys):
    saves = dict(save_every=256, keep_checkpoints=99, out="runs/trunk")
    assert train.main(flags(corpus_path, schedule="wsd", **saves)) == 0
    assert merge.main(["runs/trunk", "--last=0.02"]) == 2  # one checkpoint
    assert "fewer than 2 checkpoints" in capsys.readouterr().err
    (command,) = re.findall(r"python -m tools.merge (.+)", PAGES["schedules.md"])
    assert merge.main(command.split()) == 0
    assert runs.read_checkpoint(Path("runs/trunk/merged.pt"))["tokens"] == 36 * 256  # no decay
    assert evaluation.main(["--model=runs/trunk/merged.pt", "--device=cpu"]) == 0
    assert train.main(["--branch=runs/trunk/merged.pt", "--decay_tokens=1024"]) == 0
