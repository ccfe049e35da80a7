"""A run may stop at any moment, resume and branch. It ends with the same bits."""

import errno
import math
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import config
import data
import train
from schedules import make_schedule, rates
from test_train import MOE, STEP, argv, assert_same_tensors, files_in
from test_train import metrics, newest, record_of
from tools import files, plots, run_folder, signals
from tools.prepare import prepare

SHORT = dict(eval_tokens=320, final_eval_tokens=640)
SAVES = SHORT | dict(save_every=3 * STEP, keep_checkpoints=3)  # of 30 steps
RESUME = ["--out=run", "--resume"]
BRANCH = ["--branch=run"]
TIMES = {"seconds", "tokens_per_second", "command", "started", "git_commit", "out"}


def everything(run) -> dict:
    """All that a run leaves, except for times and names."""

    def without_times(fields: dict) -> dict:
        return {name: value for name, value in fields.items() if name not in TIMES}

    parts = {name: without_times(fields) for name, fields in record_of(run).items()}
    lines = [without_times(line) for line in files.read_metrics(Path(run))]
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


@pytest.fixture(scope="module", autouse=True)
def no_curve():
    """It would take longer than the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_curve", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def folder(corpus_path, tmp_path_factory) -> Path:
    """A folder with finished runs, `whole` and `cosine`, and `run`, stopped after 20 steps."""
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
    """What a run leaves that nobody stops."""
    return everything(folder / "whole")


@pytest.fixture
def run(folder) -> Path:
    """The run stopped after 20 steps, in the current folder."""
    shutil.copytree(folder / "run", "run")
    return Path("run")


# -- Stop and resume -----------------------------------------------------------------------


KINDS = {
    "MoE": dict(MOE, micro_batch_size=4, data="a:0.7,b:0.3"),
    "cosine": dict(data="a", schedule="cosine", dtype="bfloat16"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_resumes(kind, corpus_path, documents, tmp_path, capsys):
    """After Ctrl-C and after the signal of a cluster, by the command that it prints."""
    (tmp_path / "a").symlink_to(corpus_path)
    prepare(documents[:100], "bytes", tmp_path / "b")
    fields = SHORT | dict(total_tokens=12 * STEP, save_every=5 * STEP) | KINDS[kind]
    typed = [*argv(**fields), "--no-tie_embeddings"]
    assert train.main([*typed, "--out=whole"]) == 0
    stop([*typed, "--out=run", "--recompute"], 6, signal.SIGINT)
    stop([*typed, "--out=run", "--resume"], 5, signal.SIGTERM)
    assert newest("run")["tokens"] == 11 * STEP
    assert not Path("run/record.json").exists()
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert train.main(words[words.index("train.py") + 1 :]) == 0
    whole = everything("whole")
    whole["config"]["recompute"] = True  # costs time, and changes no bit
    assert_same(everything("run"), whole)


def test_a_text_that_moved_is_the_same_text(run, undisturbed, corpus_path, one_line):
    """A run resumes with --data, and then knows the new path."""
    shutil.copytree(corpus_path, "moved")
    config_file = run / "config.json"
    content = config_file.read_text().replace(str(corpus_path), "nowhere")
    config_file.write_text(content)
    assert "--data" in one_line(train.main, RESUME)
    stop([*RESUME, "--data=./moved"], 3)
    assert train.main(RESUME) == 0
    found = everything(run)
    assert found["config"].pop("data") == "./moved"
    del undisturbed["config"]["data"]
    assert_same(found, undisturbed)


def test_a_lost_connection_saves(corpus_path):
    stop(argv(data=corpus_path, out="run", **SHORT), 2, signal.SIGHUP)
    assert newest("run")["tokens"] == 2 * STEP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # but not under nohup
    signals.stop_request(math.inf)
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_a_disk_without_locks_trains(corpus_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    fields = dict(total_tokens=STEP, warmup_tokens=0, out="run")
    assert train.main(argv(data=corpus_path, **fields, **SHORT)) == 0
    assert "locks" in capsys.readouterr().out


def test_a_killed_log_and_half_a_checkpoint_do_no_harm(run, undisturbed):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"tokens": 5376, "lo')
    (run / "ckpt/.0000000000005376.pt.tmp").write_bytes(b"half a checkpoint")
    assert train.main(RESUME) == 0
    assert list(run.rglob("*.tmp")) == []
    assert_same(everything(run), undisturbed)


class Malice:
    def __reduce__(self):
        return open, ("owned", "w")


def test_a_damaged_or_malicious_checkpoint_is_named_and_the_one_before_resumes(
    run, undisturbed, one_line
):
    file = run_folder.checkpoints(run)[-1]
    whole = file.read_bytes()
    torch.save(
        {"config": Malice(), "tokens": 0, "model": {}, "optimizer": {}}, "malice.pt"
    )
    for content in (whole[: len(whole) // 2], b"", Path("malice.pt").read_bytes()):
        file.write_bytes(content)
        before = files_in(run)
        assert file.name in one_line(train.main, RESUME)
        assert files_in(run) == before
    assert not Path("owned").exists()
    file.unlink()
    assert train.main(RESUME) == 0
    assert_same(everything(run), undisturbed)


def test_runtime_fields_may_change_on_resume(run, undisturbed):
    changed = dict(log_every=2 * STEP, eval_every=5 * STEP, save_every=STEP)
    typed = [f"--{name}={value}" for name, value in changed.items()]
    assert train.main([*RESUME, *typed, "--recompute"]) == 0
    assert_same_tensors(newest(run)["model"], undisturbed["saved"]["model"])
    logged = [line["tokens"] // STEP for line in metrics(run)]
    assert logged == [*range(1, 21), 22, 24, 26, 28, 30]
    checked = [line["tokens"] // STEP for line in metrics(run, "val_loss")]
    assert checked == [10, 20, 25, 30]


@pytest.mark.parametrize("typed, word", [
    ("--total_tokens=1e6", "--branch"), ("--seed=1", "seed"), ("--data=x", "data"),
    ("--branch=nowhere", "nowhere"), ("--law=law.json", "--law"),
])  # fmt: skip
def test_other_fields_may_not_change_on_resume(typed, word, run, one_line):
    law = config.LAPTOP_LAW._asdict()
    files.write_json(Path("law.json"), law)
    before = files_in(run)
    assert word in one_line(train.main, [*RESUME, typed])
    assert files_in(run) == before


@pytest.mark.parametrize("typed", [["--data=mine"], []], ids=["mine", "embedded"])
def test_a_run_does_not_resume_over_a_different_text(
    typed, documents, monkeypatch, one_line
):
    """As after data.py made it again, or after an upgrade of torch."""
    monkeypatch.setattr(data, "embedded_corpus", lambda _: Path("mine"))
    prepare(documents[:100], "bytes", Path("mine"))
    typed = [*argv(total_tokens=9 * STEP, out="run", **SHORT), *typed, "--resume"]
    stop(typed, 3)
    Path("mine").rename("first")
    prepare(documents[:200], "bytes", Path("mine"))
    before = files_in(Path("run"))
    for refused in (typed, BRANCH):
        assert "--data" in one_line(train.main, refused)
    assert files_in(Path("run")) == before
    name = "mine" if "--data=mine" in typed else "embedded"
    assert train.main([*BRANCH, f"--data={name}", "--out=branch"]) == 0
    fingerprint = record_of("branch")["config"]["fingerprint"]
    assert fingerprint == data.open_corpus("mine").meta["fingerprint"]

    shutil.rmtree("mine")
    Path("first").rename("mine")
    assert train.main(typed) == 0
    shutil.rmtree("mine")
    assert train.main(typed) == 0  # finished already


def test_a_folder_in_use_is_refused(run, one_line):
    with files.locked(run):
        assert "another process" in one_line(train.main, RESUME)
    assert train.main(RESUME) == 0


# -- Branches ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["power", "wsd"])
def test_a_branch_is_the_separate_run(schedule, corpus_path):
    """From a long run to a shorter one, and from a short run to a longer one."""
    totals = {"long": 20 * STEP, "short": 10 * STEP}
    fields = dict(data=corpus_path, schedule=schedule, save_every=4 * STEP, **SHORT)
    for out, total in totals.items():
        typed = argv(**fields, out=out, total_tokens=total, keep_checkpoints=9)
        assert train.main(typed) == 0
    for parent, separate in (("long", "short"), ("short", "long")):
        start = run_folder.checkpoint_file(Path(parent), 8 * STEP)
        length = f"--total_tokens={totals[separate]}"
        assert train.main([f"--branch={start}", length, f"--out=from-{parent}"]) == 0
        branch = everything(f"from-{parent}")
        alone = everything(separate)
        assert branch["origin"]["parent"] == str(start.resolve())
        alone["metrics"] = [x for x in alone["metrics"] if x["tokens"] > 8 * STEP]
        assert_same(branch, alone, but=("origin", "config"))


def test_a_branch_of_a_folder_starts_before_its_decay(corpus_path):
    fields = dict(total_tokens=20 * STEP, save_every=STEP, keep_checkpoints=2)
    assert train.main(argv(data=corpus_path, out="run", **fields, **SHORT)) == 0
    kept = run_folder.checkpoints(Path("run"))
    assert [int(path.stem) // STEP for path in kept] == [18, 19, 20]
    assert train.main([*BRANCH, f"--total_tokens={30 * STEP}", "--out=longer"]) == 0
    record = record_of("longer")
    assert record["origin"]["parent"] == str(kept[0].resolve())
    assert record["config"]["decay_share"] == 0.1  # keeps its share of the run
    assert train.main([*BRANCH, "--decay_share=0.1", "--out=ended"]) == 0
    assert record_of("ended")["results"]["tokens"] == 20 * STEP


def test_a_branch_has_the_share_that_its_user_asked_for(run, capsys):
    """Ended at once, longer again. A share of 0 stays 0."""

    def branch(typed: str, out: str):
        assert train.main([*f"--branch={typed} --out={out}".split()]) == 0
        return config.make_config(**record_of(out)["config"])

    ended = branch("run --decay_share=0.3", "ended")
    seen = 20 * STEP
    assert (ended.total_tokens, ended.decay_share) == (7314, 0.3)  # 5120 / 0.7
    assert ended.decay_start == seen
    at = make_schedule(ended)
    assert metrics("ended")[-1]["tokens"] == 28 * STEP
    assert metrics("ended")[0]["lr"] == at(20.5 * STEP) < at(20 * STEP)
    longer = branch("run --decay_share=0.3 --total_tokens=12k", "longer")
    assert (longer.decay_share, longer.decay_tokens) == (0.3, 3600)
    assert metrics("longer")[0]["tokens"] == 21 * STEP
    none = branch("longer --decay_share=0 --total_tokens=11k", "none")
    more = branch("none --total_tokens=12k", "more")
    assert none.decay_tokens == more.decay_tokens == 0


def test_a_branch_resumes_and_if_killed_at_once_starts_from_its_parent(
    run, tmp_path, monkeypatch
):
    """Also from a different folder, or with the whole command again."""
    branch = [*BRANCH, "--total_tokens=6144"]
    assert train.main([*branch, "--out=whole"]) == 0
    stop([*branch, "--out=stopped"], 2)
    assert train.main([*branch, "--out=stopped", "--resume"]) == 0
    assert_same(everything("stopped"), everything("whole"))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train, "optimizer_step", None)
        train.main([*branch, "--out=killed"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train.main(["--out=../killed", "--resume"]) == 0
    assert_same(everything("../killed"), everything("../whole"))


def test_a_branch_changes_what_is_typed(run, documents, tmp_path):
    """Data, schedule and weight decay, but not the weights."""
    prepare(documents[:150], "bytes", tmp_path / "other")
    start = run_folder.checkpoints(run)[-1]
    typed = f"--branch={start} --data=other --schedule=wsd --lr=0.01 --weight_decay=0.5"
    typed += " --total_tokens=6144 --decay_shape=linear --out=branch"
    assert train.main(typed.split()) == 0
    cfg = config.make_config(**record_of("branch")["config"])
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


@pytest.mark.parametrize("typed, word", [
    ("--branch=run --n_embd=64", "n_embd"),
    ("--branch=run --seed=1", "--seed 1"),  # of weights that it does not draw
    ("--branch=run --data_seed=1", "--data_seed 1"),  # would read sequences twice
    ("--branch=run --total_tokens=5500", "5,500"),  # less than a step more
    ("--branch=run --lr=0.1", "--lr"),  # Power has none
    ("--branch=run/ckpt/0000000000009999.pt", "0000000000009999.pt"),
    ("--branch=cosine --total_tokens=20480", "--total_tokens 20480"),
    ("--branch=cosine --decay_share=0.3", "--decay_share 0.3"),
    ("--branch=run --decay_share=1", "--decay_share 1"),
    ("--branch=run --minutes=1", "--minutes"),
    ("--branch=run --out=cosine", "--resume"),
    ("--branch=run --data=elsewhere", "elsewhere"),
])  # fmt: skip
def test_a_branch_that_cannot_be_is_refused(typed, word, folder, one_line, monkeypatch):
    monkeypatch.chdir(folder)
    before = files_in(folder)
    assert word in one_line(train.main, typed.split())
    assert files_in(folder) == before


def test_another_schedule_has_the_peak_of_its_law_and_the_decay_of_its_preset(folder):
    """But WSD and constant hold the same learning rate."""

    def branch(typed: str, out: str) -> dict:
        assert train.main(f"{typed} --total_tokens=3072 --out={out}".split()) == 0
        return record_of(out)["config"]

    wsd = branch(f"--branch={folder}/cosine --schedule=wsd", "wsd")
    assert wsd["decay_share"] == 0.3
    cfg = config.make_config(**wsd)
    assert wsd["lr"] == rates(config.LAPTOP_LAW, cfg)["lr"] != 0.02
    start = "--branch=wsd/ckpt/0000000000002048.pt"  # before its decay
    assert branch(f"{start} --schedule=constant", "constant")["lr"] == wsd["lr"]


def test_a_branch_outlives_the_checkpoint_where_it_started(run):
    """As of a trunk that goes on. It resumes, counts its own time, and can be extended."""
    start = run_folder.checkpoints(run)[-1]
    torch.save(torch.load(start) | {"seconds": 1e6}, start)
    ended = [*BRANCH, "--decay_share=0.2"]
    assert train.main([*ended, "--out=whole"]) == 0
    stop([*ended, "--out=ended"], 2)
    shutil.rmtree(run)
    assert newest("ended")["seconds"] < 1e6
    assert train.main(["--out=ended", "--resume"]) == 0
    assert_same(everything("ended"), everything("whole"))


def test_a_branch_says_what_differs(run, capsys):
    """Also its learning rate, if that jumps."""

    def branch(typed: str) -> str:
        length = f"--total_tokens={24 * STEP}"
        assert train.main(["--branch=run", typed, length, "--out=branch"]) == 0
        shutil.rmtree("branch")
        return capsys.readouterr().out

    assert f"total_tokens {24 * STEP} (was {30 * STEP})" in branch("--save_every=512")
    assert "schedule wsd (was power)" in branch("--schedule=wsd")
    said = branch("--batch_size=12")
    now, before = re.search(r"learning rate (\S+) \(was (\S+)\)", said).groups()
    assert float(now) / float(before) == pytest.approx(1.5**0.5, rel=1e-3)  # q is 0.5


# -- Runs that end by the clock ------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A minute passes in every step."""
    real = train.optimizer_step
    minutes = [0]

    def counted(*args):
        minutes[0] += 1
        return real(*args)

    monkeypatch.setattr(train, "optimizer_step", counted)
    now = lambda: 60.0 * minutes[0]
    monkeypatch.setattr(run_folder.time, "perf_counter", now)
    return minutes


def test_a_run_with_minutes_is_the_run_planned_with_its_tokens(corpus_path, clock):
    """Bit for bit, also if it is stopped before or during its decay."""
    fields = dict(data=corpus_path, save_every=3 * STEP, decay_share=0.25, **SHORT)
    typed = argv(**fields, minutes=16)
    assert train.main([*typed, "--out=timed"]) == 0
    record = record_of("timed")
    assert record["results"]["tokens"] == 16 * STEP  # 12 minutes, and 4 of decay
    planned = {"total_tokens": 16 * STEP, "decay_share": 0.25}
    saved = files.read_json(Path("timed/config.json"))["config"]
    for settings in (saved, newest("timed")["config"], record["config"]):
        assert settings.items() >= planned.items()
    assert train.main(argv(**fields, total_tokens=16 * STEP, out="planned")) == 0
    assert_same(everything("timed"), everything("planned"), but=("config", "metrics"))
    assert [x["lr"] for x in metrics("timed")] == [x["lr"] for x in metrics("planned")]

    # earlier parts count, also before a line of the log
    typed += ["--log_every=1e6", "--out=parts", "--resume"]
    for steps in (5, 5, 4):
        stop(typed, steps)
    saved = files.read_json(Path("parts/config.json"))["config"]
    assert saved.items() >= planned.items()
    assert train.main(typed) == 0
    assert_same(everything("parts"), everything("planned"), but=("config", "metrics"))


def test_minutes_wait_for_the_warmup_and_a_branch_needs_a_length(
    corpus_path, clock, one_line
):
    typed = argv(data=corpus_path, out="run", minutes=1, **SHORT)
    stop(typed, 2)
    assert "--total_tokens" in one_line(train.main, ["--branch=run"])
    assert "--minutes" in one_line(train.main, ["--branch=run", "--minutes=1"])
    assert train.main(["--branch=run", "--total_tokens=5120", "--out=longer"]) == 0
    assert train.main([*typed, "--resume"]) == 0
    assert record_of("run")["config"]["total_tokens"] == math.ceil(4 * STEP / 0.9)
