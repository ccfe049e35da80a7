"""A run may be stopped at any moment, continued, branched: nothing changes and nothing is lost."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import model as model_file
import train
from test_train import SMALL, flags, read, weights

ROOT = Path(__file__).parent.parent
SAVES = dict(save_every=3 * 256, keep_checkpoints=3)  # of 40 steps of 256 tokens


def everything(run: Path) -> dict:
    """What a run comes to, times aside."""
    saved = torch.load(max((run / "ckpt").glob("*.pt")), weights_only=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    record = read(run / "record.json")
    timeless = {"seconds", "tokens_per_second", "command", "started", "out"}
    return {
        "model": saved["model"], "optimizer": saved["optimizer"]["state"], "tokens": saved["tokens"],
        "metrics": [{k: v for k, v in line.items() if k not in timeless} for line in lines],
        "record": {k: v for k, v in record.items() if k not in timeless}, "sample": (run / "sample.txt").read_text(),
    }  # fmt: skip


def assert_same(one: dict, other: dict) -> None:
    assert {k: v for k, v in one.items() if k not in ("model", "optimizer")} == {k: v for k, v in other.items() if k not in ("model", "optimizer")}
    assert all(torch.equal(w, other["model"][name]) for name, w in one["model"].items())
    for i, state in one["optimizer"].items():
        assert all(torch.equal(value, other["optimizer"][i][key]) for key, value in state.items())


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory) -> dict:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train.main(flags(corpus_path, out=run, **SAVES)) == 0
    return everything(run)


def stop_after(monkeypatch, steps: int, how) -> None:
    """Call how() after so many steps from now."""
    real, left = train.optimizer_step, [steps]

    def counted(*args):
        result = real(*args)
        left[0] -= 1
        if left[0] == 0:
            how()
        return result

    monkeypatch.setattr(train, "optimizer_step", counted)


# -- stop and go on --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7, 35, 36, 37, 39])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_goes_on(steps, number, undisturbed, corpus_path, tmp_path, monkeypatch, capsys):
    argv = flags(corpus_path, out="run", **SAVES)
    with monkeypatch.context() as patch:
        stop_after(patch, steps, lambda: os.kill(os.getpid(), number))
        assert train.main(argv) == 3
    assert "--out run --resume" in capsys.readouterr().out and not (tmp_path / "run" / "record.json").exists()
    assert train.main(["--out", "run", "--resume"]) == 0  # its configuration is in its folder
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_stopped_again_and_again(undisturbed, corpus_path, tmp_path, monkeypatch):
    argv, sessions = [*flags(corpus_path, out="run", **SAVES), "--resume"], 0  # one command line, however often
    for _ in range(20):
        with monkeypatch.context() as patch:
            stop_after(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
            sessions += 1
            if train.main(argv) == 0:
                break
    assert sessions == 14  # 13 times 3 steps, then the last one
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_time_limit(undisturbed, corpus_path, tmp_path):
    argv = [*flags(corpus_path, out="run", **SAVES), "--resume"]
    assert train.main([*argv, "--time_limit", "1e-6"]) == 3
    assert [path.stem for path in train.checkpoints(tmp_path / "run")] == ["0000000000000256"]
    assert train.main(argv) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)


def start(argv: list[str], folder: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, ROOT / "train.py", *argv], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill_until_done(argv: list[str], folder: Path, kills: int, wait_for) -> int:
    """SIGKILL the run so many times, each when wait_for(process) says so, and then let it finish; -> kills that hit."""
    hits = 0
    for _ in range(kills):
        process = start(argv, folder)
        wait_for(process)
        process.kill()
        hits += process.wait() == -signal.SIGKILL
    process = start(argv, folder)
    assert process.wait(timeout=300) == 0, process.stderr.read().decode()
    return hits


def lines_appear(run: Path, rng: random.Random):
    """Wait until the run has come a few steps further than it was, then a random moment."""

    def wait(process):
        def size():
            return (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0

        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end and size() == 0:
            time.sleep(0.005)
        time.sleep(0.05 + rng.random() * 0.3)

    return wait


def test_killed_without_warning(undisturbed, corpus_path, tmp_path):
    argv = [*flags(corpus_path, out="run", **SAVES), "--resume"]
    kill_until_done(argv, tmp_path, 2, lines_appear(tmp_path / "run", random.Random(0)))
    assert_same(everything(tmp_path / "run"), undisturbed)
    assert not list((tmp_path / "run").rglob("*.tmp"))


@pytest.mark.slow
def test_killed_twenty_times(corpus_path, tmp_path):
    """Longer steps, so that the kills are spread over the run."""
    size = dict(n_embd=128, n_head=4, total_tokens=200 * 256, **SAVES)
    assert train.main(flags(corpus_path, out="quiet", **size)) == 0
    argv = [*flags(corpus_path, out="run", **size), "--resume"]
    hits = kill_until_done(argv, tmp_path, 20, lines_appear(tmp_path / "run", random.Random(1)))
    print(f"{hits} of 20 kills hit a run that had not finished")
    assert_same(everything(tmp_path / "run"), everything(tmp_path / "quiet"))


@pytest.mark.slow
def test_killed_fifty_times_while_saving(corpus_path, tmp_path):
    """A checkpoint after every step, and the kill comes while its temporary file is there."""
    size = dict(n_embd=256, n_head=4, n_layer=4, total_tokens=120 * 256, save_every=256, keep_checkpoints=2)
    assert train.main(flags(corpus_path, out="quiet", **size)) == 0
    argv, caught = [*flags(corpus_path, out="run", **size), "--resume"], []

    def while_saving(process):
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            if any((tmp_path / "run").glob("ckpt/*.tmp")):
                caught.append(True)
                return

    kill_until_done(argv, tmp_path, 50, while_saving)
    print(f"{len(caught)} of 50 kills while a checkpoint was being written")
    assert_same(everything(tmp_path / "run"), everything(tmp_path / "quiet"))


# -- branches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["power", "wsd", "constant"])
def test_a_branch_is_the_separate_run(schedule, corpus_path, tmp_path):
    """Branch off a long run for a shorter one, and off a short one for a longer one."""
    long, short = 60 * 256, 40 * 256
    for name, total in (("long", long), ("short", short)):
        assert train.main(flags(corpus_path, out=name, schedule=schedule, total_tokens=total, save_every=6 * 256, keep_checkpoints=100)) == 0
    assert train.main(["--branch", f"long/ckpt/{36 * 256:016d}.pt", "--total_tokens", str(short), "--out", "shorter"]) == 0
    assert train.main(["--branch", "short" if schedule != "constant" else f"short/ckpt/{36 * 256:016d}.pt", "--total_tokens", str(long), "--out", "longer"]) == 0
    for branch, separate in (("shorter", "short"), ("longer", "long")):
        a, b = everything(tmp_path / branch), everything(tmp_path / separate)
        since = [line for line in b["metrics"] if line["tokens"] > 36 * 256]
        assert a["metrics"] == since and a["sample"] == b["sample"] and a["tokens"] == b["tokens"]
        assert a["record"]["val_loss"] == b["record"]["val_loss"]
        assert all(torch.equal(w, b["model"][name]) for name, w in a["model"].items())
        assert a["record"]["parent"].endswith(f"{36 * 256:016d}.pt") and b["record"]["parent"] is None


def test_cool_down_here(corpus_path, tmp_path, monkeypatch):
    """Stop a run, then decay from where it is, without counting steps."""
    with monkeypatch.context() as patch:
        stop_after(patch, 20, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train.main(flags(corpus_path, out="run")) == 3
    assert train.main(["--branch", "run", "--decay_tokens", str(4 * 256), "--out", "cooled"]) == 0
    record = read(tmp_path / "cooled" / "record.json")
    assert record["total_tokens"] == 24 * 256 and record["decay_tokens"] == 4 * 256 and record["tokens"] == 24 * 256
    assert train.main(flags(corpus_path, out="separate", total_tokens=24 * 256, decay_tokens=4 * 256)) == 0
    assert all(torch.equal(w, weights(tmp_path / "separate")[name]) for name, w in weights(tmp_path / "cooled").items())


@pytest.mark.parametrize("batch", [4, 16])
def test_a_branch_with_another_batch_size_goes_on_with_the_text(batch, corpus_path, tmp_path, monkeypatch):
    assert train.main(flags(corpus_path, out="run", **SAVES)) == 0
    seen, real = [], train.data.shuffled
    monkeypatch.setattr(train.data, "shuffled", lambda g, n, seed: (seen.extend(g.tolist()), real(g, n, seed))[1])
    monkeypatch.setattr(train, "validation_loss", lambda *a: {"val_loss": 1.0, "val_bpb": 1.0})  # it shuffles too
    assert train.main(["--branch", f"run/ckpt/{36 * 256:016d}.pt", "--batch_size", str(batch), "--total_tokens", str(60 * 256), "--out", "b"]) == 0
    assert seen == list(range(36 * 8, 60 * 8))  # sequences: none again, none left out
    assert read(tmp_path / "b" / "record.json")["micro_batch_size"] == min(batch, 8)  # what fitted into memory before still does


def test_a_branch_may_change_the_tail_and_the_optimizer(corpus_path, tmp_path):
    assert train.main(flags(corpus_path, out="run", **SAVES)) == 0
    assert train.main(["--branch", "run", "--decay_shape", "linear", "--weight_decay", "0.5", "--out", "b"]) == 0
    record = read(tmp_path / "b" / "record.json")
    assert record["decay_shape"] == "linear" and record["weight_decay"] == 0.5 and record["parent"].endswith(f"{36 * 256:016d}.pt")
    saved = torch.load(max((tmp_path / "b" / "ckpt").glob("*.pt")), weights_only=True)
    assert {group["weight_decay"] for group in saved["optimizer"]["param_groups"]} == {0, 0.5}


def test_a_branch_can_be_resumed(corpus_path, tmp_path, monkeypatch):
    assert train.main(flags(corpus_path, out="run", **SAVES)) == 0
    argv = ["--branch", f"run/ckpt/{36 * 256:016d}.pt", "--total_tokens", str(60 * 256)]
    assert train.main([*argv, "--out", "whole"]) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train.main([*argv, "--out", "parts", "--resume"]) == 3
    assert train.main([*argv, "--out", "parts", "--resume"]) == 0
    assert_same(everything(tmp_path / "parts"), everything(tmp_path / "whole"))
    for path in (tmp_path / "parts").glob("ckpt/*"):  # killed before its first checkpoint: again from the parent
        path.unlink()
    (tmp_path / "parts" / "record.json").unlink()
    assert train.main(["--out", "parts", "--resume"]) == 0
    assert_same(everything(tmp_path / "parts"), everything(tmp_path / "whole"))


def test_the_checkpoint_before_the_decay_stays(corpus_path, tmp_path):
    assert train.main(flags(corpus_path, out="run", save_every=256, keep_checkpoints=2)) == 0
    assert [int(p.stem) // 256 for p in train.checkpoints(tmp_path / "run")] == [36, 39, 40]


# -- what can go wrong -----------------------------------------------------------------------------


def stopped_run(corpus_path, monkeypatch, steps=20) -> Path:
    with monkeypatch.context() as patch:
        stop_after(patch, steps, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train.main(flags(corpus_path, out="run", **SAVES)) == 3
    return Path("run").resolve()


@pytest.mark.parametrize("damage", ["truncated", "garbled", "empty", "not even a zip"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(damage, undisturbed, corpus_path, tmp_path, monkeypatch, capsys):
    run = stopped_run(corpus_path, monkeypatch)
    newest = train.checkpoints(run)[-1]
    content = bytearray(newest.read_bytes())
    if damage == "garbled":
        content[len(content) // 2] ^= 1  # one bit of one weight
    newest.write_bytes({"truncated": content[: len(content) // 2], "garbled": content, "empty": b""}.get(damage, b"what?"))
    capsys.readouterr()
    assert train.main(["--out", "run", "--resume"]) == 0
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and newest.name in error and "the one before it" in error
    assert_same(everything(run), undisturbed)


class Malice:
    def __reduce__(self):
        return open, ("owned", "w")


def test_a_pickle_that_runs_code_is_refused(corpus_path, tmp_path, monkeypatch, capsys):
    run = stopped_run(corpus_path, monkeypatch)
    for path in train.checkpoints(run):
        torch.save({"config": Malice(), "tokens": 0, "model": {}, "optimizer": {}}, path)
    assert train.main(["--out", "run", "--resume"]) == 2
    path.write_bytes(pickle.dumps(Malice()))
    assert train.main(["--branch", str(path)]) == 2
    assert not (tmp_path / "owned").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--out", "run", "--resume", "--lr", "0.5"], ("--lr 0.5", "0.01")),
        (["--out", "run", "--resume", "--n_layer", "3"], ("--n_layer 3", "2")),
        (["--out", "run", "--resume", "--total_tokens", "1e6"], ("--total_tokens 1000000", "10240", "--branch")),
        (["--out", "run", "--resume", "--data", "other"], ("--data", "other")),
        (["--branch", "run", "--n_embd", "64"], ("--n_embd 64", "32")),
        (["--branch", "run", "--seq_len", "64"], ("--seq_len 64", "32")),
        (["--branch", "run", "--preset", "1B"], ("--preset 1B", "laptop")),
        (["--branch", "run", "--total_tokens", "5120"], ("--total_tokens 5,120", "5,120")),
        (["--branch", "run", "--total_tokens", "7000", "--decay_tokens", "3000"], ("3,000", "7,000", "4,000", "5,120")),
        (["--branch", "run/ckpt/0000000000009999.pt"], ("0000000000009999.pt", "no such")),
        (["--branch", "cosine", "--total_tokens", "20480"], ("--total_tokens 20,480", "10,240", "cosine")),
        (["--branch", "run", "--out", "cosine"], ("--out cosine", "holds a run", "--resume", "--overwrite")),
    ],
)
def test_what_does_not_fit_is_refused(argv, says, corpus_path, tmp_path, monkeypatch, capsys):
    stopped_run(corpus_path, monkeypatch)
    assert train.main(flags(corpus_path, out="cosine", schedule="cosine")) == 0
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"}
    capsys.readouterr()
    assert train.main(argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and all(word in error for word in says), error
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_nothing_is_lost_in_the_last_evaluation(corpus_path, tmp_path, monkeypatch):
    """All steps are saved before it: if it fails, --resume only evaluates."""
    with monkeypatch.context() as broken:
        broken.setattr(train, "evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.main(flags(corpus_path, out="run"))
    assert train.checkpoints(tmp_path / "run")[-1].stem == f"{SMALL['total_tokens']:016d}"
    monkeypatch.setattr(train, "optimizer_step", lambda *_: 1 / 0)
    assert train.main(["--out", "run", "--resume"]) == 0
    assert read(tmp_path / "run" / "record.json")["tokens"] == SMALL["total_tokens"]


def test_a_damaged_last_checkpoint_does_not_stop_a_branch_from_before_the_decay(corpus_path, tmp_path):
    assert train.main(flags(corpus_path, out="run", **SAVES)) == 0
    train.checkpoints(tmp_path / "run")[-1].write_bytes(b"")
    assert train.main(["--branch", "run", "--decay_tokens", "1024", "--out", "b"]) == 0


def test_another_corpus_is_refused(corpus_path, documents, tmp_path, monkeypatch, capsys):
    train.data.prepare(documents[:150], "bytes", tmp_path / "c")
    run = stopped_run(tmp_path / "c", monkeypatch)
    for file in (tmp_path / "c").iterdir():
        file.unlink()
        file.write_bytes((corpus_path / file.name).read_bytes())  # another text in the same place
    for argv in (["--out", "run", "--resume"], ["--branch", "run"]):
        capsys.readouterr()
        assert train.main(argv) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "fingerprint" in error
    assert train.main(["--branch", "run", "--data", str(corpus_path), "--out", "new"]) == 0  # said on purpose, it is fine
    assert run.exists()


def test_torn_last_line(undisturbed, corpus_path, monkeypatch):
    run = stopped_run(corpus_path, monkeypatch)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "tok')
    assert train.main(["--out", "run", "--resume"]) == 0
    assert_same(everything(run), undisturbed)


@pytest.mark.parametrize("missing", [["record.json"], ["record.json", "curve.png", "sample.txt"]])
def test_killed_between_the_last_step_and_the_record(missing, undisturbed, corpus_path, tmp_path):
    assert train.main(flags(corpus_path, out="run", **SAVES)) == 0
    for name in missing:
        (tmp_path / "run" / name).unlink()
    assert train.main(["--out", "run", "--resume"]) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_a_finished_run_stays(corpus_path, tmp_path, capsys):
    assert train.main(flags(corpus_path, out="run")) == 0
    before = (tmp_path / "run" / "record.json").read_bytes()
    capsys.readouterr()
    assert train.main([*flags(corpus_path, out="run"), "--resume"]) == 0  # as a job that is started again would
    assert "finished already" in capsys.readouterr().out
    assert (tmp_path / "run" / "record.json").read_bytes() == before


def test_two_processes_on_one_folder(corpus_path, tmp_path, monkeypatch, capsys):
    run = stopped_run(corpus_path, monkeypatch)
    held = train.lock(run)
    for argv in (["--out", "run", "--resume"], [*flags(corpus_path, out="run"), "--overwrite"]):
        capsys.readouterr()
        assert train.main(argv) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and "another process" in error
    held.close()
    assert train.checkpoints(run) and train.main(["--out", "run", "--resume"]) == 0


def test_a_full_disk(undisturbed, corpus_path, tmp_path, monkeypatch, capsys):
    """/dev/full is a disk that is always full; the second checkpoint goes there."""
    real = open

    def disk(path, mode="r", *args, **kwargs):
        full = str(path).endswith("1536.tmp") and "w" in mode
        return real("/dev/full" if full else path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", disk)
        assert train.main(flags(corpus_path, out="run", **SAVES)) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "1536.pt" in error and "--resume" in error
    assert train.main(["--out", "run", "--resume"]) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_a_folder_that_vanishes(corpus_path, tmp_path, monkeypatch, capsys):
    import shutil

    stop_after(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "run"))
    assert train.main(flags(corpus_path, out="run", **SAVES)) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "ckpt" in error


def test_a_diverged_run_is_finished(corpus_path, tmp_path, capsys):
    argv = flags(corpus_path, schedule="constant", lr=1e6, grad_clip=0, out="boom", save_every=256)
    assert train.main(argv) == 0
    assert read(tmp_path / "boom" / "record.json")["diverged"] is True
    assert all(json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in open(tmp_path / "boom" / "metrics.jsonl"))
    assert train.main([*argv, "--resume"]) == 0 and "finished already" in capsys.readouterr().out
