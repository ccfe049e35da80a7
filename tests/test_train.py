"""Training, from the command line to the record."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import config
import data
import eval as evaluation
import model as model_file
import schedules
import train
from tools import devices, files

SMALL = dict(
    n_layer=2, n_embd=32, n_head=2, seq_len=32, base_width=32, batch_size=8,
    total_tokens=40 * 256, warmup_tokens=4 * 256, device="cpu", log_every=256,
    eval_every=10 * 256, init_std=0.02, m_emb=1.0,
)  # fmt: skip
MOE = dict(preset="laptop-moe", n_ffn=40)


def flags(corpus_path, **changed) -> list[str]:
    fields = SMALL | {"data": corpus_path} | changed
    of_power = {"power_a": 5.0, "power_b": -0.51, "power_q": 1}
    peak = of_power if fields.get("schedule", "power") == "power" else {"lr": 0.01}
    return [f"--{name}={value}" for name, value in (peak | fields).items()]


def read(path: Path) -> dict:
    """A JSON file, or a record as one flat dict."""
    content = json.loads(path.read_text())
    return flat(content) if "results" in content else content


def flat(record: dict) -> dict:
    return record["config"] | record["results"] | record["origin"]


def metrics(run: Path, key: str = "loss") -> list[dict]:
    return [line for line in files.read_metrics(run) if key in line]


def weights(run: Path) -> dict:
    return torch.load(max((run / "ckpt").iterdir()), weights_only=True)["model"]


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


def one_step(corpus, replicate=lambda model: model, **changed) -> tuple[dict, train.Step]:
    """The gradients of a first step in float64, by name, and what optimizer_step returns."""
    cfg = train.make_config(**SMALL | {"grad_clip": 0.0} | changed)
    model = train.build(cfg).model.double()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}])
    optimizer.zero_grad = lambda **_: None  # keep the gradients
    parts = train.micro_batches(cfg, 0, *devices.rank_and_world())
    step = train.optimizer_step(cfg, replicate(model), optimizer, corpus, parts, lr=1.0)
    return {name: p.grad for name, p in model.named_parameters()}, step


def norm_of(gradients: dict) -> float:
    return math.sqrt(sum(g.square().sum().item() for g in gradients.values()))


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_a_run_logs_learns_and_leaves_a_complete_folder(
    schedule, corpus_path, tmp_path, capsys
):
    argv = flags(corpus_path, schedule=schedule)
    assert train.main(argv) == 0
    run = tmp_path / "runs" / f"laptop-{schedule}-1"
    record, config, lines = (
        read(run / "record.json"),
        read(run / "config.json"),
        metrics(run),
    )
    cfg = train.make_config(**train.parse(argv)[0])

    lr = train.make_schedule(cfg)
    assert [line["tokens"] for line in lines] == [(i + 1) * 256 for i in range(40)]
    # mid-step
    assert [line["lr"] for line in lines] == [lr((i + 0.5) * 256) for i in range(40)]
    assert min(line["lr"] for line in lines) > 0
    assert lines[0]["loss"] == pytest.approx(math.log(256), rel=0.02)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1

    validations = metrics(run, "val_loss")
    assert [line["tokens"] for line in validations] == [2560, 5120, 7680, 10240]
    assert all(record[key] == validations[-1][key] for key in ("val_loss", "val_bpb"))
    assert {f.name for f in dataclasses.fields(train.TrainConfig)} == set(
        config["config"]
    )
    whole = json.loads((run / "record.json").read_text())
    assert config == {"config": whole["config"], "origin": whole["origin"], "resumed": []}
    expected = dict(
        decay_tokens=1024 if schedules.has_decay(schedule) else 0, device="cpu", dtype="float32",
        compile=False, tokens=40 * 256, diverged=False, parent=None,
    )  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    n_params = sum(w.numel() for w in weights(run).values())
    assert record["n_params"] == record["n_active_params"] == n_params
    origin = {
        "command",
        "git_commit",
        "git_dirty",
        "torch",
        "python",
        "threads",
        "fingerprint",
    }
    assert origin | {"seconds", "tokens_per_second"} <= set(record)
    assert not any(isinstance(value, (dict, list)) for value in record.values())
    assert (run / "curve.png").read_bytes()[:4] == b"\x89PNG"

    out = capsys.readouterr().out
    assert (
        f"{record['val_loss']:.4f}" in out
        and (run / "sample.txt").read_bytes().decode() in out
    )
    assert not list(run.rglob("*.tmp"))


def test_a_run_that_explodes_is_a_finished_result(corpus_path, tmp_path, capsys):
    argv = flags(corpus_path, schedule="constant", lr=1e6, grad_clip=0, out="boom")
    assert train.main(argv) == 0
    record = read(tmp_path / "boom" / "record.json")
    assert record["diverged"] is True and record["val_loss"] is record["val_bpb"] is None
    branch = ["--branch=boom", "--schedule=constant", "--lr=0.01", "--total_tokens=20480"]
    assert train.main(branch) == 2 and "diverged" in capsys.readouterr().err
    not_json = lambda name: pytest.fail(f"{name} is not JSON")
    for line in (tmp_path / "boom" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=not_json)


def test_each_seed_changes_the_run_and_each_run_gets_a_folder(
    corpus_path, tmp_path, capsys
):
    quick = dict(total_tokens=512, warmup_tokens=0)
    for changed in ({}, {"seed": 1}, {"data_seed": 1}):
        assert train.main(flags(corpus_path, **quick, **changed)) == 0
    folders = [tmp_path / "runs" / f"laptop-power-{number}" for number in (1, 2, 3)]
    assert len({metrics(folder)[0]["loss"] for folder in folders}) == 3
    assert train.main(flags(corpus_path, **quick, out=folders[1])) == 2
    assert (
        "--resume" in capsys.readouterr().err
        and read(folders[1] / "record.json")["seed"] == 1
    )


@pytest.mark.parametrize(
    "final, changed", [(None, {}), (320, {"final_eval_tokens": 320})]
)
def test_the_record_has_the_loss_of_the_final_eval_tokens(
    final, changed, corpus_path, tmp_path
):
    """A mixture of a corpus with itself has the loss of the corpus."""
    (tmp_path / "other").symlink_to(corpus_path)
    corpus, mixture = (
        data.open_corpus(corpus_path),
        f"{corpus_path}:0.5,{tmp_path / 'other'}:0.5",
    )
    n_all = data.n_sequences(corpus.val, 32) * 32
    quick = dict(total_tokens=2560, eval_every=1280, eval_tokens=64, save_every=1280)
    assert train.main(flags(mixture, **quick, out="run", **changed)) == 0
    record, model = (
        read(tmp_path / "run" / "record.json"),
        model_file.load_model(Path("run")),
    )
    expected = evaluation.validation_loss(model, corpus, final)["val_loss"]
    assert record["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert record["val_tokens"] == 2 * (final or n_all)
    before = Path("run/ckpt/0000000000001280.pt")
    first = evaluation.validation_loss(model_file.load_model(before), corpus, 64)[
        "val_loss"
    ]
    assert metrics(tmp_path / "run", "val_loss")[0]["val_loss"] == pytest.approx(
        first, rel=1e-6
    )


def test_a_terminal_without_utf8_shows_what_it_can(corpus_path, monkeypatch):
    """As under LC_ALL=C: standard output is ASCII, and the sample is not."""
    import io

    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(train, "sample", lambda *_: "épsilon ζ")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert (
        train.main(flags(corpus_path, total_tokens=512, warmup_tokens=0, out="run")) == 0
    )
    terminal.flush()
    assert b"?psilon ?" in terminal.buffer.getvalue()
    assert Path("run/sample.txt").read_text(encoding="utf-8") == "épsilon ζ"


@pytest.mark.parametrize("lr, why", [(0.01, "ended the text at once"), (1e6, "diverged")])
def test_an_empty_sample_says_why(lr, why, corpus_path, monkeypatch):
    monkeypatch.setattr(train, "sample", lambda *_: "")
    quick = dict(schedule="constant", total_tokens=2560, warmup_tokens=0, grad_clip=0)
    assert train.main(flags(corpus_path, **quick, lr=lr, out="run")) == 0
    assert why in Path("run/sample.txt").read_text(encoding="utf-8")


def test_threads_do_not_spin_for_long():
    """libgomp reads its setting when torch is imported. A setting by the user stays."""
    root = Path(train.__file__).parent
    code = "import os, sys; sys.modules['torch'] = None\ntry: import train\nexcept ImportError: "
    code += "print(os.environ['GOMP_SPINCOUNT'])"
    for env, expected in (({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        command = [sys.executable, "-c", code]
        printed = subprocess.check_output(command, env=env, cwd=root, text=True)
        assert printed.strip() == expected


@pytest.mark.parametrize("module", ["copy", "numpy", "tools.signals"])
def test_ctrl_c_before_the_first_step_is_quiet(module, corpus_path):
    """While torch loads, and while the run is planned. -X importtime names loaded modules."""
    command = [sys.executable, "-X", "importtime", train.__file__]
    command += flags(corpus_path, out="run")
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, **pipe)
    while not process.stderr.readline().endswith(f" {module}\n"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=60)[1].splitlines()
    said = [line for line in lines if not line.startswith("import time:")]
    assert process.returncode in (-signal.SIGINT, 130, 3)
    assert said in ([], ["train.py: interrupted before the first step"])


@pytest.mark.parametrize("world, n, most, passes", [
    (1, 8, None, 1), (1, 8, 8, 1), (5, 8, 20, 1), (1, 8, 4, 2), (3, 7, 3, 7), (1, 96, 8, 12),
    (2, 12, 8, 2),  # two passes of 6, where 8 does not divide 12
])  # fmt: skip
def test_a_batch_takes_as_few_equal_passes_as_possible(world, n, most, passes):
    fields = dict(batch_size=world * n, micro_batch_size=most, seq_len=16)
    cfg = train.make_config(**fields)
    read = []
    for rank in range(world):
        parts = train.micro_batches(cfg, 160 * world * n, rank, world)
        assert len(parts) == passes
        assert {len(part) for part in parts} == {n // passes}
        read += [g for part in parts for g in part]
    assert sorted(read) == list(range(10 * world * n, 11 * world * n))
    fewer = [k for k in range(1, passes) if n % k == 0 and n // k <= (most or n)]
    assert fewer == []


def test_accumulated_gradients_are_those_of_the_whole_batch(corpus):
    results = [one_step(corpus, batch_size=16, micro_batch_size=m) for m in (16, 8, 2, 1)]
    whole, step_of_whole = results[0]
    assert step_of_whole.grad_norm.item() == pytest.approx(norm_of(whole), rel=1e-9)
    for gradients, step in results[1:]:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-6, atol=1e-12)
        assert step.loss.item() == pytest.approx(step_of_whole.loss.item(), rel=1e-12)
        assert step.grad_norm.item() == pytest.approx(norm_of(whole), rel=1e-9)


def test_each_group_gets_its_multiplier_and_weight_decay(corpus):
    cfg = devices.resolve_device(train.make_config(**SMALL | {"n_embd": 64}))  # m_width 2
    state = train.build(cfg)
    parts = train.micro_batches(cfg, 0, 0, 1)
    train.optimizer_step(cfg, state.model, state.optimizer, corpus, parts, lr=0.02)
    groups = state.optimizer.param_groups
    got = {group["role"]: (group["lr"], group["weight_decay"]) for group in groups}
    wide = {"hidden": (0.01, 0.1), "output": (0.01, 0.1)}
    assert got == {"embedding": (0.02, 0.1), "gain": (0.02, 0)} | wide
    assert all(p.grad is None for p in state.model.parameters())


def test_the_gradient_is_clipped_to_its_norm(corpus):
    gradients, _ = one_step(corpus, grad_clip=1e-3)
    assert norm_of(gradients) == pytest.approx(1e-3, rel=1e-2)


def test_default_below_preset_below_flag():
    assert train.make_config().batch_size == config.PRESETS["laptop"]["batch_size"]
    preset, typed = train.make_config(preset="1B"), train.make_config(preset="1B", lr=0.5)
    assert (preset.lr, preset.m_emb, preset.decay_tokens) == (0.01, 12, 100e9)
    assert (
        typed.lr == 0.5 and train.make_config(preset="PowerLM-3B").decay_tokens == 250e9
    )


def test_numbers_as_people_write_them():
    argv = "--total_tokens 2e9 --log_every 2.5M --warmup_tokens 3k --save_every 1B --eval_every 70"
    argv += " --seed 12345678901234567 --lr=1e-3 --no-compile --power_b -0.51"
    expected = dict(
        total_tokens=2 * 10**9, log_every=2_500_000, warmup_tokens=3000, eval_every=70
    )
    expected |= dict(seed=12345678901234567, lr=1e-3, compile=False, power_b=-0.51)
    assert train.parse(argv.split())[0] == expected | {"save_every": 10**9}


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for f in dataclasses.fields(train.TrainConfig):
        assert f"--{f.name}" in out and len(f.metadata["help"]) > 10
        assert all(choice in out for choice in f.metadata.get("choices", ()))
