"""One process or many: the same losses, one writer, and one end for all."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import data
import forked
import train
from test_train import MOE, STEP, argv, assert_same_tensors, config_of, gradients_of
from test_train import metrics, newest, record_of
from tools import run_folder

# with few and low learning rates, because rounding grows in the course of a run
FEW = dict(total_tokens=10 * STEP, lr_max=0.01)
FEW |= dict(eval_every=8 * STEP, final_eval_tokens=3200)


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


def losses(run) -> list[float]:
    return [line[key] for key in ("loss", "val_loss") for line in metrics(run, key)]


def routing(run) -> list[float]:
    """What an MoE logs of its routers."""
    found = []
    for line in metrics(run, "aux_loss"):
        found += [line["aux_loss"], *line["max_load"]]
    return found


@pytest.fixture(scope="module")
def alone(corpus_path, tmp_path_factory) -> Path:
    """A folder with the runs of one process."""
    folder = tmp_path_factory.mktemp("alone")
    for name, shape in (("dense", {}), ("moe", MOE)):
        typed = argv(data=corpus_path, out=folder / name, **FEW, **shape)
        assert train.main(typed) == 0
    return folder


def train_and_leave(typed: list[str]) -> int:
    """Train, and destroy the group of processes at the end."""
    status = train.main(typed)
    assert not torch.distributed.is_initialized()
    return status


@pytest.mark.parametrize("name, changed", [
    ("dense", dict(micro_batch_size=1)), ("moe", MOE),
], ids=["micro-batches", "MoE"])  # fmt: skip
def test_two_processes_train_and_validate_like_one(name, changed, alone, corpus_path):
    typed = argv(data=corpus_path, out="run", **FEW, **changed)
    outputs = finish(launch(2, train_and_leave, typed))
    assert len(losses("run")) == 10 + 2
    assert losses("run") == pytest.approx(losses(alone / name), rel=1e-5)
    assert routing("run") == pytest.approx(routing(alone / name), rel=1e-5)
    assert record_of("run")["origin"]["processes"] == 2
    # only rank 0 prints and writes
    assert "a sample" in outputs[0][0] and outputs[1] == ("", "")
    assert [path.name for path in Path(".").iterdir() if path.is_dir()] == ["run"]


def test_a_run_resumes_with_a_different_number_of_processes(alone, corpus_path):
    typed = [*argv(data=corpus_path, out="run", **FEW), "--resume"]
    finish(launch(2, train.main, [*typed, "--time_limit=0"]), status=3)
    assert newest("run")["tokens"] == STEP
    outputs = finish(launch(4, train.main, typed))
    assert outputs[1:] == [("", "")] * 3
    assert losses("run") == pytest.approx(losses(alone / "dense"), rel=1e-5)


def test_under_torchrun_a_stop_that_saved_is_no_failure(corpus_path, monkeypatch):
    """There, every other status is a traceback."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    typed = argv(data=corpus_path, out="run", **FEW)
    assert train.main([*typed, "--time_limit=0"]) == 0
    assert not Path("run/record.json").exists()
    assert newest("run")["tokens"] == STEP


def test_sigterm_to_one_process_stops_all_after_the_same_step(corpus_path):
    fields = FEW | dict(data=corpus_path, decay_share=0)
    endless = argv(**fields | dict(out="stopped", total_tokens=10**8))
    processes = launch(2, train.main, endless)
    while len(metrics("stopped")) < 10:
        time.sleep(0.02)
    processes[1].terminate()
    finish(processes, status=3)
    (checkpoint,) = run_folder.checkpoints(Path("stopped"))
    # as a run that was planned to end there
    planned = fields | dict(out="planned", total_tokens=int(checkpoint.stem))
    finish(launch(2, train.main, argv(**planned)))
    assert_same_tensors(newest("stopped")["model"], newest("planned")["model"])


def test_rank_0_has_the_clock_of_a_run_with_minutes(corpus_path):
    fields = {name: x for name, x in FEW.items() if name != "total_tokens"}
    fields |= dict(data=corpus_path, log_every=10**6, eval_every=10**6)
    finish(launch(2, train.main, argv(**fields, minutes=0.01, out="timed")))
    length = record_of("timed")["config"]["total_tokens"]
    finish(launch(2, train.main, argv(**fields, total_tokens=length, out="planned")))
    assert_same_tensors(newest("timed")["model"], newest("planned")["model"])


@pytest.mark.parametrize("changed, word", [
    (dict(batch_size=9), "multiple"), (dict(data="nowhere"), "nowhere"),
])  # fmt: skip
def test_an_error_of_rank_0_is_one_line_and_ends_all(changed, word, corpus_path):
    typed = argv(**dict(data=corpus_path, out="run") | changed)
    outputs = finish(launch(2, train.main, typed), status=2)
    for _, error in outputs:
        assert word in error and len(error.splitlines()) == 1
    assert not Path("run").exists()


def join(function: Callable, *args) -> None:
    """Call a function in the group of processes."""
    with train.devices.distributed("cpu"):
        function(*args)


def save_gradients(corpus_path: Path) -> None:
    """Those of a first step with micro-batches, with the auxiliary loss at full weight."""
    rank, world = train.devices.rank_and_world()
    replicate = DistributedDataParallel if world > 1 else lambda model: model
    corpus = data.load_mixture(config_of(data=str(corpus_path)))
    gradients, step = gradients_of(corpus, replicate, **MOE, router_aux_weight=1.0)
    torch.save(gradients | {"load": step.routing.load}, f"{world}-{rank}.pt")


def test_the_gradients_of_an_moe_are_those_of_one_process(corpus_path):
    save_gradients(corpus_path)
    finish(launch(2, join, save_gradients, corpus_path))
    one = torch.load("1-0.pt")
    for rank in (0, 1):
        two = torch.load(f"2-{rank}.pt")
        for name, expected in one.items():
            torch.testing.assert_close(two[name], expected, rtol=0, atol=1e-9)
