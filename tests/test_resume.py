"""A run may stop at any moment, resume and branch. It ends with the same bits."""

import itertools
import math
import os
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import config
import data
import forked
import train
from conftest import FEW_VALIDATED, MOE, STEP, argv, files_in, metrics, newest, record_of
from schedules import lr_by_law, make_schedule
from tools import files, run_folder, signals

SAVES = FEW_VALIDATED | dict(save_every=3 * STEP)  # of 30 steps
RESUME = ["--out=run", "--resume"]
TIMES = {"seconds", "tokens_per_second", "command", "git_commit", "out"}


def everything(run) -> dict:
    """All that a run leaves, except for times and names."""

    def without_times(fields: dict) -> dict:
        return {name: value for name, value in fields.items() if name not in TIMES}

    parts = {name: without_times(fields) for name, fields in record_of(run).items()}
    lines = files.read_records(Path(run, "metrics.jsonl"))
    lines = [without_times(line) for line in lines]
    sample = Path(run, "sample.txt").read_text(encoding="utf-8")
    return parts | {"metrics": lines, "sample": sample, "saved": newest(run)}


def assert_same(one: dict, other: dict, but=()) -> None:
    """Bit for bit, with weights and moments."""
    for part in one.keys() - {"saved", *but}:
        assert one[part] == other[part], part
    names = ("tokens", "model", "optimizer")
    one, other = ({name: side["saved"][name] for name in names} for side in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def stop(typed: list[str], steps: int, number=signal.SIGTERM) -> None:
    """Train, with a signal during this step."""
    real = train.optimizer_step
    left = [steps]

    def counted(*args):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer_step", counted)
        assert train.main(typed) == 3


def branch(typed: str, out: str = "branch") -> train.TrainConfig:
    """Train a branch, and return its settings."""
    assert train.main(f"--branch={typed} --out={out}".split()) == 0
    return config.make_config(**record_of(out)["config"])


@pytest.fixture(scope="module")
def folder(corpus_path, tmp_path_factory) -> Path:
    """With finished runs, `whole` and `cosine`, and `run`, stopped after 20 steps."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main(argv(data=corpus_path, out="whole", **SAVES)) == 0
        stop(argv(data=corpus_path, out="run", **SAVES), 20)
        cosine = argv(data=corpus_path, schedule="cosine", total_tokens=8 * STEP)
        assert train.main([*cosine, "--out=cosine"]) == 0
    return folder


@pytest.fixture
def undisturbed(folder) -> dict:
    """What `run` leaves if nobody stops it."""
    return everything(folder / "whole")


@pytest.fixture
def run(folder) -> Path:
    """The run stopped after 20 steps, in the current folder."""
    shutil.copytree(folder / "run", "run")
    return Path("run")


# -- Stop and resume ---------------------------------------------------------------------


@pytest.mark.parametrize("changed", [
    dict(MOE, micro_batch_size=4, data="a:0.7,b:0.3"),
    dict(data="a", schedule="cosine", dtype="bfloat16"),
], ids=["MoE", "cosine"])  # fmt: skip
def test_a_stopped_run_resumes(changed, corpus_path, numbers_path, capsys):
    """After any signal, by the command that it prints."""
    Path("a").symlink_to(corpus_path)
    Path("b").symlink_to(numbers_path)
    fields = FEW_VALIDATED | dict(total_tokens=12 * STEP, save_every=5 * STEP) | changed
    typed = [*argv(**fields), "--no-tie_embeddings"]
    assert train.main([*typed, "--out=whole"]) == 0
    again = [*typed, "--out=run", "--resume"]
    stop([*again, "--recompute"], 2, signal.SIGINT)  # Ctrl-C
    stop(again, 3, signal.SIGHUP)  # a lost connection
    stop(again, 1, signal.SIGPIPE)  # nobody reads what it prints
    stop(again, 5, signal.SIGTERM)  # a cluster
    assert newest("run")["tokens"] == 11 * STEP
    assert not Path("run/record.json").exists()
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert train.main(words[words.index("train.py") + 1 :]) == 0
    whole = everything("whole")
    whole["config"]["recompute"] = True  # costs time, and changes no bit
    assert_same(everything("run"), whole)


def test_a_second_ctrl_c_ends_at_once_and_nohup_holds():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    must_stop = signals.stop_request(math.inf)
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert not must_stop()
    os.kill(os.getpid(), signal.SIGINT)
    assert must_stop()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL


def test_a_run_killed_before_any_write_ends_with_the_same_bits(undisturbed, corpus_path):
    """Before its config, its log, its first checkpoint, and its last one when resumed."""
    typed = [*argv(data=corpus_path, out="run", **SAVES), "--resume"]
    for k in (1, 2, 3, 6):
        process = forked.start(forked.die_before_rename, k, train.main, typed)
        process.join()
        assert process.exitcode == 9, forked.printed(process)
        for path in run_folder.checkpoints(Path("run")):  # all can be read
            assert run_folder.read_checkpoint(path)["tokens"] == int(path.stem)
    with open("run/metrics.jsonl", "a") as log:
        log.write('{"tokens": 5376, "lo')
    assert train.main(typed) == 0
    assert_same(everything("run"), undisturbed)
    assert list(Path("run").rglob("*.tmp")) == []


def test_a_full_disk_leaves_a_file_as_it_was():
    file = Path("file")
    file.write_text("old")
    with pytest.raises(OSError), files.replacing(file) as temporary:
        temporary.write_text("half")
        raise OSError("No space left on device")
    assert file.read_text() == "old" and list(Path().iterdir()) == [file]


def test_a_damaged_checkpoint_is_named_and_the_one_before_resumes(
    run, undisturbed, one_line
):
    file = run_folder.checkpoints(run)[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert file.name in one_line(train.main, RESUME)
    file.unlink()
    assert train.main(RESUME) == 0
    assert_same(everything(run), undisturbed)


def test_a_folder_in_use_is_refused(run, one_line):
    with files.locked(run):
        assert "another process" in one_line(train.main, RESUME)


def test_runtime_fields_may_change_on_resume(run, undisturbed):
    changed = [f"--log_every={2 * STEP}", f"--eval_every={5 * STEP}"]
    assert train.main([*RESUME, *changed]) == 0
    assert_same(everything(run), undisturbed, but=("config", "metrics"))
    logged = [line["tokens"] // STEP for line in metrics(run)]
    assert logged == [*range(1, 21), 22, 24, 26, 28, 30]


@pytest.mark.parametrize("typed, word", [
    ("--total_tokens=1e6", "--branch"), ("--seed=1", "seed"), ("--data=x", "data"),
    ("--law=law.json", "--law"),
])  # fmt: skip
def test_other_fields_may_not_change_on_resume(typed, word, run, one_line):
    files.write_json(Path("law.json"), config.LAPTOP_LAW._asdict())
    before = files_in(run)
    assert word in one_line(train.main, [*RESUME, typed])
    assert files_in(run) == before


def test_a_run_knows_its_text_wherever_that_is(
    run, undisturbed, corpus_path, numbers_path, one_line
):
    """With no text or another one in its place, it resumes only with --data."""
    config_file = run / "config.json"
    started = config_file.read_text()
    for there in ("nowhere", numbers_path):
        config_file.write_text(started.replace(str(corpus_path), str(there)))
        before = files_in(run)
        assert "--data" in one_line(train.main, RESUME)
        assert files_in(run) == before
    shutil.copytree(corpus_path, "moved")
    stop([*RESUME, "--data=./moved"], 3)
    assert train.main(RESUME) == 0
    found = everything(run)
    assert found["config"].pop("data") == "./moved"
    del undisturbed["config"]["data"]
    assert_same(found, undisturbed)


# -- Branches ----------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["power", "wsd"])
def test_a_branch_is_the_separate_run(schedule, corpus_path):
    """From a long run to a shorter one, and from a short run to a longer one."""
    totals = {"long": 20 * STEP, "short": 10 * STEP}
    fields = dict(data=corpus_path, schedule=schedule, save_every=4 * STEP)
    fields |= dict(keep_checkpoints=9, **FEW_VALIDATED)
    for out, total in totals.items():
        assert train.main(argv(**fields, out=out, total_tokens=total)) == 0
    for parent, separate in (("long", "short"), ("short", "long")):
        start = run_folder.checkpoint_file(Path(parent), 8 * STEP)
        branch(f"{start} --total_tokens={totals[separate]}", f"from-{parent}")
        found = everything(f"from-{parent}")
        assert found["origin"]["parent"] == str(start.resolve())
        alone = everything(separate)
        alone["metrics"] = [x for x in alone["metrics"] if x["tokens"] > 8 * STEP]
        assert_same(found, alone, but=("origin", "config"))


def test_a_branch_of_a_folder_starts_before_its_decay(corpus_path):
    """There is always a checkpoint, also if save_every does not pass it."""
    fields = dict(total_tokens=25 * STEP, decay_share=0.24, keep_checkpoints=1)
    fields |= dict(save_every=4 * STEP, **FEW_VALIDATED)
    assert train.main(argv(data=corpus_path, out="run", **fields)) == 0
    kept = run_folder.checkpoints(Path("run"))
    assert [int(path.stem) // STEP for path in kept] == [19, 25]
    assert branch(f"run --total_tokens={30 * STEP}").decay_share == 0.24
    assert record_of("branch")["origin"]["parent"] == str(kept[0].resolve())


def test_a_branch_has_the_share_that_its_user_asked_for(run):
    """Ended at once, longer again. A share of 0 stays 0."""
    seen = 20 * STEP
    ended = branch("run --decay_share=0.3", "ended")
    assert (ended.total_tokens, ended.decay_share) == (7314, 0.3)  # 5120 / 0.7
    assert ended.decay_start == seen
    lr_at = make_schedule(ended)
    assert metrics("ended")[-1]["tokens"] == 28 * STEP
    assert metrics("ended")[0]["lr"] == lr_at(seen + STEP / 2) < lr_at(seen)
    longer = branch("run --decay_share=0.3 --total_tokens=12k", "longer")
    assert (longer.decay_share, longer.decay_tokens) == (0.3, 3600)
    none = branch("longer --decay_share=0 --total_tokens=11k", "none")
    more = branch("none --total_tokens=12k", "more")
    assert none.decay_tokens == more.decay_tokens == 0


def test_a_branch_resumes_without_its_parent_and_if_killed_at_once_from_it(run):
    """It counts its own time."""
    start = run_folder.checkpoints(run)[-1]
    torch.save(torch.load(start) | {"seconds": 1e6}, start)
    typed = f"--branch=run --total_tokens={24 * STEP}".split()
    assert train.main([*typed, "--out=whole"]) == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train, "optimizer_step", None)
        train.main([*typed, "--out=killed"])
    shutil.rmtree("killed/ckpt")
    stop([*typed, "--out=killed", "--resume"], 2)
    shutil.rmtree(run)
    assert newest("killed")["seconds"] < 1e6
    assert train.main(["--out=killed", "--resume"]) == 0
    assert_same(everything("killed"), everything("whole"))


def test_a_branch_changes_what_is_typed(run, numbers_path):
    """Data, schedule and weight decay, but not the weights."""
    start = run_folder.checkpoints(run)[-1]
    typed = f"{start} --data={numbers_path} --schedule=wsd --lr=0.01 --weight_decay=0.5"
    cfg = branch(f"{typed} --total_tokens={24 * STEP} --decay_shape=linear")
    assert (cfg.schedule, cfg.decay_shape, cfg.warmup_tokens) == ("wsd", "linear", 1024)
    lr_at = make_schedule(cfg)
    lines = metrics("branch")
    assert [x["lr"] for x in lines] == [lr_at(STEP * (i + 0.5)) for i in range(20, 24)]

    state = train.build(cfg, run_folder.read_checkpoint(start))
    decays = {g["role"]: g["weight_decay"] for g in state.optimizer.param_groups}
    assert decays["hidden"] == 0.5 and decays["gain"] == 0
    # sequences 160 to 167 of the order of the new text
    batch = data.load_mixture(cfg).draw(np.arange(160, 168), 32, seed=0)
    loss, _ = state.model(*map(torch.from_numpy, batch))
    assert lines[0]["loss"] == loss.item()


def test_another_schedule_keeps_the_peak_and_gets_the_decay_of_its_preset(folder):
    """Power has no peak, so a branch of it follows the law."""
    wsd = branch(f"{folder}/cosine --schedule=wsd --total_tokens=3072", "wsd")
    assert (wsd.lr, wsd.decay_share) == (0.02, 0.3)
    from_power = branch(f"{folder}/run --schedule=wsd --total_tokens=7k")
    assert from_power.lr == lr_by_law(config.LAPTOP_LAW, from_power)["lr"]


@pytest.mark.parametrize("typed, word", [
    ("run --seed=1", "--seed 1"),  # of weights that it does not draw
    ("run --data_seed=1", "--data_seed 1"),  # would read sequences twice
    ("run --total_tokens=5500", "5,500"),  # less than a step more
    ("run --lr=0.1", "--lr 0.1"),  # Power has none
    ("run/ckpt/0000000000009999.pt", "0000000000009999.pt"),
    ("run --minutes=1", "--minutes"),
    ("run --out=cosine", "--resume"),
])  # fmt: skip
def test_a_branch_that_cannot_be_is_refused(typed, word, folder, one_line, monkeypatch):
    monkeypatch.chdir(folder)
    before = files_in(folder)
    assert word in one_line(train.main, f"--branch={typed}".split())
    assert files_in(folder) == before


# -- Runs that end by the clock ----------------------------------------------------------


def test_a_run_with_minutes_is_the_run_planned_with_its_tokens(corpus_path, monkeypatch):
    """Bit for bit, also if it is stopped before or during its decay."""
    real = train.optimizer_step
    minutes = [0]

    def step_of_a_minute(*args):
        minutes[0] += 1
        return real(*args)

    monkeypatch.setattr(train, "optimizer_step", step_of_a_minute)
    monkeypatch.setattr(run_folder.time, "perf_counter", lambda: 60.0 * minutes[0])
    fields = dict(data=corpus_path, save_every=3 * STEP, decay_share=0.25)
    fields |= FEW_VALIDATED
    assert train.main(argv(**fields, total_tokens=16 * STEP, out="planned")) == 0
    planned = everything("planned")
    typed = [*argv(**fields, minutes=16), "--out=timed", "--resume"]
    for steps in (5, 5, 4):  # 12, and 2 of 4 of decay
        stop(typed, steps)
    length = files.read_json(Path("timed/config.json"))["config"]["total_tokens"]
    assert length == 16 * STEP
    assert train.main(typed) == 0
    assert_same(everything("timed"), planned, but=("config", "metrics"))
    assert [x["lr"] for x in metrics("timed")] == [x["lr"] for x in metrics("planned")]


@pytest.mark.parametrize("n_val, starts", [(0, 54), (2000, 60 / 2.111)])
def test_a_decay_starts_after_the_warmup_and_leaves_time_to_validate(n_val, starts):
    """A minute is 1,000 tokens, 111 of decay, and half of the tokens to validate."""
    cfg = config.make_config(minutes=1, decay_share=0.1, warmup_tokens=1000)
    mixture = SimpleNamespace(corpora=[SimpleNamespace(val=range(n_val))])
    for tokens, seconds in itertools.product((999, 1000), (starts - 1, starts + 1)):
        state = train.State(None, None, tokens)
        decays = train.must_decay(cfg, state, mixture, seconds)
        assert decays == (tokens >= 1000 and seconds > starts)
