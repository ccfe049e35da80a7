"""What the speed rests on: no graph breaks, one compilation, estimates that hold; no timings."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import model as model_file
import train
from model import GPT
from test_mistakes import one_line
from tools import devices, flags

SMALL = dict(
    n_layer=2, n_embd=64, n_head=4, n_ffn=128, seq_len=64, batch_size=4, device="cpu"
)
MOE = dict(n_expert=8, n_expert_active=2)


def kept_bytes(cfg: train.TrainConfig) -> int:
    """What autograd keeps for the backward pass inside blocks and in their copies of weights."""
    model = train.build(dataclasses.replace(cfg, compile=False)).model
    if cfg.compile:
        for block in model.blocks:
            block.compile()
    own = {
        t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())
    }
    kept, sizes = [], {}

    def keep(tensor):
        kept.append(tensor)  # or another tensor would get its address
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.seq_len))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, devices.mixed_precision(cfg):
        model(x, x)
    return sum(n for address, n in sizes.items() if address not in own)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, shape", [
    ("float32", {}), ("bfloat16", {}), ("bfloat16", dict(n_kv_head=2)), ("bfloat16", MOE),
])  # fmt: skip
def test_the_memory_estimate_is_what_autograd_keeps(shape, dtype, monkeypatch):
    """Two layers more need as many bytes more as bench.py says, if dtypes are those of a GPU."""
    attend = model_file.attend  # on a CPU it would use the dtype of q, float32
    as_on_a_gpu = lambda q, k, v, scale: attend(q.to(v.dtype), k.to(v.dtype), v, scale)
    monkeypatch.setattr(model_file, "attend", as_on_a_gpu)
    monkeypatch.setattr("tools.devices.is_hopper", lambda x: True)  # it groups experts
    kept, estimates = [], []
    for n_layer in (1, 3):
        torch.compiler.reset()
        fields = dict(n_layer=n_layer, dtype=dtype, compile=True)
        cfg = train.make_config(**SMALL | shape | fields)
        kept.append(kept_bytes(cfg))
        parts = bench.memory(cfg, GPT(cfg).n_params())
        estimates.append(parts["blocks"] + parts["bfloat16 copies"])
    assert estimates[1] - estimates[0] == pytest.approx(kept[1] - kept[0], rel=0.1)


def test_recomputing_keeps_less_and_changes_nothing():
    results = []
    for recompute in (False, True):
        model = train.build(train.make_config(**SMALL | MOE, recompute=recompute)).model
        x = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
        loss, routing = model(x, x)
        (loss + routing.aux_loss.sum()).backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    cfg, again = (train.make_config(**SMALL, recompute=r) for r in (False, True))
    assert kept_bytes(cfg) > 3 * kept_bytes(again)
    assert bench.memory(cfg, 0)["blocks"] > 1.5 * bench.memory(again, 0)["blocks"]


def test_recomputing_keeps_no_copies_of_weights():
    kept, copies = [], []
    for n_ffn in (64, 512):
        fields = dict(n_ffn=n_ffn, recompute=True, dtype="bfloat16")
        cfg = train.make_config(**SMALL | fields)
        kept.append(kept_bytes(cfg))
        copies.append(bench.memory(cfg, GPT(cfg).n_params())["bfloat16 copies"])
    assert kept[0] == kept[1]
    assert copies[1] == 2 * GPT(cfg).n_params() / cfg.n_layer  # of a block


@pytest.mark.parametrize("mixed", [False, True])
# the model; block, loss
@pytest.mark.parametrize("device, parts", [("cpu", 1), ("cuda", 2)])
def test_every_shape_is_one_static_program_per_part(
    device, parts, mixed, corpus, monkeypatch
):
    """A sweep trains more shapes than torch would compile. No program has a break."""
    programs = []

    def count(graph, inputs, **_):
        programs.append(
            all(isinstance(n, int) for x in inputs for n in getattr(x, "shape", [x]))
        )
        return graph

    torch.compiler.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", count)
    torch._dynamo.config.recompile_limit = 2
    monkeypatch.setattr(GPT, "to", lambda self, *_: self)  # stay on the CPU
    tiny = SMALL | dict(
        n_embd=32, seq_len=16, device=device, compile=True, dtype="float32"
    )
    for i in range(1, 5):
        cfg = train.make_config(**tiny | dict(batch_size=i, n_kv_head=2 + i % 2 * 2))
        state = train.build(cfg)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss, _ = state.model(*torch.zeros(2, i, 16, dtype=torch.long))
            loss.backward()
        train.validation_losses(cfg, state, corpus, 16 * 7)
        assert programs == [True] * parts * i


def test_processes_exchange_gradients_without_more_programs(tmp_path, monkeypatch):
    """By default torch splits a compiled block wherever a buffer of gradients is full."""
    programs = []

    def count(graph, inputs, **_):
        programs.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", count)
    monkeypatch.setattr(GPT, "to", lambda self, *_: self)  # stay on the CPU
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1
    )
    cfg = train.make_config(**SMALL | dict(device="cuda", compile=True, dtype="float32"))
    try:
        model = train.DistributedDataParallel(train.build(cfg).model, bucket_cap_mb=0.001)
        # Without a backward pass: gloo, destroyed just after it has exchanged gradients, may
        # wait for ever for one of its threads.
        model(*torch.zeros(2, 2, 16, dtype=torch.long))
    finally:
        dist.destroy_process_group()
    assert len(programs) == 2  # of a block, and of the loss


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        reads = ("_local_scalar_dense", "nonzero", "masked_select", "unique")
        assert not any(name in str(op) for name in reads), op
        return op(*args, **(kwargs or {}))


def test_nothing_in_a_step_reads_a_value(corpus):
    """Reading one would make a GPU wait: `item` and friends are for lines of the log."""
    cfg = devices.resolve_device(train.make_config(**SMALL, warmup_tokens=0))
    steps = train.training_steps(cfg, train.build(cfg), corpus)
    next(steps)  # whatever happens once, happens here
    with NoReads():
        next(steps)
        with pytest.raises(AssertionError):
            torch.ones(()).item()


def test_dry_run_counts(capsys):
    assert bench.main(["--preset=1B", "--dry_run"]) == 0
    out, cfg = capsys.readouterr().out, train.make_config(preset="1B")
    assert "238,418 steps of 4,194,304" in out and "256 x 4 sequences" in out
    with torch.device("meta"):
        flops = GPT(cfg).flops_per_token() * 238_418 * 4_194_304
    assert f"{flops:.3g}" in out
    assert f"{flops / (0.44 * 989e12 * 3600):,.1f} hours on H100" in out
    on_gpu = dataclasses.replace(cfg, dtype="bfloat16")
    parts = bench.memory(on_gpu, 1_208_083_968)
    assert f"{sum(parts.values()) / 2**30:.3g} GiB per GPU in bfloat16, compiled\n" in out
    assert parts["AdamW"] == 8 * 1_208_083_968
    with pytest.raises(ValueError, match="multiple of 3"):
        bench.dry_run(cfg, world=3)


def test_benchmark_and_profile_leave_no_run(corpus_path, tmp_path, capsys):
    argv = [f"--{k}={v}" for k, v in (SMALL | dict(data=corpus_path)).items()]
    assert bench.main(argv) == 0
    assert "tokens/s" in capsys.readouterr().out and not list(tmp_path.iterdir())
    peaks = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": None,
    }
    assert {
        card: devices.PEAK_FLOPS.get(card) for card in peaks
    } == peaks  # no card has another's


def test_no_speed_is_printed_of_a_model_that_did_not_learn(corpus_path, capsys):
    argv = [f"--{k}={v}" for k, v in (SMALL | dict(data=corpus_path)).items()]
    diverging = [*argv, "--schedule=constant", "--warmup_tokens=0", "--lr=1e4"]
    assert "did not learn: its loss went from" in one_line(bench.main, diverging, capsys)
    for first, last in ((5.0, 5.0), (5.0, math.nan), (math.nan, 5.0), (math.inf, 5.0)):
        with pytest.raises(flags.UserError):
            bench.check_learned("the model", first, last)


def test_a_model_is_refused_if_its_training_state_exceeds_the_memory(monkeypatch, capsys):
    cfg = train.make_config(device="cpu")
    monkeypatch.setattr(
        devices.os, "sysconf", {"SC_PHYS_PAGES": 16, "SC_PAGE_SIZE": 1000}.get
    )
    devices.check_memory(cfg, 1000)
    with pytest.raises(ValueError, match="--n_embd 128"):
        devices.check_memory(cfg, 1001)
    for program in (train, bench):
        assert "choose a smaller model" in one_line(
            program.main, ["--device=cpu"], capsys
        )
    monkeypatch.setattr(
        devices.os, "sysconf", {"SC_PHYS_PAGES": 598_912, "SC_PAGE_SIZE": 16}.get
    )
    devices.check_memory(cfg, GPT(cfg).n_params())  # the default model just fits
