"""Wrong input anywhere: one clear line, exit status 2, and nothing left behind."""

import dataclasses
import random
import typing

import pytest
import torch

import bench
import data
import eval as evaluation
import model as model_file
import mup
import schedules
import train
from test_train import flags

FIELDS = dataclasses.fields(train.TrainConfig)


def kind(field) -> type:
    return next(t for t in (typing.get_args(field.type) or (field.type,)) if t is not type(None))


def wrong_values(field) -> list[str]:
    """Values that this flag must refuse, from its type and its limits."""
    limits, wrong = field.metadata, []
    if kind(field) is bool:
        return ["true"]
    if kind(field) is str:
        return [""] + ["nonsense"] * ("choices" in limits)
    wrong += ["", "x", "nan", "inf", "-inf", "1,000"] + ["1.5"] * (kind(field) is int)
    outside = {"above": 0, "below": 0, "at_least": -1, "at_most": 1}
    return wrong + [str(limits[name] + step) for name, step in outside.items() if name in limits]


def one_line(main, argv, capsys) -> str:
    """Run a command line that must be refused; -> what it says."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2, (argv, status, error)
    assert len(error.splitlines()) == 1 and error.endswith("\n"), (argv, error)
    assert "Traceback" not in error, (argv, error)
    return error


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_training_flag_refuses_wrong_values(field, corpus_path, tmp_path, capsys):
    rest = [f"--{n}={v}" for n, v in (("device", "cpu"), ("data", corpus_path)) if n != field.name]
    flag = f"--{field.name}"
    for value in wrong_values(field):
        assert flag in one_line(train.main, [f"{flag}={value}", *rest], capsys)
    assert f"{flag}x" in one_line(train.main, [f"{flag}x", "1", *rest], capsys)  # misspelled
    if kind(field) is not bool:
        assert flag in one_line(train.main, [flag], capsys)  # its value forgotten
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "schedule, name", [(s, n) for s in schedules.SCHEDULES for s2 in schedules.READS for n in
                       sorted(schedules.READS[s2] - schedules.READS[s])]
)  # fmt: skip
def test_a_flag_that_the_schedule_does_not_read_is_refused(schedule, name, capsys):
    value = "linear" if name == "decay_shape" else "0" if name == "power_b" else "1"
    error = one_line(train.main, [f"--schedule={schedule}", f"--{name}={value}"], capsys)
    assert f"--{name} " in error and schedule in error


@pytest.fixture(scope="module")
def folder(corpus_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "corpus").symlink_to(corpus_path)
    (folder / "file").write_text("in the way")
    quick = dict(total_tokens=512, warmup_tokens=0, out=folder / "run", vocab_size=300)
    assert train.main(flags(corpus_path, **quick)) == 0
    torch.save({"weights": torch.zeros(3)}, folder / "foreign.pt")
    data.prepare(["too short for a sequence"], "bytes", folder / "tiny", 0.2)
    return folder


@pytest.mark.parametrize("program, argv, says", [
    (train, "stray", "stray"),
    (train, "--total_tokens 100", "one batch"),
    (train, "--micro_batch_size 3", "divide"),
    (train, "--n_head 3", "n_embd 128"),
    (train, "--warmup_tokens 1e9", "1,000,000,000"),
    (train, "--device cuda:99", "--device cuda:99"),
    (train, "--device tpu", "cpu"),
    (train, "--n_embd 65536", "--n_embd 65536"),
    (train, "--data nowhere", "nowhere"),
    (train, "--data corpus --tokenizer bytes", "--data"),
    (train, "--data corpus --seq_len 1e6 --batch_size 1 --n_layer 1", "--seq_len 1000000"),
    (train, "--data corpus --vocab_size 100", "--vocab_size 256"),
    (train, "--data corpus --out file", "--out file"),
    (train, "--data corpus --out file/run", "--out file/run"),
    (train, "--data corpus --out .", "other things"),
    (train, "--resume", "--out"),
    (train, "--resume --out file", "--out file"),
    (train, "--branch nowhere", "nowhere"),
    (train, "--branch file", "not a checkpoint"),
    (train, "--branch .", "checkpoint"),
    (train, "--time_limit nan", "--time_limit nan"),
    (train, "--profile trace.json", "bench.py --profile"),
    (bench, "--lr 0", "--lr 0"),
    (bench, "--device cpu --data corpus --profile file/trace.json", "file"),
    (schedules, "--ot x", "--ot"),
    (mup, "--outt 1", "--outt"),
    (model_file, "36M", "36M"),
    (data, "--val_fraction x", "--val_fraction"),
    (data, "--out file/corpus --source file", "--out file"),
    (evaluation, "", "--model"),
    (evaluation, "--model nowhere", "nowhere"),
    (evaluation, "--model .", "no checkpoint"),
    (evaluation, "--model missing.pt", "missing.pt"),
    (evaluation, "--model file", "file"),
    (evaluation, "--model foreign.pt", "foreign.pt"),
    (evaluation, "--model run --data nowhere", "nowhere"),
    (evaluation, "--model run --data tiny", "--seq_len 32"),
    (evaluation, "--model run --device tpu", "--device tpu"),
    (evaluation, "--model run --seed -1", "--seed -1"),
    (evaluation, "--model run --prompt x --temperature nan", "--temperature nan"),
    (evaluation, "--model run --prompt x --top_k 0", "--top_k 0"),
])  # fmt: skip
def test_a_mistake_is_one_line(program, argv, says, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert says in one_line(program.main, argv.split(), capsys)
    assert sorted(folder.rglob("*")) == before


def test_any_mix_of_values_is_accepted_or_refused_properly(capsys):
    """Thousands of random command lines, up to the point at which a run would begin."""
    rng, outcomes = random.Random(0), {"accepted": 0, "refused": 0}
    numbers = "0 1 2 3 7 8 64 1e3 4096 1e6 1e9 0.5 -1 -0.51 0.1 1e-9 1e300 -1e300 nan inf".split()
    for _ in range(2000):
        words = []
        for field in rng.sample(FIELDS, rng.randrange(1, 6)):
            choices = [*field.metadata.get("choices", []), "x", ""]
            value = rng.choice(choices if kind(field) is str else [*numbers, ""])
            no = rng.choice(["", "no-"])
            is_bool = kind(field) is bool
            words.append(f"--{no}{field.name}" if is_bool else f"--{field.name}={value}")
        try:
            typed, actions = train.parse(words)
            cfg, start = train.plan(typed, actions)
            assert start is None and cfg.total_tokens >= cfg.batch_tokens > 0
            lr = train.make_schedule(cfg)
            assert all(lr(n * cfg.batch_tokens) >= 0 for n in (0, 0.5, 1, 2))
            outcomes["accepted"] += 1
        except ValueError as refusal:
            assert "--" in str(refusal) or "warmup_tokens" in str(refusal), refusal
            outcomes["refused"] += 1
        except SystemExit as stop:
            assert stop.code == 2
            outcomes["refused"] += 1
    capsys.readouterr()
    assert min(outcomes.values()) > 100, outcomes
