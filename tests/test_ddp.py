"""One process or many: the same losses, one writer, and an end for all when one of them fails."""

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import data
import train

ROOT = Path(train.__file__).parent
STEPS = 200
TINY = dict(
    n_layer=2, n_embd=32, n_head=2, seq_len=32, base_width=32, batch_size=8, warmup_tokens=2560, log_every=256, device="cpu",
    total_tokens=STEPS * 256, eval_every=10**6, save_every=10**6, lr_max=0.01,  # at higher rates rounding grows as the run goes on
)  # fmt: skip
MIXTURE = dict(preset="laptop-moe", n_ffn=40)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(world: int, flags: dict, script=ROOT / "train.py", folders=None, port=None) -> list[subprocess.Popen]:
    """What torchrun does, without its table of errors."""
    argv = [sys.executable, str(script), *(f"--{k}={v}" if v is not True else f"--{k}" for k, v in flags.items())]
    where = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folders[rank] if folders else None,
            env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]  # fmt: skip


def finish(processes, status=0) -> list[tuple[str, str]]:
    """Wait for all -> (standard output, standard error) of each."""
    try:
        outputs = [p.communicate(timeout=120) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [status] * len(processes), outputs
    return outputs


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line] + [line["val_loss"] for line in lines if "val_loss" in line]


@pytest.fixture(scope="module")
def alone(corpus_path, tmp_path_factory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train.main([f"--{k}={v}" for k, v in (TINY | {"data": corpus_path, "out": out}).items()]) == 0
    return out


@pytest.mark.parametrize("world, micro_batch_size", [(2, 4), (4, 1)])
def test_many_processes_are_one(world, micro_batch_size, alone, corpus_path, tmp_path):
    out = tmp_path / "run"
    outputs = finish(launch(world, TINY | {"data": corpus_path, "out": out, "micro_batch_size": micro_batch_size}))
    assert len(losses(out)) == STEPS + 1 and losses(out) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = (json.loads((path / "record.json").read_text()) for path in (out, alone))
    assert ours["processes"] == world and ours["batch_size"] == 8 and ours["val_bpb"] == pytest.approx(theirs["val_bpb"], rel=1e-5)
    assert f"{world} processes" in outputs[0][0] and all(printed == "" for printed, _ in outputs[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_resumed_on_other_numbers_of_processes(alone, corpus_path, tmp_path):
    out = tmp_path / "run"
    flags = TINY | {"data": corpus_path, "out": out, "log_every": 50 * 256}
    outputs = finish(launch(2, flags | {"time_limit": 0.001}), status=3)  # they agree to stop behind the same step
    assert "stopped and saved" in outputs[0][0] and outputs[1] == ("", "")
    assert [path.stem for path in (out / "ckpt").iterdir()] == [f"{256:016d}"]
    finish(launch(2, {"out": out, "resume": True, "time_limit": 0.2}), status=3)
    assert train.main([f"--out={out}", "--resume", "--time_limit=0.001"]) == 3
    finish(launch(4, {"out": out, "resume": True}))
    assert losses(out) == pytest.approx([losses(alone)[i] for i in (49, 99, 149, 199, 200)], rel=1e-5)


WATCHED = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import train
from test_ddp import watch
watch(train.data, open("read-by-" + os.environ["RANK"], "w", buffering=1))
sys.exit(train.main())
"""


def watch(data, log, patch=setattr) -> None:
    """Write down a hash of each sequence that is drawn from now on, with its number."""
    draw = data.draw

    def drawing(corpus, g, seq_len, seed):
        inputs, targets = draw(corpus, g, seq_len, seed)
        for number, x, y in zip(g.tolist(), inputs, targets):
            print(json.dumps([number, hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()]), file=log)
        return inputs, targets

    patch(data, "draw", drawing)


def test_a_mixture_of_corpora_is_read_as_by_one(documents, tmp_path, monkeypatch):
    """Each process draws its own sequences of the mixture, before and after it changes, in the midst of a batch."""
    for name, part in (("a", documents[:150]), ("b", documents[150:])):
        data.prepare(part, "bytes", tmp_path / name, val_fraction=0.1)
    a, b = tmp_path / "a", tmp_path / "b"
    flags = TINY | {"data": f"{a}:0.7,{b}:0.3", "decay_data": f"{a}:0.2,{b}:0.8", "total_tokens": 24 * 256, "decay_tokens": 10 * 256 - 40}
    (tmp_path / "watched.py").write_text(WATCHED)
    processes = launch(2, flags | {"out": tmp_path / "two"}, tmp_path / "watched.py", folders=[tmp_path] * 2)
    with open("read-by-one", "w") as log:
        watch(data, log, monkeypatch.setattr)
        assert train.main([f"--{k}={v}" for k, v in (flags | {"out": tmp_path / "one"}).items()]) == 0
    finish(processes)
    first, second, one = (dict(json.loads(line) for line in open(f"read-by-{who}")) for who in (0, 1, "one"))
    assert sorted(one) == list(range(192)) and not set(first) & set(second) and first | second == one
    assert len(losses(tmp_path / "one")) == 25 and losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("one", "two"))
    assert two["processes"] == 2 and two["fingerprint"] == one["fingerprint"] and two["epochs_b"] == one["epochs_b"] > 0
    assert all(two[name] == pytest.approx(one[name], rel=1e-5) for name in ("val_loss_a", "val_loss_b", "val_bpb"))


def test_sigterm_to_all_saves_once(corpus_path, tmp_path):
    flags = TINY | {"data": corpus_path, "decay_tokens": 0}
    stopped, planned = tmp_path / "stopped", tmp_path / "planned"
    processes = launch(2, flags | {"out": stopped, "total_tokens": 10**8})
    while not (stopped / "metrics.jsonl").exists() or len(losses(stopped)) < 20:
        time.sleep(0.05)
    for p in processes:
        p.send_signal(signal.SIGTERM)
    finish(processes, status=3)
    (checkpoint,) = (stopped / "ckpt").iterdir()
    finish(launch(2, flags | {"out": planned, "total_tokens": int(checkpoint.stem)}))  # a run that was planned to end there
    ours, theirs = (torch.load(max((path / "ckpt").iterdir()), weights_only=True)["model"] for path in (stopped, planned))
    assert all(torch.equal(w, theirs[name]) for name, w in ours.items())


# -- the mixture -----------------------------------------------------------------------------------


def one_step(rank: int, world: int, port: int, corpus_path: Path, out: Path, f_of_each: bool) -> None:
    """The gradients of a mixture's first step in float64, with the auxiliary loss at full weight."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    cfg = train.resolve_device(train.make_config(**TINY | MIXTURE, router_aux_weight=1.0, grad_clip=0.0))
    model = train.build(cfg).model
    model.double()
    if f_of_each:
        for block in model.blocks:
            block.mlp.training = False
    sgd = torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}])
    gradients = {}
    sgd.step = lambda: gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
    replica = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    _, _, routing = train.optimizer_step(cfg, replica, sgd, data.open_corpus(corpus_path), 0, lr=1.0)
    torch.save({"gradients": gradients, "load": routing.load}, out / f"{world}-{rank}-{f_of_each}.pt")
    if world > 1:
        os._exit(0)  # as train.py ends


def test_a_mixtures_gradients_are_those_of_one_process(corpus_path, tmp_path):
    one_step(0, 1, 0, corpus_path, tmp_path, False)
    for f_of_each in (False, True):
        mp.spawn(one_step, (2, free_port(), corpus_path, tmp_path, f_of_each), nprocs=2)
    read = lambda name: torch.load(tmp_path / f"{name}.pt")
    one, first, second, each = (read(name) for name in ("1-0-False", "2-0-False", "2-1-False", "2-0-True"))
    difference = lambda a, b: max((a["gradients"][name] - g).abs().max().item() for name, g in b["gradients"].items())
    assert difference(first, one) <= 1e-9 and difference(second, one) <= 1e-9
    assert difference(each, one) > 1e-4  # with an f for each process it would be another loss
    assert torch.allclose(first["load"], one["load"]) and not torch.allclose(each["load"], one["load"])


@pytest.mark.slow
def test_a_mixture_learns_the_same_within_noise(corpus_path, tmp_path):
    """Sums in another order send some tokens to other experts: no more than another seed does."""
    flags = TINY | MIXTURE | {"data": corpus_path, "log_every": 51200, "total_tokens": 51200}
    for seed in (0, 1, 2):
        assert train.main([f"--{k}={v}" for k, v in (flags | {"out": tmp_path / f"{seed}", "seed": seed}).items()]) == 0
    finish(launch(2, flags | {"out": tmp_path / "two"}))
    final = {path.name: losses(path)[-1] for path in tmp_path.iterdir() if (path / "record.json").exists()}
    seeds = [final[str(seed)] for seed in (0, 1, 2)]
    assert abs(final["two"] - final["0"]) <= max(seeds) - min(seeds), final


# -- failures --------------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_shared(corpus_path, tmp_path):
    outputs = finish(launch(3, TINY | {"data": corpus_path, "out": tmp_path / "run"}), status=2)
    assert outputs[0][1] == "train.py: --batch_size 8: must be a multiple of the 3 processes that share it\n"
    assert outputs[1:] == [("", "")] * 2 and not (tmp_path / "run").exists()


def test_bad_data_in_one_process_ends_all(corpus_path, tmp_path):
    (tmp_path / "here" / "data").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "data" / "small").symlink_to(corpus_path)
    processes = launch(2, TINY | {"data": "data/small", "out": tmp_path / "run"}, folders=[tmp_path / "here", tmp_path / "there"])
    outputs = finish(processes, status=2)
    assert outputs[0][1].startswith("train.py: rank 1: --data ") and "there/data/small: no prepared corpus" in outputs[0][1] and outputs[1][1] == "" and len(outputs[0][1].splitlines()) == 1


FAILING = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train
step, n = train.optimizer_step, 0
def fails(*args):
    global n
    n += 1
    if n == 5 and os.environ["RANK"] == "1":
        raise {{}}
    return step(*args)
train.optimizer_step = fails
sys.exit(train.main())
"""


@pytest.mark.parametrize(
    "exception, reason",
    [
        ("ValueError('this batch is bad')", "rank 1: ValueError: this batch is bad"),
        ("train.torch.OutOfMemoryError('CUDA out of memory')", "rank 1: out of memory; a smaller --micro_batch_size"),
        ("SystemExit(7)", None),
    ],
)
def test_a_process_that_fails_ends_all(exception, reason, corpus_path, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(exception))
    started = time.perf_counter()
    processes = launch(2, TINY | {"data": corpus_path, "out": tmp_path / "run", "total_tokens": 10**9}, script)
    outputs = [p.communicate(timeout=60) for p in processes]
    assert all(p.returncode != 0 for p in processes) and time.perf_counter() - started < 50
    assert outputs[0][1].splitlines()[-1] == "train.py: rank 0: lost the other processes, one of them has failed"
    if reason:
        assert outputs[1][1].splitlines()[-1].startswith(f"train.py: {reason}")


def test_a_port_in_use(corpus_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (first, second) = launch(2, TINY | {"data": corpus_path}, port=other.getsockname()[1])
        _, error = first.communicate(timeout=60)
        second.kill()
        second.communicate()
    assert first.returncode == 2 and len(error.splitlines()) == 1
    assert error.startswith("train.py: cannot meet the other 1 processes that WORLD_SIZE=2 promises") and "address already in use" in error


@pytest.mark.slow
def test_a_process_that_waits_alone(corpus_path):
    processes = launch(3, TINY | {"data": corpus_path})
    processes[2].kill()
    for p in processes[:2]:
        _, error = p.communicate(timeout=150)
        assert p.returncode == 2 and "cannot meet the other 2 processes that WORLD_SIZE=3 promises" in error.splitlines()[-1]


@pytest.mark.slow
def test_killed_ten_times_under_torchrun(corpus_path, tmp_path):
    """The metrics and final weights are those of an undisturbed run, bit by bit."""
    flags = [f"--{k}={v}" for k, v in (TINY | {"data": corpus_path, "total_tokens": 2000 * 256, "save_every": 100 * 256}).items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", "--max_restarts=20"]
    for name in ("whole", "killed"):
        job = subprocess.Popen([*torchrun, str(ROOT / "train.py"), *flags, f"--out={tmp_path / name}", "--resume"],
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        rng, kills = random.Random(0), 0
        while name == "killed" and kills < 10:
            time.sleep(rng.uniform(4, 9))
            workers = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
            if workers and job.poll() is None:
                os.kill(int(rng.choice(workers)), signal.SIGKILL)
                kills += 1
        assert job.wait(timeout=600) == 0
    read = lambda name: torch.load(max((tmp_path / name / "ckpt").iterdir()), weights_only=True)
    whole, killed = read("whole"), read("killed")
    assert all(torch.equal(w, killed["model"][key]) for key, w in whole["model"].items())
    clocks = {"seconds", "tokens_per_second"}
    lines = [[{k: v for k, v in json.loads(line).items() if k not in clocks} for line in open(tmp_path / name / "metrics.jsonl")] for name in ("whole", "killed")]
    assert lines[0] == lines[1] and len(lines[0]) == 2001
