"""The average of the weights: its closed form, and that it is kept, saved and given back."""

import json
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from test_train import SMALL

FLAGS = SMALL | dict(schedule="power", average=True, decay_tokens=0, total_tokens=3072, eval_every=1024)


def config(corpus_path, **changed) -> train.TrainConfig:
    return train.resolve_device(train.make_config(**FLAGS | dict(data=str(corpus_path)) | changed))


@pytest.mark.parametrize("batch_size", [4, 8])
def test_the_weights_at_n_tokens_count_as_n_to_the_16th(batch_size, corpus_path, corpus):
    cfg = config(corpus_path, batch_size=batch_size)
    state = train.build(cfg)
    model, optimizer = state.model, state.optimizer
    average = state.average
    expected, total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in model.named_parameters()}, 0.0
    for step in range(12):
        before, tokens = step * cfg.batch_tokens, (step + 1) * cfg.batch_tokens
        train.optimizer_step(cfg, model, optimizer, corpus, before, 0.05)
        train.update_average(average, model, before, tokens)
        share = float(tokens) ** 17 - float(before) ** 17  # of the integral of n^16
        total += share
        for name, w in model.named_parameters():
            expected[name] += share * w.detach().double()
    for name, w in average.named_parameters():
        torch.testing.assert_close(w.double(), expected[name] / total, rtol=1e-4, atol=1e-6)
        assert not w.requires_grad


def run(out: str, *more: str, **flags) -> dict:
    assert train.main([*(f"--{name}={value}" for name, value in (FLAGS | flags).items() if name != "average"), f"--out={out}", *more]) == 0
    return json.loads(Path(out, "record.json").read_text())


def test_it_watches_and_changes_nothing(corpus_path, corpus, capsys):
    with_it, without = run("a", "--average", data=corpus_path), run("b", data=corpus_path)
    assert with_it["val_loss"] == without["val_loss"] and "average_val_loss" not in without
    model = evaluation.load_model("a/average.pt")  # what was saved is what the record says
    assert evaluation.validation_loss(model, corpus, FLAGS.get("eval_tokens"))["val_loss"] == pytest.approx(with_it["average_val_loss"], abs=1e-6)
    assert with_it["average_val_loss"] != with_it["val_loss"]
    assert evaluation.main(["--model=a/average.pt", "--device=cpu"]) == 0  # it knows whose it is
    assert f"{evaluation.validation_loss(model, corpus)['val_loss']:.4f} nats" in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines if "average_val_loss" in line] == [1024, 2048, 3072]


def test_a_run_that_was_stopped_has_the_same_average(corpus_path):
    whole = run("a", "--average", data=corpus_path)
    argv = [f"--{name}={value}" for name, value in (FLAGS | dict(data=corpus_path)).items() if name != "average"] + ["--average", "--out=b", "--save_every=1024"]
    stops = iter([False] * 9 + [True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "stop_request", lambda _: __import__("contextlib").nullcontext(lambda: next(stops)))
        assert train.main(argv) == 3
    assert train.main([*argv, "--resume"]) == 0
    assert json.loads(Path("b/record.json").read_text())["average_val_loss"] == whole["average_val_loss"]


def test_a_branch_goes_on_with_its_parents_average_or_begins_one(corpus_path):
    whole = run("a", "--average", data=corpus_path)
    run("half", "--average", data=corpus_path, total_tokens=1536)
    argv = ["--branch=half", "--total_tokens=3072", "--decay_tokens=0", "--out=b", "--device=cpu"]
    assert train.main(argv) == 0
    assert json.loads(Path("b/record.json").read_text())["average_val_loss"] == whole["average_val_loss"]
    run("plain", data=corpus_path, total_tokens=1536)
    assert train.main(["--branch=plain", "--average", *argv[1:3], "--out=c", "--device=cpu"]) == 0
    assert json.loads(Path("c/record.json").read_text())["average_val_loss"] == pytest.approx(whole["average_val_loss"], abs=0.02)
