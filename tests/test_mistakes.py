"""Wrong input anywhere: one clear line, exit status 2, and nothing left behind."""

import dataclasses
import random
import typing

import pytest

import data
import eval as evaluation
import model as model_file
import mup
import schedules
import train

FIELDS = dataclasses.fields(train.TrainConfig)


def kind(field) -> type:
    return next(t for t in (typing.get_args(field.type) or (field.type,)) if t is not type(None))


def wrong_values(field) -> list[str]:
    """Values that this flag must refuse, from its type and its limits."""
    limits, wrong = field.metadata, []
    if kind(field) in (int, float):
        wrong += ["", "x", "nan", "inf", "-inf", "1e999", "1,000", "None"]
        wrong += ["1.5", "1e-3"] * (kind(field) is int)
        outside = {"above": 0, "below": 0, "at_least": -1, "at_most": 1}
        wrong += [str(limits[name] + step) for name, step in outside.items() if name in limits]
    elif kind(field) is bool:
        wrong += ["true", "maybe", ""]
    else:
        wrong += [""] + ["nonsense"] * ("choices" in limits)
    return wrong


def one_line(main, argv, capsys) -> str:
    """Run a command line that must be refused; -> what it says."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2, (argv, status, error)
    assert len(error.splitlines()) == 1 and error.endswith("\n") and "Traceback" not in error, (argv, error)
    return error


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_training_flag(field, corpus_path, tmp_path, capsys):
    rest = [f"--{name}={value}" for name, value in (("device", "cpu"), ("data", corpus_path)) if name != field.name]
    for value in wrong_values(field):
        error = one_line(train.main, [f"--{field.name}={value}", *rest], capsys)
        assert f"--{field.name}" in error, error
    error = one_line(train.main, [f"--{field.name}x", "1", *rest], capsys)  # misspelled
    assert f"--{field.name}x" in error and f"--{field.name}?" in error
    if kind(field) is not bool:
        assert f"--{field.name}" in one_line(train.main, [f"--{field.name}"], capsys)  # its value forgotten
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "main, argv, says",
    [
        (schedules.main, ["--ot", "x"], "--ot"), (schedules.main, ["--out"], "--out"), (schedules.main, ["--out", "/proc/no/figure.png"], "--out /proc/no"),
        (mup.main, ["x"], "x"), (mup.main, ["--out"], "--out"), (mup.main, ["--outt", "1"], "--outt"),
        (model_file.main, ["--presets"], "--presets"), (model_file.main, ["36M"], "36M"),
        (data.main, ["--val_fraction", "x"], "--val_fraction"), (data.main, ["--tokenizer"], "--tokenizer"), (data.main, ["--tokenizer", ""], "--tokenizer"),
        (data.main, ["--source"], "--source"), (data.main, ["--out", "/proc/no/corpus", "--source", __file__], "--out /proc/no"),
        (evaluation.main, [], "--model"), (evaluation.main, ["--model"], "--model"), (evaluation.main, ["--modle", "x"], "--model"),
        (evaluation.main, ["--model", "x", "--seed", "x"], "--seed"), (evaluation.main, ["--model", "x", "--top_k", "1.5"], "--top_k"),
        (evaluation.main, ["--model", "x", "--temperature", "nan"], "--temperature nan"), (evaluation.main, ["--model", ""], "no checkpoint"),
        (train.main, ["--time_limit", "nan"], "--time_limit nan"), (train.main, ["--time_limit", "x"], "--time_limit"),
        (train.main, ["--branch"], "--branch"), (train.main, ["--branch", ""], "--branch"), (train.main, ["--resume=x"], "--resume"),
        (train.main, ["--out", "/proc/no/run", "--data", "CORPUS"], "--out /proc/no"), (train.main, ["--data", __file__], "--data"),
        (train.main, ["--resume", "--out", __file__, "--data", "CORPUS"], "--out"), (train.main, ["--out", __file__, "--data", "CORPUS"], "--out"),
    ],
)  # fmt: skip
def test_every_other_command_line(main, argv, says, corpus_path, tmp_path, capsys):
    error = one_line(main, [str(corpus_path) if word == "CORPUS" else word for word in argv], capsys)
    assert says in error
    assert not list(tmp_path.iterdir())


def test_any_mix_of_values_is_accepted_or_refused_properly(capsys):
    """Thousands of random command lines, up to the point where a run would begin."""
    rng, outcomes = random.Random(0), {"accepted": 0, "refused": 0}
    numbers = ["0", "1", "2", "3", "7", "8", "64", "1e3", "4096", "1e6", "1e9", "0.5", "-1", "-0.51", "0.1", "1e-9", "1e300", "-1e300", "nan", "inf", ""]
    for _ in range(3000):
        words = []
        for field in rng.sample(FIELDS, rng.randrange(1, 6)):
            if kind(field) is bool:
                words.append(f"--{rng.choice(['', 'no-'])}{field.name}")
            elif kind(field) is str:
                words.append(f"--{field.name}={rng.choice([*field.metadata.get('choices', []), 'x', ''])}")
            else:
                words.append(f"--{field.name}={rng.choice(numbers)}")
        try:
            cfg, start = train.plan(*train.parse(words))
            assert start is None and cfg.total_tokens >= cfg.batch_tokens > 0
            assert all(train.make_schedule(cfg)(n * cfg.batch_tokens) >= 0 for n in (0, 0.5, 1, 2))
            outcomes["accepted"] += 1
        except ValueError as refusal:
            assert str(refusal).startswith("--") or "warmup_tokens" in str(refusal), refusal
            outcomes["refused"] += 1
        except SystemExit as stop:
            assert stop.code == 2
            outcomes["refused"] += 1
    capsys.readouterr()
    assert min(outcomes.values()) > 100, outcomes
