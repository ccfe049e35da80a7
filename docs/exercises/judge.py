"""Judges the exercises in their order, and stops at the first fault.

python -m pytest             all exercises
python -m pytest -k decay    one of them
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import average
import mup
import power


def check(holds: bool, message: str) -> None:
    if not holds:
        pytest.fail(message, pytrace=False)


def check_value(found: float, expected: float, what: str) -> None:
    equal = found == pytest.approx(expected, rel=1e-3, abs=1e-9)
    check(equal, f"{what} is {found:.4g}, and should be {expected:.4g}")


@pytest.fixture(autouse=True)
def quick_measures(monkeypatch):
    """We compare runs, not their losses, so 16 held-out sequences are enough."""
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:16])


# -- 1 decay -----------------------------------------------------------------------------


def falling(n):
    """A schedule that would go on falling during the decay."""
    return 8 / n


def test_decay_follows_the_schedule_until_it_starts():
    schedule = power.decay(falling, start=800, T=1000)
    for n, where in ((1, "before the decay"), (500, "before"), (800, "where it starts")):
        check_value(schedule(n), falling(n), f"{where}: the rate at n = {n}")


def test_decay_is_a_straight_line_to_zero():
    """The remaining share of the learning rate after 0, 2, ... 10 tenths of the decay."""
    schedule = power.decay(power.constant(1.0), start=800, T=1000)
    for tenths in (0, 2, 4, 6, 8, 10):
        found = schedule(800 + 20 * tenths)
        share = 1 - tenths / 10
        what = f"after {tenths} tenths of the decay, a learning rate of 1 is now {found}"
        check(abs(found - share) < 1e-9, f"{what}, and should be {share:g}")


def test_decay_lowers_the_last_value_of_the_schedule():
    schedule = power.decay(falling, start=800, T=1000)
    what = "the schedule must hold its last value during the decay: halfway, the rate"
    check_value(schedule(900), falling(800) / 2, what)


def test_decay_ends_at_zero():
    schedule = power.decay(falling, start=800, T=1000)
    check(schedule(1100) == 0, f"beyond T the rate is {schedule(1100)}, and should be 0")


# -- 2 power_law -------------------------------------------------------------------------


def test_power_law_has_its_learning_rate_at_t0():
    for shift in (0, power.T0):
        schedule = power.power_law(0.01, b=-0.3, shift=shift)
        what = f"lr = 0.01, shift = {shift}: the rate at n = T0"
        check_value(schedule(power.T0), 0.01, what)


def test_power_law_has_the_values_of_the_paper():
    """In its figure 1, a = 4, b = -0.51, beta = 1024."""
    lr = 1024 * 4 * power.T0**-0.51
    schedule = power.power_law(lr, b=-0.51, lr_max=0.02)
    what = f"lr = {lr:.2f}, b = -0.51, lr_max = 0.02: the rate at n"
    for n, expected in ((9e11, 0.0032787), (1e12, 0.0031071)):
        check_value(schedule(n), expected, f"{what} = {n:g}")


def test_power_law_stays_below_its_ceiling():
    schedule = power.power_law(0.01, b=-0.3, lr_max=0.02)
    for n in (1, 100):
        check_value(schedule(n), 0.02, f"under the ceiling 0.02: the rate at n = {n}")


def test_power_law_takes_its_shift():
    schedule = power.power_law(0.01, b=-1 / 2, shift=power.T0)
    for n, factor in ((3 * power.T0, 0.5**0.5), (7 * power.T0, 0.5)):
        what = f"lr = 0.01, b = -1/2, shift = T0: the rate at n = {n // power.T0} T0"
        check_value(schedule(n), 0.01 * factor, what)


# -- 3 rules -----------------------------------------------------------------------------

BASE_WIDTH = 64


def rules_at(m_width: float) -> dict:
    return mup.rules(SimpleNamespace(m_width=m_width, init_std=0.1))


def start_and_change(rule, width: int) -> tuple[float, float]:
    """Size of a hidden matrix's outputs, and how far one step of AdamW moves them."""
    torch.manual_seed(0)
    matrix = nn.Linear(width, width, bias=False)
    nn.init.normal_(matrix.weight, std=rule.init_std)
    optimizer = torch.optim.AdamW(matrix.parameters(), lr=0.01 * rule.lr_scale)
    inputs = torch.randn(256, width).sign()
    start = matrix(inputs)
    before = start[0]
    before.sum().backward()
    optimizer.step()
    change = matrix(inputs[0]) - before
    return start.std().item(), change.abs().mean().item()


def test_rules_change_nothing_at_the_base_width():
    table = rules_at(1)
    for kind in ("embedding", "hidden", "branch_out"):
        rule = table[kind]
        check_value(rule.init_std, 0.1, f"m_width = 1, init_std = 0.1: that of {kind}")
        check_value(rule.lr_scale, 1, f"m_width = 1: lr_scale of {kind}")


@pytest.mark.parametrize("kind", ["hidden", "branch_out"])
def test_rules_make_every_width_alike(kind):
    start, change = start_and_change(rules_at(1)[kind], BASE_WIDTH)
    for m in (4, 16):
        wide_start, wide_change = start_and_change(rules_at(m)[kind], m * BASE_WIDTH)
        words = f"times as large as at the base width, so {kind} has the wrong"
        ratio = wide_start / start
        check(0.8 < ratio < 1.25, f"m = {m}: outputs start {ratio:.2g} {words} init_std")
        ratio = wide_change / change
        check(0.8 < ratio < 1.25, f"m = {m}: one step is {ratio:.2g} {words} lr_scale")


def test_rules_leave_embedding_and_gains_as_they_are():
    for m in (0.5, 8):
        table = rules_at(m)
        what = f"the embedding adds up nothing. m = {m}: its"
        check_value(table["embedding"].init_std, 0.1, f"{what} init_std")
        check_value(table["embedding"].lr_scale, 1, f"{what} lr_scale")
        check_value(table["gain"].lr_scale, 1, f"m = {m}: lr_scale of gain")
        check(table["gain"].init_std is None, "gains are 1 already, so init_std is None")


def test_rules_shrink_matrices_only():
    for kind, decay in (("embedding", 1), ("hidden", 1), ("branch_out", 1), ("gain", 0)):
        what = (
            f"AdamW shrinks weights by lr times decay, and lr is scaled: decay of {kind}"
        )
        check_value(rules_at(8)[kind].wd_scale, decay, what)


# -- 4 vertex ----------------------------------------------------------------------------


def valley(bottom: float, rates: list[float], bumps=(0, 0, 0, 0, 0)) -> dict:
    """Losses on a parabola over log2 lr, plus bumps."""
    away = [math.log2(lr / bottom) for lr in rates]
    return {lr: 2 + 0.1 * x**2 + bump for lr, x, bump in zip(rates, away, bumps)}


RATES = [0.002, 0.004, 0.008, 0.016, 0.032]


def test_vertex_finds_the_bottom_between_the_points():
    for bottom in (0.005, 0.008, 0.012):
        found = power.vertex(valley(bottom, RATES))
        check(found > 0, f"your bottom is {found:.4g}. Did you undo the logarithm?")
        check_value(found, bottom, "the losses are a parabola over log2 lr. Your bottom")


def test_vertex_uses_all_points():
    """No parabola can follow these bumps, so they must not move its bottom."""
    bumps = [0.02, -0.08, 0.12, -0.08, 0.02]
    found = power.vertex(valley(0.011, RATES, bumps))
    check_value(found, 0.011, "fit all five points by least squares. Your bottom")


def test_vertex_takes_the_best_try_if_the_parabola_has_no_bottom_among_them():
    cases = {
        "opens downward": [2.30, 2.33, 2.34],
        "has its bottom above the tries": [2.340, 2.320, 2.303],
        "has its bottom below the tries": [2.303, 2.320, 2.340],
    }
    for shape, three in cases.items():
        losses = dict(zip((0.5, 1, 2), three))
        found = power.vertex(losses)
        what = f"the parabola {shape}, so take the best try. Your bottom"
        check_value(found, min(losses, key=losses.get), what)


# -- 5 branch and trunk_and_branches -----------------------------------------------------

LENGTHS = (10_240, 20_480)
SCHEDULE = power.warmup(lambda n: 0.02 - n * 4e-7)


def equal(one: power.Run, other: power.Run) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters())
    return all(torch.equal(p, q) for p, q in pairs)


def test_branch_leaves_its_trunk_alone():
    trunk = power.Run(seed=1).train(SCHEDULE, LENGTHS[0])
    straight = power.Run(seed=1).train(SCHEDULE, LENGTHS[0])
    branch = trunk.branch()
    check(branch is not trunk, "a branch must be a copy, and yours is the trunk")
    branch.train(SCHEDULE, LENGTHS[1])
    check(equal(trunk, straight), "training a branch must not move the trunk's weights")
    check(trunk.tokens == LENGTHS[0], "training a branch must not advance its trunk")
    words = "a branch must not add to the learning rates of its trunk"
    check(len(trunk.rates) == LENGTHS[0] // power.STEP, words)


def test_branch_continues_as_the_trunk_would():
    trunk = power.Run(seed=1).train(SCHEDULE, LENGTHS[0])
    branch = trunk.branch()
    check(
        branch.tokens == trunk.tokens, "a branch should start at the tokens of its trunk"
    )
    moments = branch.optimizer.state
    check(len(moments) > 0, "a branch needs a copy of the optimizer's state, too")
    words = (
        "the optimizer of a branch must hold the weights of the branch. Copy both at once"
    )
    check(next(branch.model.parameters()) in moments, words)
    shared = [
        moment.data_ptr()
        for state in (*moments.values(), *trunk.optimizer.state.values())
        for name, moment in state.items()
        if name != "step"
    ]
    words = "a branch shares AdamW's moments with its trunk, so both change them"
    check(len(shared) == len(set(shared)), words)
    branch.train(SCHEDULE, LENGTHS[1])
    trunk.train(SCHEDULE, LENGTHS[1])
    check(
        equal(trunk, branch),
        "on the same schedule, the branch must stay equal to its trunk",
    )


def start_of(T: int) -> int:
    return T - round(power.DECAY * T)


def test_trunk_and_branches_are_the_separate_runs():
    branches = power.trunk_and_branches(SCHEDULE, LENGTHS, seed=1)
    check(set(branches) == set(LENGTHS), "branches should be a dict, {T: branch}")
    for T in LENGTHS:
        alone = power.Run(seed=1).train(power.decay(SCHEDULE, start_of(T), T), T)
        what = f"T = {T:,}: the branch is not, bit for bit, the separate run"
        words = "Has it the seed? Does it decay over the last round(DECAY * T) tokens?"
        check(equal(branches[T], alone), f"{what}. {words}")


def test_trunk_and_branches_measure_the_ends():
    branches = power.trunk_and_branches(SCHEDULE, LENGTHS, seed=1)
    for T in LENGTHS:
        found = vars(branches[T]).get("loss")
        branches[T].measure()
        words = f"T = {T:,}: measure a branch at its end"
        check(found == branches[T].loss, words)


def test_trunk_and_branches_train_the_trunk_once(monkeypatch):
    step = power.Run.step
    steps = []

    def counted(run, lr):
        steps.append(lr)
        return step(run, lr)

    monkeypatch.setattr(power.Run, "step", counted)
    power.trunk_and_branches(SCHEDULE, LENGTHS, seed=1)
    starts = [start_of(T) // power.STEP for T in LENGTHS]
    ends = [T // power.STEP for T in LENGTHS]
    enough = starts[-1] + sum(ends) - sum(starts)
    words = f"{len(steps)} steps were trained, and {enough} are enough"
    check(len(steps) == enough, f"train the trunk once: {words}")


# -- 6 update_mean -----------------------------------------------------------------------


def test_update_mean_is_the_mean_of_all_steps():
    torch.manual_seed(0)
    models = [power.Block() for _ in range(3)]
    mean = power.Block()  # its first weights must not count
    for steps, model in enumerate(models, start=1):
        before = model.up.weight.clone()
        average.update_mean(mean, model, steps)
        check(torch.equal(model.up.weight, before), "the mean must not move the weights")
        expected = sum(one.up.weight for one in models[:steps]) / steps
        words = f"after {steps} steps, the mean should be that of all of them"
        check(torch.allclose(mean.up.weight, expected, atol=1e-6), words)
