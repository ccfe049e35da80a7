"""Exercise 6, an average of the weights in place of a decay: write `update_mean`.

How far must a mean of steps - 1 tensors move towards one more? (p += q changes a parameter
p in place.)
"""

import torch

from power import DECAY, STEP, T0, Run, constant, decay, warmup


@torch.no_grad()
def update_mean(average, model, steps):
    """Add the weights of a model to their mean over steps - 1 steps, in place."""
    raise NotImplementedError("write update_mean")


def test_it_is_the_mean_of_all_steps():
    models = [torch.nn.Linear(3, 3) for _ in range(3)]
    average = torch.nn.Linear(3, 3)  # whose first weights must not count
    for steps in (1, 2, 3):
        update_mean(average, models[steps - 1], steps)
        expected = sum(model.weight for model in models[:steps]) / steps
        assert torch.allclose(average.weight, expected, atol=1e-6)


def test_an_average_ends_below_its_run():
    """Losses of short runs. Add -s to the command to see them."""
    T = 2 * T0
    start = T - round(DECAY * T)
    held = warmup(constant(0.016))
    run = Run(seed=0).train(held, start)
    branch = run.branch().train(decay(held, start, T), T)
    average = run.branch()
    steps = 0
    while run.tokens < T:
        run.train(held, run.tokens + STEP)
        steps += 1
        update_mean(average.model, run.model, steps)
    for one in (run, branch, average):
        one.measure()
    print(f"held {run.loss:.3f}, decay {branch.loss:.3f}, average {average.loss:.3f}")
    assert average.loss < run.loss
