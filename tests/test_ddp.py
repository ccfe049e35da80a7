"""One process or many: the same losses, one writer, and an end for all when one of them fails."""

import itertools
import os
import socket
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import data
import forked
import runs
import train
from test_train import MOE, metrics, one_step, read, same, weights
from tools import devices

STEPS = 100
TINY = dict(  # at higher learning rates, rounding grows in the course of the run
    n_layer=2, n_embd=32, n_head=2, seq_len=32, base_width=32, batch_size=8, warmup_tokens=2560,
    log_every=256, device="cpu", total_tokens=STEPS * 256, eval_every=10**6, save_every=10**6,
    lr_max=0.01,
)  # fmt: skip


def argv_of(fields: dict) -> list[str]:
    return [f"--{k}={v}" if v is not True else f"--{k}" for k, v in fields.items()]


def launch(world: int, fields: dict, change: Callable | None = None) -> list:
    """Processes of train.py as torchrun starts them, without its table of errors."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # any free port
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    where["WORLD_SIZE"] = str(world)
    return [
        forked.start(
            run, argv_of(fields), change, **where, RANK=str(i), LOCAL_RANK=str(i)
        )
        for i in range(world)
    ]


def run(argv: list[str], change: Callable | None) -> None:
    """train.py, in a process of its own, after a change of what it calls."""
    if change:
        change()
    devices.leave(train.main(argv))


def finish(processes: list, status: int = 0) -> list[tuple[str, str]]:
    """Wait for all -> (standard output, standard error) of each."""
    for p in processes:
        p.join(timeout=120)
        p.kill()
    outputs = [forked.printed(p) for p in processes]
    assert [p.exitcode for p in processes] == [status] * len(processes), outputs
    return outputs


def losses(out: Path) -> list[float]:
    return [line[key] for key in ("loss", "val_loss") for line in metrics(out, key)]


@pytest.fixture(scope="module")
def alone(corpus_path, tmp_path_factory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train.main(argv_of(TINY | {"data": corpus_path, "out": out})) == 0
    return out


@pytest.mark.parametrize("micro_batch_size", [4, 1])  # one and four a process and step
def test_two_processes_train_like_one(micro_batch_size, alone, corpus_path, tmp_path):
    out = tmp_path / "run"
    fields = {"data": corpus_path, "out": out, "micro_batch_size": micro_batch_size}
    outputs = finish(launch(2, TINY | fields))
    assert len(losses(out)) == STEPS + 1
    assert losses(out) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = read(out / "record.json"), read(alone / "record.json")
    assert (ours["processes"], ours["batch_size"]) == (2, 8)
    assert ours["val_bpb"] == pytest.approx(theirs["val_bpb"], rel=1e-5)
    assert [printed == "" for printed, _ in outputs] == [False, True]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]


def watch_calls() -> None:
    """Print the name whenever one of these is called."""

    def watch(owner, name):
        real = getattr(owner, name)

        def watched(self):
            print(name, file=sys.stderr)
            return real(self)

        setattr(owner, name, watched)

    watch(zipfile.ZipFile, "testzip")
    watch(train.DistributedDataParallel, "_sync_buffers")


def watch_gradients() -> None:
    """Print the address of a gradient before each pass."""
    forward = train.DistributedDataParallel.forward

    def watched(self, *args):
        grad = next(self.parameters()).grad
        print(grad if grad is None else grad.data_ptr(), file=sys.stderr)
        return forward(self, *args)

    train.DistributedDataParallel.forward = watched


def test_gradients_stay_in_the_buffers_that_processes_exchange(corpus_path, tmp_path):
    """Memory for new ones beside them would cost as much as the model."""
    fields = TINY | {"data": corpus_path, "out": tmp_path / "run", "micro_batch_size": 1}
    fields |= {"total_tokens": 4 * 256, "warmup_tokens": 256, "decay_tokens": 0}
    for _, printed in finish(launch(2, fields, watch_gradients)):
        addresses = printed.splitlines()
        assert len(addresses) == 4 * 4  # steps, passes
        # DDP makes its buffers anew in the second step
        assert len(set(addresses[2 * 4 :])) == 1 and "None" not in addresses[2 * 4 :]


def test_a_run_resumes_on_other_numbers_of_processes(alone, corpus_path, tmp_path):
    """Rank 0 alone looks for damage, and tells it; and none sends constant tables."""
    out = tmp_path / "run"
    fields = TINY | {"data": corpus_path, "out": out, "log_every": 25 * 256}
    outputs = finish(launch(2, fields | {"time_limit": 0.001}), status=3)
    assert outputs[1] == ("", "")
    # the same step
    assert [path.stem for path in runs.checkpoints(out)] == [f"{256:016d}"]
    assert train.main([f"--out={out}", "--resume", "--time_limit=0.001"]) == 3
    newest = out / "ckpt" / f"{10**6:016d}.pt"
    newest.write_bytes(runs.checkpoints(out)[0].read_bytes()[:-100])  # damaged
    outputs = finish(launch(4, {"out": out, "resume": True}), status=2)
    assert newest.name in outputs[0][1] and outputs[1:] == [("", "")] * 3
    newest.unlink()
    outputs = finish(launch(4, {"out": out, "resume": True}, watch_calls))
    # at its start, and for the sample at its end
    assert outputs[0][1].count("testzip") == 2 and outputs[1:] == [("", "")] * 3
    assert "_sync_buffers" not in outputs[0][1]
    expected = [losses(alone)[i] for i in (24, 49, 74, 99, 100)]
    assert losses(out) == pytest.approx(expected, rel=1e-5)


def test_sigterm_to_all_processes_saves_once(corpus_path, tmp_path):
    fields = TINY | {"data": corpus_path, "decay_tokens": 0}
    stopped, planned = tmp_path / "stopped", tmp_path / "planned"
    processes = launch(2, fields | {"out": stopped, "total_tokens": 10**8})
    while not (stopped / "metrics.jsonl").exists() or len(losses(stopped)) < 20:
        time.sleep(0.05)
    for p in processes:
        p.terminate()
    finish(processes, status=3)
    (checkpoint,) = runs.checkpoints(stopped)
    total = int(checkpoint.stem)  # a run that was planned to end there
    finish(launch(2, fields | {"out": planned, "total_tokens": total}))
    assert same(weights(stopped), weights(planned))


def save_gradients(rank: int, world: int, corpus_path: Path, out: Path) -> None:
    """Those of an MoE's first step, with the auxiliary loss at full weight."""
    replicate = lambda model: model
    if world > 1:
        where = f"file://{out}/meeting"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
        replicate = torch.nn.parallel.DistributedDataParallel
    corpus = data.open_corpus(corpus_path)
    gradients, step = one_step(corpus, replicate, **MOE, router_aux_weight=1.0)
    found = {"gradients": gradients, "load": step.routing.load}
    torch.save(found, out / f"{world}-{rank}.pt")
    if world > 1:
        os._exit(0)  # as train.py ends


def test_the_gradients_of_an_moe_are_those_of_one_process(corpus_path, tmp_path):
    save_gradients(0, 1, corpus_path, tmp_path)
    finish(
        [forked.start(save_gradients, rank, 2, corpus_path, tmp_path) for rank in (0, 1)]
    )
    one, *two = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for process in two:
        assert torch.allclose(process["load"], one["load"])
        for name, gradient in one["gradients"].items():
            assert (process["gradients"][name] - gradient).abs().max() <= 1e-9, name


def test_a_batch_that_cannot_be_shared_is_refused_once(corpus_path, tmp_path):
    fields = TINY | {"data": corpus_path, "out": tmp_path / "run", "batch_size": 8}
    outputs = finish(launch(3, fields), status=2)
    assert outputs[0][1].startswith("train.py: --batch_size 8: must be a multiple of 3")
    assert outputs[1:] == [("", "")] * 2 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("changed, says", [
    ({"MASTER_ADDR": None}, "MASTER_ADDR"), ({"RANK": None}, "RANK"),
    ({"WORLD_SIZE": "two"}, "two"),
])  # fmt: skip
def test_half_an_environment_of_torchrun_is_one_line(
    changed, says, corpus_path, tmp_path
):
    complete = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", WORLD_SIZE="2", RANK="0")
    where = {name: value for name, value in (complete | changed).items() if value}
    fields = argv_of(TINY | {"data": corpus_path, "out": tmp_path / "run"})
    ((_, error),) = finish([forked.start(run, fields, None, **where)], status=2)
    assert len(error.splitlines()) == 1
    assert says in error and not (tmp_path / "run").exists()


def fail_in_process_1() -> None:
    """Run out of memory in the fifth step."""
    real, steps = train.optimizer_step, itertools.count(1)

    def step(*args):
        if next(steps) == 5 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    train.optimizer_step = step


def test_a_process_that_fails_ends_all(corpus_path, tmp_path):
    fields = TINY | {"data": corpus_path, "out": tmp_path / "run", "total_tokens": 10**9}
    outputs = finish(launch(2, fields, fail_in_process_1), status=2)
    last = outputs[0][1].splitlines()[-1]
    assert last == "train.py: lost the other processes; one of them failed"
    assert outputs[1][1].startswith("train.py: out of memory; try")
