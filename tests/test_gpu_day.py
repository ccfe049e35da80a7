"""The measurements for a GPU, in small."""

import json
import re

import pytest

import exact
import gpu_day
from tools import bench

NANOGPT = """
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.n_embd)
        print("number of parameters:", self.embed.weight.numel())

    def forward(self, idx, targets=None):
        logits = F.linear(self.embed(idx), self.embed.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
"""
ORIGIN = {"step", "command", "device", "torch", "python", "commit"}


@pytest.fixture
def small(corpus_path, monkeypatch) -> str:
    """The flags of --tiny, on a small corpus."""
    flags = f"{gpu_day.SMALL} --data {corpus_path}"
    monkeypatch.setattr(gpu_day, "SMALL", flags)
    return flags


def printed(step: str, flags: str, capfd) -> str:
    """What the command of a step prints in this process."""
    _, program, *words = f"{gpu_day.STEPS[step]} {flags}".split()
    main = {"tools.bench": bench.main, "research.exact": exact.main}[program]
    assert main(words) == 0
    return capfd.readouterr().out


def test_a_line_has_what_reproduces_it(small, monkeypatch, tmp_path, capfd):
    monkeypatch.delenv("NANOGPT", raising=False)
    assert gpu_day.main(["nanogpt", "--tiny"]) == 0
    skipped = json.loads(capfd.readouterr().out)
    assert skipped.keys() == ORIGIN | {"skipped"}

    (tmp_path / "model.py").write_text(NANOGPT)
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    gpu_day.main(["nanogpt", "--tiny"])
    line = json.loads(capfd.readouterr().out)
    assert line.keys() > ORIGIN | {"step_ms", "tokens_per_second"}
    first, last = line["losses"]
    assert last < first  # it learns


def test_a_failed_step_says_so(monkeypatch, capfd):
    monkeypatch.setitem(gpu_day.STEPS, "moe", "-c 1/0")
    gpu_day.main(["moe"])
    assert json.loads(capfd.readouterr().out).keys() == ORIGIN | {"error"}


@pytest.mark.parametrize("step", ["exact", "exact-moe"])
def test_runs_that_continue_are_exact(step, small, capfd):
    found = json.loads(printed(step, small, capfd))
    assert found == dict(resumed=0.0, branch=0.0, sweep=0.0)


def test_an_moe_layer_beside_that_of_transformers(small, capfd):
    ours, theirs = json.loads(printed("layer", small, capfd))["layer_ms"].values()
    assert ours > 0 and theirs > 0


def test_every_operation_has_a_kind(small, capfd):
    found = json.loads(printed("1B-moe", small, capfd))["kernels_ms"]
    assert found.keys() == {"products", "attention", "sorting", "optimizer", "rest"}
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("cutlass::device_kernel<GemmUniversal<GroupProblemShape<", "grouped products"),
        ("triton_poi_fused__grouped_mm_silu_sort_mul_3", "compiler"),
        ("at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<", "optimizer"),
        ("at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<", "sorting"),
        ("Memcpy HtoD (Pinned -> Device)", "rest"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert bench.kind_of(kernel) == kind


STEPS_OF_BENCH = [step for step, line in gpu_day.STEPS.items() if "tools.bench" in line]


@pytest.mark.parametrize("step", STEPS_OF_BENCH)
def test_large_steps_fit_on_one_gpu(step, capfd):
    out = printed(step, "--dry_run", capfd)
    assert float(re.search(r"memory: ([\d.]+) GiB", out)[1]) < 78
