"""Judges the exercises in their order, and stops at the first fault.

python -m pytest             all exercises
python -m pytest -k decay    one of them
"""

import contextlib
import io
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
def quick_looks(monkeypatch):
    """We compare runs, not their losses, so 16 held-out sequences are enough."""
    monkeypatch.setattr(power, "HELD_OUT", power.HELD_OUT[:16])


# -- 1 decay -----------------------------------------------------------------------------


def falling(n):
    """A schedule that would go on falling during the decay."""
    return 8 / n


def test_decay_follows_the_schedule_until_it_starts():
    schedule = power.decay(falling, T=1000, decay_tokens=200)
    for n, where in ((1, "before the decay"), (500, "before"), (800, "where it starts")):
        check_value(schedule(n), falling(n), f"{where}: the rate at n = {n}")


def test_decay_falls_as_in_the_code_of_ibm():
    """The remaining share of the learning rate after 0, 2, ... 10 tenths of the decay."""
    shares = {0: 1, 2: 0.7132, 4: 0.4785, 6: 0.2862, 8: 0.1289, 10: 0}
    schedule = power.decay(power.constant(1.0), T=1000, decay_tokens=200)
    for tenths, share in shares.items():
        found = schedule(800 + 20 * tenths)
        what = f"after {tenths} tenths of the decay, a learning rate of 1 is now {found}"
        check(abs(found - share) < 1e-4, f"{what}, and should be {share}")


def test_decay_lowers_the_last_value_of_the_schedule():
    schedule = power.decay(falling, T=1000, decay_tokens=200)
    what = "the schedule must hold its last value during the decay: halfway, the rate"
    check_value(schedule(900), 0.3775 * falling(800), what)


def test_decay_ends_at_zero():
    schedule = power.decay(falling, T=1000, decay_tokens=200)
    check(schedule(1100) == 0, f"beyond T the rate is {schedule(1100)}, and should be 0")


# -- 2 power_law -------------------------------------------------------------------------

PAPER = dict(a=4, b=-0.51, beta=1024, lr_max=0.02)


def test_power_law_has_the_values_of_the_paper():
    schedule = power.power_law(**PAPER)
    for n, lr in ((9e11, 0.0032787), (1e12, 0.0031071)):
        check_value(
            schedule(n), lr, f"a = 4, b = -0.51, beta = 1024: the rate at n = {n:g}"
        )


def test_power_law_stays_below_its_ceiling():
    schedule = power.power_law(**PAPER)
    for n in (1e6, 1e10):
        check_value(schedule(n), 0.02, f"under the ceiling 0.02: the rate at n = {n:g}")


def test_power_law_starts_at_its_ceiling():
    try:
        first = power.power_law(**PAPER)(0)
    except ZeroDivisionError:
        first = math.inf
    check_value(first, 0.02, "at n = 0 the law is infinite: the rate")


def test_power_law_grows_with_the_batch_size_as_q_says():
    for q, factor in ((1, 4), (0.5, 2), (0, 1)):
        for beta, expected in ((1, 1), (4, factor)):
            lr = power.power_law(a=3, b=-0.51, beta=beta, lr_max=1, q=q)(1e9)
            what = f"a = 3, b = -0.51, q = {q}, beta = {beta}: the rate at n = 1e9"
            check_value(lr, expected * 3 * 1e9**-0.51, what)


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
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found = power.vertex(losses)
        what = f"the parabola {shape}, so take the best try. Your bottom"
        check_value(found, min(losses, key=losses.get), what)
        lines = printed.getvalue().count("\n")
        check(lines == 1, f"the parabola {shape}, and one printed line should say so")


# -- 5 branch and trunk_and_branches -----------------------------------------------------

LENGTHS = (10_240, 20_480)
SCHEDULE = power.warmup(lambda n: 0.02 - n * 4e-7, 2_048)


def equal(one: power.Run, other: power.Run) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters())
    return all(torch.equal(p, q) for p, q in pairs)


def test_branch_leaves_its_trunk_alone():
    trunk = power.Run(batch_size=8).train(SCHEDULE, LENGTHS[0])
    straight = power.Run(batch_size=8).train(SCHEDULE, LENGTHS[0])
    branch = trunk.branch()
    check(branch is not trunk, "a branch must be a copy, and yours is the trunk")
    branch.train(SCHEDULE, LENGTHS[1])
    check(equal(trunk, straight), "training a branch must not move the trunk's weights")
    check(trunk.tokens == LENGTHS[0], "training a branch must not advance its trunk")
    check(len(trunk.curve) == 0, "a branch must not add to the curve of its trunk")


def test_branch_continues_as_the_trunk_would():
    trunk = power.Run(batch_size=8).train(SCHEDULE, LENGTHS[0])
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


def test_trunk_and_branches_are_the_separate_runs():
    _, branches = power.trunk_and_branches(SCHEDULE, 8, LENGTHS)
    check(set(branches) == set(LENGTHS), "branches should be a dict, {T: branch}")
    for T in LENGTHS:
        decayed = power.decay(SCHEDULE, T, round(power.DECAY * T))
        alone = power.Run(8).train(decayed, T)
        what = f"T = {T:,}: the branch is not, bit for bit, the separate run"
        words = "Does it decay over the last round(DECAY * T) tokens?"
        check(equal(branches[T], alone), f"{what}. {words}")
        ends = [tokens for tokens, _ in branches[T].curve]
        words = "its curve should end with a look at its last token"
        check(ends[-1:] == [alone.tokens], f"T = {T:,}: {words}")


def test_trunk_and_branches_train_the_trunk_once(monkeypatch):
    step = power.Run.step
    lengths = []

    def counted(run, lr):
        lengths.append(run.batch_size * power.SEQ_LEN)
        return step(run, lr)

    monkeypatch.setattr(power.Run, "step", counted)
    trunk, branches = power.trunk_and_branches(SCHEDULE, 8, LENGTHS)
    step_tokens = 8 * power.SEQ_LEN
    expected = trunk.tokens
    for T, branch in branches.items():
        begins = (T - round(power.DECAY * T)) // step_tokens * step_tokens
        expected += branch.tokens - begins
    words = f"{sum(lengths):,} tokens were trained, and {expected:,} are enough"
    check(sum(lengths) == expected, f"train the trunk once: {words}")


# -- 6 update_mean -----------------------------------------------------------------------


def test_update_mean_is_the_mean_of_all_steps():
    torch.manual_seed(0)
    models = [power.MLP() for _ in range(3)]
    mean = power.MLP()  # its first weights must not count
    for steps, model in enumerate(models, start=1):
        before = model.up.weight.clone()
        average.update_mean(mean, model, steps)
        check(torch.equal(model.up.weight, before), "the mean must not move the weights")
        expected = sum(one.up.weight for one in models[:steps]) / steps
        words = f"after {steps} steps, the mean should be that of all of them"
        check(torch.allclose(mean.up.weight, expected, atol=1e-6), words)
