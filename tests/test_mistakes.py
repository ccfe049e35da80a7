"""Wrong input anywhere: one clear line, exit status 2, and nothing left behind."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import data
import eval as evaluation
import fit
import records
import runs
import schedules
import sweep
import train
from test_train import flags
from tools import devices


ROOT = Path(__file__).parent.parent


def one_line(main, argv, capsys) -> str:
    """Run a command line that must be refused; -> what it says."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2, (argv, status, error)
    assert len(error.splitlines()) == 1 and "Traceback" not in error, (argv, error)
    assert error.startswith(f"{main.__module__}.py"), error
    return error


@pytest.fixture(scope="module")
def folder(corpus_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "other").mkdir()
    for name in ("corpus", "other/corpus"):
        (folder / name).symlink_to(corpus_path)
    (folder / "file").write_text("in the way")
    quick = dict(total_tokens=512, warmup_tokens=0, out=folder / "run", vocab_size=300)
    assert train.main(flags(corpus_path, **quick)) == 0
    torch.save({"weights": torch.zeros(3)}, folder / "foreign.pt")
    data.prepare(["too short for a sequence"], "bytes", folder / "tiny", 0.2)
    (folder / "odd").mkdir()
    (folder / "odd/records.jsonl").write_text("{}\n")
    (folder / "table.csv").write_text("lr,batch_size\n0.01,8\n")
    row = dict(lr=0.01, batch_size=8, total_tokens=1e6, val_loss=2.2)
    rows = {
        "no_tokens": {field: row[field] for field in ("lr", "batch_size", "val_loss")},
        "no_loss": {field: row[field] for field in ("lr", "batch_size", "total_tokens")},
        "text": row | {"lr": "0.01"},
    }
    for name in rows:
        (folder / f"{name}.jsonl").write_text(json.dumps(rows[name]) + "\n")
    ranks = [base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)]
    (folder / "words.tiktoken").write_bytes(b"".join(ranks))
    texts = [f"some text {i}" for i in range(500)]
    data.prepare(texts, str(folder / "words.tiktoken"), folder / "words")
    return folder


@pytest.mark.parametrize("program, argv, says", [
    (train, "--lrr 1", "--lrr"),
    (train, "--lr nan", "--lr nan: must be a finite number"),
    (train, "--lr 0", "--lr 0.0: must be above 0"),
    (train, "--beta1 1", "--beta1 1.0: must be below 1"),
    (train, "--seed -1", "--seed -1: must be at least 0"),
    (train, "--power_b 0.1", "--power_b 0.1: must be at most 0"),
    (train, "--total_tokens 1.5", "--total_tokens"),
    (train, "--out=", "--out"), (train, "--compile=true", "--compile"),
    (train, "--dtype float64", "--dtype"), (evaluation, "", "--model"),
    (train, "--schedule cosine --decay_tokens 1e5", "--decay_tokens 100000"),
    (train, "--lr 0.1", "only with wsd"),
    (train, "--total_tokens 100", "a batch has"), (train, "--micro_batch_size 3", "divide"),
    (train, "--warmup_tokens 1e9", "1,000,000,000"),
    (train, "--n_head 5", "--n_head 5"), (train, "--n_kv_head 3", "--n_kv_head 3"),
    (train, "--n_expert_active 2", "--n_expert_active 2"), (train, "--n_expert 4", "--n_expert 4"),
    (train, "--n_expert 4 --n_expert_active 2 --n_ffn 20", "--n_ffn 20"),
    (train, "--n_expert 4 --n_expert_active 2 --n_head 2 --n_embd 36", "--n_embd 36"),
    (train, "--device cuda:99", "--device cuda:99"), (train, "--n_embd 65536", "--n_embd 65536"),
    (train, "--data corpus --tokenizer bytes", "--data"),
    (train, "--data corpus --seq_len 1e6 --batch_size 1 --n_layer 1", "--seq_len 1000000"),
    (train, "--data corpus --vocab_size 100", "--vocab_size 256"),
    (train, "--data corpus:0.8,tiny:0.1", "add up to 1"),
    (train, "--data corpus:1.5,tiny:-0.5", "add up to 1"),
    (train, "--data corpus:0.5,other/corpus:0.5", "the name corpus"),
    (train, "--data corpus:0.5,nowhere:0.5", "nowhere"),
    (train, "--data corpus:0.5,words:0.5", "words: its tokenizer is not that of"),
    (train, "--data corpus --decay_data corpus:0.5", "--decay_data"),
    (train, "--data corpus --decay_data other/corpus", "one of this name"),
    (train, "--data corpus --out file/run", "--out file/run"),
    (train, "--data corpus --out file", "--out file"), (train, "--data corpus --out .", "--out ."),
    (train, "--resume", "--out"), (train, "--resume --out file", "--out file"),
    (train, "--time_limit -1", "--time_limit: -1: must be at least 0"),
    (train, "--branch nowhere", "nowhere"), (train, "--branch file", "not a checkpoint"),
    (train, "--branch .", "checkpoint"),
    (train, "--branch run --data words", "words: its tokenizer is not that of"),
    (train, "--branch run --preset 12M", "a branch cannot change it"),
    (train, "--profile trace.json", "--profile"),
    (train, "--total_tokens 1e19", "--total_tokens 10000000000000000000: must be at most"),
    (train, "--vocab_size 1e18", "--vocab_size 1000000000000000000: must be below"),
    (bench, "--data corpus --total_tokens 4096 --warmup_tokens 0", "4,096: 23 steps take"),
    (sweep, "wsd --decay_share nan", "nan: must be a finite number"),
    (sweep, "wsd --sweep branch=x", "--branch=x"),
    (sweep, "wsd --weight_decay 0.2 --sweep weight_decay=0,0.1", "has its values already"),
    (sweep, "wsd --out odd --dry_run", "a record has no total_tokens"),
    (schedules, "--ot x", "--ot"),
    (records, "nowhere", "nowhere: no records"), (records, "odd", "a record has"),
    (fit, "", "name the folder"), (fit, "tiny", "tiny: no records"),
    (fit, "nowhere.csv", "fit.py: nowhere.csv: cannot be read (No such file or directory)"),
    (fit, "table.csv", "table.csv: no column total_tokens"), (runs, "nowhere", "nowhere: no runs"),
    (records, "table.csv", "table.csv: no column total_tokens"),
    (fit, "no_tokens.jsonl", "no_tokens.jsonl: line 1: a record has no total_tokens"),
    (fit, "no_loss.jsonl", "no_loss.jsonl: no record has a val_loss"),
    (fit, "text.jsonl", "text.jsonl: line 1: a record has lr '0.01'"),
    (fit, "--predict --total_tokens 1e9 --batch_size nan", "value: 'nan'"),
    (fit, "--predict --total_tokens 1e9 --batch_size 2.5", "value: '2.5'"),
    (fit, "run --total_tokens 1e9", "total_tokens: has no effect without --predict"),
    (fit, "run --predict --batch_size 8", "folders: has no effect with --predict"),
    (fit, "--predict --total_tokens 1e9 --batch_size 8 --law no.json", "no.json"),
    (fit, "--predict --total_tokens 1e9 --batch_size 8 --law file", "--law file"),
    (data, "--out file/corpus --source file", "file"),
    (data, "--val_fraction 0.1", "--val_fraction 0.1: has no effect"),
    (evaluation, "--model nowhere", "nowhere"), (evaluation, "--model .", "no checkpoint in"),
    (evaluation, "--model foreign.pt", "foreign.pt"),
    (evaluation, "--model run --limit 3", "--limit 3"),
    (evaluation, "--model run --data tiny", "--seq_len 32"),
    (evaluation, "--model run --data words", "words: its tokenizer is not that of run"),
    (evaluation, "--model run --num_fewshot -1", "--num_fewshot: -1: must be at least 0"),
    (evaluation, "--model run --prompt x --temperature nan", "nan: must be"),
    (evaluation, "--model run --prompt x --temperature 1e-38", "at least 0.001"),
    (evaluation, f"--model run --prompt x --seed {2**64 - 1}", "below 2^63"),
    (evaluation, "--model run --seed 1", "--seed 1: has no effect without --prompt"),
    (evaluation, "--model run --temperature 1", "has no effect without --prompt"),
    (evaluation, "--model run --prompt x --tasks piqa", "--prompt: has no effect"),
])  # fmt: skip
def test_a_mistake_is_one_line(program, argv, says, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert says in one_line(program.main, argv.split(), capsys)
    assert sorted(folder.rglob("*")) == before


def test_a_line_break_in_a_name_stays_in_the_line(capsys):
    assert "a\\nb" in one_line(train.main, ["--data", "a\nb"], capsys)


@pytest.mark.parametrize("program", ["config.py", "records.py", "fit.py"])
def test_a_reader_may_leave_early(program):
    """As in `python config.py | head -1`, but it leaves at once."""
    argv = {"config.py": [], "records.py": ["--help"], "fit.py": ["--help"]}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, program, *argv[program]]
    process = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.stderr == b""


def test_a_bug_keeps_its_traceback(folder, monkeypatch):
    """A forgotten transpose raises ValueError, which is not a mistake of the user."""
    monkeypatch.setattr(fit, "predict", lambda *_: dict([(1, 2, 3)]))
    with pytest.raises(ValueError, match="dictionary update sequence"):
        fit.main(["--predict", "--total_tokens=1e9", "--batch_size=8"])


def test_a_rank_beyond_the_number_of_processes_is_one_line():
    """It would wait for ever."""
    where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="2", RANK="2")
    command = [sys.executable, ROOT / "train.py", "--device=cpu"]
    how = dict(env=os.environ | where, capture_output=True, text=True, timeout=60)
    done = subprocess.run(command, **how)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "RANK must be below WORLD_SIZE" in done.stderr


def test_a_missing_compiler_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/no/compiler"))
    # a shape that no other test compiles in this process
    argv = flags("corpus", total_tokens=512, warmup_tokens=0, out="compiled", n_ffn=72)
    assert "no working C++ compiler" in one_line(train.main, [*argv, "--compile"], capsys)


@pytest.mark.parametrize("text, reason", [
    ("Connection closed by peer [127.0.0.1]:1", "lost the other processes"),
    ("NCCL error: invalid argument", None), ("gloo: shapes do not match", None),
])  # fmt: skip
def test_only_a_lost_process_is_called_that(text, reason, monkeypatch):
    monkeypatch.setattr(devices.dist, "is_initialized", lambda: True)
    found = devices.reason_of(RuntimeError(text))
    assert (reason or "") in (found or "") and (found is None) == (reason is None)


def test_a_failing_disk_is_named_without_the_number_of_the_error():
    error = OSError(28, "No space left on device", "out/ckpt")
    assert devices.reason_of(error) == "out/ckpt: No space left on device"
