"""Each run of a sweep is train.py's, bit for bit. Every grid gives a made-up law back."""

import contextlib
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import data
import fit
import forked
import sweep
import train
from config import TrainConfig, make_config
from schedules import make_schedule, paper_batch_size, peak, tuned_lr
from tools import devices, engines, files

SMALL = dict(
    n_layer=1, seq_len=16, base_width=16, init_std=0.05, m_emb=1.0, warmup_tokens=64,
    dtype="float32", device="cpu", final_eval_tokens=512,
)  # fmt: skip
BUDGETS = [320, 500, 1280]  # not all whole batches
CELL = dict(n_embd=16, n_head=1, batch_size=2, seed=0)
WSD = CELL | dict(schedule="wsd", lr=0.02, decay_share=0.1)


@contextlib.contextmanager
def in_a_thread(devices: list[str]):
    """As engines.on_this_machine, without new processes."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit, as_completed


def sweep_here(argv: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "on_this_machine", in_a_thread)
        return sweep.main(argv)


# -- A trunk -----------------------------------------------------------------------------


def runs_of(fields: dict, budgets=BUDGETS, **common) -> list[TrainConfig]:
    """Runs of these lengths, with what their text determines."""
    runs = []
    for T in budgets:
        cfg = make_config(**SMALL | common | fields, total_tokens=T)
        runs.append(data.with_corpus(cfg, ()))
    return runs


def trained(runs: list[TrainConfig], file="trunk.jsonl") -> list[dict]:
    sweep.train_trunk(runs, Path(file))
    return files.read_records(Path(file))


KINDS = {
    "wsd": WSD,
    "power": CELL | dict(schedule="power", power_a=0.5),
    "cosine": CELL | dict(schedule="cosine", lr=0.02),
    "MoE": WSD | dict(n_expert=4, n_expert_active=2, micro_batch_size=1),
    "diverged": WSD | dict(lr=1e30),  # before the first decay
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_a_sweep_is_the_run_of_train_py(kind, corpus_path, numbers_path):
    common = dict(data=f"{corpus_path}:0.7,{numbers_path}:0.3", log_every=128)
    runs = runs_of(KINDS[kind], **common)
    trunks = set(map(sweep.trunk_name, runs))
    assert len(trunks) == (3 if kind == "cosine" else 1)
    records = []
    for trunk, of_trunk in itertools.groupby(runs, sweep.trunk_name):
        records += trained(list(of_trunk), f"{trunk}.jsonl")
    assert not list(Path().glob("*.pt"))
    if kind == "diverged":  # so longer runs have the same results
        assert records[0]["results"] == records[1]["results"] == records[2]["results"]
        assert records[0]["results"]["tokens"] < 320

    # a branch, and the longest run, alone
    for T, record in zip(BUDGETS[1:], records[1:]):
        fields = SMALL | KINDS[kind] | common | dict(total_tokens=T, out=f"alone-{T}")
        assert train.main([f"--{name}={value}" for name, value in fields.items()]) == 0
        alone = files.read_json(Path(f"alone-{T}/record.json"))
        assert alone["results"]["diverged"] == (kind == "diverged")
        found = dict(alone["results"])
        found.pop("seconds")
        if kind == "diverged":  # train.py also looks before it saves
            found["tokens"] = record["results"]["tokens"]
        assert record["results"] == found
        assert record["config"] | {"out": f"alone-{T}"} == alone["config"]


def test_a_trunk_of_a_longer_run_does_not_change_a_shorter_one(corpus_path):
    """As after a sweep that was stopped, and then gets shorter runs."""
    runs = runs_of(WSD, [320, 1200, 1280], data=str(corpus_path))
    expected = [record["results"] for record in trained(runs)]
    for cfg, results in list(zip(runs, expected))[::-1]:
        assert sweep.train_from(Path("other.pt"), devices.resolve(cfg)) == results


def test_a_trunk_killed_before_any_write_ends_with_the_same_records(corpus_path):
    runs = runs_of(WSD, [320, 640], data=str(corpus_path), save_every=256)
    whole = trained(runs)
    for k in (2, 3, 5, 6):  # of trunks at 256, 288, 512 and 576 tokens, and two records
        file = Path(f"{k}.jsonl")
        args = (k, sweep.train_trunk, runs, file)
        process = forked.start(forked.die_before_rename, *args)
        process.join()
        assert process.exitcode == 9
        assert trained(runs, file) == whole  # it skips runs with a record


def test_a_run_is_its_settings_and_not_its_length(corpus_path, numbers_path):
    """Runs with the same T and other decays are two, equal runs are one."""
    common = dict(data=str(corpus_path))
    ten, half = (runs_of(WSD | dict(decay_share=x), [640], **common) for x in (0.1, 0.5))
    again = runs_of(WSD | dict(out="elsewhere", power_a=3.0), [640], **common)
    straight = runs_of(WSD | dict(decay_shape="linear"), [640], **common)
    (left,) = sweep.unfinished(ten + half + again + straight, Path()).values()
    assert [cfg.decay_share for cfg in left] == [0.5, 0.1, 0.1]  # the first decay first
    trunk = sweep.trunk_name(ten[0])
    records = trained(left, f"{trunk}.jsonl")
    assert not sweep.unfinished(ten + half + straight, Path())
    assert records[0] == trained(half, "alone.jsonl")[0]
    # its text counts, and not where it is
    Path("moved").symlink_to(corpus_path)
    (moved,) = runs_of(WSD, [640], data="moved")
    (text,) = runs_of(WSD, [640], data=str(numbers_path))
    (decay,) = runs_of(WSD | dict(weight_decay=0.0), [640], **common)
    assert sweep.trunk_name(moved) == trunk
    assert trunk not in (sweep.trunk_name(text), sweep.trunk_name(decay))


# -- A sweep -----------------------------------------------------------------------------

TINY = [
    "wsd", "--widths=16", "--batches=2,4", "--budgets=320,500,1280", "--lrs=0.01,0.02",
    "--seeds=1",
    *[f"--{name}={value}" for name, value in SMALL.items()],
]  # fmt: skip


@pytest.fixture
def tiny(corpus_path) -> list[str]:
    return [*TINY, f"--data={corpus_path}", "--out=out"]


def records_in(folder) -> dict:
    return {file.name: file.read_text() for file in Path(folder).glob("*.jsonl")}


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory) -> dict:
    """The records of the tiny sweep, that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert sweep_here([*TINY, f"--data={corpus_path}", f"--out={out}"]) == 0
    assert {file.suffix for file in out.iterdir() if file.suffix} == {".jsonl"}
    return records_in(out)


def sweep_in_a_group(argv: list[str]) -> int:
    """Sweep in a new group of processes."""
    os.setsid()
    return sweep.main(argv)


def test_ctrl_c_ends_all_processes_and_loses_nothing(undisturbed, tiny):
    """It reaches all processes of a group, as in a terminal."""
    process = forked.start(sweep_in_a_group, [*tiny, "--workers=1"])
    while not records_in("out"):
        assert process.is_alive(), forked.printed(process)
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    assert "Traceback" not in forked.printed(process)[1]
    assert Path("out/unfinished").exists()  # for fit.py
    with pytest.raises(ProcessLookupError):  # soon, no process is left
        for _ in range(600):
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    # the same command ends with the same records
    assert sweep_here(tiny) == 0
    assert records_in("out") == undisturbed
    assert not Path("out/unfinished").exists()


def test_a_sweep_on_slurm_is_the_same(undisturbed, tiny, monkeypatch):
    """Without Slurm, submitit starts a process of this machine for every job."""
    submitit = pytest.importorskip("submitit")
    quick = partial(submitit.helpers.as_completed, poll_frequency=0.1)
    monkeypatch.setattr(submitit.helpers, "as_completed", quick)
    one_trunk = ["--batches=2", "--lrs=0.01"]
    assert sweep.main([*tiny, *one_trunk, "--slurm", "timeout_min=5"]) == 0
    assert len(records_in("out")) == 1
    assert records_in("out").items() <= undisturbed.items()


# -- Its folder and its command line -----------------------------------------------------


def test_a_folder_has_one_sweep_whose_command_resumes_it(
    tiny, undisturbed, corpus_path, numbers_path, one_line
):
    Path("out").mkdir()
    for file, text in undisturbed.items():
        # as from before this field existed
        Path("out", file).write_text(text.replace('"grad_clip": 1.0, ', ""))
    made = records_in("out")
    with files.locked(Path("out")):
        assert "another process" in one_line(sweep.main, [*tiny, "--batches=1"])
    # runtime flags, and a text that moved, are the same runs; a new batch size adds some
    Path("moved").symlink_to(corpus_path)
    tiny.append("--data=moved")
    assert sweep.main([*tiny, "--micro_batch_size=1", "--save_every=512"]) == 0
    assert records_in("out") == made
    assert sweep_here([*tiny, "--batches=1", "--budgets=320"]) == 0
    assert records_in("out").items() > made.items()
    assert len(fit.read_runs(Path("out"), "")) == 12 + 2
    # other settings and another text are found before anything trains
    made = records_in("out")
    assert "grad_clip" in one_line(sweep.main, [*tiny, "--grad_clip=2"])
    assert "fingerprint" in one_line(sweep.main, [*tiny, f"--data={numbers_path}"])
    assert records_in("out") == made and not Path("out/unfinished").exists()


def test_a_dry_run_counts_what_is_left_and_leaves_nothing(tiny, capsys):
    assert sweep.main([*tiny, "--dry_run"]) == 0
    tokens = 4 * (1152 + 32 + 50 + 128)  # four trunks to 1152, and three decays each
    assert f"12 runs with {tokens:,} tokens" in capsys.readouterr().out
    assert not list(Path().iterdir())


@pytest.mark.parametrize("typed, word", [
    ("wsd --workers 0.5", "--workers"),
    ("wsd --warmup_tokens 1e6", "warmup_tokens"),  # longer than its runs
    ("pilot --widths 40 --dry_run", "--widths 40"),
    ("wsd --law law.json", "--law"),  # a sweep finds one
    ("wsd --power_b -0.3", "--power_b"),  # WSD has none
    ("wsd --slurm timeout_min", "--slurm"),
    ("wsd --data no", "no"),
])  # fmt: skip
def test_a_wrong_command_line_is_one_line(typed, word, corpus_path, one_line):
    assert word in one_line(sweep.main, [f"--data={corpus_path}", *typed.split()])
    assert not Path("runs").exists()


# -- Every grid gives a made-up law back -------------------------------------------------

SCALES = tuple(sweep.GRIDS["wsd"])
OF_LINES = [("quick", "linear")]


@pytest.mark.parametrize("scale, schedule", [(x, "wsd") for x in SCALES] + OF_LINES)
def test_every_grid_gives_its_law_back(scale, schedule, monkeypatch):
    law = dict(a=4.6, b=-0.51, q=1.0) if scale == "paper" else dict(a=1, b=-0.3, q=0.6)
    if schedule == "linear":  # as far from WSD's as in the table
        law["a"] *= peak("linear", 0.0) / peak("wsd", 0.1)

    def loss(cfg: TrainConfig) -> float:
        best = law["a"] * cfg.total_tokens ** law["b"]
        best *= paper_batch_size(cfg.batch_tokens) ** law["q"]
        x = math.log2(cfg.lr / best)
        return 2 + 0.03 * x**2 + 1 / math.log(cfg.total_tokens)

    def train_all(runs, folder, *_) -> None:
        folder.mkdir()
        with open(folder / "runs.jsonl", "w") as file:
            for cfg in runs:
                record = {"config": vars(cfg), "results": {"val_loss": loss(cfg)}}
                file.write(json.dumps(record) + "\n")

    monkeypatch.setattr(sweep, "train_all", train_all)
    monkeypatch.setattr(sweep.data, "with_corpus", lambda cfg, fixed: cfg)
    typed = ["wsd", f"--scale={scale}", f"--schedule={schedule}", "--out=out"]
    assert sweep.main(typed) == 0
    assert fit.main(["out"]) == 0
    found = files.read_json(Path("out/law.json"))
    assert {name: found[name] for name in law} == pytest.approx(law, rel=0.01)
    assert found["schedule"] == schedule


@pytest.mark.parametrize("scale, schedule", [(x, "power") for x in SCALES] + OF_LINES)
def test_a_pilot_tries_five_numbers_around_that_of_the_preset(scale, schedule):
    """Peaks, or under Power values at n = T. Its seeds are those of no other run."""
    typed = ["pilot", f"--scale={scale}", f"--schedule={schedule}"]
    grid, _, _ = sweep.parse(typed, "sweep.py", "", sweep.GRIDS)
    runs = sweep.runs_of(grid)
    assert len(runs) == 15 and {cfg.seed for cfg in runs} == {100, 101, 102}
    cfg = runs[0]
    steps = (cfg.total_tokens / cfg.batch_tokens, cfg.warmup_tokens / cfg.batch_tokens)
    assert steps == (160, 32)
    names = "preset schedule total_tokens warmup_tokens batch_size seq_len".split()
    preset = make_config(**{name: getattr(cfg, name) for name in names})
    usual = min(tuned_lr(vars(preset)), preset.lr_max or math.inf)
    rates = sorted({tuned_lr(vars(cfg)) for cfg in runs})
    assert np.diff(np.log2(rates)) == pytest.approx(1, abs=2e-3)
    assert 0.8 < rates[2] / usual < 1.25
    # no ceiling makes two equal
    assert len({make_schedule(cfg)(cfg.warmup_tokens) for cfg in runs}) == 5


# -- From a text to a run ----------------------------------------------------------------


def test_three_commands_lead_from_a_text_to_a_run(documents, tokenizer_path, capsys):
    """With a tokenizer of one's own, of which only the data folder has a copy."""
    Path("notes.txt").write_text("\n".join(documents[:60]), encoding="utf-8")
    shutil.copy(tokenizer_path, "mine.json")
    typed = ["--source=notes.txt", "--tokenizer=mine.json", "--val_fraction=0.1"]
    assert data.main([*typed, "--out=data/x"]) == 0
    Path("mine.json").unlink()
    pilot = ["pilot", *TINY[1:], "--data=data/x", "--out=pilot", "--batches=2"]
    pilot += ["--budgets=2560", "--lrs=0.0001,0.001,0.01,0.1,1"]
    assert sweep_here(pilot) == 0
    Path("data/x").rename("data/y")
    capsys.readouterr()
    assert fit.main(["pilot"]) == 0
    printed = capsys.readouterr().out

    # the printed command, of a smaller run
    (line,) = [line for line in printed.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words[:2] == ["python", "train.py"]
    smaller = ["--total_tokens=1280", "--n_embd=16", "--n_head=1", "--device=cpu"]
    assert train.main([*words[2:], "--data=data/y", *smaller, "--out=run"]) == 0
    cfg = files.read_json(Path("run/record.json"))["config"]
    assert cfg["schedule"] == "power" and cfg["tokenizer"].endswith(".json")
    of_pilot = files.read_records(next(Path("pilot").glob("*.jsonl")))[0]["config"]
    for name in ("tokenizer", "vocab_size", "fingerprint", "n_layer", "seq_len"):
        assert cfg[name] == of_pilot[name], name
