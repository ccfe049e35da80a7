"""Each run of a sweep is train.py's, bit for bit. Every grid gives a made-up law back."""

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import fit
import sweep
import train
from schedules import paper_batch_size
from tools import figures, files

SMALL = dict(
    n_layer=1, seq_len=16, base_width=16, init_std=0.05, m_emb=1.0, warmup_tokens=64,
    dtype="float32", device="cpu", final_eval_tokens=512,
)  # fmt: skip
BUDGETS = [640, 1000, 2560]  # not all whole batches
CELL = dict(n_embd=16, n_head=1, batch_size=2, seed=0)
WSD = CELL | dict(schedule="wsd", lr=0.02)


# -- A trunk -----------------------------------------------------------------------------


def runs_of(fields: dict, budgets=BUDGETS, **common) -> list[sweep.Run]:
    grid = sweep.Grid(SMALL | common, 0, [16], [2], 1, budgets)
    return [sweep.make_run(grid, fields, T) for T in budgets]


def trained(runs: list[sweep.Run], file="trunk.jsonl") -> list[dict]:
    sweep.train_trunk(runs, Path(file))
    return fit.read_records(Path(file))


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def assert_is_train_py(record: dict, fields: dict, out: str) -> None:
    """Train the same run with train.py, and compare settings and results."""
    words = [f"--{name}={value}" for name, value in fields.items()]
    assert train.main([*words, f"--out={out}"]) == 0
    alone = files.read_json(Path(out, "record.json"))
    assert record["results"] == without(alone["results"], "seconds")
    assert without(record["config"], "out") == without(alone["config"], "out")


KINDS = {
    "wsd": WSD,
    "power": CELL | dict(schedule="power", power_a=0.5),
    "cosine": CELL | dict(schedule="cosine", lr=0.02),
    "MoE": WSD | dict(n_expert=4, n_expert_active=2, micro_batch_size=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_a_sweep_is_the_run_of_train_py(kind, corpus_path):
    data_flag = dict(data=str(corpus_path))
    runs = runs_of(KINDS[kind], **data_flag)
    assert len({run.trunk for run in runs}) == (3 if kind == "cosine" else 1)
    records = []
    for trunk, some in itertools.groupby(runs, lambda run: run.trunk):
        records += trained(list(some), f"{trunk}.jsonl")
    fields = SMALL | KINDS[kind] | data_flag | dict(total_tokens=BUDGETS[2])
    assert_is_train_py(records[2], fields, "alone")
    assert not list(Path().glob("*.pt"))


def test_a_curriculum_is_trained_in_a_sweep_too(corpus_path, documents):
    """It begins where the decay does, which the trunk has not reached."""
    data.prepare(documents[:100], "bytes", Path("other"))
    mixture = dict(data=f"{corpus_path}:0.7,other:0.3", decay_data="other")
    records = trained(runs_of(WSD, **mixture))
    assert "val_loss_other" in records[2]["results"]
    fields = SMALL | WSD | mixture | dict(total_tokens=BUDGETS[2])
    assert_is_train_py(records[2], fields, "alone")


def test_a_trunk_of_a_longer_run_does_not_change_a_shorter_one(corpus_path):
    runs = runs_of(WSD, [640, 2400, 2560], data=str(corpus_path))
    whole = trained(runs)
    sweep.train_from(Path("other.pt"), runs[2].cfg)
    saved = torch.load("other.pt", weights_only=True)
    assert saved["tokens"] == 2304  # where its decay begins, 10% before the end
    for run, record in zip(reversed(runs), reversed(whole)):
        assert sweep.train_from(Path("other.pt"), run.cfg) == record["results"]


def test_a_diverged_trunk_ends_where_train_py_ends(corpus_path, monkeypatch):
    """It diverges before the first decay, so longer runs need no training."""
    built = []
    build = train.build
    monkeypatch.setattr(train, "build", lambda *args: built.append(1) or build(*args))
    fields = WSD | dict(lr=1e30)
    common = dict(data=str(corpus_path), log_every=128)
    records = trained(runs_of(fields, **common))
    assert len(built) == 1
    for T, record in zip(BUDGETS, records):
        assert record["config"]["total_tokens"] == T
        assert record["results"] == records[0]["results"]
        assert record["results"]["diverged"] and record["results"]["tokens"] < 640
    alone = SMALL | fields | common | dict(total_tokens=BUDGETS[2])
    assert_is_train_py(records[2], alone, "alone")


def fork(function, *args) -> int:
    """Call a function in a copy of this process, in a new group of processes.

    What it prints is in the file err. Its exit status is what the function returns.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        # as in a new program. Here, train.main has taken SIGINT and SIGTERM
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.stderr = open("err", "w")
        status = 1
        try:
            status = function(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def train_and_die(runs: list[sweep.Run], file: Path, k: int) -> int:
    """Train a trunk, and end like a killed process right before the k-th rename."""
    renames = itertools.count(1)
    replace = os.replace

    def counted(*args) -> None:
        if next(renames) == k:
            os._exit(9)
        replace(*args)

    os.replace = counted
    sweep.train_trunk(runs, file)
    return 0


def test_a_trunk_that_was_killed_at_any_write_ends_with_the_same_records(corpus_path):
    runs = runs_of(WSD, [640, 2560], data=str(corpus_path), save_every=1024)
    whole = trained(runs)
    status = 9
    for k in itertools.count(1):
        file = Path(f"{k}.jsonl")
        status = status_of(fork(train_and_die, runs, file, k))
        if status != 9:
            break
        left = [run for run in runs if run.T not in sweep.losses_in(file)]
        assert trained(left, file) == whole
    assert status == 0 and k == 7  # trunks at 576, 1024, 2048, 2304, and two records


# -- A sweep -----------------------------------------------------------------------------

TINY = [
    "wsd", "--widths=16", "--batches=2,4", "--budgets=640,1000,2560", "--lrs=0.01,0.02",
    *[f"--{name}={value}" for name, value in SMALL.items()],
]  # fmt: skip


@pytest.fixture
def tiny(corpus_path) -> list[str]:
    return [*TINY, f"--data={corpus_path}", "--out=out"]


def records_in(folder) -> dict:
    return {file.name: file.read_text() for file in Path(folder).glob("*.jsonl")}


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory) -> dict:
    """The records of the tiny sweep, from one worker that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    argv = [*TINY, f"--data={corpus_path}", f"--out={out}", "--workers=1"]
    assert sweep.main(argv) == 0
    assert {file.suffix for file in out.iterdir() if file.suffix} == {".json", ".jsonl"}
    return records_in(out)


def leave(records: dict, folder="out") -> None:
    """As if a sweep had made these records already."""
    Path(folder).mkdir()
    for name, text in records.items():
        Path(folder, name).write_text(text)


def wait_for(is_true, pid: int) -> None:
    """Wait until something is true while a process runs."""
    while not is_true():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), Path("err").read_text()
        time.sleep(0.01)


def n_records() -> int:
    return sum(len(text.splitlines()) for text in records_in("out").values())


def is_group(number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, 0)
        return True
    return False


def assert_group_ends(number: int) -> None:
    end = time.monotonic() + 60
    while is_group(number):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)


def workers_of(pid: int) -> list[int]:
    """The processes that a process has spawned, from Linux's /proc."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(int(child))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_kills_and_ctrl_c_leave_no_process_and_lose_nothing(undisturbed, tiny):
    """At random moments."""
    # 1. Kill a worker
    two = [*tiny, "--workers=2"]
    pid = fork(sweep.main, two)
    least = random.randrange(1, 4)
    wait_for(lambda: n_records() >= least, pid)
    os.kill(random.choice(workers_of(pid)), signal.SIGKILL)
    assert status_of(pid) == 2
    assert "a worker died" in Path("err").read_text().splitlines()[-1]
    assert_group_ends(pid)

    # 2. Kill the parent, while its worker starts or trains
    before = n_records()
    pid = fork(sweep.main, [*tiny, "--workers=1"])
    wait_for(lambda: workers_of(pid), pid)
    wait_for(lambda: n_records() > before or random.random() < 0.01, pid)
    os.kill(pid, signal.SIGKILL)
    assert status_of(pid) == -signal.SIGKILL
    assert_group_ends(pid)

    # 3. Ctrl-C, which reaches all processes
    pid = fork(sweep.main, two)
    wait_for(lambda: workers_of(pid), pid)
    time.sleep(random.random())
    os.killpg(pid, signal.SIGINT)
    assert status_of(pid) == 130
    error = Path("err").read_text()
    assert "Traceback" not in error and error.splitlines()[-1].startswith("sweep.py: ")
    assert_group_ends(pid)

    # 4. The same command ends with the same records
    assert sweep.main(two) == 0
    assert records_in("out") == undisturbed


def test_a_sweep_on_slurm_is_the_same(undisturbed, tiny):
    """Without Slurm, submitit starts a process of this machine for every job."""
    pytest.importorskip("submitit")
    *done, _last = undisturbed
    leave({name: undisturbed[name] for name in done})
    pid = fork(sweep.main, [*tiny, "--slurm", "timeout_min=5"])
    assert status_of(pid) == 0, Path("err").read_text()
    assert records_in("out") == undisturbed


def test_a_sweep_that_is_ended_takes_its_jobs_from_the_cluster(tiny):
    pytest.importorskip("submitit")
    one_job = ["--batches=2", "--lrs=0.01", "--budgets=10M", "--save_every=1000"]
    pid = fork(sweep.main, [*tiny, *one_job, "--slurm", "timeout_min=5"])
    wait_for(lambda: list(Path("out").glob("*.pt")), pid)
    os.kill(pid, random.choice([signal.SIGTERM, signal.SIGHUP]))
    assert status_of(pid) == 130
    assert "Traceback" not in Path("err").read_text()
    assert_group_ends(pid)  # a job is in it


def test_a_comparison_tunes_and_then_tests(corpus_path, monkeypatch):
    lrs = [0.005, 0.02]
    tune = sweep.Tuning(16, 4, [320])
    grid = sweep.Grid(SMALL, 64, [16], [8], 1, [640], lrs, tune=tune)
    monkeypatch.setitem(sweep.GRIDS["compare"], "quick", grid)
    assert sweep.main(["compare", f"--data={corpus_path}", "--out=out"]) == 0
    rows = fit.read_sweep(Path("out"))
    tested = [row for row in rows if "line" in row]
    assert {row["line"] for row in tested} == set(sweep.LINES) and len(tested) == 6
    assert {row["seed"] for row in rows} == {0, 100, 101}
    # every line is tested at the learning rate with the lowest mean in its trials
    losses = {lr: 0.0 for lr in lrs}
    for row in rows:
        if row["seed"] >= 100 and (row["schedule"], row["decay_shape"]) == ("wsd", "exp"):
            losses[row["lr"]] += row["loss"]
    (wsd,) = [row for row in tested if row["line"] == "WSD"]
    best = min(losses, key=losses.get)
    assert wsd["lr"] == pytest.approx(best * math.sqrt(2), rel=1e-3)  # of the batch size
    assert any(row["schedule"] == "linear" for row in tested)


# -- Its folder and its command line -----------------------------------------------------


def one_line(argv: list[str], capsys) -> str:
    """The message of a sweep that refuses its command line."""
    capsys.readouterr()
    try:
        status = sweep.main(argv)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1, error
    return error


def test_only_runtime_flags_may_change(undisturbed, tiny, documents, capsys):
    leave(undisturbed)
    data.prepare(documents[:100], "bytes", Path("mine"))
    tiny.append("--data=mine")
    assert sweep.main(tiny) == 0
    again = [*tiny, "--micro_batch_size=1", "--save_every=512", "--workers=2"]
    assert sweep.main(again) == 0
    settings = files.read_json(Path("out/sweep.json"))["settings"]
    assert "micro_batch_size" not in settings and settings["experiment"] == "wsd"
    for flag in ("--weight_decay=0", "--n_layer=2", "--decay_tokens=100"):
        assert flag[2:].split("=")[0] in one_line([*tiny, flag], capsys)
    assert "experiment" in one_line(["transfer", *tiny[1:]], capsys)
    shutil.rmtree("mine")
    data.prepare(documents[:200], "bytes", Path("mine"))
    assert "fingerprint" in one_line(tiny, capsys)
    assert records_in("out") == undisturbed


def test_two_sweeps_in_one_folder_are_refused(tiny, capsys):
    Path("out").mkdir()
    with files.locked(Path("out")):
        assert "another process" in one_line(tiny, capsys)


def test_a_dry_run_counts_what_is_left_and_leaves_nothing(undisturbed, tiny, capsys):
    assert sweep.main([*tiny, "--dry_run"]) == 0
    # four trunks to 2304, and three decays each
    tokens = 4 * (2304 + 64 + 100 + 256)
    assert f"12 runs with {tokens:,} tokens" in capsys.readouterr().out
    assert not list(Path().iterdir())
    leave(undisturbed)
    assert sweep.main([*tiny, "--dry_run", "--budgets=640,5120"]) == 0
    assert f"4 runs with {4 * 5120:,} tokens" in capsys.readouterr().out


def test_the_command_line_replaces_the_grid():
    argv = ["wsd", "--widths=32,64", "--batches=2", "--budgets=80k,1.6e5", "--seeds=2"]
    args, typed = sweep.parse([*argv, "--beta2=0.9", "--n_layer=3", "--lrs=0.01"])
    assert typed == dict(beta2=0.9, n_layer=3)
    grid = sweep.grid_of(args, typed)
    configs = [run.cfg for run in sweep.wsd_runs(grid, Path())]
    assert len(configs) == 2 * 2 * 2
    values = lambda name: {getattr(cfg, name) for cfg in configs}
    assert values("n_embd") == {32, 64} and values("n_head") == {2, 4}
    assert values("batch_size") == {2} and values("lr") == {0.01}
    assert values("seed") == values("data_seed") == {0, 1}
    assert values("total_tokens") == {80_000, 160_000}
    assert values("beta2") == {0.9} and values("n_layer") == {3}


WRONG = [
    ("", "experiment"),
    ("wsd --workers 0", "--workers"),
    ("wsd --budgets 1.5", "--budgets"),
    ("wsd --warmup_tokens 1e6", "warmup_tokens"),
    ("wsd --widths 100", "n_head"),
    ("wsd --widths 32,8", "n_head"),
    ("wsd --lrs 0.01,-1", "lr"),
    ("wsd --out /proc/no", "/proc/no"),
    ("wsd --n_embd 48", "--n_embd"),
    ("wsd --lr 0.1", "--lr"),
    ("wsd --total_tokens 1e6", "--total_tokens"),
    ("wsd --power_a 3", "--power_a"),
    ("wsd --eval_every 1e5", "--eval_every"),
    ("wsd --weight_decy 1", "weight_decy"),
    ("power --lrs 0.01", "--lrs"),
    ("compare --schedule power", "--schedule"),
    ("compare --widths 32,100", "n_head"),  # in its second phase
    ("wsd --data no", "no"),
    ("wsd --device cuda:99", "--device"),
    ("wsd --slurm no_such=1", "--slurm"),
]


@pytest.mark.parametrize("line, word", WRONG)
def test_a_wrong_command_line_is_one_line(line, word, corpus_path, capsys):
    words = line.split()
    if words and "--data" not in words:
        words.append(f"--data={corpus_path}")
    assert word in one_line(words, capsys)
    left = (
        {path.name for path in Path("runs").rglob("*")} if "--slurm" not in line else {}
    )
    assert not left


def test_a_full_disk_is_one_line(tiny, capsys):
    """A limit on the size of files ends a write as a full disk does."""
    resource = pytest.importorskip("resource")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # less than a checkpoint
    try:
        status = sweep.main([*tiny, "--workers=1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    last = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and last.startswith("sweep.py: ") and ".pt" in last


# -- Every grid gives a made-up law back -------------------------------------------------

SCALES = tuple(sweep.GRIDS["wsd"])


def law_of(scale: str) -> dict:
    """The paper's law for its own grid, another one for ours."""
    if scale == "paper":
        return dict(a=4.6, b=-0.51, q=1.0)
    return dict(a=1.1, b=-0.3, q=0.6)


def off(cfg, scale: str, lr: float | None = None) -> float:
    """log2 of a learning rate over the best one."""
    law = law_of(scale)
    best = law["a"] * paper_batch_size(cfg.batch_tokens) ** law["q"]
    best *= cfg.total_tokens ** law["b"]
    return math.log2((lr or cfg.lr) / best)


def made_up(experiment: str, scale: str, loss) -> list[dict]:
    """The rows of a whole experiment, in a folder of this name. loss(cfg): of a run."""
    grid = sweep.grid_of(*sweep.parse([experiment, f"--scale={scale}"]))
    out = Path(experiment)
    out.mkdir()
    for runs_of_phase in sweep.EXPERIMENTS[experiment]:
        for trunk, runs in sweep.unfinished(runs_of_phase(grid, out), out).items():
            with open(out / f"{trunk}.jsonl", "a") as file:
                for run in runs:
                    config = vars(run.cfg) | ({"line": run.line} if run.line else {})
                    record = {"config": config, "results": {"val_loss": loss(run.cfg)}}
                    file.write(json.dumps(record) + "\n")
    sweep.check_folder(out, {"experiment": experiment, **grid.common})
    return fit.read_sweep(out)


@pytest.fixture
def reported(monkeypatch):
    """Report an experiment without its figures, which test_fit draws."""
    for name in vars(figures):
        if name.startswith("draw_"):
            monkeypatch.setattr(figures, name, lambda *_, **__: None)

    def report(experiment: str) -> None:
        assert fit.main([experiment]) == 0

    return report


@pytest.mark.parametrize("scale", SCALES)
def test_wsd_gives_the_law_back(scale, reported):
    loss = lambda cfg: 2 + 0.03 * off(cfg, scale) ** 2 + 1 / math.log(cfg.total_tokens)
    made_up("wsd", scale, loss)
    reported("wsd")
    found = files.read_json(Path("wsd/law.json"))
    for name, value in law_of(scale).items():
        assert found[name] == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("scale", SCALES)
def test_transfer_gives_the_effect_of_width_back(scale, reported):
    """The best learning rate stays under muP. Without it, it falls as 1 / width here."""

    def loss(cfg) -> float:
        is_mup = math.isclose(cfg.attention_multiplier, 1 / cfg.d_head)
        factor = 1.0 if is_mup else cfg.base_width / cfg.n_embd
        return 2 + 0.03 * (off(cfg, scale) - math.log2(factor)) ** 2

    rows = made_up("transfer", scale, loss)
    best = fit.minima(fit.runs_of(rows))
    assert len(best) == 2 * len(sweep.GRIDS["transfer"][scale].widths)
    lrs = {name: [x for cell, x in best.items() if (fit.STANDARD in cell.shape) == name]
           for name in (False, True)}  # fmt: skip
    widths = np.log2(sweep.GRIDS["transfer"][scale].widths)
    assert np.ptp(lrs[False]) == pytest.approx(0, abs=1e-3)
    assert lrs[True] - lrs[True][0] == pytest.approx(widths[0] - widths, abs=1e-3)
    reported("transfer")


@pytest.mark.parametrize("scale", SCALES)
def test_power_gives_the_best_a_and_b_back(scale, reported):
    center = sweep.GRIDS["power"][scale].common
    a = math.log2(1.1 * center["power_a"])
    b = center["power_b"] + 0.013

    def loss(cfg) -> float:
        distance = 0.1 * (math.log2(cfg.power_a) - a) ** 2
        return 2 + distance + 4 * (cfg.power_b - b) ** 2

    rows = made_up("power", scale, loss)
    scans = {
        "power_b": (a, lambda row: math.log2(row["power_a"])),
        "power_a": (b, lambda row: row["power_b"]),
    }
    for fixed, (best, x) in scans.items():
        some = [row for row in rows if row[fixed] == center[fixed]]
        found = fit.minima(fit.runs_of(some, x), degree=2, window=5)
        assert len(found) == len({(r["batch_size"], r["total_tokens"]) for r in rows})
        assert list(found.values()) == pytest.approx([best] * len(found), abs=1e-3)
    reported("power")


EXTRA = {"cosine": 0.002, "linear": 0.003, "power": 0.001}


@pytest.mark.parametrize("scale", SCALES)
def test_compare_gives_tuning_and_lines_back(scale, reported):
    """A line has the loss of its schedule, and of its distance from the best."""
    grid = sweep.GRIDS["compare"][scale]

    def loss(cfg) -> float:
        lr = cfg.lr
        if cfg.schedule == "power":  # at its end
            lr = cfg.power_a * paper_batch_size(cfg.batch_tokens) ** cfg.power_q
            lr *= cfg.total_tokens**cfg.power_b
        extra = EXTRA.get(cfg.schedule, 0)
        return 2 + 0.01 * (cfg.seed % 50) + extra + 0.03 * off(cfg, scale, lr) ** 2

    rows = made_up("compare", scale, loss)
    reported("compare")
    law = law_of(scale)
    first, last = grid.tune.budgets
    seq_len = rows[0]["seq_len"]
    for name, line in sweep.LINES.items():

        def wrong(lr: float, batch_size: int, T: int) -> float:
            """Distance of the line from the best learning rate, from its exponents."""
            lr *= (batch_size / grid.tune.batch_size) ** line.q * (T / first) ** line.b
            beta = paper_batch_size(batch_size * seq_len)
            return math.log2(lr / (law["a"] * beta ** law["q"] * T ** law["b"]))

        def mean(lr: float) -> float:
            return sum(wrong(lr, grid.tune.batch_size, T) ** 2 for T in (first, last))

        lr = min(grid.lrs, key=mean)
        extra = EXTRA.get(line.fields["schedule"], 0)
        extra += EXTRA.get(line.fields.get("decay_shape"), 0)
        some = [row for row in rows if row.get("line") == name]
        cells = len(grid.widths) * len(grid.batches) * len(grid.budgets)
        assert len(some) == cells * grid.seeds
        for row in some:
            distance = wrong(lr, row["batch_size"], row["total_tokens"])
            expected = 2 + 0.01 * row["seed"] + extra + 0.03 * distance**2
            assert row["loss"] == pytest.approx(expected, abs=1e-3)
