"""A run may be stopped at any moment, resumed, branched: nothing changes and nothing is lost."""

import json
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import data
import eval as evaluation
import forked
import runs
import schedules
import train
from test_mistakes import one_line
from test_train import flags, metrics, read, same, weights
from tools import devices
from tools.files import lock, read_metrics
from tools.signals import stop_request

ROOT = Path(__file__).parent.parent
SAVES = dict(save_every=3 * 256, keep_checkpoints=3)  # of 40 steps of 256 tokens
RESUME, BRANCH = ["--out=run", "--resume"], ["--branch=run"]
TIMELESS = {
    "seconds",
    "tokens_per_second",
    "command",
    "started",
    "out",
    "git_commit",
    "git_dirty",
}


def everything(run: Path) -> dict:
    """All results of a run except times."""
    saved = torch.load(max((run / "ckpt").glob("*.pt")), weights_only=True)
    timeless = lambda line: {
        name: value for name, value in line.items() if name not in TIMELESS
    }
    return {
        "model": saved["model"], "optimizer": saved["optimizer"]["state"],
        "tokens": saved["tokens"], "metrics": [timeless(line) for line in read_metrics(run)],
        "record": timeless(read(run / "record.json")), "sample": (run / "sample.txt").read_text(),
    }  # fmt: skip


def assert_same(one: dict, other: dict) -> None:
    for part in ("tokens", "metrics", "record", "sample"):
        assert one[part] == other[part], part
    assert same(one["model"], other["model"])
    assert all(
        same(state, other["optimizer"][i]) for i, state in one["optimizer"].items()
    )


@pytest.fixture(scope="module")
def undisturbed(corpus_path, tmp_path_factory) -> dict:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train.main(flags(corpus_path, out=run, **SAVES)) == 0
    return everything(run)


def stop(argv: list[str], steps: int, number=signal.SIGTERM) -> None:
    """Train, with a signal after this many steps."""
    real, left = train.optimizer_step, [steps]

    def counted(*args):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer_step", counted)
        assert train.main(argv) == 3


def stopped_run(corpus_path, out="run") -> Path:
    stop(flags(corpus_path, out=out, **SAVES), 20)
    return Path(out).resolve()


def files(folder: Path) -> dict:
    """Every file of a folder, with the time of its last change."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p: p.stat().st_mtime_ns for p in found}


def edit(file: Path, **changed) -> None:
    """Change settings in a config.json, or in a checkpoint. None takes one away."""
    is_json = file.suffix == ".json"
    content = read(file) if is_json else torch.load(file, weights_only=True)
    content["config"] |= changed
    for name, value in changed.items():
        if value is None:
            del content["config"][name]
    if is_json:
        file.write_text(json.dumps(content))
    else:
        torch.save(content, file)


@pytest.mark.parametrize("changed, says", [
    ({"fixed_norm": "hidden"}, "this version has no setting fixed_norm"),
    ({"power_q": None}, "power_q"),
    ({"weight_decay": 0.5}, "weight_decay is 0.5, but it is 0.1 in"),
], ids=["of a fork", "older", "edited"])  # fmt: skip
def test_settings_that_we_would_drop_are_refused(changed, says, corpus_path, capsys):
    """They may be those of a fork. A config.json that somebody edited is refused, too."""
    run = stopped_run(corpus_path)
    for file in (runs.checkpoints(run)[-1], run / "config.json"):
        whole = file.read_bytes()
        edit(file, **changed)
        if "weight_decay" not in changed or file.suffix == ".json":
            assert says in one_line(train.main, RESUME, capsys)
        if file.suffix == ".pt" and "weight_decay" not in changed:
            assert says in one_line(train.main, [*BRANCH, "--decay_tokens=512"], capsys)
            assert says in one_line(evaluation.main, ["--model=run"], capsys)
        file.write_bytes(whole)
    assert train.main(RESUME) == 0


@pytest.mark.parametrize("steps", [1, 7, 36, 37, 39])
def test_a_signal_saves_and_resume_continues(steps, undisturbed, corpus_path, tmp_path):
    number = {36: signal.SIGTERM, 37: signal.SIGHUP}.get(steps, signal.SIGINT)
    stop(flags(corpus_path, out="run", **SAVES), steps, number)
    assert not (tmp_path / "run" / "record.json").exists()
    # its configuration is in its folder
    assert train.main(["--out", "run", "--resume"]) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_the_origin_is_that_of_the_start(corpus_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--first"])
    run = stopped_run(corpus_path)
    started = read(run / "config.json")
    monkeypatch.setattr(sys, "argv", ["train.py", "--second"])
    assert train.main(RESUME) == 0
    assert started["origin"]["command"] == "python train.py --first"
    whole = json.loads((run / "record.json").read_text())
    assert whole["origin"] == started["origin"]
    config = read(run / "config.json")
    (session,) = config["resumed"]
    assert session["command"] == "python train.py --second"
    assert config == started | {"resumed": [session]}


def test_flags_that_only_report_may_change_on_resume(undisturbed, corpus_path, tmp_path):
    run = stopped_run(corpus_path)
    argv = (
        "--log_every=512 --eval_every=1280 --save_every=512 --micro_batch_size=8".split()
    )
    assert train.main(["--out=run", "--resume", *argv]) == 0
    assert same(weights(run), undisturbed["model"])
    logged = [line["tokens"] // 256 for line in metrics(run)]
    assert logged == [*range(1, 21), *range(22, 41, 2)]
    assert [line["tokens"] // 256 for line in metrics(run, "val_loss")] == [
        10,
        20,
        25,
        30,
        35,
        40,
    ]


def test_killed_without_warning_it_ends_the_same(undisturbed, corpus_path, tmp_path):
    argv, run = [*flags(corpus_path, out="run", **SAVES), "--resume"], tmp_path / "run"
    rng = random.Random(0)
    for _ in range(2):
        process = forked.start(train.main, argv)
        while process.is_alive() and not (run / "metrics.jsonl").exists():
            time.sleep(0.005)
        time.sleep(0.05 + rng.random() * 0.3)
        process.kill()
        process.join()
    assert train.main(argv) == 0
    assert_same(everything(run), undisturbed)
    assert not list(run.rglob("*.tmp"))


def test_a_failing_sample_loses_nothing(undisturbed, corpus_path, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train, "sample", None)
        train.main(flags(corpus_path, out="run", **SAVES))
    assert read(tmp_path / "run" / "record.json")["tokens"] == 10240
    assert train.main(RESUME) == 0 and (tmp_path / "run" / "curve.png").exists()
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_a_failing_figure_does_not_fail_its_run(
    undisturbed, corpus_path, tmp_path, capsys
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.figures, "draw_curve", None)
        assert train.main(flags(corpus_path, out="run", **SAVES)) == 0
    assert "no curve.png" in capsys.readouterr().out
    assert read(tmp_path / "run" / "record.json")["tokens"] == 10240
    assert train.main(RESUME) == 0 and (tmp_path / "run" / "curve.png").exists()
    assert_same(everything(tmp_path / "run"), undisturbed)


NOT_PLANNED = [name for name in schedules.SCHEDULES if not schedules.is_planned(name)]


@pytest.mark.parametrize("schedule", NOT_PLANNED)
def test_a_branch_is_the_separate_run(schedule, corpus_path, tmp_path):
    """Branch off a long run for a shorter one, and off a short run for a longer one."""
    totals = {"long": 60 * 256, "short": 40 * 256}
    for out, total in totals.items():
        saves = dict(save_every=6 * 256, keep_checkpoints=100)
        argv = flags(corpus_path, out=out, schedule=schedule, total_tokens=total, **saves)
        assert train.main(argv) == 0
    for parent, separate in (("long", "short"), ("short", "long")):
        path, length = (
            f"{parent}/ckpt/{36 * 256:016d}.pt",
            f"--total_tokens={totals[separate]}",
        )
        if (schedule, separate) == ("wsd", "short"):
            length = "--decay_tokens=1024"  # alone, it cools down from here
        assert train.main([f"--branch={path}", length, f"--out=from-{parent}"]) == 0
        a, b = everything(tmp_path / f"from-{parent}"), everything(tmp_path / separate)
        assert a["metrics"] == [
            line for line in b["metrics"] if line["tokens"] > 36 * 256
        ]
        assert a["sample"] == b["sample"] and same(a["model"], b["model"])
        assert a["record"]["val_loss"] == b["record"]["val_loss"]
        assert (a["record"]["parent"], b["record"]["parent"]) == (
            str(tmp_path / path),
            None,
        )


@pytest.mark.parametrize("parent, more, share", [
    ({"decay_tokens": 0}, [], 0.0), ({"decay_tokens": 2560}, [], 0.25),
    ({"decay_share": 0.5}, [], 0.5), ({"schedule": "cosine"}, ["--schedule=wsd"], 0.1),
    ({"decay_tokens": 2560}, ["--decay_share=0.1"], 0.1), ({}, [], 0.1),
], ids=str)  # fmt: skip
def test_a_branch_decays_over_the_share_of_its_parent(parent, more, share, corpus_path):
    argv = flags(corpus_path, out="run", save_every=256, keep_checkpoints=40, **parent)
    assert train.main(argv) == 0
    branch = ["--branch=run/ckpt/0000000000002560.pt", "--total_tokens=20480", *more]
    typed, actions = train.parse(branch)
    cfg, _ = runs.plan(typed, False, actions.branch)
    assert (cfg.decay_share, cfg.decay_tokens) == (share, int(share * 20480))


def test_a_branch_without_a_decay_needs_no_text_for_it(corpus_path):
    argv = flags(corpus_path, out="run", decay_data=str(corpus_path), save_every=2560)
    assert train.main(argv) == 0
    for end in ("--decay_tokens=0", "--schedule=constant"):
        branch = ["--branch=run", "--total_tokens=20480", end]
        typed, actions = train.parse(branch)
        cfg, _ = runs.plan(typed, False, actions.branch)
        assert cfg.decay_data is None and cfg.decay_tokens == 0


def test_every_process_resumes_on_its_own_gpu(corpus_path, monkeypatch):
    """Rank 0 saved the name of its GPU."""
    run = stopped_run(corpus_path)
    for file in (run / "config.json", runs.checkpoints(run)[-1]):
        edit(file, device="cuda:0")
    assert runs.plan({"out": "run"}, True, None)[0].device == "cuda:0"
    monkeypatch.setattr(devices, "rank_and_world", lambda: (3, 8))
    assert runs.plan({"out": "run"}, True, None)[0].device == "cuda"


def test_a_resumed_branch_keeps_its_parent(corpus_path, tmp_path, capsys):
    """A cluster types the whole command again; another --branch is a mistake."""
    argv = flags(corpus_path, out="run", total_tokens=20 * 256)
    assert train.main(argv) == 0
    again = ["--branch=run", "--total_tokens=10240", "--out=b", "--resume"]
    assert train.main([*again, "--time_limit=0"]) == 3
    (tmp_path / "other").mkdir()
    for wrong in ("other", "b"):
        error = one_line(train.main, [f"--branch={wrong}", "--out=b", "--resume"], capsys)
        assert f"--branch {wrong}: the run in b started from" in error
    assert train.main(again) == 0
    assert read(tmp_path / "b" / "record.json")["tokens"] == 10240


def test_a_branch_keeps_its_tokenizer_even_if_the_first_corpus_is_gone(
    corpus_path, capsys
):
    """The checkpoint has a hash of the tokens."""
    checkpoint = runs.checkpoints(stopped_run(corpus_path))[-1]
    edit(checkpoint, data="/gone", tokenizer="a.tiktoken")
    branch = [f"--branch={checkpoint}", "--decay_tokens=512", f"--data={corpus_path}"]
    assert train.main(branch) == 0
    saved = torch.load(checkpoint, weights_only=True)
    torch.save(saved | {"token_hash": "another"}, checkpoint)
    error = one_line(train.main, branch, capsys)
    assert f"its tokenizer is not that of {checkpoint}" in error


def test_a_branch_starts_before_the_decay_and_may_change_it(corpus_path, tmp_path):
    assert (
        train.main(flags(corpus_path, out="run", save_every=256, keep_checkpoints=2)) == 0
    )
    kept = runs.checkpoints(tmp_path / "run")
    assert [int(path.stem) // 256 for path in kept] == [36, 39, 40]
    kept[-1].write_bytes(b"")  # damaged, and not needed
    argv = ["--branch=run", "--decay_shape=linear", "--weight_decay=0.5", "--out=b"]
    assert (train.main(argv), train.main(["--branch=b", "--decay_tokens=512"])) == (0, 2)
    record = read(tmp_path / "b" / "record.json")
    assert (record["decay_shape"], record["weight_decay"]) == ("linear", 0.5)
    assert record["parent"].endswith(kept[0].name)
    saved = torch.load(runs.checkpoints(tmp_path / "b")[-1], weights_only=True)
    assert {group["weight_decay"] for group in saved["optimizer"]["param_groups"]} == {
        0,
        0.5,
    }


def test_a_closed_output_is_a_stop_request(undisturbed, corpus_path, tmp_path):
    """`python train.py | head -1` reads one line and leaves."""
    argv = [*flags(corpus_path, out="run", **SAVES), "--resume"]
    command = [sys.executable, ROOT / "train.py", *argv]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipe)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 3 and process.stderr.read() == ""
    assert 0 < torch.load(runs.checkpoints(tmp_path / "run")[-1])["tokens"] < 10240
    assert train.main(argv) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)


def test_nohup_keeps_a_run_alive():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_request() as must_stop:
        signal.raise_signal(signal.SIGHUP)
        assert not must_stop()
    signal.signal(signal.SIGHUP, before)


def test_other_files_among_the_checkpoints_are_left_alone(
    undisturbed, corpus_path, tmp_path
):
    run = stopped_run(corpus_path)
    (run / "ckpt/best.pt").write_bytes(runs.checkpoints(run)[0].read_bytes())
    assert train.main(RESUME) == 0
    (run / "ckpt/best.pt").unlink()  # it is still there
    assert_same(everything(run), undisturbed)


def test_a_run_killed_before_its_config_starts_again(undisturbed, corpus_path, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.config.json.123.tmp").write_text('{"n_la')
    assert train.main([*flags(corpus_path, out="run", **SAVES), "--resume"]) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_folder_whose_config_is_not_that_of_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    for content in ("", "null", "[1]", '{"model_type": "granite"}', '{"n_layer": 2'):
        (tmp_path / "run/config.json").write_text(content)
        assert "is not the folder of a run" in one_line(train.main, RESUME, capsys)


def test_a_lost_run_that_was_killed_stays_lost(corpus_path, tmp_path):
    """It has saved NaN, and was killed before its record."""
    argv = [
        *flags(corpus_path, out="run", save_every=256),
        "--power_a=1e9",
        "--lr_max=1e9",
    ]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train, "evaluate", None)
        train.main(argv)
    tokens = torch.load(runs.checkpoints(tmp_path / "run")[-1])["tokens"]
    assert train.main(RESUME) == 0
    record = read(tmp_path / "run/record.json")
    assert record["diverged"] and record["tokens"] == tokens < 10240


def test_a_branch_of_a_relative_path_resumes_from_any_folder(
    corpus_path, tmp_path, monkeypatch
):
    stopped_run(corpus_path)
    assert train.main(["--branch=run", "--decay_tokens=512", "--out=whole"]) == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(train, "optimizer_step", None)  # killed before its first checkpoint
        train.main(["--branch=run", "--decay_tokens=512", "--out=branch"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train.main(["--out=../branch", "--resume"]) == 0
    assert same(weights(tmp_path / "branch"), weights(tmp_path / "whole"))


DAMAGES = {  # to the newest checkpoint, and what stands at the end of metrics.jsonl
    "truncated": (lambda content: content[: len(content) // 2], b'{"step": 21, "tok'),
    "a flipped bit": (lambda content: flipped(content, len(content) // 2), b""),
    "an offset": (lambda content: flipped(content, len(content) - 46), b""),  # EINVAL
    "no zip": (lambda content: b"what?", bytes(range(128, 256)) + b"\n[1, 2]\n"),
}


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_an_older_checkpoint_resumes(
    damage, undisturbed, corpus_path, capsys
):
    run, (damaged, tail) = stopped_run(corpus_path), DAMAGES[damage]
    newest = runs.checkpoints(run)[-1]
    newest.write_bytes(damaged(newest.read_bytes()))
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(tail)
    before = files(run)
    error = one_line(train.main, RESUME, capsys)
    assert (
        f"{newest.name}: not a checkpoint, or a damaged one" in error
        and "delete it" in error
    )
    assert files(run) == before
    newest.unlink()
    assert train.main(RESUME) == 0
    assert_same(everything(run), undisturbed)


class Malice:
    def __reduce__(self):
        return open, ("owned", "w")


def test_a_pickle_that_runs_code_is_refused(corpus_path, tmp_path, capsys):
    path = runs.checkpoints(stopped_run(corpus_path))[-1]
    torch.save({"config": Malice(), "tokens": 0, "model": {}, "optimizer": {}}, path)
    assert train.main(["--out", "run", "--resume"]) == 2
    path.write_bytes(pickle.dumps(Malice()))
    assert train.main(["--branch", str(path)]) == 2
    assert not (tmp_path / "owned").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_runs(corpus_path, tmp_path_factory) -> Path:
    """A folder with a stopped run and a cosine."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stop([*flags(corpus_path, out="run", **SAVES), "--average"], 20)
        assert train.main(flags(corpus_path, out="cosine", schedule="cosine")) == 0
    return folder


@pytest.mark.parametrize("argv, says", [
    ([*RESUME, "--power_a=0.5"], ("--power_a 0.5", "5.0")),
    ([*RESUME, "--total_tokens=1e6"], ("--total_tokens 1000000", "10240", "--branch")),
    ([*RESUME, "--data=other"], ("--data", "other")),
    ([*BRANCH, "--n_embd=64"], ("--n_embd 64", "32")),
    ([*BRANCH, "--preset=1B"], ("--preset 1B", "laptop")),
    ([*BRANCH, "--total_tokens=5120"], ("--total_tokens 5,120", "5,120")),
    ([*BRANCH, "--total_tokens=7000", "--decay_tokens=3000"], ("3,000", "4,000", "5,120")),
    ([*BRANCH, "--lr=0.1"], ("--lr 0.1", "power")),
    (["--branch=run/average.pt"], ("average.pt", "ckpt/")),
    (["--branch=run/ckpt/0000000000009999.pt"], ("0000000000009999.pt", "no such")),
    (["--branch=cosine", "--total_tokens=20480"], ("--total_tokens 20,480", "10,240")),
    ([*BRANCH, "--out=cosine"], ("--out cosine", "--resume")),
], ids=lambda argv: " ".join(argv)[:40])  # fmt: skip
def test_what_does_not_fit_is_refused(argv, says, two_runs, capsys, monkeypatch):
    monkeypatch.chdir(two_runs)
    before = files(two_runs)
    error = one_line(train.main, argv, capsys)
    assert all(word in error for word in says), error
    assert files(two_runs) == before


def test_another_text_in_the_same_place_is_refused(
    corpus_path, documents, tmp_path, capsys
):
    data.prepare(documents[:150], "bytes", tmp_path / "c")
    stopped_run(tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        shutil.copy(corpus_path / file.name, file)
    for argv in (RESUME, BRANCH):
        assert "fingerprint" in one_line(train.main, argv, capsys)
    assert train.main([*BRANCH, f"--data={corpus_path}", "--out=new"]) == 0  # on purpose


def test_two_processes_in_one_folder(corpus_path, capsys):
    held = lock(stopped_run(corpus_path) / ".lock")
    assert "another process" in one_line(train.main, RESUME, capsys)
    held.close()
    assert train.main(RESUME) == 0


def test_a_full_disk_leaves_whole_checkpoints(undisturbed, corpus_path, tmp_path, capsys):
    """/dev/full is a disk that is always full; the second checkpoint goes there."""
    real = open

    def disk(path, mode="r", *args, **kwargs):
        full = "1536.pt." in str(path) and "w" in mode
        return real("/dev/full" if full else path, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", disk)
        error = one_line(train.main, flags(corpus_path, out="run", **SAVES), capsys)
    assert "1536.pt" in error and "--resume" in error
    assert train.main(RESUME) == 0
    assert_same(everything(tmp_path / "run"), undisturbed)


@pytest.mark.parametrize("out", ["my runs/a b", "-dash"])
def test_the_printed_command_finishes_the_run_once(out, corpus_path, tmp_path, capsys):
    stop(flags(corpus_path, out=out, **SAVES), 20)
    line = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(line[line.index("python train.py") :])
    assert train.main(words[2:]) == 0 and (tmp_path / out / "record.json").exists()
    for checkpoint in (tmp_path / out / "ckpt").iterdir():
        checkpoint.write_bytes(b"damaged")  # a finished run needs it no more
    before = files(tmp_path)
    assert train.main(words[2:]) == 0  # as a restarted job would
    assert "finished already" in capsys.readouterr().out and files(tmp_path) == before
    assert "--branch" in one_line(
        train.main, [*words[2:], "--total_tokens=20480"], capsys
    )
