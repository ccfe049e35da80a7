"""The exercises can be solved: their tests pass our solutions."""

import copy
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import mup
import power

FOLDER = Path(power.__file__).parent / "docs/exercises"
BRANCH = """
def branch(run):
    return copy.deepcopy(run)

def trunk_and_branches(schedule, lengths, seed):
    trunk = Run(seed)
    branches = {}
    for T in lengths:
        start = T - round(DECAY * T)
        trunk.train(schedule, start)
        branches[T] = branch(trunk)
        branches[T].train(decay(schedule, start, T), T).measure()
    return branches
"""
MEAN = """
@torch.no_grad()
def update_mean(average, model, steps):
    for mean, weights in zip(average.parameters(), model.parameters()):
        mean += (weights - mean) / steps
"""
SOLUTIONS = {  # file: source of the functions that it lacks
    "1_decay": inspect.getsource(power.decay),
    "2_power_law": inspect.getsource(power.power_law),
    "3_rules": inspect.getsource(mup.rules),
    "4_vertex": inspect.getsource(power.vertex),
    "5_branch": BRANCH,
    "6_average": MEAN,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_solution_passes(name, monkeypatch):
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:16])
    exercise = dict(copy=copy, math=math, np=np, torch=torch)
    exec((FOLDER / f"{name}.py").read_text(encoding="utf-8"), exercise)
    exec(SOLUTIONS[name], exercise)
    tests = [test for key, test in exercise.items() if key.startswith("test_")]
    assert tests
    for test in tests:
        wanted = inspect.signature(test).parameters  # monkeypatch, if anything
        test(*[monkeypatch for _ in wanted])
