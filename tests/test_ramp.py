"""A batch size that changes on the way: every step is that of a run with its batch size fixed."""

import math
from pathlib import Path

import pytest

import sweep
import train
from test_ddp import TINY, argv_of, finish, launch, losses
from test_train import flags, metrics, read
from tools.records import DEFAULTS, differs

RAMP = "8@0,4@1024,12@4e3,8@9e3"  # the last two start amid a step, of 32 tokens per sequence


def dumb_loop(total: int) -> list[tuple[int, int]]:
    """(first token, sequences) of every step."""
    steps, n, size = [], 0, 8
    while n + 32 * size <= total:
        steps.append((n, size))
        n += 32 * size
        size = 8 if n < 1024 else 4 if n < 4000 else 12 if n < 9000 else 8
    return steps


def closed_form(schedule: str, n: float, beta: float) -> float:
    """Learning rate at n tokens in a run of SMALL, which decays over the last tenth."""
    stable = lambda n: min(0.02, beta * 5 * n**-0.51) if schedule == "power" else 0.01
    total, warm, tail = 10240, 1024, 1024
    if schedule != "constant" and n > total - tail:
        return stable(total - tail) * (math.exp((total - n) / tail) - 1) / (math.e - 1)
    return min(n / warm, 1) * stable(max(n, warm))


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The sequence numbers of every pass."""
    seen, real = [], train.data.draw
    monkeypatch.setattr(train.data, "draw", lambda *a: (seen.append(a[1].tolist()), real(*a))[1])
    return seen


@pytest.mark.parametrize("kind, m", [("power", 24), ("wsd", 4), ("constant", 1)])
def test_every_step_is_that_of_a_dumb_loop(kind, m, corpus_path, tmp_path, drawn):
    run = tmp_path / "run"
    changed = dict(batch_ramp=RAMP, micro_batch_size=m, log_every=1)
    argv = flags(corpus_path, schedule=kind, out=run, **changed)
    argv.remove("--batch_size=8")  # the ramp fills it in
    assert train.main(argv) == 0
    steps, record, lines = dumb_loop(10240), read(run / "record.json"), metrics(run)
    assert (record["batch_ramp"], record["batch_size"]) == (RAMP, 8)
    assert differs(record, DEFAULTS) == ["batch_ramp"]  # as old records are read
    ends = [n + 32 * size for n, size in steps]
    assert sum(drawn, []) == [*range(ends[-1] // 32)] and [x["tokens"] for x in lines] == ends
    assert [len(g) for g in drawn] == sum(([m] * (n // m) or [n] for _, n in steps), [])
    rates = [closed_form(kind, n + 16 * size, 32 * size / 4096) for n, size in steps]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)


def test_a_branch_may_end_or_begin_a_ramp(corpus_path, drawn):
    assert train.main(flags(corpus_path, out="0", batch_ramp=RAMP)) == 0
    assert train.main(["--branch=0", "--out=1", "--batch_size=4"]) == 0
    drawn.clear()
    assert train.main(["--branch=1", "--out=2", "--batch_ramp=4@0,16@9500"]) == 0
    of = lambda run: [read(Path(run, "record.json"))[name] for name in ("batch_size", "batch_ramp")]
    assert of("1") == [4, None] and of("2") == [4, "4@0,16@9500"]
    assert (len(drawn[0]), len(drawn[-1])) == (4, 16)
    start = int(Path(read(Path("2/record.json"))["parent"]).stem) // 32
    read_in_order = sum(drawn, [])  # no sequence twice, none left out
    assert read_in_order == [*range(start, start + len(read_in_order))]


def test_two_processes_train_like_one(corpus_path, tmp_path):
    fields = TINY | dict(data=corpus_path, total_tokens=15_000, batch_ramp=RAMP)
    assert train.main(argv_of(fields | {"out": tmp_path / "one"})) == 0
    finish(launch(2, fields | {"out": tmp_path / "two"}))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("experiment", ["wsd", "power"])
def test_a_sweep_has_the_ramp_in_all_runs(experiment, corpus_path):
    argv = [experiment, f"--data={corpus_path}", "--batch_ramp=4@0,8@1e4", "--widths=32"]
    found = sweep.prepare(*sweep.parse(argv)).left()
    assert {(cfg.batch_size, cfg.batch_ramp) for cfg in found} == {(4, "4@0,8@1e4")}
    assert 2 * len(set(map(sweep.trunk_of, found))) < len(found)  # one trunk for all T
