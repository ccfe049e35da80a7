"""The tests of the exercises pass solutions, and fail plausible errors."""

import copy
import importlib.util
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
ERRORS = [  # file, what of its solution to replace, and with what
    ("1_decay", "schedule(start)", "schedule(n)"),
    ("1_decay", "max(0, ", "max(-9, "),
    ("1_decay", "(T - start))", "(T - start)) ** 2"),
    ("2_power_law", "min(lr_max, ", "("),
    ("2_power_law", "** b", "** (b / 2)"),
    ("2_power_law", "lr * (", "2 * lr * ("),
    ("3_rules", "1.0 / m", "1.0 / math.sqrt(m)"),
    ("3_rules", "std / math.sqrt(m)", "std / m"),
    ("3_rules", "hidden_std, 1.0 / m,  1.0", "hidden_std, 1.0 / m, m"),
    ("4_vertex", "return", "return min(losses, key=losses.get)  #"),
    ("4_vertex", "2**bottom", "bottom"),
    ("4_vertex", "c2 > 0", "True"),
    ("4_vertex", "x.min() <= bottom <= x.max()", "True"),
    ("5_branch", "copy.deepcopy(run)", "copy.copy(run)"),
    ("5_branch", ", T).measure()", ", T)"),
    ("5_branch", "Run(seed)", "Run(0)"),
    ("5_branch", "branch(trunk)", "Run(seed).train(schedule, start)"),
    ("6_average", "(weights - mean) / steps", "0.1 * (weights - mean)"),
]


@pytest.fixture(autouse=True)
def quick_measures(monkeypatch):
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:16])


def run_tests(name: str, solution: str) -> None:
    """Run the tests of an exercise with these functions in their place."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    exercise = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exercise)
    vars(exercise).update(copy=copy, math=math, np=np, torch=torch)
    exec(solution, vars(exercise))
    for name, test in list(vars(exercise).items()):
        if not name.startswith("test_"):
            continue
        if "monkeypatch" in inspect.signature(test).parameters:
            with pytest.MonkeyPatch.context() as patch:
                test(patch)
        else:
            test()


def test_every_exercise_has_a_solution():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SOLUTIONS)


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_solution_passes(name):
    run_tests(name, SOLUTIONS[name])


@pytest.mark.parametrize("name, old, new", ERRORS)
def test_a_plausible_error_fails(name, old, new):
    assert old in SOLUTIONS[name]
    with pytest.raises((AssertionError, AttributeError)):
        run_tests(name, SOLUTIONS[name].replace(old, new))
