"""Averages of the weights, kept in training by --average."""

import itertools
from pathlib import Path

import pytest
import torch
from tools import devices

import train
from eval import main as evaluate, validation_loss
from model import load_model, main as export
from test_resume import stop
from test_train import SMALL, flags, metrics, read, same

AVERAGE = dict(decay_tokens=0, total_tokens=3072, eval_every=1024)


@pytest.mark.parametrize("batch_size", [4, 8])
def test_weights_at_n_tokens_count_as_n_to_the_16th(batch_size, corpus):
    changed = dict(
        AVERAGE, average=True, batch_size=batch_size, schedule="constant", lr=0.05
    )
    cfg = devices.resolve_device(
        train.make_config(**SMALL | changed | {"warmup_tokens": 0})
    )
    state, before, total = train.build(cfg), 0, 0.0
    expected = dict.fromkeys(dict(state.model.named_parameters()), 0.0)
    for _ in itertools.islice(train.training_steps(cfg, state, corpus), 12):
        share = float(state.tokens) ** 17 - float(before) ** 17  # of the integral of n^16
        before, total = state.tokens, total + share
        for name, w in state.model.named_parameters():
            expected[name] += share * w.detach().double()
    for name, w in state.average.named_parameters():
        torch.testing.assert_close(
            w.double(), expected[name] / total, rtol=1e-4, atol=1e-6
        )
        assert not w.requires_grad


def run(corpus_path, out: str, *more: str, **changed) -> dict:
    argv = [*flags(corpus_path, out=out, **AVERAGE | changed), *more]
    assert train.main(argv) == 0
    return read(Path(out) / "record.json")


def test_averaging_does_not_change_training(corpus_path, corpus, capsys):
    """What is saved, without the optimizer, has the loss of the record and wrote the sample."""
    averaged, plain = run(corpus_path, "a", "--average"), run(corpus_path, "b")
    assert averaged["val_loss"] == plain["val_loss"] != averaged["average_val_loss"]
    assert "average_val_loss" not in plain
    lines = metrics(Path("a"), "average_val_loss")
    assert [line["tokens"] for line in lines] == [1024, 2048, 3072]
    model = load_model("a/average.pt")
    loss = validation_loss(model, corpus)["val_loss"]
    assert loss == pytest.approx(averaged["average_val_loss"], abs=1e-6)
    assert evaluate(["--model=a/average.pt", "--device=cpu"]) == 0  # it finds the corpus
    assert f"{loss:.4f}" in capsys.readouterr().out
    newest = torch.load(max(Path("a/ckpt").iterdir()), weights_only=True)
    saved = torch.load("a/average.pt", weights_only=True)
    assert "optimizer" not in saved and same(saved["model"], newest["average"])
    torch.manual_seed(0)
    assert Path("a/sample.txt").read_bytes().decode() == train.sample(
        model, corpus.tokenizer
    )


def test_a_run_without_a_decay_is_evaluated_and_exported_by_its_average(
    corpus_path, capsys
):
    """As its record reports it. A run that decays keeps its last weights."""
    record = run(corpus_path, "a", "--average")
    decayed = run(corpus_path, "b", "--average", decay_tokens=512)
    argv = flags(corpus_path, out="c", schedule="cosine", total_tokens=3072)
    assert train.main([*argv, "--average"]) == 0
    cosine = read(Path("c/record.json"))
    results = [("a", record["average_val_loss"]), ("b", decayed["val_loss"])]
    for out, loss in [*results, ("c", cosine["val_loss"])]:
        capsys.readouterr()
        assert evaluate([f"--model={out}", "--device=cpu"]) == 0
        printed = capsys.readouterr()
        assert f"{loss:.4f} nats" in printed.out
        assert ("averaged weights" in printed.err) == (out == "a")
        assert export([f"--export={out}", f"--to={out}-granite"]) == 0
        assert (
            evaluate([f"--model={out}-granite", f"--data={corpus_path}", "--device=cpu"])
            == 0
        )
        assert f"{loss:.4f} nats" in capsys.readouterr().out


def test_only_a_decay_of_its_own_is_replaced_by_the_average(monkeypatch):
    """Not that of a planned schedule, which is all one decay, whatever its name."""

    def of(name: str, tokens: int = 0):
        fields = dict(schedule=name, average=True, decay_tokens=tokens)
        return train.make_config(**fields)

    used = [of("wsd"), of("wsd", 10), of("power"), of("cosine")]
    assert [cfg.uses_average for cfg in used] == [True, False, True, False]


def test_resuming_and_branching_continue_the_average(corpus_path):
    """A branch of a run without an average starts one, before its decay."""
    whole = run(corpus_path, "a", "--average")["average_val_loss"]
    stop([*flags(corpus_path, out="stopped", **AVERAGE), "--average"], 10)
    assert train.main(["--out=stopped", "--resume"]) == 0
    run(corpus_path, "half", "--average", total_tokens=1536)
    run(corpus_path, "plain", total_tokens=1536, decay_tokens=256)
    for parent in ("half", "plain"):
        argv = [
            f"--branch={parent}",
            "--average",
            "--total_tokens=3072",
            "--decay_tokens=0",
        ]
        assert train.main([*argv, f"--out=from-{parent}", "--device=cpu"]) == 0
    loss = lambda out: read(Path(out) / "record.json")["average_val_loss"]
    assert loss("stopped") == loss("from-half") == whole
    assert loss("from-plain") == pytest.approx(whole, abs=0.02)
