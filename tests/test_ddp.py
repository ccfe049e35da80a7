"""One process or many: the same losses, one writer, and one end for all."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
import train
from conftest import FEW_VALIDATED, MOE, STEP, argv, metrics, newest, record_of
from tools import run_folder

# with few and low learning rates, because rounding grows in the course of a run
FEW = dict(FEW_VALIDATED, total_tokens=10 * STEP, lr_max=0.01, eval_every=8 * STEP)


def launch(world: int, function: Callable, *args) -> list:
    """Processes with an environment as torchrun makes it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world))
    processes = []
    for i in range(world):
        rank = dict(RANK=str(i), LOCAL_RANK=str(i))
        processes.append(forked.start(function, *args, **where, **rank))
    return processes


def finish(processes: list, status: int = 0) -> list[tuple[str, str]]:
    """Wait for all. Returns (standard output, standard error) of each."""
    for process in processes:
        process.join(timeout=120)
        process.kill()
    outputs = [forked.printed(process) for process in processes]
    assert [p.exitcode for p in processes] == [status] * len(processes), outputs
    return outputs


def logged(run) -> list[float]:
    """All losses of an MoE, and what it logs of its routers."""
    found = [line["val_loss"] for line in metrics(run, "val_loss")]
    for line in metrics(run):
        found += [line["loss"], line["grad_norm"], line["aux_loss"]]
        found += line["max_load"]
    return found


def test_processes_train_and_validate_like_one_and_resume_with_others(corpus_path):
    """An MoE with micro-batches, and with a large auxiliary loss over all processes."""
    fields = dict(FEW, data=corpus_path, router_aux_weight=1.0, **MOE)
    assert train.main(argv(**fields, out="alone", micro_batch_size=4)) == 0
    two = argv(**fields, out="run", micro_batch_size=2)
    finish(launch(2, train.main, [*two, "--time_limit=0"]), status=3)
    assert newest("run")["tokens"] == STEP
    four = [*argv(**fields, out="run", micro_batch_size=1), "--resume"]
    outputs = finish(launch(4, train.main, four))
    assert len(metrics("run")) == 10 and len(metrics("run", "val_loss")) == 2
    assert logged("run") == pytest.approx(logged("alone"), rel=1e-5)
    # only rank 0 prints and writes
    assert "a sample" in outputs[0][0] and outputs[1:] == [("", "")] * 3
    assert record_of("run")["origin"]["processes"] == 2  # of its first start
    assert sorted(path.name for path in Path().glob("*/")) == ["alone", "run"]


def test_under_torchrun_a_stop_that_saved_is_no_failure(corpus_path, monkeypatch):
    """There, every other status is a traceback."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    typed = argv(data=corpus_path, out="run", **FEW)
    assert train.main([*typed, "--time_limit=0"]) == 0
    assert not Path("run/record.json").exists()
    assert newest("run")["tokens"] == STEP


def test_sigterm_to_one_process_stops_all_after_the_same_step(corpus_path):
    fields = dict(FEW, data=corpus_path, decay_share=0, total_tokens=10**8)
    processes = launch(2, train.main, argv(**fields, out="run"))
    while len(metrics("run")) < 10:
        time.sleep(0.02)
    processes[1].terminate()
    finish(processes, status=3)
    assert len(run_folder.checkpoints(Path("run"))) == 1


def test_rank_0_has_the_clock_of_a_run_with_minutes(corpus_path):
    """Otherwise the processes would wait for each other."""
    fields = dict(FEW, data=corpus_path, minutes=0.01, out="run")
    del fields["total_tokens"]
    finish(launch(2, train.main, argv(**fields)))
    record = record_of("run")
    steps = record["config"]["total_tokens"] // STEP
    assert record["results"]["tokens"] == steps * STEP


def test_an_error_of_rank_0_is_one_line_and_ends_all(corpus_path):
    typed = argv(data=corpus_path, out="run", batch_size=9)
    for _, error in finish(launch(2, train.main, typed), status=2):
        assert "multiple" in error and len(error.splitlines()) == 1
    assert not Path("run").exists()
