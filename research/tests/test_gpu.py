"""What one H100 showed (gpu.jsonl), beside the estimates of bench.py and the pages."""

import json
from pathlib import Path

import pytest

import bench
import train
from model import empty_model

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "research/gpu.jsonl").read_text(encoding="utf-8").splitlines()
STEPS = [row for row in map(json.loads, LINES) if row["kind"] == "step"]


def config_of(row: dict) -> train.TrainConfig:
    names = ("preset", "micro_batch_size", "recompute")
    return train.make_config(**{name: row[name] for name in names}, dtype="bfloat16")


def estimated_gib(cfg: train.TrainConfig) -> float:
    return sum(bench.memory(cfg, empty_model(cfg).n_params()).values()) / 2**30


@pytest.mark.parametrize("row", STEPS, ids=[row["command"][24:] for row in STEPS])
def test_the_estimates_of_the_dry_run_hold(row):
    """Memory within a tenth of the peak, and hours within a sixth."""
    cfg = config_of(row)
    assert estimated_gib(cfg) == pytest.approx(row["peak_gib"], rel=0.1)
    tokens_per_second = bench.expected_speed(cfg) / empty_model(cfg).flops_per_token()
    assert tokens_per_second == pytest.approx(row["tokens_per_second"], rel=1 / 6)


def test_the_eight_rows_are_there():
    assert len(STEPS) == 8 and {row["device"] for row in STEPS} == {
        "NVIDIA H100 80GB HBM3"
    }
