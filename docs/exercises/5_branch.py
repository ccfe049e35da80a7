"""Exercise 5, one trunk for many ends: write `branch` and `trunk_and_branches`.

A Run has a model, an optimizer, tokens, train(schedule, until) and measure(), which sets
its loss. What must a copy have, to train on as the trunk would? What may it share?
"""

import torch

from power import DECAY, STEP, Run, decay, warmup

LENGTHS = (10 * STEP, 20 * STEP)  # tokens


def branch(run):
    """A copy of a run that trains separately from here."""
    raise NotImplementedError("write branch")


def trunk_and_branches(schedule, lengths, seed):
    """Train one trunk, and a branch for each length T. -> {T: branch with its loss}

    A branch decays over the last round(DECAY * T) tokens. The lengths are in order.
    """
    raise NotImplementedError("write trunk_and_branches")


def schedule(n):
    return 0.02 - n * 4e-7


def equal(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters())
    return all(torch.equal(p, q) for p, q in pairs)


def test_a_branch_does_not_move_its_trunk():
    trunk = Run(seed=1).train(schedule, LENGTHS[0])
    branch(trunk).train(schedule, LENGTHS[1])
    assert equal(trunk, Run(seed=1).train(schedule, LENGTHS[0]))
    assert trunk.tokens == LENGTHS[0]


def test_a_branch_continues_as_its_trunk_would():
    """So it has its weights, its place in the text, and the moments of AdamW."""
    trunk = Run(seed=1).train(schedule, LENGTHS[0])
    copied = branch(trunk).train(schedule, LENGTHS[1])
    trunk.train(schedule, LENGTHS[1])
    assert copied.tokens == trunk.tokens
    assert equal(copied, trunk)


def test_branches_are_the_separate_runs_bit_for_bit():
    branches = trunk_and_branches(warmup(schedule), LENGTHS, seed=1)
    for T in LENGTHS:
        start = T - round(DECAY * T)
        alone = Run(seed=1).train(decay(warmup(schedule), start, T), T)
        alone.measure()
        assert equal(branches[T], alone)
        assert branches[T].loss == alone.loss


def test_the_trunk_is_trained_once(monkeypatch):
    step = Run.step
    steps = []

    def counted(run, lr):
        steps.append(lr)
        step(run, lr)

    monkeypatch.setattr(Run, "step", counted)
    trunk_and_branches(warmup(schedule), LENGTHS, seed=1)
    assert len(steps) == 14 + 3 + 6  # the trunk, and the decays
