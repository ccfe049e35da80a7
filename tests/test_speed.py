"""What the speed rests on: no graph breaks, one compilation per shape, predictions that hold. (Timings are benchmarks, not tests.)"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from model import GPT

ROOT = Path(train.__file__).parent
SMALL = dict(n_layer=2, n_embd=64, n_head=4, n_ffn=128, seq_len=64, batch_size=4, device="cpu")


def kept_bytes(cfg: train.TrainConfig) -> int:
    """What autograd keeps for the backward pass inside the blocks and in their copies of the weights."""
    model = train.build(dataclasses.replace(cfg, compile=False)).model
    if cfg.compile:
        for block in model.blocks:
            block.compile()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept, sizes = [], {}

    def keep(tensor):
        kept.append(tensor)  # or another one would get its address
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), train.mixed_precision(cfg):
        model(x, x)
    return sum(n for address, n in sizes.items() if address not in own)


MIX = dict(n_expert=8, n_expert_active=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [{}, dict(n_kv_head=2), MIX, pytest.param(dict(compile=True), marks=pytest.mark.slow), pytest.param(dict(compile=True, n_kv_head=2), marks=pytest.mark.slow)],
    ids=["dense", "grouped queries", "mixture", "compiled", "compiled, grouped queries"],
)
def test_memory_is_what_autograd_keeps(shape, dtype):
    """A layer more needs so many bytes more, as --dry_run says, within 15 %. (A compiled mixture is another thing on a CPU than on a GPU.)"""
    torch.compiler.reset()
    configs = [train.make_config(**SMALL | shape | dict(n_layer=n, dtype=dtype)) for n in (1, 3)]
    kept = [kept_bytes(cfg) for cfg in configs]
    said = [sum(train.memory(cfg)[part] for part in ("blocks", "bfloat16 copies")) for cfg in configs]
    assert said[1] - said[0] == pytest.approx(kept[1] - kept[0], rel=0.15)


def test_recomputing_keeps_less_and_changes_nothing():
    results = []
    for recompute in (False, True):
        cfg = train.make_config(**SMALL | MIX, recompute=recompute)
        model = train.build(cfg).model
        x = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
        loss, routing = model(x, x)
        (loss + routing.aux_loss.sum()).backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    cfg = train.make_config(**SMALL)
    assert kept_bytes(cfg) > 3 * kept_bytes(dataclasses.replace(cfg, recompute=True))
    assert train.memory(cfg)["blocks"] > 1.5 * train.memory(dataclasses.replace(cfg, recompute=True))["blocks"]


@pytest.mark.parametrize("shape", [{}, dict(n_kv_head=2, n_embd=32)], ids=["dense", "grouped queries"])
def test_a_block_is_one_graph_for_all_batches(shape):
    """fullgraph raises at a break; the learning rate, which changes at every step, must not reach the compiler."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    cfg = train.make_config(**SMALL | shape, dtype="bfloat16")
    state = train.build(cfg)
    model, optimizer = state.model, state.optimizer
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    model.loss = torch.compile(model.loss, fullgraph=True, backend=counter)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1) * group["lr_scale"]
        x = torch.randint(256, (4, 64))
        with train.mixed_precision(cfg):
            loss, _ = model(x, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count == 2  # blocks, of which there are two alike, and the loss


STEP = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
import train
from torch._dynamo.utils import counters
train.main(sys.argv[1:])
print("cache", counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow  # compiles twice
def test_another_rate_budget_and_batch_count_start_from_the_cache(corpus_path, tmp_path):
    flags = [f"--{k}={v}" for k, v in (SMALL | dict(data=corpus_path, warmup_tokens=0)).items()] + ["--compile"]
    seen = []
    for i, more in enumerate((["--lr=0.01", "--total_tokens=512"], ["--lr=0.02", "--total_tokens=2048", "--batch_size=8", "--micro_batch_size=4"])):
        command = [sys.executable, "-c", STEP, *flags, "--schedule=wsd", *more, f"--out={tmp_path / str(i)}"]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        seen.append([int(n) for n in output.splitlines()[-1].split()[1:]])
    assert seen[0][1] > 0 and seen[1][0] > 0 and seen[1][1] == 0, seen


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert not any(name in str(op) for name in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), op
        return op(*args, **(kwargs or {}))


def test_nothing_in_a_step_reads_a_value(corpus):
    """Reading one would make a GPU wait: `item`, `tolist` and friends are for lines of the log."""
    cfg = train.resolve_device(train.make_config(**SMALL, warmup_tokens=0))
    state = train.build(cfg)
    model, optimizer = state.model, state.optimizer
    train.optimizer_step(cfg, model, optimizer, corpus, 0, lr=0.01)  # whatever happens once, happens here

    with NoReads():
        train.optimizer_step(cfg, model, optimizer, corpus, cfg.batch_tokens, lr=0.01)
        with pytest.raises(AssertionError):
            torch.ones(()).item()


def test_dry_run_counts(capsys):
    assert train.main(["--preset=1B", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "238,418 steps of 4,194,304" in out and "256 micro-batches of 4 sequences" in out
    with torch.device("meta"):
        flops = GPT(train.make_config(preset="1B")).flops_per_token() * 238_418 * 4_194_304
    assert f"{flops:.3g}" in out and f"{flops / (0.4 * 989e12 * 3600):,.3g} hours on H200s" in out
    parts = train.memory(train.make_config(preset="1B", dtype="bfloat16", compile=True, device="cuda"), n_micro=256)
    assert f"{sum(parts.values()) / 2**30:.3g} GiB per device" in out and parts["AdamW"] == 8 * 1_208_083_968
    assert train.memory(train.make_config(preset="1B"), n_micro=1)["gradients"] == 0


def test_dry_run_keeps_what_was_typed(capsys):
    assert train.main(["--preset=1B", "--dry_run", "--dtype=float32", "--no-compile"]) == 0
    assert "(cuda, float32, eager, no recompute" in capsys.readouterr().out
    train.dry_run(train.make_config(preset="laptop"), n_devices=2)  # a batch of 8 in one piece, where it is not shared
    assert "devices: 2, each 1 micro-batch of 4 sequences" in capsys.readouterr().out


def test_one_gpu_without_a_number_is_no_mistake(monkeypatch):
    """torch.cuda.set_device refuses a plain "cuda", before it looks for a GPU; the current one is right already."""
    monkeypatch.setattr(train, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: True)
    cfg = train.resolve_device(train.make_config(preset="1B"))
    assert (cfg.device, cfg.dtype, cfg.compile) == ("cuda", "bfloat16", True)


def test_profile_writes_a_trace(corpus_path, tmp_path, capsys):
    flags = [f"--{k}={v}" for k, v in (SMALL | dict(data=corpus_path)).items()]
    assert train.main([*flags, "--profile", "trace.json"]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
    assert train.main([*flags, "--profile", "nowhere/trace.json"]) == 2
    assert capsys.readouterr().err == "train.py: --profile nowhere/trace.json: there is no folder nowhere\n"
