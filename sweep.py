"""Sweeps: the paper's experiments as grids of training runs, at the size of your machine.

    python sweep.py wsd --scale quick               the paper's Table 2, small: the best rate over T and batch size
    python sweep.py wsd --scale laptop --dry_run    what a larger one would cost: runs, tokens, hours
    python sweep.py beyond --scale quick            the best rate at 4 times the longest T, to try the law on
    python sweep.py power --scale quick             the paper's Table 3: a and b of the Power schedule
    python sweep.py transfer --scale quick          the best rate at several widths, with and without muP
    python sweep.py compare --scale quick           cosine, WSD and Power, each tuned once, against a search of every cell
    python sweep.py wsd --shard 1/2                 half of the columns; another machine takes 2/2
    python sweep.py wsd --n_embd 32                 one of the widths
    python fit.py runs/wsd-quick                    the law and the figures

Ctrl-C stops, the same line goes on. Flags of train.py may follow: --warmup_tokens, --data, ...

A WSD or Power run does not know its length until its decay begins. So for each shape, batch size,
learning rate and seed one *trunk* is trained, and for every budget T a *branch* leaves it and
decays. Each is, bit by bit, the run that train.py would make of it; together they take about half
the tokens. A cosine has no trunk in common with a longer one: each is trained from its start.

Read `train_trunk`, then `search`, the rule that says which learning rates are tried.
"""

import argparse
import contextlib
import copy
import dataclasses
import difflib
import functools
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import train
from train import TrainConfig, make_config

# ---------------------------------------------------------------------------------------------
# A trunk and its branches


def advance(cfg: TrainConfig, model, optimizer, average, corpus, tokens: int, until: int, must_stop=lambda: False) -> int:
    """Train from token position `tokens` on, in whole batches, to no further than `until`; -> the position reached."""
    schedule = train.make_schedule(cfg)
    while tokens + cfg.batch_tokens <= until and not must_stop():
        loss, *_ = train.optimizer_step(cfg, model, optimizer, corpus, tokens, schedule(tokens + cfg.batch_tokens / 2))
        before, tokens = tokens, tokens + cfg.batch_tokens
        if average:
            train.update_average(average, model, before, tokens)
        if tokens // cfg.log_every > before // cfg.log_every and not math.isfinite(loss):
            break  # it diverged, as train.py would notice here
    return tokens


def train_trunk(runs: list[TrainConfig], corpus, checkpoint: Path, must_stop=lambda: False, look_at: list[int] = []) -> Iterator[dict]:
    """Train runs that differ only in total_tokens, shortest first; yield the record of each.

    The trunk is saved before every branch, and where must_stop() ends it. The next call goes on from
    there, be it to finish these runs or to reach a longer one. At the token counts in look_at the
    trunk is evaluated as it is; the record then has a val_loss_at_TOKENS.
    """
    model, optimizer = train.build(runs[-1])
    average = train.start_average(runs[-1], model)
    tokens, looks, provenance = 0, {}, train.describe_origin(runs[-1], corpus) | {"parent": None}
    with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or a damaged one
        saved = train.read_checkpoint(checkpoint)
        differ = {name for name, value in vars(runs[0]).items() if saved["config"][name] != value} - {"total_tokens", "decay_tokens", "device"}
        too_far = saved["tokens"] > runs[0].total_tokens - runs[0].decay_tokens
        if not differ and not too_far and saved["fingerprint"] == corpus.meta["fingerprint"]:
            tokens, looks = train.restore(saved, model, optimizer, average)["tokens"], saved["looks"]

    for cfg in runs:
        began, start = time.perf_counter(), tokens
        for T in look_at:
            tokens = advance(cfg, model, optimizer, average, corpus, tokens, T, must_stop)
            if f"val_loss_at_{T}" not in looks and not must_stop():
                looks[f"val_loss_at_{T}"] = train.evaluate(cfg, model, corpus, tokens)[1]["val_loss"]
        tokens = advance(cfg, model, optimizer, average, corpus, tokens, cfg.total_tokens - cfg.decay_tokens, must_stop)
        train.save_checkpoint(checkpoint, cfg, corpus, model, optimizer, average, train.FRESH | {"tokens": tokens, "looks": looks})
        trunk = copy.deepcopy((model.state_dict(), optimizer.state_dict(), average and average.state_dict()))
        end = advance(cfg, model, optimizer, average, corpus, tokens, cfg.total_tokens, must_stop)
        if must_stop():
            return
        _, record = train.evaluate(cfg, model, corpus, end, average)
        seconds = time.perf_counter() - began  # what this run took beyond the one before it
        yield record | looks | provenance | {"seconds": round(seconds, 1), "tokens_per_second": round((end - start) / seconds)}
        model.load_state_dict(trunk[0])
        optimizer.load_state_dict(trunk[1])
        if average:
            average.load_state_dict(trunk[2])


# ---------------------------------------------------------------------------------------------
# Which learning rates to try. A rule is a generator: it yields the trunks that it wants next, as
# {setting: longest budget}, and is sent {(setting, T): loss} for all runs of these trunks. It must
# depend on nothing else: then a sweep that is stopped, or dealt out to machines, ends the same.

Rule = Generator[dict, dict, None]


def rate(j: int) -> float:
    """Learning rates are numbered, in steps of sqrt(2) from 1e-4: 2, 4, 6, ... are the paper's 0.0002, 0.0004, 0.0008, ..."""
    return float(f"{1e-4 * 2 ** (j / 2):.4g}")


def search(guess: Callable[[int], float], budgets: list[int]) -> Rule:
    """The rule for the best learning rate of a column (a shape, batch size and seed). For each budget T by itself:

    1. Try three rates a factor of 2 apart, the middle one next to guess(T).
    2. While the best rate is the lowest or the highest tried, try the next one, a factor of 2 beyond.
    3. Try what is missing of the three rates on each side of the best, in steps of sqrt(2). If that
       finds a better one, go on from there with 2, until nothing is missing.

    So the best rate ends with three worse ones on each side. A run that diverged is worse than any
    other. A trunk passes the shorter budgets, and is evaluated there too: these losses count.
    """
    loss: dict = {}
    middle = {T: 2 * round(math.log2(guess(T) / 1e-4)) for T in budgets}
    wanted = {(middle[T] + step, T) for T in budgets for step in (-2, 0, 2)}
    while wanted:
        loss |= yield {j: max(T for k, T in wanted if k == j) for j, _ in sorted(wanted)}
        wanted = set()
        for T in budgets:
            tried = sorted(j for j, t in loss if t == T)
            best = min(tried, key=lambda j: loss[j, T])
            steps = (-2,) if best == tried[0] else (2,) if best == tried[-1] else (-3, -2, -1, 1, 2, 3)
            wanted |= {(best + step, T) for step in steps if 1e-6 < rate(best + step) < 2} - loss.keys()


def table(settings: list, budgets: list[int]) -> Rule:
    """All of them, for all budgets: nothing depends on the losses."""
    yield dict.fromkeys(settings, budgets[-1])


# ---------------------------------------------------------------------------------------------
# The experiments


@dataclass(eq=False)
class Column:
    """Runs of one shape, batch size, seed and schedule, over budgets and the settings that a rule wants.

    What is known of a run is asked of `loss_of`: config -> loss, None where there is none yet.
    """

    fields: dict  # of all its runs
    budgets: list[int]  # T, short to long
    knobs: Callable[..., dict]  # setting -> the fields that it stands for
    rule: Callable[[Callable], Rule]  # of loss_of, for rules that wait for other columns
    made_up: Callable[[TrainConfig], float] = lambda cfg: 0.0  # a loss to plan with
    look_at: tuple[int, ...] = ()  # token counts at which its longest run is looked at on its way

    @functools.cache
    def runs(self, setting, longest: int) -> list[TrainConfig]:
        return [make_config(**self.fields | self.knobs(setting), total_tokens=T) for T in self.budgets if T <= longest]

    @functools.cached_property
    def flops_per_token(self) -> float:
        cfg = make_config(**self.fields, total_tokens=self.budgets[-1])
        return flops_per_token(train.GPTConfig(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(train.GPTConfig)}))


@functools.cache  # a shape is that of many columns
def flops_per_token(shape: train.GPTConfig) -> float:
    with torch.device("meta"):  # no weights, only their shapes
        return train.GPT(shape).flops_per_token()


def by_rate(j: int) -> dict:
    return {"lr": rate(j)}


def wsd_column(grid: dict, fields: dict) -> Column:
    """The best learning rate of WSD: searched, or found in the paper's table of rates."""
    budgets = grid["budgets"]
    if "rates" in grid:
        return Column(fields, budgets, by_rate, lambda _: table(grid["rates"], budgets))
    batch_tokens = make_config(**fields, total_tokens=budgets[-1]).batch_tokens
    guess = lambda T: grid["guess"] * (batch_tokens / 1024) ** 0.5 * (T / budgets[0]) ** -0.2  # a good guess only saves runs
    return Column(fields, budgets, by_rate, lambda _: search(guess, budgets), lambda cfg: abs(math.log(cfg.lr / guess(cfg.total_tokens))))


def power_column(grid: dict, fields: dict) -> Column:
    """Power's loss against a, with b at the centre, and against b, with a at the centre (--power_a, --power_b)."""
    centre = make_config(**fields, total_tokens=grid["budgets"][-1])
    settings = [(float(f"{centre.power_a * factor:.4g}"), centre.power_b) for factor in grid["a"]]
    settings += [(centre.power_a, round(centre.power_b + step, 4)) for step in grid["b"]]
    return Column(fields, grid["budgets"], lambda setting: dict(zip(("power_a", "power_b"), setting)), lambda _: table(settings, grid["budgets"]))


TUNING_SEEDS = (100, 101, 102)  # no seed of a comparison


def tuned(columns: list[Column], loss_of) -> object:
    """The setting with the lowest mean loss over columns that differ in their seeds alone; None while a run is missing."""
    losses = [{setting: loss_of(runs[-1]) for setting, runs in replay(column, loss_of).items()} for column in columns]
    if any(None in some.values() for some in losses):
        return None
    return min(losses[0], key=lambda setting: sum(some[setting] for some in losses))


def best_again(column: Column, loss_of) -> Rule:
    """The rates that were best in another seed's column, once all of its runs are there; each up to the longest such budget."""
    losses = {(j, cfg.total_tokens): loss_of(cfg) for j, runs in replay(column, loss_of).items() for cfg in runs}
    if None not in losses.values():
        best = {T: min((j for j, t in losses if t == T), key=lambda j: losses[j, T]) for T in column.budgets}
        yield {j: max(T for T in best if best[T] == j) for j in best.values()}


def compare_columns(grid: dict, fields: Callable[..., dict]) -> list[Column]:
    """Cosine, WSD and Power, each tuned once and then left alone, and the floor: WSD with the best rate of every cell.

    Tuning: in one cell, with seeds of its own, the same number of trials for each; of the rate for
    cosine and WSD, of a for Power. With 2^d times the batch of that cell, cosine and WSD are trained
    at the tuned rate and as common practice scales it, ∝ sqrt(batch) and ∝ batch; Power scales
    itself, ∝ batch, and is also trained ∝ sqrt(batch). "ours" is Power with the b and q of a law that
    was measured at this scale, in place of the paper's. Both are also trained without a decay, their
    weights averaged. The floor is searched with seed 0, and the rates that were best then are trained
    with the other seeds.
    """
    budgets, (shape, batch_size, T) = grid["budgets"], grid["tune"]
    by_a = lambda j: {"power_a": float(f"{2 ** (j / 2):.4g}")}
    knobs = {"cosine": by_rate, "wsd": by_rate, "power": by_a, "ours": lambda j: by_a(j) | {"power_b": grid["ours"][0]}}
    no_decay = dict(average=True, decay_tokens=0)

    def trial(kind, seed):
        schedule = "power" if kind == "ours" else kind
        return Column(fields(schedule, shape, batch_size, seed), [T], knobs[kind], lambda _: table(grid["trials"][kind], [T]))

    tuning = {kind: [trial(kind, seed) for seed in TUNING_SEEDS] for kind in grid["trials"]}

    def left_alone(kind, row, steps, **more):
        """The tuned setting, moved by some steps of sqrt(2)."""

        def rule(loss_of):
            j = tuned(tuning[kind], loss_of)
            if j is not None:
                yield {j + step: budgets[-1] for step in steps}

        schedule = "power" if kind == "ours" else kind
        return Column(fields(schedule, *row) | more, budgets, knobs[kind], rule, look_at=tuple(budgets[:-1]) if schedule == "cosine" else ())

    columns = sum(tuning.values(), [])
    for shape, batches, seeds in grid["rows"]:
        for batch in batches:
            d = round(math.log2(batch / batch_size))
            floor = wsd_column(grid, fields("wsd", shape, batch, 0))
            for seed in range(seeds):
                row = shape, batch, seed
                columns += [left_alone("wsd", row, {0, d, 2 * d}), left_alone("cosine", row, {0, d, 2 * d})]
                # Power's rate is ∝ batch by itself: steps of a take some of that back
                columns += [left_alone("power", row, {0, -d}), left_alone("power", row, {0}, **no_decay)]
                if "ours" in grid:
                    step = round(2 * d * (grid["ours"][1] - 1))
                    columns += [left_alone("ours", row, {step}), left_alone("ours", row, {step}, **no_decay)]
                columns += [Column(fields("wsd", *row), budgets, by_rate, functools.partial(best_again, floor)) if seed else floor]
    return columns


def width(n: int, head: int) -> dict:
    return dict(n_embd=n, n_head=n // head)


def doublings(first: int, number: int) -> list[int]:
    return [first * 2**k for k in range(number)]


def with_and_without_mup(widths: tuple, head: int, batch_size: int, seeds: int) -> list[tuple]:
    """Rows: each width under muP, and with the rules of muP switched off and attention's usual scale."""
    standard = dict(m_width=1.0, attention_multiplier=head**-0.5)
    return [(width(n, head) | rules | dict(n_ffn=5 * n // 2), [batch_size], seeds) for rules in ({}, standard) for n in widths]


def warmed_up(common: dict, smallest_budget: int) -> dict:
    return common | dict(warmup_tokens=2 * smallest_budget // 5)


# What stands in no row is the preset's. Rows are (shape, batch sizes in sequences, seeds), budgets
# are T in tokens. `guess` is where a search begins, at the smallest T and 1,024 tokens a batch.
# One dtype for all widths, on every machine. The warm-up: in the paper a billion tokens whatever T is,
# half of its smallest one. Here `wsd` has 2.5 % of it (give it --warmup_tokens 32000 to see what that
# does), and where Power is trained it is 40 %: a Power run begins at its ceiling, and with a warm-up of
# a few steps that hurts it for long (results/compare-short).
_laptop = dict(preset="laptop", n_layer=2, warmup_tokens=2_000, eval_tokens=2**16, dtype="float32")
_gpu = dict(preset="laptop", n_layer=8, seq_len=512, base_width=256, warmup_tokens=25_000, eval_tokens=2**19)
_a, _b = [2 ** (k / 2) for k in range(-4, 5)], [k / 50 for k in range(-5, 6) if k]  # factors of a, steps of b
_trials = dict(cosine=range(6, 19), wsd=range(6, 19), power=range(2, 15), ours=range(-4, 9))
_ours = (-0.3, 0.5)  # b and q of results/wsd-laptop-long/law.json, of the same warm-up
GRIDS = {
    "wsd": {
        "quick": dict(common=_laptop, rows=[(width(32, 16), [2, 4, 8], 1), (width(64, 16), [2, 4, 8], 1)], budgets=doublings(40_000, 4), guess=0.01),
        # batch size 1 at width 128 would take as long as all of width 32
        "laptop": dict(common=_laptop, rows=[(width(32, 16), [1, 2, 4, 8], 3), (width(64, 16), [1, 2, 4, 8], 3), (width(128, 16), [2, 4, 8], 3)],
                       budgets=doublings(80_000, 5), guess=0.01),
        "gpu": dict(common=_gpu, rows=[(width(n, 64), [8, 16, 32, 64], 1) for n in (128, 256, 512)], budgets=doublings(10**6, 5), guess=0.01),
        # the paper's Table 2: eight rates for everything
        "paper": dict(common={}, rows=[(dict(preset=name), doublings(16, 6), 1) for name in ("12M", "36M", "121M")], budgets=doublings(2 * 10**9, 8),
                      rates=range(2, 18, 2)),
    },
    # one cell beyond the grid of `wsd`, at 4 times its longest T: does the law hold there? (fit.py --beyond)
    "beyond": {
        "quick": dict(common=_laptop, rows=[(width(64, 16), [4], 1)], budgets=[1_280_000], guess=0.007),
        "laptop": dict(common=_laptop, rows=[(width(64, 16), [4], 1)], budgets=[5_120_000], guess=0.005),
        "gpu": dict(common=_gpu, rows=[(width(256, 64), [32], 1)], budgets=[64 * 10**6], guess=0.005),
        "paper": dict(common={}, rows=[(dict(preset="36M"), [128], 1)], budgets=[1024 * 10**9], rates=range(0, 10, 2)),
    },
    "power": {
        "quick": dict(common=warmed_up(_laptop, 40_000), rows=[(width(32, 16), [2, 8], 1)], budgets=doublings(40_000, 4), a=_a, b=_b),
        "laptop": dict(common=warmed_up(_laptop, 80_000), rows=[(width(64, 16), [2, 4, 8], 2)], budgets=doublings(80_000, 5), a=_a, b=_b),
        "gpu": dict(common=warmed_up(_gpu, 10**6), rows=[(width(256, 64), [16, 32, 64], 1)], budgets=doublings(10**6, 5), a=_a, b=_b),
        # the paper's Table 3: a in [3, 5], b in [-0.6, -0.4]; in which steps it does not say
        "paper": dict(common={}, rows=[(dict(preset="36M-power"), doublings(32, 5), 1)], budgets=doublings(2 * 10**9, 7),
                      a=[0.75, 0.875, 1, 1.125, 1.25], b=[k / 100 for k in range(-9, 12, 2)]),
    },
    "transfer": {
        "quick": dict(common=_laptop, rows=with_and_without_mup((32, 64, 128), 16, 4, 1), budgets=[80_000], guess=0.01),
        "laptop": dict(common=_laptop, rows=with_and_without_mup((32, 64, 128, 256), 16, 4, 3), budgets=[160_000], guess=0.01),
        "gpu": dict(common=_gpu, rows=with_and_without_mup((128, 256, 512, 1024, 2048), 64, 16, 1), budgets=[4 * 10**6], guess=0.01),
        "paper": dict(common=dict(preset="36M"), rows=with_and_without_mup((128, 256, 512, 1024), 64, 128, 1), budgets=[4 * 10**9], guess=0.01),
    },
    # `tune`: the cell in which `trials` are made, in steps of sqrt(2): of the rate from 0.0008 to 0.0512, of a from 2 to 128, and with
    # our b from 0.25 to 16, which are about the same rates
    "compare": {
        "quick": dict(common=warmed_up(_laptop, 20_000), tune=(width(32, 16), 2, 40_000), trials=_trials, ours=_ours, rows=[(width(32, 16), [2, 8], 1), (width(64, 16), [2, 8], 1)],
                      budgets=doublings(20_000, 5), guess=0.01),
        "laptop": dict(common=warmed_up(_laptop, 80_000), tune=(width(32, 16), 2, 80_000), trials=_trials, ours=_ours, budgets=doublings(80_000, 5), guess=0.01,
                       rows=[(width(64, 16), [2, 8], 3), (width(128, 16), [2, 8], 3), (dict(preset="laptop-moe", **width(64, 16), n_ffn=80), [2, 8], 3)]),
        "gpu": dict(common=warmed_up(_gpu, 10**6), tune=(width(128, 64), 8, 10**6), trials=_trials, ours=_ours, budgets=doublings(10**6, 5), guess=0.01,
                    rows=[(width(256, 64), [8, 32], 3), (width(512, 64), [8, 32], 3), (dict(preset="laptop-moe", **width(256, 64), n_ffn=320), [8, 32], 3)]),
        "paper": dict(common=dict(decay_tokens=None), tune=(dict(preset="36M-power"), 128, 4 * 10**9), budgets=doublings(16 * 10**9, 5), guess=0.01,
                      trials=dict(cosine=range(4, 17), wsd=range(4, 17), power=range(-2, 11)), rows=[(dict(preset=name), [128, 512], 3) for name in ("121M", "1B", "1B-moe")]),
    },
}  # fmt: skip


def columns_of(experiment: str, scale: str, typed: dict) -> list[Column]:
    """The columns of an experiment, with the user's fields in all of them. Raises ValueError where they do not fit in."""
    grid = GRIDS[experiment][scale]
    chosen = {"preset", "schedule", "total_tokens", "batch_size", "seed", "data_seed", "out", "past_data", *(name for shape, *_ in grid["rows"] for name in shape)}
    chosen |= {"wsd": {"lr"}, "transfer": {"lr"}, "beyond": {"lr"}, "power": set(), "compare": {"lr", "power_a", "average", "decay_tokens"}}[experiment]
    for name in typed.keys() & chosen:
        raise ValueError(f"--{name} {typed[name]}: the experiment chooses it, leave it out")
    if "decay_data" in typed:
        raise ValueError(f"--decay_data {typed['decay_data']}: a sweep has one corpus or mixture, --data, for all of a run")
    fields = lambda schedule, shape, batch_size, seed: (
        grid["common"] | shape | dict(schedule=schedule, batch_size=batch_size, seed=seed, data_seed=seed) | typed
    )
    if experiment == "compare":
        return compare_columns(grid, fields)
    column, schedule = (power_column, "power") if experiment == "power" else (wsd_column, "wsd")
    return [column(grid, fields(schedule, shape, batch_size, seed)) for shape, batches, seeds in grid["rows"] for batch_size in batches for seed in range(seeds)]


# ---------------------------------------------------------------------------------------------
# What is done, what is missing, what it costs

IDENTITY = ("n_embd", "n_expert", "m_width", "attention_multiplier", "batch_size", "seed", "schedule", "lr", "power_a", "power_b", "average", "total_tokens")


def identity(fields: dict) -> tuple:
    """What tells the runs of an experiment apart; of a record, or of vars(config)."""
    return tuple(fields.get(name, False) for name in IDENTITY)  # records from before there was an average lack it


def trunk_of(cfg: TrainConfig) -> tuple:
    return identity(vars(cfg))[:-1]


def by_trunk(runs: list[TrainConfig]) -> list[tuple[str, list[TrainConfig]]]:
    """Runs of one setting -> [(name of a trunk, the runs on it)]: all on one, but every cosine by itself."""

    def name(cfg):
        *others, T = identity(vars(cfg))
        return "-".join(map(str, others + [T] * (cfg.schedule == "cosine")))

    return [(trunk, list(group)) for trunk, group in itertools.groupby(runs, name)]


def tokens_of(runs: list[TrainConfig]) -> int:
    """Tokens trained for runs on one trunk: the trunk to where the last decay begins, and all decays."""
    return max(cfg.total_tokens - cfg.decay_tokens for cfg in runs) + sum(cfg.decay_tokens for cfg in runs)


# Seconds that a step takes at least, and operations per second beyond that, of one worker: a core
# of an AMD EPYC of 2023, measured; an H200 and a Mac, assumed.
COST = {"cpu": (3e-3, 50e9), "cuda": (15e-3, 250e12), "mps": (15e-3, 2e12)}


def seconds_of(column: Column, runs: list[TrainConfig], device: str) -> float:
    """Expected time of runs of one setting, with their evaluations, a third of training per token."""
    overhead, speed = COST[device.split(":")[0]]
    tokens = sum(tokens_of(trunk) for _, trunk in by_trunk(runs))
    evaluated = sum(cfg.eval_tokens or 0 for cfg in runs) / 3
    return tokens / runs[0].batch_tokens * overhead + (tokens + evaluated) * column.flops_per_token / speed if runs else 0.0


def replay(column: Column, loss_of: Callable[[TrainConfig], float | None]) -> dict:
    """Follow a column's rule as far as losses are known; -> {setting: its runs}. Where some are unknown (None), the rule waits."""
    trunks: dict = {}
    rule = column.rule(loss_of)
    with contextlib.suppress(StopIteration):
        wanted = next(rule)
        while True:
            trunks |= {setting: column.runs(setting, longest) for setting, longest in wanted.items()}
            losses = {(setting, cfg.total_tokens): loss_of(cfg) for setting in wanted for cfg in trunks[setting]}
            if None in losses.values():
                break
            wanted = rule.send(losses)
    return trunks


def a_run_of(column: Column) -> TrainConfig:
    """One of its longest: what all runs of a column have, this one has."""
    setting = next(iter(replay(column, column.made_up)))
    return column.runs(setting, column.budgets[-1])[-1]


def plan(column: Column, loss_of, device: str) -> dict:
    """What a column comes to, guessed where losses are not known yet."""
    trunks = replay(column, lambda cfg: column.made_up(cfg) if loss_of(cfg) is None else loss_of(cfg)).values()
    tokens = sum(tokens_of(trunk) for runs in trunks for _, trunk in by_trunk(runs))
    return {
        "runs": sum(map(len, trunks)), "done": sum(loss_of(cfg) is not None for runs in trunks for cfg in runs),
        "trunks": sum(len(by_trunk(runs)) for runs in trunks), "tokens": tokens,
        "separate": sum(cfg.total_tokens for runs in trunks for cfg in runs), "flops": tokens * column.flops_per_token,
        "seconds": sum(seconds_of(column, runs, device) for runs in trunks),
        "left": sum(seconds_of(column, [cfg for cfg in runs if loss_of(cfg) is None], device) for runs in trunks),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Workers: one process per GPU or CPU core. They train what they are sent and answer with records.


def work(connection, device: str, data: str | None, tokenizer: str) -> None:
    """A worker's life: receive (runs of one setting, where to look at the longest, folder for trunks), send each record, then None; end when sent None, or when the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    if device == "cpu":
        torch.set_num_threads(1)
    corpus = train.data.load_corpus(data, tokenizer)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, or has no more to do
        while job := connection.recv():
            runs, look_at, folder = job
            runs = [train.resolve_device(dataclasses.replace(cfg, device=device)) for cfg in runs]
            for name, trunk in by_trunk(runs):
                if connection.poll():
                    break
                # whatever arrives while we train means: save and stop
                for record in train_trunk(trunk, corpus, folder / f"{name}.pt", connection.poll, look_at if trunk[-1] is runs[-1] else ()):
                    connection.send(record)
            connection.send(None)


def start_worker(device: str, data: str | None, tokenizer: str):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=work, args=(theirs, device, data, tokenizer), daemon=True).start()
    theirs.close()  # or we would not notice that a worker died
    return ours


def sweep(columns: list[Column], losses: dict, folder: Path, trunks: Path, workers: list, device: str, must_stop) -> bool:
    """Train what the columns' rules want and has no record; -> is all of it done (or were we stopped)?

    losses: identity -> loss of every record; grows. Records are written as they come.
    Raises EOFError if a worker dies.
    """
    loss_of = lambda cfg: losses.get(identity(vars(cfg)))
    missing = lambda column: {s: [cfg for cfg in runs if loss_of(cfg) is None] for s, runs in replay(column, loss_of).items()}
    plans = {column: plan(column, loss_of, device) for column in columns}
    total = lambda name: sum(p[name] for p in plans.values())
    running: dict = {}  # worker -> its column and trunk
    stopping = False
    bar = tqdm(initial=total("seconds") - total("left"), total=total("seconds"), bar_format=BAR, mininterval=0.5 if sys.stderr.isatty() else 60)
    with open_records(folder) as file, bar:
        while True:
            if must_stop() and not stopping:
                stopping = True
                for worker in running:
                    worker.send(None)
            idle = [] if stopping else [worker for worker in workers if worker not in running]
            if idle:
                # by trunk: two columns may want the same one
                ready = {trunk_of(runs[0]): (column, runs) for column in columns for runs in missing(column).values() if runs}
                ready = [job for trunk, job in ready.items() if trunk not in [there for _, there in running.values()]]
                ready.sort(key=lambda job: -seconds_of(*job, device))  # long ones first
                for worker, (column, runs) in zip(idle, ready):
                    worker.send((runs, column.look_at if runs[-1].total_tokens == column.budgets[-1] else (), trunks))
                    running[worker] = column, trunk_of(runs[0])
            if not running:
                return not stopping
            for worker in multiprocessing.connection.wait(list(running), timeout=0.5):
                column, record = running[worker][0], worker.recv()
                if record:
                    file.write(json.dumps(record) + "\n")
                    losses[identity(record)] = loss_in(record)
                    plans[column] = plan(column, loss_of, device)
                    bar.total = total("seconds")
                    bar.set_postfix_str(f"{total('done'):,} of about {total('runs'):,} runs", refresh=False)
                    bar.update(total("seconds") - total("left") - bar.n)
                else:
                    del running[worker]
                    if not any(missing(column).values()):  # then nobody goes on with its trunks
                        for name, _ in [trunk for runs in replay(column, loss_of).values() for trunk in by_trunk(runs)]:
                            (trunks / f"{name}.pt").unlink(missing_ok=True)


BAR = "{percentage:3.0f} % |{bar:30}| {elapsed} gone, {remaining} left{postfix}"


# ---------------------------------------------------------------------------------------------
# Records


def loss_in(record: dict) -> float:
    return math.inf if record["diverged"] else record["val_loss"]


def read_records(folder: Path) -> list[dict]:
    """All records under a folder, of all shards. A line that is not whole was being written when the power went."""
    records = []
    for path in sorted(folder.rglob("records.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
    return records


def open_records(folder: Path):
    """records.jsonl, to append whole lines to."""
    path = folder / "records.jsonl"
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
    file = open(path, "a", buffering=1)
    file.write("\n" if torn else "")
    return file


def check_records(records: list[dict], columns: list[Column], fingerprint: str, out: Path) -> None:
    """Raise ValueError if there are records of another experiment, of other flags or of another corpus."""
    configs = [a_run_of(column) for column in columns]
    free = {*IDENTITY, *train.RUNTIME_FLAGS, "decay_tokens", "dtype", "data", "tokenizer", "out", "log_every", "eval_every"}
    same = {name: value for name, value in vars(configs[0]).items() if all(getattr(cfg, name) == value for cfg in configs) and name not in free}
    expected, schedules = {"fingerprint": fingerprint} | same, sorted({cfg.schedule for cfg in configs})
    for record in records:
        if record["schedule"] not in schedules:
            raise ValueError(f"--out {out}: has records with schedule {record['schedule']}, and this sweep has {', '.join(schedules)}; name another folder")
        for name, value in expected.items():
            if record[name] != value:
                raise ValueError(f"--out {out}: has records with {name} {record[name]}, and this sweep has {value}; name another folder")


# ---------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
    """Command line -> (our own arguments, the typed fields of train.py)."""
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("experiment", choices=tuple(GRIDS))
    parser.add_argument("--scale", choices=tuple(GRIDS["wsd"]), default="quick", help="how large (default: quick)")
    parser.add_argument("--workers", type=int, help="processes (default: one per GPU, or per CPU core)")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th column, from the I-th on (default: all)")
    parser.add_argument("--out", type=Path, help="folder of the records (default: runs/EXPERIMENT-SCALE)")
    parser.add_argument("--dry_run", action="store_true", help="say what it costs and stop")
    args, rest = parser.parse_known_args(argv)
    known = ["--scale", "--workers", "--shard", "--out", "--dry_run", *(f"--{f.name}" for f in dataclasses.fields(TrainConfig))]
    for word in rest:
        flag = re.sub("^--no-", "--", word.split("=")[0])
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            parser.error(f"unknown argument {word}" + (f", did you mean {near[0]}?" if near else ", see --help, and that of train.py"))
    typed, _ = train.parse(rest)
    args.out = args.out or Path("runs") / f"{args.experiment}-{args.scale}"
    return args, typed


def prepare(args: argparse.Namespace, typed: dict) -> tuple[list[Column], list[dict], str]:
    """-> (the columns of our shard, all records that are there, device). Raises ValueError or OSError where something does not fit.

    typed: loses what a sweep decides, --device and --n_embd; gets the tokenizer of its --data.
    """
    shard = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", args.shard)
    if not shard or int(shard[1]) > int(shard[2]):
        raise ValueError(f"--shard {args.shard}: must be I/N, with I from 1 to N")
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers {args.workers}: must be at least 1")
    if "data" in typed and "tokenizer" in typed:
        raise ValueError(f"--tokenizer {typed['tokenizer']}: --data {typed['data']} has a tokenizer of its own, leave one of them out")
    device = train.pick_device(typed.pop("device", "auto"))
    only_width = typed.pop("n_embd", None) if args.experiment != "compare" else None  # there, other widths wait for the tuned one's
    columns_of(args.experiment, args.scale, typed)  # raises before a corpus is prepared
    corpus = train.data.load_corpus(typed.get("data"), typed.get("tokenizer", "bytes"))
    if "data" in typed:
        typed |= {"data": train.data.format_mixture(train.data.parse_mixture(typed["data"])), "tokenizer": corpus.meta["tokenizer"]}
    columns = columns_of(args.experiment, args.scale, typed)
    for column, source in itertools.product(columns, corpus.sources.values()):
        train.check_corpus(a_run_of(column), source)
    records = read_records(args.out)
    check_records(records, columns, corpus.meta["fingerprint"], args.out)
    there = sorted({a_run_of(column).n_embd for column in columns})
    if only_width not in (None, *there):
        raise ValueError(f"--n_embd {only_width}: the experiment has the widths {', '.join(map(str, there))}")
    columns = [column for column in columns if only_width in (None, a_run_of(column).n_embd)][int(shard[1]) - 1 :: int(shard[2])]
    if not columns:
        raise ValueError(f"--shard {args.shard}: there are fewer columns than that")
    return columns, records, device


def take(args: argparse.Namespace):
    """-> (the folder that this shard writes to, its lock). Raises OSError where another sweep has it, or it cannot be written."""
    folder = args.out if args.shard == "1/1" else args.out / f"shard-{args.shard.replace('/', '-of-')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder, train.lock(folder)
    except BlockingIOError:
        raise BlockingIOError(f"--out {args.out}: another sweep is writing there") from None
    except OSError as error:
        raise OSError(f"--out {args.out}: cannot be written ({error.strerror})") from None


def say_what_it_takes(args: argparse.Namespace, columns: list[Column], plans: list[dict], devices: list[str]) -> None:
    total = lambda name: sum(p[name] for p in plans)
    budgets = sorted({T for column in columns for T in column.budgets})
    print(f"{args.out}: {args.experiment}, {len(columns)} columns (shape, batch size, seed), T = {', '.join(f'{T:,}' for T in budgets)} tokens")
    print(f"about {total('runs'):,} runs on {total('trunks'):,} trunks, {total('tokens'):.3g} tokens, {total('flops'):.2g} FLOPs")
    print(f"as separate runs: {total('separate'):.3g} tokens, so branches take {total('tokens') / total('separate'):.0%} of that")
    if args.experiment == "compare":
        shares = {name: sum(p["tokens"] for p, c in zip(plans, columns) if c.fields["schedule"] == name) for name in ("wsd", "power", "cosine")}
        print(", ".join(f"{name} {tokens:.3g} tokens" for name, tokens in shares.items()) + "; every cosine is trained from its start")
    workers = f"{len(devices)} {devices[0].split(':')[0]} worker{'s' * (len(devices) > 1)}"
    print(f"about {total('left') / len(devices) / 3600:.2g} hours left on {workers}", flush=True)


def main(argv: list[str] | None = None) -> int:
    args, typed = parse(argv)
    try:
        columns, records, device = prepare(args, typed)
        folder, held = (None, None) if args.dry_run else take(args)
    except (ValueError, OSError) as mistake:
        print(f"sweep.py: {mistake}", file=sys.stderr)
        return 2

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n_devices = {"cpu": cores, "cuda": torch.cuda.device_count()}.get(device, 1)
    devices = [f"cuda:{i % n_devices}" if device == "cuda" else device for i in range(args.workers or n_devices)]
    losses = {identity(record): loss_in(record) for record in records}
    plans = [plan(column, lambda cfg: losses.get(identity(vars(cfg))), device) for column in columns]
    say_what_it_takes(args, columns, plans, devices)
    if args.dry_run:
        return 0

    began = time.perf_counter()
    with train.stop_request(None) as must_stop:
        workers = [start_worker(each, typed.get("data"), typed.get("tokenizer", "bytes")) for each in devices if any(p["left"] for p in plans)]
        try:
            finished = sweep(columns, losses, folder, folder / "trunks", workers, device, must_stop)
        except (EOFError, ConnectionError):
            print("sweep.py: a worker died, out of memory or disk? The same command goes on with what is saved", file=sys.stderr)
            return 2
        finally:
            for worker in workers:
                worker.close()  # they notice, and end; one that still trains saves its trunk first
    held.close()
    if not finished:
        print("stopped and saved; the same command goes on")
        return 3
    if any(plan(column, lambda cfg: losses.get(identity(vars(cfg))), device)["left"] for column in columns):
        print("these runs wait for some of the other shards'; when those are there, the same command goes on")
        return 3
    print(f"finished after {train.clock(time.perf_counter() - began)}: {len(losses):,} records; next: python fit.py {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
