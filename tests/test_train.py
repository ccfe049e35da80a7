"""Training, from the command line to the record."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import eval as evaluation
import model as model_file
import train

SMALL = dict(
    n_layer=2, n_embd=32, n_head=2, seq_len=32, base_width=32, batch_size=8, total_tokens=40 * 256, warmup_tokens=4 * 256,
    device="cpu", log_every=256, eval_every=10 * 256, power_a=5.0, lr=0.01, init_std=0.02, m_emb=1.0,
)  # fmt: skip


def flags(corpus_path, **changed) -> list[str]:
    return [f"--{name}={value}" for name, value in (SMALL | {"data": corpus_path} | changed).items()]


def read(path):
    return json.loads(path.read_text())


def metrics(run, key="loss"):
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if key in line]


def weights(run):
    return torch.load(max((run / "ckpt").iterdir()), weights_only=True)["model"]


# -- a run and what it leaves behind ---------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["power", "wsd", "cosine", "constant"])
def test_a_run_from_the_command_line(schedule, corpus_path, tmp_path, capsys):
    assert train.main(flags(corpus_path, schedule=schedule)) == 0
    run = tmp_path / "runs" / f"laptop-{schedule}-1"
    record, config, lines = read(run / "record.json"), read(run / "config.json"), metrics(run)
    cfg = train.make_config(**SMALL, schedule=schedule, data=str(corpus_path))

    assert len(lines) == 40
    schedule_at = train.make_schedule(cfg)
    for i, line in enumerate(lines):
        assert line["step"] == i + 1 and line["tokens"] == (i + 1) * 256
        assert line["lr"] == schedule_at((i + 0.5) * 256) > 0  # the middle of the step's tokens
    assert lines[-1]["loss"] < lines[0]["loss"] - 1  # it learns
    assert math.isclose(lines[0]["loss"], math.log(256), rel_tol=0.02)

    held_out = metrics(run, "val_loss")
    assert [line["tokens"] for line in held_out] == [2560, 5120, 7680, 10240]
    assert record["val_loss"] == held_out[-1]["val_loss"] and record["val_bpb"] == held_out[-1]["val_bpb"]
    assert record["val_loss"] == pytest.approx(evaluation.validation_loss(model_file.load_model(run), evaluation.data.open_corpus(corpus_path))["val_loss"])

    assert set(config) < set(record) and all(record[key] == config[key] for key in config)
    assert {f.name for f in dataclasses.fields(train.TrainConfig)} <= set(config)
    assert record["decay_tokens"] == (1024 if schedule in ("power", "wsd") else 0) and record["device"] == "cpu" and record["dtype"] == "float32" and record["compile"] is False
    assert record["tokens"] == 10240 and record["diverged"] is False and record["parent"] is None
    assert record["n_params"] == record["n_active_params"] == sum(w.numel() for w in weights(run).values())
    assert {"command", "git_commit", "git_dirty", "torch", "python", "threads", "fingerprint", "seconds", "tokens_per_second"} <= set(record)
    assert not any(isinstance(value, (dict, list)) for value in record.values())  # flat
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG" and (run / "sample.txt").exists()

    out = capsys.readouterr().out
    assert "left" in out and f"{record['val_loss']:.4f}" in out and (run / "sample.txt").read_text() in out
    assert not list(run.rglob("*.tmp"))


def test_two_identical_runs_are_identical(corpus_path, tmp_path):
    for name in ("a", "b"):
        assert train.main(flags(corpus_path, out=name)) == 0
    assert all(torch.equal(w, weights(tmp_path / "b")[name]) for name, w in weights(tmp_path / "a").items())
    timeless = [[{k: v for k, v in line.items() if "second" not in k} for line in metrics(tmp_path / name)] for name in ("a", "b")]
    assert timeless[0] == timeless[1]
    assert (tmp_path / "a" / "sample.txt").read_text() == (tmp_path / "b" / "sample.txt").read_text()


@pytest.mark.parametrize("schedule", ["power", "wsd", "constant"])
def test_a_longer_run_is_the_same_run_until_the_decay(schedule, corpus_path, tmp_path):
    for name, total in (("short", 40 * 256), ("long", 60 * 256)):
        assert train.main(flags(corpus_path, schedule=schedule, total_tokens=total, out=name)) == 0
    short, long = metrics(tmp_path / "short"), metrics(tmp_path / "long")
    assert [line["loss"] for line in short[:36]] == [line["loss"] for line in long[:36]]
    if schedule != "constant":
        assert [line["loss"] for line in short[37:]] != [line["loss"] for line in long[37:40]]


def test_seeds(corpus_path, tmp_path):
    for name, seeds in (("a", (0, 0)), ("b", (1, 0)), ("c", (0, 1))):
        assert train.main(flags(corpus_path, seed=seeds[0], data_seed=seeds[1], total_tokens=2560, warmup_tokens=0, out=name)) == 0
    losses = {name: metrics(tmp_path / name)[0]["loss"] for name in "abc"}
    assert losses["a"] != losses["b"] and losses["a"] != losses["c"]


def test_a_run_that_explodes_is_a_result(corpus_path, tmp_path, capsys):
    assert train.main(flags(corpus_path, schedule="constant", lr=1e6, grad_clip=0, out="boom")) == 0
    record = read(tmp_path / "boom" / "record.json")
    assert record["diverged"] is True and record["val_loss"] is None and record["val_bpb"] is None
    assert "diverged" in capsys.readouterr().out


def test_new_runs_get_new_folders_and_old_ones_stay(corpus_path, tmp_path, capsys):
    quick = dict(total_tokens=512, warmup_tokens=0)
    for _ in range(2):
        assert train.main(flags(corpus_path, **quick)) == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"laptop-power-1", "laptop-power-2"}
    before = (tmp_path / "runs" / "laptop-power-1" / "record.json").read_bytes()
    assert train.main(flags(corpus_path, **quick, out="runs/laptop-power-1")) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "--overwrite" in error
    assert (tmp_path / "runs" / "laptop-power-1" / "record.json").read_bytes() == before
    assert train.main([*flags(corpus_path, **quick, out="runs/laptop-power-1", seed=1), "--overwrite"]) == 0
    assert read(tmp_path / "runs" / "laptop-power-1" / "record.json")["seed"] == 1


def test_a_replaced_run_is_guarded_like_a_new_one(corpus_path):
    assert train.main(flags(corpus_path, total_tokens=512, warmup_tokens=0, out="a")) == 0
    _, held = train.run_folder(train.make_config(**SMALL, out="a"), resume=False, overwrite=True)
    with pytest.raises(BlockingIOError, match="another process"):
        train.lock(Path("a"))
    held.close()


# -- the step --------------------------------------------------------------------------------------


def test_accumulated_gradients_are_the_full_batchs(corpus):
    """In float64; read off the weights that plain gradient descent leaves."""
    after = []
    for micro in (16, 8, 2, 1):
        cfg = train.resolve_device(train.make_config(**SMALL | {"batch_size": 16, "micro_batch_size": micro, "grad_clip": 0}))
        model = train.build(cfg).model
        model.double()
        sgd = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}])
        before = [p.detach().clone() for p in model.parameters()]
        loss, norm, _ = train.optimizer_step(cfg, model, sgd, corpus, 0, lr=1.0)
        after.append(([b - p.detach() for b, p in zip(before, model.parameters())], loss.item(), norm.item()))
    for gradients, loss, norm in after[1:]:
        assert all(torch.allclose(g, full, rtol=1e-6, atol=1e-12) for g, full in zip(gradients, after[0][0]))
        assert loss == pytest.approx(after[0][1], rel=1e-12) and norm == pytest.approx(after[0][2], rel=1e-9)
    assert norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in after[0][0])), rel=1e-9)


def test_each_group_gets_its_share_of_the_rate_and_the_decay(corpus):
    cfg = train.resolve_device(train.make_config(**SMALL | {"n_embd": 64}))  # m_width 2
    state = train.build(cfg)
    model, optimizer = state.model, state.optimizer
    train.optimizer_step(cfg, model, optimizer, corpus, 0, lr=0.02)
    got = {g["role"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert got == {"embedding": (0.02, 0.1), "hidden": (0.01, 0.1), "output": (0.01, 0.1), "gain": (0.02, 0)}
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_clipped(corpus):
    moved = {}
    for clip in (0, 1e-3):
        cfg = train.resolve_device(train.make_config(**SMALL | {"grad_clip": clip}))
        model = train.build(cfg).model
        sgd = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}])
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        _, norm, _ = train.optimizer_step(cfg, model, sgd, corpus, 0, lr=1.0)
        moved[clip] = (before - torch.cat([p.detach().flatten() for p in model.parameters()])).norm().item()
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2) and moved[0] == pytest.approx(norm.item(), rel=1e-3)


# -- configuration ---------------------------------------------------------------------------------


def test_default_below_preset_below_flag():
    assert train.make_config().batch_size == train.RECIPES["laptop"]["batch_size"]
    assert train.make_config(preset="1B").lr == 0.01 and train.make_config(preset="1B").m_emb == 12
    typed = train.make_config(preset="1B", lr=0.5, decay_tokens=5)
    assert typed.lr == 0.5 and typed.decay_tokens == 5
    assert train.make_config(preset="PowerLM-3B").decay_tokens == 250e9 and train.make_config(preset="1B").decay_tokens == 100e9
    assert set(train.RECIPES) == set(model_file.PRESETS)


def test_numbers_as_people_write_them():
    typed, _ = train.parse(["--total_tokens", "2e9", "--seed", "12345678901234567", "--lr=1e-3", "--no-compile", "--tie_embeddings"])
    assert typed == {"total_tokens": 2_000_000_000, "seed": 12345678901234567, "lr": 1e-3, "compile": False, "tie_embeddings": True}


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for f in dataclasses.fields(train.TrainConfig):
        assert f"--{f.name}" in out and len(f.metadata["help"]) > 10


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--schedul", "wsd"], ("--schedul", "--schedule")),
        (["--learning_rate=1"], ("--learning_rate",)),
        (["stray"], ("stray",)),
        (["--schedule", "exp"], ("--schedule", "'exp'", "wsd")),
        (["--preset", "2B"], ("--preset", "'2B'", "laptop")),
        (["--total_tokens", "many"], ("--total_tokens", "'many'", "whole number")),
        (["--lr", "-1e-3"], ("--lr -0.001", "above 0")),
        (["--total_tokens", "1.5"], ("--total_tokens", "'1.5'")),
        (["--total_tokens", "inf"], ("--total_tokens", "'inf'")),
        (["--total_tokens", "nan"], ("--total_tokens", "'nan'")),
        (["--total_tokens"], ("--total_tokens",)),
        (["--total_tokens", "0"], ("--total_tokens 0", "above 0")),
        (["--total_tokens", "100"], ("--total_tokens 100", "one batch")),
        (["--batch_size", "-4"], ("--batch_size -4", "above 0")),
        (["--micro_batch_size", "3"], ("--micro_batch_size 3", "divide")),
        (["--lr", "nan"], ("--lr nan", "finite")),
        (["--lr", ""], ("--lr",)),
        (["--power_b", "0.5"], ("--power_b 0.5", "at most 0")),
        (["--beta1", "1"], ("--beta1 1", "below 1")),
        (["--n_head", "3"], ("--n_head 3", "n_embd 128")),
        (["--warmup_tokens", "1e9"], ("1,000,000,000", "total_tokens")),
        (["--decay_tokens", "1e9"], ("1,000,000,000", "total_tokens")),
        (["--device", "cuda:99"], ("--device cuda:99",)),
        (["--device", "tpu"], ("--device tpu", "cpu")),
        (["--dtype", "float16"], ("--dtype", "float16")),
        (["--data", "nowhere"], ("--data ", "nowhere: no prepared corpus")),
        (["--seq_len", "1e6", "--batch_size", "1"], ("--seq_len 1000000", "tokens")),
        (["--vocab_size", "100"], ("--vocab_size 100", "--vocab_size 256")),
        (["--tokenizer", "bytes"], ("--tokenizer bytes", "--data")),
        (["--out", "file"], ("--out file",)),
        (["--out", "file/run"], ("--out file/run",)),
        (["--out", ".", "--overwrite"], ("--out .", "other things")),
        (["--resume"], ("--resume", "--out")),
        (["--branch", "nowhere"], ("nowhere",)),
        (["--branch", "file"], ("file", "not a checkpoint")),
        (["--branch", "."], ("--branch .", "no checkpoint")),
        (["--time_limit", "0"], ("--time_limit 0",)),
    ],
)
def test_mistakes_are_one_line(argv, says, corpus_path, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    try:
        status = train.main(argv + ([] if "--data" in argv else ["--data", str(corpus_path)]))
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and len(error.splitlines()) == 1 and "Traceback" not in error
    assert all(word in error for word in says), error
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# -- the rest of the command lines -----------------------------------------------------------------


def test_benchmark(corpus_path, tmp_path, capsys):
    assert train.main([*flags(corpus_path), "--benchmark"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out and "GiB" in out and not (tmp_path / "runs").exists()


def test_evaluate_and_sample(corpus_path, tmp_path, capsys):
    assert train.main(flags(corpus_path, out="run")) == 0
    capsys.readouterr()
    assert evaluation.main(["--model", "run", "--device", "cpu"]) == 0
    assert f"{read(tmp_path / 'run' / 'record.json')['val_loss']:.4f}" in capsys.readouterr().out
    texts = []
    for seed in (0, 0, 1):
        assert evaluation.main(["--model", "run", "--device", "cpu", "--prompt", "def ", "--seed", str(seed), "--max_new_tokens", "50"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("def ") and texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--model", "nowhere"], "nowhere"), (["--model", "."], "no checkpoint"), (["--model", "run", "--data", "nowhere"], "nowhere: no prepared corpus"),
        (["--model", "run", "--device", "tpu"], "--device tpu"), (["--model", "run", "--prompt", "x", "--temperature", "-1"], "--temperature -1"),
        (["--model", "run", "--prompt", "x", "--top_k", "0"], "--top_k 0"), (["--model", "run", "--prompt", "x", "--max_new_tokens", "-1"], "--max_new_tokens -1"),
        (["--model", "broken.pt"], "broken.pt"), (["--model", "missing.pt"], "missing.pt"), (["--model", "foreign.pt"], "foreign.pt"),
        (["--model", "run", "--seed", "-1"], "--seed -1"), (["--model", "run", "--prompt", "x", "--temperature", "1e-45"], "--temperature 1e-45"),
        (["--model", "run", "--device", "cpu:"], "--device cpu:"), (["--model", "run", "--data", "tiny"], "--seq_len 32"),
    ],
)  # fmt: skip
def test_evaluation_mistakes_are_one_line(argv, says, corpus_path, tmp_path, capsys):
    assert train.main(flags(corpus_path, total_tokens=512, warmup_tokens=0, out="run")) == 0
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    evaluation.data.prepare(["too short for a sequence"], "bytes", tmp_path / "tiny", val_fraction=0.2)
    capsys.readouterr()
    assert evaluation.main(argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and says in error


def test_a_corpus_of_another_tokenizer_is_refused(corpus_path, documents, tmp_path, capsys):
    import base64

    assert train.main(flags(corpus_path, vocab_size=300, total_tokens=512, warmup_tokens=0, out="run")) == 0
    (tmp_path / "backwards.tiktoken").write_bytes(b"".join(base64.b64encode(bytes([255 - i])) + b" %d\n" % i for i in range(256)))
    evaluation.data.prepare(documents, str(tmp_path / "backwards.tiktoken"), tmp_path / "other")
    capsys.readouterr()
    assert evaluation.main(["--model", "run", "--data", "other", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "backwards" in error and "was trained with bytes" in error
