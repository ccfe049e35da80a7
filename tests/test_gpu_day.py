"""The measurements for a GPU, in small on a CPU, and the estimate of its memory."""

import json
import math
from pathlib import Path

import pytest

import gpu_day
import paper
import sweep
from model import empty_model
from schedules import make_schedule, tuned_lr
from tools import bench

TINY = (
    "--n_layer 1 --n_embd 32 --n_head 2 --n_kv_head 1 --n_ffn 32 --vocab_size 256 "
    "--seq_len 32 --batch_size 4 --micro_batch_size 2 --device cpu --no-compile"
)
MOE = "--n_expert 4 --n_expert_active 2"


@pytest.fixture
def result(capfd, corpus_path):
    """A function that runs a step in small, and returns its line."""

    def run(step: str, more: str = "") -> dict:
        assert gpu_day.main(f"{step} {TINY} --data {corpus_path} {more}".split()) == 0
        return json.loads(capfd.readouterr().out.splitlines()[-1])

    return run


def test_a_line_has_what_reproduces_it(result):
    line = result("moe", MOE)
    assert line["flags"].startswith(f"--preset 1B-moe {TINY}")
    assert {"step", "device", "torch", "python", "commit", "seconds"} <= line.keys()
    assert line["torch.float32"] < 1e-5 < line["torch.bfloat16"] < 0.05


def test_runs_that_continue_are_exact(result):
    more = "--total_tokens 2k --warmup_tokens 300 --decay_share 0.25"
    line = result("exact-moe-bfloat16", more)
    assert (line["resumed"], line["branch"], line["sweep"]) == (0, 0, 0)


NANOGPT = """
import types, torch
GPTConfig = types.SimpleNamespace
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        torch.nn.init.zeros_(self.table.weight)
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr, betas)
    def forward(self, idx, targets):
        logits = self.table(idx)
        return logits, torch.nn.functional.cross_entropy(logits.mT, targets)
"""


def test_speeds_of_ours_nanogpt_and_transformers(result, monkeypatch, tmp_path):
    Path("model.py").write_text(NANOGPT)
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    more = "--schedule wsd --lr 0.1 --total_tokens 4k --warmup_tokens 0"
    for step in ("1B", "nanogpt"):
        line = result(step, more)
        assert line["tokens_per_second"] > 0 and 0 < line["estimated_gib"] < 0.1
        first, last = line["losses"]
        assert last < first - 0.5
    line = result("transformers", MOE)
    assert line["ours"] > 0 and line["transformers"] > 0


def test_the_race_runs_every_runner_at_its_learning_rate(monkeypatch, result):
    trained = []

    def loss(cfg, folder):
        """Lowest at 1/2 of the middle of five learning rates."""
        lowest = 0.5 * tuned_lr(vars(trained[2 if cfg.schedule == "wsd" else 7]))
        return {"loss": 2 + math.log2(tuned_lr(vars(cfg)) / lowest) ** 2}

    monkeypatch.setattr(sweep, "train_all", lambda runs, *_, **more: trained.extend(runs))
    monkeypatch.setattr(paper, "row_of", loss)
    line = result("race", "--total_tokens 512 --warmup_tokens 128")
    wsd, power = (line[f"pilot of {x}"]["best"] for x in ("wsd", "power"))
    assert wsd == pytest.approx(0.5 * trained[2].lr)
    runs = trained[-6:]
    assert {cfg.total_tokens for cfg in runs} == {16 * 512}
    assert [cfg.lr for cfg in runs[:4]] == [wsd, wsd, wsd / 2, wsd / 2]
    # the number of Power's pilot is its learning rate after the tokens of a pilot
    assert make_schedule(runs[4])(512) == pytest.approx(power, rel=1e-4)


MEASURED = {  # at commit 81f0289 on one H100: preset and passes -> peak GiB
    "--preset 1B --micro_batch_size 4": 59.0,
    "--preset 1B --micro_batch_size 2": 37.3,
    "--preset 1B-moe --micro_batch_size 4": 44.5,
    "--preset PowerLM-3B --micro_batch_size 2 --recompute": 57.1,
    "--preset PowerMoE-3B --micro_batch_size 2 --recompute": 52.0,
}


@pytest.mark.parametrize("argv", MEASURED)
def test_the_estimate_of_memory_is_within_a_tenth_of_the_peak(argv):
    cfg = gpu_day.config_of([*argv.split(), "--dtype=bfloat16"])
    parts = bench.memory(cfg, empty_model(cfg).n_params())
    assert sum(parts.values()) / 2**30 == pytest.approx(MEASURED[argv], rel=0.1)


def test_a_dry_run_counts_the_run(capsys):
    """A trillion tokens of the model with 1.2 billion parameters."""
    assert bench.main(["--preset=1B", "--total_tokens=1e12", "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "1,208,083,968 parameters" in text
    assert "238,418 steps of 4,194,304 tokens" in text
    assert "8.76e+21" in text  # operations, 8.76 GFLOP per token
    assert "parameters 4.5," in text  # GiB, with 4 bytes each
