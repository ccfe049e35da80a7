"""Sweeps: a branch is the separate run, the rule finds the valley, nothing is done twice."""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import sweep
import train
from schedules import SCHEDULES, is_planned, make_schedule
from test_mistakes import one_line
from test_resume import TIMELESS
from test_train import SMALL, flat
from tools import devices, engines, runs as runs_file
from tools.files import lock
from records import differing, identity, read_records, settings

AXES = ("n_embd", "n_head", "batch_size", "total_tokens", "lr", "device", "power_a")
QUICK = dict(SMALL, dtype="float32", final_eval_tokens=512)
COMMON = {k: v for k, v in QUICK.items() if k not in AXES}
SHAPE, BUDGETS = dict(n_embd=32, n_head=2), [3000, 6000, 12000]  # not whole batches
TINY = dict(
    common=COMMON, rows=[(SHAPE, [4, 8], 1)], budgets=[1280, 2560, 5120], guess=0.04
)


@pytest.fixture
def tiny(monkeypatch, corpus_path):
    """A scale for tests, and its command line."""
    monkeypatch.setitem(sweep.grids.GRIDS["wsd"], "tiny", TINY)
    data = f"--data={corpus_path}"
    return ["wsd", "--scale=tiny", "--out=out", "--workers=1", data, "--device=cpu"]


def records(folder="out") -> dict:
    """identity -> record without times and places; fails if a run is there twice."""
    found = {}
    for record in read_records(Path(folder)):
        run = identity(record["config"])
        assert run not in found
        found[run] = {
            part: {name: x for name, x in values.items() if name not in TIMELESS}
            for part, values in record.items()
        }
    return found


def config(corpus_path, **changed) -> train.TrainConfig:
    fields = (
        COMMON | SHAPE | dict(batch_size=8, device="cpu", data=str(corpus_path)) | changed
    )
    return devices.resolve_device(train.make_config(**fields))


@pytest.fixture
def final_weights(monkeypatch) -> list[torch.Tensor]:
    """The weights of every run at its end, in order."""
    seen, real = [], train.evaluate

    def evaluate(cfg, state, corpus):
        seen.append(torch.cat([w.detach().flatten() for w in state.model.parameters()]))
        return real(cfg, state, corpus)

    monkeypatch.setattr(train, "evaluate", evaluate)
    return seen


def train_runs(runs: list, corpus, trunks="trunks", *args, **more) -> list:
    return [sweep.make_run(cfg, corpus, Path(trunks), *args, **more) for cfg in runs]


KINDS = {name: dict(schedule=name) for name in SCHEDULES}
KINDS["average"] = dict(schedule="power", average=True, decay_tokens=300)
KINDS["MoE"] = dict(schedule="wsd", n_expert=4, n_expert_active=2, micro_batch_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_is_the_separate_run(
    kind, corpus_path, corpus, final_weights, monkeypatch
):
    """Bit for bit, whatever the schedule; a planned one shares no trunk, a long decay is early."""
    monkeypatch.setattr(train, "sample", lambda *_: "")  # slow, and not what we compare
    monkeypatch.setattr(train.figures, "draw_curve", lambda *_: None)
    runs = [config(corpus_path, total_tokens=T, **KINDS[kind]) for T in BUDGETS]
    if kind == "wsd":
        runs[2] = config(
            corpus_path, total_tokens=BUDGETS[2], schedule="wsd", decay_tokens=9500
        )
    trunks = sweep.by_trunk(runs).values()
    assert len(trunks) == (3 if is_planned(runs[0].schedule) else 1)
    runs = sum(trunks, [])
    for cfg, (ours, _) in zip(runs, train_runs(runs, corpus)):
        out = Path(str(cfg.total_tokens))
        out.mkdir()
        record = train.train_run(cfg, corpus, out)
        ours, theirs = flat(ours), flat(record)
        assert set(ours) == set(theirs)
        machine = TIMELESS - {"out", "command"}
        assert all(
            ours[name] == value for name, value in theirs.items() if name not in machine
        )
    assert (
        all(map(torch.equal, final_weights[:3], final_weights[3:]))
        and len(final_weights) == 6
    )


def test_a_stopped_trunk_resumes(corpus_path, corpus, final_weights, monkeypatch):
    """At any step, in a branch or before a look; and a trunk is made longer later."""
    monkeypatch.setattr(
        sweep, "POINTS", 12
    )  # so that a point is the mean of several steps
    runs = [config(corpus_path, total_tokens=T, **KINDS["average"]) for T in BUDGETS]
    whole = train_runs(runs, corpus, "a", look_at=[2000])
    expected, final_weights[:] = final_weights[:], []
    done = []
    for patience in (11, 1, 7, 12, 30, 33, 2, 50, 10**9):
        calls = iter(range(patience))
        must_stop = lambda: next(calls, None) is None
        limit = 2 if len(done) < 2 and patience < 40 else 3  # first the two shorter ones
        some = train_runs(runs[len(done) : limit], corpus, "b", must_stop, [2000])
        done += [result for result in some if result]
    for name in ("val_loss", "val_loss_at_2000"):
        of = lambda some: [record["results"][name] for record, _ in some]
        assert of(done) == of(whole)
    assert [curve for _, curve in done] == [curve for _, curve in whole]
    assert all(map(torch.equal, expected, final_weights))


def test_a_record_names_all_code_that_trained_it(corpus_path, corpus, monkeypatch):
    """As after a git pull between two runs of a trunk."""
    runs, found = (
        [config(corpus_path, total_tokens=T, schedule="wsd") for T in BUDGETS],
        [],
    )
    for commit, cfg in zip(["old", "old", "new"], runs):
        origin = {"git_commit": commit, "fingerprint": ""}
        monkeypatch.setattr(runs_file, "origin", lambda *_: dict(origin))
        corpus.meta["fingerprint"] = ""
        found += [
            record["origin"]["git_commit"] for record, _ in train_runs([cfg], corpus)
        ]
    assert found == ["old", "old", "old, new"]


@pytest.mark.parametrize(
    "damage", ["too far", "other corpus", "truncated", "other optimizer"]
)
def test_a_trunk_that_does_not_fit_is_not_used(damage, corpus_path, corpus):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in (3000, 6000)]
    ((expected, _),) = train_runs(runs[:1], corpus, "a")
    (path,) = Path("a").iterdir()
    saved = torch.load(path, weights_only=True)
    if damage == "too far":  # its record was lost, and the trunk has come further
        train_runs(runs, corpus, "a")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "other corpus":
        saved["model"] = {name: 2 * w for name, w in saved["model"].items()}
        torch.save(saved | {"fingerprint": "another"}, path)
    else:
        saved["optimizer"]["param_groups"].pop()
        torch.save(saved, path)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            train_runs(runs[:1], corpus, "a")
        return
    ((record, _),) = train_runs(runs[:1], corpus, "a")
    assert record["results"]["val_loss"] == expected["results"]["val_loss"]


def test_a_diverged_run_is_a_record(corpus_path, corpus):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd", lr=1e30) for T in BUDGETS]
    together = [record["results"] for record, _ in train_runs(runs, corpus)]
    found = [(r["diverged"], r["val_loss"], r["loss"]) for r in together]
    assert found == [(True, None, None)] * 3
    assert all(r["tokens"] < 3000 for r in together)  # nobody waits for the rest


def test_a_curve_is_the_training_loss(corpus_path, corpus, monkeypatch):
    """Means over stretches of a run; the trunk's part is in the curve of every branch."""
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in BUDGETS]
    monkeypatch.setattr(sweep, "POINTS", 12)
    curves = [curve for _, curve in train_runs(runs, corpus)]
    assert {curve[0] for curve in curves} == {curves[0][0]}
    assert all(6 <= len(curve) <= 12 for curve in curves)
    state, schedule = train.build(runs[2]), make_schedule(runs[2])
    steps = train.training_steps(runs[2], state, corpus)
    losses = [loss.item() for _, loss, _, _ in steps]
    for tokens, loss, lr in curves[2]:
        assert lr == schedule(tokens - 128)  # the middle of the last step
        near = losses[max(0, tokens // 256 - 4) : tokens // 256]
        assert min(near) <= loss <= max(near) or tokens > 10800  # mean of up to 4 steps


def test_tokens_are_counted_once_for_a_trunk(corpus_path):
    runs_of = lambda **how: [config(corpus_path, total_tokens=T, **how) for T in BUDGETS]
    assert sweep.tokens_of(runs_of(schedule="cosine")) == sum(BUDGETS)
    assert sweep.tokens_of(runs_of(schedule="wsd")) == 10800 + sum(BUDGETS) // 10


def follow(loss, middle: dict) -> dict:
    """Train what the search wants until it wants nothing more; -> {(setting, T): loss}."""
    seen = {}
    while missing := sweep.search(lambda *run: seen.get(run), middle) - seen.keys():
        seen |= {run: loss(*run) for run in missing}
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_the_search_ends_with_three_worse_rates_on_each_side(seed):
    rng = random.Random(seed)
    best = {T: rng.uniform(0, 20) for T in BUDGETS}
    noise = {(j, T): rng.gauss(0, 0.01) for j in range(-20, 60) for T in BUDGETS}
    cliff = rng.uniform(1, 6)  # too high a learning rate diverges

    def loss(j, T):
        return (
            0.02 * (j - best[T]) ** 2 + noise[j, T] if j < best[T] + cliff else math.inf
        )

    middle = {T: rng.randrange(6, 20, 2) for T in BUDGETS}
    seen = follow(loss, middle)
    for T in BUDGETS:
        tried = {j: value for (j, t), value in seen.items() if t == T}
        lowest = min(tried, key=tried.get)
        assert all(
            tried[lowest + step] >= tried[lowest] for step in (-3, -2, -1, 1, 2, 3)
        )
        assert abs(lowest - best[T]) < 2.5
    # nothing in vain
    assert sweep.search(lambda *run: seen.get(run), middle) == seen.keys()
    assert len({j for j, _ in seen}) < 60


@pytest.mark.parametrize("loss", [lambda j, T: -j, lambda j, T: j, lambda j, T: math.inf])
def test_the_search_ends_where_learning_rates_make_no_sense(loss):
    rates = [sweep.nth_lr(j) for j, _ in follow(loss, dict.fromkeys(BUDGETS, 14))]
    assert 1e-6 < min(rates) <= max(rates) < 2


def test_a_grid_from_the_command_line(tiny):
    flags = ["--widths=32,64", "--batches=2", "--budgets=2k,4.096k", "--seeds=2"]
    flags += ["--sweep=weight_decay=0,0.1", "--sweep", "n_layer=1,2", "--beta2=0.9"]
    plan = sweep.prepare(*sweep.parse([*tiny, *flags]))
    configs = plan.left()
    values = lambda name: {getattr(cfg, name) for cfg in configs}
    assert len(plan.series) == 2 * 2 * 2 * 2 and plan.known == {}
    assert values("n_embd") == {32, 64} and values("n_head") == {2, 4}
    assert values("batch_size") == {2} and values("seed") == values("data_seed") == {0, 1}
    assert values("weight_decay") == {0, 0.1} and values("total_tokens") == {2000, 4096}
    assert values("n_layer") == {1, 2} and values("beta2") == {0.9}
    # none is left out
    assert len({identity(vars(cfg)) for cfg in configs}) == len(configs)
    paper = ["transfer", "--scale=paper", "--widths=128,256", "--device=cpu", *tiny[4:5]]
    assert {cfg.n_embd for cfg in sweep.prepare(*sweep.parse(paper)).left()} == {128, 256}


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory):
    """The records of the tiny sweep, made at one go."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sweep.grids.GRIDS["wsd"], "tiny", TINY)
        flags = [f"--out={out}", "--workers=1", f"--data={corpus_path}", "--device=cpu"]
        assert sweep.main(["wsd", "--scale=tiny", *flags]) == 0
    assert not (out / "trunks").exists()
    curves = [
        json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()
    ]
    named = [
        [
            r
            for r in records(out).values()
            if not differing(curve["config"], settings(r["config"]))
        ]
        for curve in curves
    ]
    assert all(named) and len(curves) == len(records(out))
    return records(out)


TINY_COMPARISON = dict(
    common=COMMON | dict(n_layer=1), tune=(SHAPE, 4, [1280, 2560]), trials=range(13, 15),
    rows=[(SHAPE, [4, 16], 1)], budgets=[1280, 2560], guess=0.02,
)  # fmt: skip


def test_a_comparison_tunes_and_looks_at_its_longest_cosine(
    corpus_path, corpus, monkeypatch
):
    """test_grids.py checks what the trials are for."""
    monkeypatch.setitem(sweep.grids.GRIDS["wsd"], "tiny", TINY)
    monkeypatch.setitem(sweep.grids.GRIDS["compare"], "tiny", TINY_COMPARISON)
    argv = ["compare", "--scale=tiny", "--out=out", "--workers=1", "--device=cpu"]
    assert sweep.main([*argv, f"--data={corpus_path}"]) == 0
    found = list(map(flat, records().values()))
    assert {r["seed"] for r in found} == {0, 100, 101}
    assert all(r["decay_tokens"] == 0 for r in found if r["average"])
    whole = [r for r in found if r["decay_shape"] == "linear"]
    assert {r["total_tokens"] - r["decay_tokens"] for r in whole} == {
        COMMON["warmup_tokens"]
    }

    # the longest cosine, evaluated on its way, is what it was there
    looked = [r for r in found if "val_loss_at_1280" in r]
    assert {(r["schedule"], r["total_tokens"]) for r in looked} == {("cosine", 2560)}
    cosine = next(r for r in looked if r["seed"] == 0 and r["min_lr_ratio"])
    same = ("n_layer", "schedule", "lr", "total_tokens", "batch_size")
    cfg = config(corpus_path, **{name: cosine[name] for name in same})
    state = train.build(cfg)
    for _ in train.training_steps(cfg, state, corpus):
        if state.tokens == 1280:
            break
    assert train.evaluate(cfg, state, corpus)[1]["val_loss"] == cosine["val_loss_at_1280"]


def when_there_are(n: int, do) -> None:
    """Call do() from another thread as soon as there are n records."""

    def watch():
        while len(read_records(Path("out"))) < n:
            time.sleep(0.02)
        do()

    threading.Thread(target=watch, daemon=True).start()


def test_a_stopped_sweep_resumes_in_any_number_of_processes(undisturbed, tiny, capsys):
    two = ["--workers=2" if word == "--workers=1" else word for word in tiny]
    when_there_are(4, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert sweep.main(two) == 3
    assert "the same command resumes" in capsys.readouterr().out
    assert 4 <= len(before := records()) < len(undisturbed)
    with open("out/records.jsonl", "a") as file:
        file.write('{"n_embd": 32, "los')  # power cut in the middle of a line
    when_there_are(len(before) + 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sweep.main(tiny) == 3
    assert len(before) + 3 <= len(records()) < len(undisturbed)
    assert sweep.main(two) == 0 and records() == undisturbed
    assert sweep.main(tiny) == 0 and records() == undisturbed  # nothing left to do


def test_two_sweeps_in_one_folder_are_refused(tiny, capsys):
    Path("out").mkdir()
    with lock(Path("out/.lock")):
        assert "another sweep is running" in one_line(sweep.main, tiny, capsys)
    assert sweep.main([*tiny, "--budgets=1280"]) == 0


SWEEP = """
import sweep
from test_sweep import TINY
if __name__ in ("__main__", "__mp_main__"):
    sweep.grids.GRIDS["wsd"]["tiny"] = TINY
if __name__ == "__main__":
    raise SystemExit(sweep.main())
"""


def start_sweep(argv: list[str], **how) -> subprocess.Popen:
    """The tiny sweep as a program of its own, in a group of processes of its own."""
    Path("tiny.py").write_text(SWEEP)
    root = Path(sweep.__file__).parent
    path = os.pathsep.join([str(root), str(root / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tiny.py", *argv]
    return subprocess.Popen(command, env=environment, start_new_session=True, **how)


def alive(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


@pytest.mark.parametrize(
    "victim", ["all, at once", "all, Ctrl-C", "parent, SIGKILL", "worker, SIGKILL"]
)
def test_a_disturbed_sweep_loses_nothing_and_leaves_no_process(victim, undisturbed, tiny):
    two = ["--workers=2" if word == "--workers=1" else word for word in tiny]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = "/proc/{0}/task/{0}/children"
    if victim == "worker, SIGKILL" and not Path(children.format(os.getpid())).exists():
        pytest.skip("needs the list of children that Linux keeps")
    process = start_sweep(two, **pipe)
    least = 0 if victim == "all, at once" else 3
    if victim == "all, at once":
        process.stdout.readline()  # then its workers start
    while least and (not Path("out/records.jsonl").exists() or len(records()) < least):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    if victim.startswith("all"):
        os.killpg(process.pid, signal.SIGINT)
    elif victim == "parent, SIGKILL":
        process.kill()
    else:
        spawned = [pid for pid in map(int, Path(children.format(process.pid)).read_text().split())
                   if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]  # fmt: skip
        os.kill(spawned[-1], signal.SIGKILL)
    status, error = process.wait(), process.stderr.read()
    expected = {"parent, SIGKILL": -9, "worker, SIGKILL": 2}.get(victim, 3)
    assert status == expected and "Traceback" not in error, error
    if status == 2:
        assert error.splitlines()[-1].startswith("sweep.py: a worker died")
    patience = time.monotonic() + 30
    while alive(process.pid) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not alive(process.pid)
    assert len(records()) >= least
    assert sweep.main(tiny) == 0 and records() == undisturbed


def raises(*_):
    raise ValueError("a bug")


def pid_of(*_) -> int:
    return os.getpid()


def test_all_workers_start_at_once():
    """While signals wait, so that they inherit this until they have imported everything."""
    before = set(multiprocessing.active_children())
    with engines.in_processes(["cpu", "cpu", "cpu"]):
        assert len(set(multiprocessing.active_children()) - before) == 3


def test_ctrl_c_is_not_lost_while_workers_start():
    class Devices(list):
        """The second loop over them starts the workers."""

        loops = 0

        def __iter__(self):
            self.loops += 1
            for device in list.__iter__(self):
                yield device
                if self.loops == 2:
                    os.kill(os.getpid(), signal.SIGINT)

    with runs_file.stop_request(None) as must_stop:
        with engines.in_processes(Devices(["cpu"])):
            assert must_stop()


def test_a_worker_ends_after_sigterm_even_if_a_job_has_raised():
    with engines.in_processes(["cpu"]) as (submit, _):
        pid = submit(pid_of).result()
        with pytest.raises(ValueError, match="a bug"):
            submit(raises).result()
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(BrokenExecutor):
            submit(pid_of).result(timeout=20)


def test_a_sweep_on_slurm_is_the_same(corpus_path, capsys):
    """As a program. Without Slurm, submitit starts a process of this machine for every job."""
    small = [
        "wsd",
        "--widths=32",
        "--batches=8",
        "--budgets=20480",
        "--n_layer=1",
        "--device=cpu",
    ]
    small += [f"--data={corpus_path}", "--final_eval_tokens=512"]
    assert sweep.main([*small, "--out=local", "--workers=1"]) == 0
    assert len(records("local")) > 5
    Path("out").mkdir()  # two runs are left for Slurm
    lines = Path("local/records.jsonl").read_text().splitlines(keepends=True)
    Path("out/records.jsonl").write_text("".join(lines[:-2]))
    slurm = [*small, "--out=out", "--engine=slurm", "--workers=2"]
    capsys.readouterr()
    assert "no_such" in one_line(sweep.main, [*slurm, "--slurm=no_such=1"], capsys)
    program = [sys.executable, sweep.__file__, *slurm, "--slurm=timeout_min=5"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert records() == records("local")


def test_any_executor_is_an_engine(undisturbed, tiny):
    """As those of Dask and Ray."""
    with ThreadPoolExecutor(1) as pool:
        assert sweep.main(tiny, pool.submit) == 0
    assert records() == undisturbed


def test_a_full_disk_ends_a_sweep_in_one_line(tiny, monkeypatch, capsys):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(runs_file, "write_checkpoint", full)
    assert sweep.main(tiny) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last.startswith("sweep.py: no space left") and "The same command resumes" in last
    )


WRONG = [
    ("", "experiment"), ("wsd --workers 0", "--workers"),
    ("wsd --data CORPUS --tokenizer gpt2", "--tokenizer"),
    ("wsd --warmup_tokens 1e6", "warmup_tokens"), ("wsd --out /proc/no --data CORPUS", "/proc/no"),
    ("wsd --n_embd=48", "--widths"), ("wsd --power_a 3", "--power_a"), ("wsd --lr 0.1", "--lr"),
    ("wsd --save_every 1e5", "--save_every"), ("wsd --sweep log_every=1e3,2e3", "--sweep"),
    ("compare --average", "--average"), ("compare --sweep seed=0,1", "only one value"),
    ("wsd --sweep weight_decy=1", "weight_decy"), ("wsd --widths 33", "33"),
    ("wsd --widths 40", "heads of 16"), ("wsd --scale paper --widths 64", "--widths"),
    ("wsd --sweep branch=x", "branch"), ("wsd --slurm x", "NAME=VALUE"),
    ("wsd --slurm timeout_min=5", "without --engine slurm"),
    ("wsd --budgets 1.5", "--budgets"), ("wsd --dtype auto", "--dtype"),
    ("compare --schedule power", "--schedule"), ("compare --total_tokens 1e6", "--total_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("argv, says", WRONG)
def test_a_wrong_command_line_is_one_line(argv, says, corpus_path, tmp_path, capsys):
    words = [str(corpus_path) if word == "CORPUS" else word for word in argv.split()]
    assert says in one_line(sweep.main, words, capsys)
    assert not list(tmp_path.iterdir())


def leave(some: list[dict]) -> None:
    """As if the folder out had these records already."""
    Path("out").mkdir()
    with open("out/records.jsonl", "w") as file:
        for record in some:
            whole = record | {"config": record["config"] | {"out": None}}
            file.write(json.dumps(whole) + "\n")


def test_a_failing_job_costs_no_other_its_record(undisturbed, tiny, monkeypatch, capsys):
    """And a failure after a request to stop is told, too."""
    real = sweep.make_run
    made = []

    def make_run(cfg, *args):
        if (cfg.batch_size, cfg.total_tokens, cfg.lr) == (4, 2560, 0.0064):
            time.sleep(0.2)  # until the next job waits behind this one
            raise OSError("no space left")
        made.append(cfg)
        return real(cfg, *args)

    monkeypatch.setattr(sweep, "make_run", make_run)
    two = ["--workers=2" if word == "--workers=1" else word for word in tiny]
    with ThreadPoolExecutor(1) as pool:  # two jobs at a time, one after the other
        assert sweep.main(two, pool.submit) == 2
    found = records()
    assert all(undisturbed[run] == r for run, r in found.items())
    assert len(found) == len(made)
    assert "no space left. The same command resumes" in capsys.readouterr().err
    monkeypatch.setattr(sweep, "make_run", real)
    assert sweep.main(tiny) == 0 and records() == undisturbed


def test_records_of_another_sweep_are_refused(undisturbed, tiny, documents, capsys):
    leave(undisturbed.values())
    for flag in ("--average", "--dtype=bfloat16", "--decay_tokens=0"):
        assert "has records with" in one_line(sweep.main, [*tiny, flag], capsys)
    assert records() == undisturbed
    assert "has records with" in one_line(
        sweep.main, ["power", *tiny[2:], "--widths=32"], capsys
    )
    train.data.prepare(documents[:200], "bytes", Path("other"))
    assert "fingerprint" in one_line(sweep.main, [*tiny[:-2], "--data=other"], capsys)


@pytest.mark.parametrize("change, says", [
    (lambda config: config | {"fixed_norm": "hidden"}, "no setting fixed_norm"),
    (lambda config: {n: x for n, x in config.items() if n != "beta2"}, "without beta2"),
])  # fmt: skip
def test_records_with_other_settings_are_refused(change, says, undisturbed, tiny, capsys):
    """Of a fork, whose runs are not ours, or of an older version."""
    leave([r | {"config": change(r["config"])} for r in undisturbed.values()])
    assert says in one_line(sweep.main, tiny, capsys)


def test_every_setting_is_part_of_the_identity_of_a_run(corpus_path):
    cfg = config(corpus_path, total_tokens=3000, schedule="wsd")
    same = lambda name: identity(vars(cfg)) == identity(vars(cfg) | {name: "x"})
    free = {field.name for field in dataclasses.fields(cfg) if same(field.name)}
    assert free == {
        "power_a", "power_b", "power_q", "lr_max", "min_lr_ratio",  # WSD does not read them
        "preset", "decay_share", "data", "tokenizer", "out", "device", "compile", "recompute",
        "micro_batch_size", "log_every", "eval_every", "eval_tokens", "save_every",
        "keep_checkpoints",
    }  # fmt: skip


def test_a_folder_may_have_more_seeds_than_a_sweep(undisturbed, tiny):
    other = [
        r | {"config": r["config"] | dict(seed=1, data_seed=1)}
        for r in undisturbed.values()
    ]
    leave([*undisturbed.values(), *other])
    assert sweep.prepare(*sweep.parse(tiny)).left() == []
    assert sweep.prepare(*sweep.parse([*tiny, "--seeds=2"])).left() == []
