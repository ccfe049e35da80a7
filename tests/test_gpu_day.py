"""The measurements for a GPU, in small."""

import json
import re

import pytest

import exact
import gpu_day
from tools import bench

ORIGIN = {"step", "command", "device", "torch", "python", "commit"}


def printed(step: str, flags: str, capfd) -> str:
    """What the command of a step prints in this process."""
    _, program, *words = f"{gpu_day.STEPS[step]} {flags}".split()
    main = {"tools.bench": bench.main, "research.exact": exact.main}[program]
    assert main(words) == 0
    return capfd.readouterr().out


def test_a_line_has_what_reproduces_it(monkeypatch, capfd):
    monkeypatch.delenv("NANOGPT", raising=False)
    assert gpu_day.main(["nanogpt", "--tiny"]) == 0
    assert json.loads(capfd.readouterr().out).keys() == ORIGIN | {"skipped"}

    monkeypatch.setitem(gpu_day.STEPS, "moe", """-c print('{"step_ms":1}')""")
    assert gpu_day.main(["moe"]) == 0
    assert json.loads(capfd.readouterr().out).keys() == ORIGIN | {"step_ms"}


def test_a_failed_step_says_so(monkeypatch, capfd):
    monkeypatch.setitem(gpu_day.STEPS, "moe", "-c 1/0")
    gpu_day.main(["moe"])
    assert json.loads(capfd.readouterr().out).keys() == ORIGIN | {"error"}


def test_runs_that_continue_are_exact(corpus_path, capfd):
    flags = f"{gpu_day.SMALL} --total_tokens 2k --warmup_tokens 300 --decay_share 0.25"
    found = json.loads(printed("exact", f"{flags} --data {corpus_path}", capfd))
    assert found == dict(resumed=0.0, branch=0.0, sweep=0.0)


def test_times_of_operations_and_of_a_layer_beside_that_of_transformers(
    corpus_path, capfd
):
    flags = f"{gpu_day.SMALL} --n_expert 4 --n_expert_active 2 --data {corpus_path}"
    found = json.loads(printed("1B-moe", flags, capfd))["kernels_ms"]
    assert found.keys() == {"products", "attention", "sorting", "optimizer", "rest"}
    assert min(found.values()) > 0
    ours, theirs = json.loads(printed("layer", flags, capfd))["layer_ms"].values()
    assert ours > 0 and theirs > 0


KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": "attention",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
    "cutlass::device_kernel<GemmUniversal<GroupProblemShape<": "grouped products",
    "triton_poi_fused__grouped_mm_silu_sort_mul_3": "compiler",
    "at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<": "optimizer",
    "at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<": "sorting",
    "Memcpy HtoD (Pinned -> Device)": "rest",
}


def test_kinds_of_kernels():
    assert {kernel: bench.kind_of(kernel) for kernel in KERNELS} == KERNELS


STEPS_OF_BENCH = [step for step, line in gpu_day.STEPS.items() if "tools.bench" in line]


@pytest.mark.parametrize("step", STEPS_OF_BENCH)
def test_large_steps_fit_on_one_gpu(step, capfd):
    out = printed(step, "--dry_run", capfd)
    assert float(re.search(r"memory: ([\d.]+) GiB", out)[1]) < 78
