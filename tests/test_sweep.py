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

import runs
import sweep
import train
from model import empty_model
from records import identity, read_records
from schedules import SCHEDULES, is_planned
from test_mistakes import one_line
from test_resume import TIMELESS
from test_train import SMALL, flat, metrics, read
from tools import devices, engines
from tools.files import lock
from tools.flags import UserError
from tools.signals import never, stop_request

AXES = ("n_embd", "n_head", "batch_size", "total_tokens", "lr", "device", "power_a")
PLACES = TIMELESS | {"parent"}
QUICK = dict(SMALL, dtype="float32", final_eval_tokens=512)
COMMON = {k: v for k, v in QUICK.items() if k not in AXES}
SHAPE, BUDGETS = dict(n_embd=32, n_head=2), [3000, 6000, 12000]  # not whole batches
TINY = dict(common=COMMON, rows=[(SHAPE, [4, 8], 1)], budgets=[1280, 2560], guess=0.04)


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
            part: {name: x for name, x in values.items() if name not in PLACES}
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


def train_runs(configs: list, out="sweep", must_stop=never, longest=10**9) -> list[dict]:
    """Make these runs of a sweep. -> records of those that were not stopped"""
    found = []
    for cfg in configs:
        folder = sweep.folder_of(cfg, Path(out))
        if sweep.make_run(cfg, folder, "cpu", must_stop):
            found.append(sweep.take_record(Path(out), folder, longest))
    return found


KINDS = {name: dict(schedule=name) for name in SCHEDULES}
KINDS["average"] = dict(schedule="power", average=True, decay_tokens=300)
KINDS["MoE"] = dict(schedule="wsd", n_expert=4, n_expert_active=2, micro_batch_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_is_the_separate_run(kind, corpus_path, corpus, final_weights):
    """Bit for bit, whatever the schedule; a planned one shares no trunk, a long decay is early."""
    runs = [config(corpus_path, total_tokens=T, **KINDS[kind]) for T in BUDGETS]
    if kind == "wsd":
        runs[2] = config(
            corpus_path, total_tokens=BUDGETS[2], schedule="wsd", decay_tokens=9500
        )
    trunks = sweep.by_trunk(runs).values()
    n_parents = 0 if is_planned(runs[0].schedule) else 2
    assert len(trunks) == 3 - n_parents
    runs = sum(trunks, [])
    for cfg, record in zip(runs, train_runs(runs)):
        out = Path(str(cfg.total_tokens))
        out.mkdir()
        assert train.train_run(cfg, corpus, out)
        ours, theirs = flat(record), read(out / "record.json")
        assert set(ours) == set(theirs)
        n_parents -= ours["parent"] is not None
        for name in set(theirs) - PLACES:
            assert ours[name] == theirs[name], name
    assert n_parents == 0 and len(final_weights) == 6
    assert all(map(torch.equal, final_weights[:3], final_weights[3:]))


def test_a_stopped_run_resumes(corpus_path, final_weights):
    """At any step, in a decay or before a validation; and a trunk is made longer later."""
    runs = [config(corpus_path, total_tokens=T, **KINDS["average"]) for T in BUDGETS]
    whole = train_runs(runs, "a")
    expected, final_weights[:] = final_weights[:], []
    done = []
    for patience in (11, 1, 7, 12, 30, 33, 2, 50, 10**9):
        calls = iter(range(patience))
        must_stop = lambda: next(calls, None) is None
        limit = 2 if len(done) < 2 and patience < 40 else 3  # first the two shorter ones
        done += train_runs(runs[len(done) : limit], "b", must_stop)
    losses = [record["results"]["val_loss"] for record in done]
    assert losses == [record["results"]["val_loss"] for record in whole]
    assert None not in losses
    assert all(map(torch.equal, expected, final_weights))


def checkpoint_of(cfg: train.TrainConfig, out: str) -> Path:
    (path,) = sweep.folder_of(cfg, Path(out)).glob("ckpt/*.pt")
    return path


@pytest.mark.parametrize("damage", ["truncated", "other corpus"])
def test_a_trunk_that_does_not_fit_is_named(damage, corpus_path):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in (3000, 6000)]
    train_runs(runs[:1])
    path = checkpoint_of(runs[0], "sweep")
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        saved = torch.load(path, weights_only=True)
        torch.save(saved | {"fingerprint": "another"}, path)
    with pytest.raises(UserError, match="fingerprint|damaged"):
        train_runs(runs[1:])
    path.unlink()  # as the message advises
    assert len(train_runs(runs[1:])) == 1


def test_a_run_whose_record_is_lost_starts_again(corpus_path):
    """The trunk has come further than the decay of this run."""
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in (3000, 6000)]
    expected, _ = train_runs(runs)
    (again,) = train_runs(runs[:1])
    assert again["results"]["val_loss"] == expected["results"]["val_loss"]


def test_one_checkpoint_of_a_trunk_stays(corpus_path):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in BUDGETS]
    for cfg in runs:
        train_runs([cfg])
        (path,) = Path("sweep").rglob("*.pt")
        assert path == checkpoint_of(cfg, "sweep")
        assert int(path.stem) == cfg.decay_start // 256 * 256


def test_no_checkpoint_stays_from_which_no_branch_can_start(corpus_path):
    """After a cosine, and after the longest T."""
    for name in ("wsd", "cosine"):
        runs = [config(corpus_path, total_tokens=T, schedule=name) for T in BUDGETS]
        train_runs(runs, longest=BUDGETS[-1])
        assert not list(Path("sweep").rglob("*.pt"))


def test_two_processes_never_train_one_run(corpus_path):
    """A job on a cluster may outlive its sweep, and the next sweep starts the run again."""
    runs = [config(corpus_path, total_tokens=BUDGETS[0])]
    folder = sweep.folder_of(runs[0], Path("sweep"))
    folder.mkdir(parents=True)
    with lock(folder / ".lock"):
        with pytest.raises(UserError, match="another process is training there"):
            train_runs(runs)
    assert len(train_runs(runs)) == 1


def test_a_diverged_run_is_a_record(corpus_path):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd", lr=1e30) for T in BUDGETS]
    together = [record["results"] for record in train_runs(runs)]
    found = [(r["diverged"], r["val_loss"], r["loss"]) for r in together]
    assert found == [(True, None, None)] * 3
    assert all(r["tokens"] < 3000 for r in together)  # nobody waits for the rest


def test_a_curve_is_that_of_the_run_and_of_its_parents(corpus_path, corpus):
    runs = [config(corpus_path, total_tokens=T, schedule="wsd") for T in BUDGETS]
    train_runs(runs)
    lines = []
    for cfg in runs:
        own = metrics(sweep.folder_of(cfg, Path("sweep")))
        start = own[0]["tokens"]
        lines = [line for line in lines if line["tokens"] < start] + own
    steps = train.training_steps(runs[2], train.build(runs[2]), corpus)
    assert [line["loss"] for line in lines] == [step.loss.item() for step in steps]


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
    plan, configs, _ = sweep.check(*sweep.parse([*tiny, *flags]))
    assert configs == plan.left()
    values = lambda name: {getattr(cfg, name) for cfg in configs}
    assert len(plan.series) == 2 * 2 * 2 * 2 and plan.known == {}
    assert values("n_embd") == {32, 64} and values("n_head") == {2, 4}
    assert values("batch_size") == {2} and values("seed") == values("data_seed") == {0, 1}
    assert values("weight_decay") == {0, 0.1} and values("total_tokens") == {2000, 4096}
    assert values("n_layer") == {1, 2} and values("beta2") == {0.9}
    # none is left out
    assert len({identity(vars(cfg)) for cfg in configs}) == len(configs)
    paper = ["transfer", "--scale=paper", "--widths=128,256", "--device=cpu", *tiny[4:5]]
    _, configs, _ = sweep.check(*sweep.parse(paper))
    assert {cfg.n_embd for cfg in configs} == {128, 256}


def test_the_memory_is_that_of_the_largest_model_and_of_the_machine_that_trains(
    tiny, monkeypatch, capsys
):
    """A deep model may need more than a wide one. A cluster has other machines than this one."""
    size = lambda n: empty_model(config(tiny[4][7:], n_layer=n)).n_params()
    least = {"SC_PHYS_PAGES": size(1) + 1, "SC_PAGE_SIZE": 16}
    monkeypatch.setattr(devices.os, "sysconf", least.get)
    layers = [*tiny, "--dry_run", "--sweep=n_layer=1,9"]
    assert sweep.main([*tiny, "--dry_run", "--n_layer=1"]) == 0
    capsys.readouterr()
    assert "choose a smaller model" in one_line(sweep.main, layers, capsys)
    assert sweep.main([*layers, "--engine=slurm"]) == 0
    assert sweep.main([*layers, "--engine=slurm", "--device=cuda"]) == 0


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory):
    """The records of the tiny sweep, made at one go."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sweep.grids.GRIDS["wsd"], "tiny", TINY)
        flags = [f"--out={out}", "--workers=1", f"--data={corpus_path}", "--device=cpu"]
        assert sweep.main(["wsd", "--scale=tiny", *flags]) == 0
    assert not list(out.rglob("*.pt"))
    assert len(list(out.rglob("metrics.jsonl"))) == len(records(out))
    summary = read(out / "sweep.json")
    assert summary["finished"] and summary["experiment"] == "wsd"
    return records(out)


TINY_COMPARISON = dict(
    common=COMMON | dict(n_layer=1), tune=(SHAPE, 4, [1280, 2560]), trials=range(13, 15),
    rows=[(SHAPE, [8], 1)], budgets=[1280, 2560], guess=0.02,
)  # fmt: skip


def test_a_comparison_tunes_and_validates_at_the_end(corpus_path, corpus, monkeypatch):
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

    # only at the end, where the loss is that of the separate run
    for file in Path("out").rglob("metrics.jsonl"):
        assert len(metrics(file.parent, "val_loss")) == 1
    cosine = next(r for r in found if r["schedule"] == "cosine" and r["seed"] == 0)
    same = ("n_layer", "schedule", "lr", "min_lr_ratio", "total_tokens", "batch_size")
    cfg = config(corpus_path, **{name: cosine[name] for name in same})
    state = train.build(cfg)
    for _ in train.training_steps(cfg, state, corpus):
        pass
    assert train.evaluate(cfg, state, corpus)[1]["val_loss"] == cosine["val_loss"]


def when_there_are(n: int, do) -> None:
    """Call do() from another thread as soon as there are n records."""

    def watch():
        while len(read_records(Path("out"))) < n:
            time.sleep(0.02)
        do()

    threading.Thread(target=watch, daemon=True).start()


def test_a_stopped_sweep_resumes_in_any_number_of_processes(undisturbed, tiny, capsys):
    when_there_are(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert sweep.main(tiny) == 3
    assert "the same command resumes" in capsys.readouterr().out
    assert 4 <= len(records()) < len(undisturbed)
    with open("out/records.jsonl", "a") as file:
        file.write('{"n_embd": 32, "los')  # power cut in the middle of a line
    two = ["--workers=2" if word == "--workers=1" else word for word in tiny]
    assert sweep.main(two) == 0 and records() == undisturbed
    assert sweep.main(tiny) == 0 and records() == undisturbed  # nothing left to do
    capsys.readouterr()
    assert runs.main(["out"]) == 0
    for line in capsys.readouterr().out.splitlines():
        seen, total = line.split(" tokens")[0].split(" of ")
        assert seen.strip() == total and " finished " in line


def test_two_sweeps_in_one_folder_are_refused(tiny, capsys):
    Path("out").mkdir()
    with lock(Path("out/.lock")):
        assert "another sweep is running" in one_line(sweep.main, tiny, capsys)
    assert sweep.main([*tiny, "--budgets=1280"]) == 0


def test_records_are_read_under_the_lock(undisturbed, tiny, monkeypatch):
    """The sweep that had the lock before us may have written some since we started."""

    def late(path):
        leave(undisturbed.values())
        return lock(path)

    monkeypatch.setattr(sweep.files, "lock", late)
    monkeypatch.setattr(sweep, "make_run", None)
    assert sweep.main(tiny) == 0


SWEEP = f"""
import sweep
if __name__ in ("__main__", "__mp_main__"):
    sweep.grids.GRIDS["wsd"]["tiny"] = {TINY}
if __name__ == "__main__":
    raise SystemExit(sweep.main())
"""


def start_sweep(argv: list[str], **how) -> subprocess.Popen:
    """The tiny sweep as a program of its own, in a group of processes of its own."""
    Path("tiny.py").write_text(SWEEP)
    root = str(Path(sweep.__file__).parent)
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tiny.py", *argv]
    return subprocess.Popen(command, env=environment, start_new_session=True, **how)


def alive(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("all, at once", marks=pytest.mark.slow),
        "all, Ctrl-C",
        "parent, SIGKILL",
        "worker, SIGKILL",
    ],
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

    with stop_request() as must_stop:
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
    Path("out").mkdir()  # one run is left for Slurm
    lines = Path("local/records.jsonl").read_text().splitlines(keepends=True)
    Path("out/records.jsonl").write_text("".join(lines[:-1]))
    slurm = [*small, "--out=out", "--engine=slurm", "--workers=2"]
    capsys.readouterr()
    assert "no_such" in one_line(sweep.main, [*slurm, "--slurm=no_such=1"], capsys)
    program = [sys.executable, sweep.__file__, *slurm, "--slurm=timeout_min=5"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert records() == records("local")


@pytest.mark.parametrize("name", ["records.jsonl", ".pt"])
def test_a_full_disk_ends_a_sweep_in_one_line(name, tiny, monkeypatch, capsys):
    """/dev/full is a disk that is always full."""
    real = open

    def disk(path, mode="r", *args, **kwargs):
        full = name in str(path) and mode != "r" and "rb" not in mode
        return real("/dev/full" if full else path, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", disk)
    assert sweep.main(tiny) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sweep.py: out/") and "The same command resumes" in last
    assert f"{name}: cannot be written" in last


WRONG = [
    ("", "experiment"), ("wsd --workers 0", "--workers"),
    ("wsd --data CORPUS --tokenizer gpt2", "--tokenizer"),
    ("wsd --warmup_tokens 1e6", "warmup_tokens"), ("wsd --out /proc/no --data CORPUS", "/proc/no"),
    ("wsd --n_embd=48", "--widths"), ("wsd --power_a 3", "--power_a"), ("wsd --lr 0.1", "--lr"),
    ("wsd --eval_every 1e5", "--eval_every"), ("wsd --sweep log_every=1e3,2e3", "--sweep"),
    ("compare --average", "--average"), ("compare --sweep seed=0,1", "only one value"),
    ("wsd --sweep weight_decy=1", "weight_decy"), ("wsd --widths 33", "33"),
    ("wsd --sweep weight_decay=0,0.1 --sweep weight_decay=0.2", "--sweep weight_decay: twice"),
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
    Path("out").mkdir(exist_ok=True)
    with open("out/records.jsonl", "w") as file:
        for record in some:
            whole = record | {"config": record["config"] | {"out": None}}
            file.write(json.dumps(whole) + "\n")


@contextlib.contextmanager
def one_thread():
    """An engine for jobs that a test has changed, one after the other."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda job, *args: pool.submit(job, *args, "cpu", never), lambda: None


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
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "engine", lambda *_: (one_thread(), 2))  # two jobs at a time
        assert sweep.main(tiny) == 2
    found = records()
    assert all(undisturbed[run] == r for run, r in found.items())
    assert len(found) == len(made)
    assert "no space left. The same command resumes" in capsys.readouterr().err
    monkeypatch.setattr(sweep, "make_run", real)
    assert sweep.main(tiny) == 0 and records() == undisturbed


def test_a_bug_after_a_request_to_stop_keeps_its_traceback(tiny, monkeypatch):
    told = threading.Event()

    @contextlib.contextmanager
    def one_thread_that_is_told():
        with one_thread() as (submit, _):
            yield submit, told.set

    def make_run(*_):
        os.kill(os.getpid(), signal.SIGINT)
        assert told.wait(20)
        raise ValueError("a bug")

    monkeypatch.setattr(sweep, "make_run", make_run)
    monkeypatch.setattr(sweep, "engine", lambda *_: (one_thread_that_is_told(), 1))
    with pytest.raises(ValueError, match="a bug"):
        sweep.main(tiny)


def test_only_a_canceled_job_of_submitit_is_not_an_error():
    utils = pytest.importorskip("submitit.core.utils")
    assert engines.was_stopped(utils.UncompletedJobError("canceled"))
    assert not engines.was_stopped(utils.FailedJobError("ValueError: a bug"))


def test_records_of_another_sweep_are_refused(undisturbed, tiny, documents, capsys):
    leave(undisturbed.values())
    for flag in ("--average", "--dtype=bfloat16", "--decay_tokens=0"):
        assert "has records with" in one_line(sweep.main, [*tiny, flag], capsys)
    assert records() == undisturbed
    assert "has records with" in one_line(
        sweep.main, ["power", *tiny[2:], "--widths=32"], capsys
    )
    Path("out/sweep.json").write_text('{"experiment": "transfer"}')
    assert "is of sweep.py transfer" in one_line(sweep.main, tiny, capsys)
    Path("out/sweep.json").unlink()
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
    for more in ([], ["--seeds=2"]):
        args, typed = sweep.parse([*tiny, *more])
        plan, configs, fingerprint = sweep.check(args, typed)
        sweep.read_done(args, plan, configs, fingerprint)
        assert plan.left() == []


def test_a_sweep_of_diverged_runs_says_so(tiny, capsys):
    """Weights of this size give no finite loss at any learning rate."""
    assert sweep.main([*tiny, "--budgets=1280", "--batches=8", "--init_std=1e30"]) == 0
    assert "runs diverged" in capsys.readouterr().out.splitlines()[-1]
