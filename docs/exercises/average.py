"""Average the weights of a run, in place of a decay."""

import copy

import torch

import power


@torch.no_grad()
def update_mean(average, model, steps):
    """Add the weights of a model to their mean over steps - 1 steps, in place."""
    for mean, weights in zip(average.parameters(), model.parameters()):
        mean += (weights - mean) / steps


def train_and_average(run, schedule, until):
    """Train as run.train(schedule, until) does. -> a model with the mean of the weights

    The mean is of the weights after every step of this call, and not of those before.
    """
    average = copy.deepcopy(run.model)
    steps = 0
    while run.tokens + power.STEP <= until:
        run.train(schedule, run.tokens + power.STEP)
        steps += 1
        update_mean(average, run.model, steps)
    return average
