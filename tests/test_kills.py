"""Kill a run at any moment: nothing that was saved is lost, and it ends with the same bits."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import forked
import train
from test_resume import SAVES, assert_same, everything
from test_train import STEP, argv, metrics, newest
from tools import run_folder


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory) -> dict:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train.main(argv(data=corpus_path, out=run, **SAVES)) == 0
    return everything(run)


def n_lines(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_again_and_again_a_run_ends_with_the_same_bits(
    kills, undisturbed, corpus_path
):
    """Each time after a few more lines of its log, and anywhere in what comes then."""
    typed = [*argv(data=corpus_path, out="run", **SAVES), "--resume"]
    rng = random.Random(kills)
    run = Path("run")
    n_killed = 0
    while n_killed < kills or not (run / "record.json").exists():
        if (run / "record.json").exists():
            shutil.rmtree(run)  # it ended before we could kill it
        process = forked.start(train.main, typed)
        if n_killed < kills:
            until = n_lines(run) + rng.randrange(1, 6)
            while n_lines(run) < until and process.is_alive():
                time.sleep(0.001)
            time.sleep(0.02 * rng.random())
            process.kill()
        process.join()
        n_killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL), forked.printed(process)
        for path in run_folder.checkpoints(run):  # all can be read
            assert run_folder.read_checkpoint(path)["tokens"] == int(path.stem)
    found = everything(run)
    # a kill after the last validation repeats its line
    n = len(undisturbed["metrics"])
    assert found["metrics"][:n] == undisturbed["metrics"]
    assert found["metrics"][-1] == undisturbed["metrics"][-1]
    assert_same(found, undisturbed, but=("metrics",))
    assert list(run.rglob("*.tmp")) == []


def train_one_endless_step(typed: list[str]) -> int:
    """Train, but the first step does not end."""
    train.optimizer_step = lambda *_: time.sleep(100)
    return train.main(typed)


def test_a_second_ctrl_c_does_not_wait_for_the_step(corpus_path):
    process = forked.start(train_one_endless_step, argv(data=corpus_path, out="run"))
    while not Path("run/metrics.jsonl").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.05)
    process.join(timeout=20)
    assert process.exitcode == -signal.SIGINT


def train_into_a_pipe(typed: list[str], n_lines: int, with_ctrl_c: bool) -> int:
    """Train, where the reader of our output ends after some lines, perhaps by Ctrl-C."""
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.close(write_end)

    def read() -> None:
        with open(read_end) as reader:
            for _ in range(n_lines):
                reader.readline()
        if with_ctrl_c:
            os.kill(os.getpid(), signal.SIGINT)

    reader = threading.Thread(target=read)
    reader.start()
    return train.main(typed)


@pytest.mark.parametrize("n_lines, log_every, with_ctrl_c", [
    (1, STEP, False), (2, 10**9, True),  # no line is due in the last step
])  # fmt: skip
def test_a_run_whose_reader_ends_saves_and_ends_quietly(
    n_lines, log_every, with_ctrl_c, corpus_path
):
    """As `python train.py | head -1`, and Ctrl-C in `python train.py | tee log`."""
    endless = dict(out="run", total_tokens=10**8, decay_share=0, log_every=log_every)
    typed = argv(data=corpus_path, **endless)
    process = forked.start(train_into_a_pipe, typed, n_lines, with_ctrl_c)
    process.join(timeout=60)
    process.kill()
    assert process.exitcode == 3 and forked.printed(process) == ("", "")
    assert newest("run")["tokens"] >= STEP
    assert [x["tokens"] for x in metrics("run")][-1:] in ([], [newest("run")["tokens"]])


def train_on_a_small_disk(typed: list[str]) -> int:
    """Train, where no file can have more than 20 kB. (Python ignores SIGXFSZ.)"""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return train.main(typed)


def test_a_full_disk_is_one_line(undisturbed, corpus_path):
    typed = [*argv(data=corpus_path, out="run", **SAVES), "--resume"]
    process = forked.start(train_on_a_small_disk, typed)
    process.join()
    _, error = forked.printed(process)
    assert process.exitcode == 2 and len(error.splitlines()) == 1
    assert "train.py: run/ckpt/" in error
    assert list(Path("run/ckpt").iterdir()) == []
    assert train.main(typed) == 0
    assert_same(everything("run"), undisturbed)
