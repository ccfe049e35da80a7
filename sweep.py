"""Sweeps: the paper's experiments as grids of training runs, at the size of your machine.

    python sweep.py wsd --scale quick              the best learning rate over T and batch size
    python sweep.py wsd --scale laptop --dry_run   a larger one: how many runs and tokens?
    python sweep.py beyond --scale quick           a search at 4 times the longest T
    python sweep.py power --scale quick            a and b of the Power schedule
    python sweep.py transfer --scale quick         several widths, with and without muP
    python sweep.py compare --scale quick          cosine, WSD and Power, each tuned once
    python sweep.py wsd --widths 32,64 --batches 2,8 --budgets 320k,1.28M --seeds 2
    python sweep.py wsd --sweep weight_decay=0,0.1 --decay_share 0.2    any field; decay 20% of T
    python sweep.py wsd --shard 1/2                half of the series; another machine takes 2/2

Ctrl-C stops, the same command resumes. Flags of train.py may follow. Then: python fit.py FOLDER

A WSD or Power run does not depend on its length T until its decay begins. So we train one *trunk*
for each shape, batch size, learning rate and seed, and at every T a *branch* leaves it and decays.
Each branch is, bit for bit, the run that train.py would make, for about half the tokens in all. A
cosine shares no trunk with a longer one. Read `train_trunk`, then `search`, the rule that chooses
the learning rates. The grids are in tools/grids.py.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tools.threads  # noqa: F401  before torch

import torch
from tqdm import tqdm

import train
from tools.config import add_flags, fail, program_parser
from tools.devices import pick_device, pick_dtype
from tools.grids import EXPERIMENTS, GRIDS, add_sweep_flags, change, check_belongs, check_typed
from tools.records import identity, read_records, settings
from tools.runs import append_to, lock, read_checkpoint, stop_request
from tools.workers import deal, start_worker
from train import FIELDS, PLANNED, READS, TrainConfig, make_config

# -- A trunk and its branches ----------------------------------------------------------------------

POINTS = 200  # of a curve, at most


def advance(cfg: TrainConfig, state, corpus, until: int, curve: list, must_stop) -> None:
    """Train to `until` tokens; stop early if must_stop() or if the loss diverges.

    Append to curve: (tokens, mean training loss since the last point, learning rate).
    """
    losses = []
    for step in train.training_steps(cfg, state, corpus, until):
        losses.append(step.loss)
        passed = lambda every: train.crossed(every, state.tokens, cfg.batch_tokens)
        if passed(math.ceil(cfg.total_tokens / POINTS)):
            mean = torch.stack(losses).mean().item()
            curve.append((state.tokens, mean if math.isfinite(mean) else None, step.lr))
            losses.clear()
        if must_stop() or passed(cfg.log_every) and not math.isfinite(step.loss):
            return  # train.py, too, looks for a diverged loss at every log_every


def train_trunk(
    runs: list[TrainConfig], corpus, trunks: Path, must_stop=lambda: False, look_at=()
) -> Iterator[tuple[dict, list]]:
    """Train runs that share a trunk, shortest first; yield the record and the curve of each.

    The trunk is saved in the folder `trunks` before every branch, and when must_stop() ends it. The
    next call resumes there, to finish these runs or to reach a longer T. At the token counts in
    look_at we evaluate the trunk as it is; the record then has a val_loss_at_TOKENS.
    """
    state, looks, curve = train.build(runs[-1]), {}, []
    origin = train.describe_origin(runs[-1], corpus) | {"parent": None}
    checkpoint = trunks / f"{trunk_of(runs[0])}.pt"
    with contextlib.suppress(FileNotFoundError, ValueError):  # no checkpoint yet, or a damaged one
        saved = read_checkpoint(checkpoint)
        too_far = saved["tokens"] > runs[0].total_tokens - runs[0].decay_tokens
        if not too_far and saved["fingerprint"] == corpus.meta["fingerprint"]:
            train.restore(saved, state)
            looks, curve = saved["looks"], saved["curve"]

    for cfg in runs:
        began, start = time.perf_counter(), state.tokens
        for T in look_at:
            advance(cfg, state, corpus, T, curve, must_stop)
            if f"val_loss_at_{T}" not in looks and not must_stop():
                looks[f"val_loss_at_{T}"] = train.evaluate(cfg, state, corpus)[1]["val_loss"]
        advance(cfg, state, corpus, cfg.total_tokens - cfg.decay_tokens, curve, must_stop)
        train.save_state(checkpoint, cfg, corpus, state, looks=looks, curve=curve)
        branch = curve.copy()
        advance(cfg, state, corpus, cfg.total_tokens, branch, must_stop)
        if must_stop():
            return
        _, record = train.evaluate(cfg, state, corpus)
        seconds = time.perf_counter() - began  # what this run took beyond the one before it
        speed = round((state.tokens - start) / seconds)
        record |= looks | origin | {"seconds": round(seconds, 1), "tokens_per_second": speed}
        yield record, branch[:: max(1, math.ceil(len(branch) / POINTS))]
        train.restore(read_checkpoint(checkpoint), state)  # back to where the branch left


@functools.cache
def trunk_of(cfg: TrainConfig) -> str:
    """Name of the trunk that a run branches off; T is part of it only if planned from the start."""
    end = () if cfg.schedule in PLANNED else ("total_tokens", "decay_tokens")
    same = sorted(identity(vars(cfg), without=end))
    return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def by_trunk(runs: list[TrainConfig]) -> dict[str, list[TrainConfig]]:
    """Group runs by their trunk, each group from short to long."""
    trunks: dict = {}
    for cfg in sorted(runs, key=lambda cfg: cfg.total_tokens):
        trunks.setdefault(trunk_of(cfg), []).append(cfg)
    return trunks


def tokens_of(runs: list[TrainConfig]) -> int:
    """Tokens trained for these runs: every trunk to where its last decay begins, and all decays."""
    stable = lambda trunk: max(cfg.total_tokens - cfg.decay_tokens for cfg in trunk)
    return sum(map(stable, by_trunk(runs).values())) + sum(cfg.decay_tokens for cfg in runs)


# -- Which learning rates to try -------------------------------------------------------------------
# A rule is a pure function of the losses known so far: it returns all runs (setting, T) that it
# wants by now. A sweep that is stopped, or divided among machines, therefore makes the same runs.


def rate(j: int) -> float:
    """Learning rate number j, in steps of sqrt(2) from 1e-4. The paper's eight are 2, 4, ... 16."""
    return float(f"{1e-4 * 2 ** (j / 2):.4g}")


def search(loss: Callable, middle: dict[int, int]) -> set[tuple[int, int]]:
    """Find the best learning rate of a series, for each run length T separately:

    1. Try three learning rates a factor of 2 apart, around a guess, rate(middle[T]).
    2. While the best is the lowest or the highest tried, try the next one, a factor of 2 beyond.
    3. Fill in the three neighbors on each side of the best, a factor of sqrt(2) apart. If one of
       them is better, return to step 2.

    The search ends when the best learning rate has three worse neighbors on each side. A diverged
    run counts as worse than any other. A trunk passes the shorter T, so these are run, too.
    loss(j, T): None if that run is not done yet. Returns all (j, T) wanted by now.
    """
    wanted, more = set(), {(j + step, T) for T, j in middle.items() for step in (-2, 0, 2)}
    while more - wanted:
        wanted |= {(j, shorter) for j, T in more for shorter in middle if shorter <= T}
        losses = {run: loss(*run) for run in wanted}
        if None in losses.values():
            break
        more = set()
        for T in middle:
            tried = sorted(j for j, t in wanted if t == T)
            best = min(tried, key=lambda j: losses[j, T])
            at_edge = {tried[0]: (-2,), tried[-1]: (2,)}
            steps = at_edge.get(best, (-3, -2, -1, 1, 2, 3))
            more |= {(best + step, T) for step in steps if 1e-6 < rate(best + step) < 2}
    return wanted


# -- The experiments -------------------------------------------------------------------------------


@dataclass(eq=False)
class Series:
    """The runs of one shape, batch size, seed and schedule, over run lengths and settings."""

    fields: dict  # of all its runs
    budgets: list[int]  # run lengths T, short to long
    knobs: Callable[..., dict]  # setting -> the fields that it stands for
    least: set[tuple]  # (setting, T) of the runs that it takes at least
    rule: Callable = lambda self, known: self.least  # None: it waits for other series
    chosen: tuple[str, ...] = ("lr", "power_a")  # fields in which its runs may differ from `least`

    @functools.cache
    def config(self, setting, T: int) -> TrainConfig:
        cfg = config_at(self.fields | self.knobs(setting), T)
        auto = {"dtype": pick_dtype(cfg.device, cfg.n_embd, cfg.n_expert)}
        return dataclasses.replace(cfg, **auto if cfg.dtype == "auto" else {})

    @functools.cache
    def run(self, setting, T: int) -> frozenset:
        return identity(vars(self.config(setting, T)))

    def loss(self, known: dict) -> Callable:
        return lambda setting, T: known.get(self.run(setting, T))

    def missing(self, known: dict) -> list[TrainConfig] | None:
        """The runs to train next, given all known losses; None: it waits for other series."""
        runs = self.rule(self, known)
        return runs and [self.config(*run) for run in sorted(runs) if self.run(*run) not in known]


def config_at(fields: dict, T: int) -> TrainConfig:
    """A config for T tokens; a decay_share among the fields is the decay's share of them."""
    fields = fields | {"total_tokens": T}
    share = fields.pop("decay_share", None)
    if share is not None and "decay_tokens" in READS[fields["schedule"]]:
        fields["decay_tokens"] = round(share * T)
    return make_config(**fields)


def by_lr(j: int) -> dict:
    return {"lr": rate(j)}


def wsd_series(grid: dict, fields: dict) -> Series:
    """WSD with the best learning rate of every T."""
    T0, batch_tokens = grid["budgets"][0], config_at(fields, grid["budgets"][-1]).batch_tokens
    guess = lambda T: grid["guess"] * (batch_tokens / 1024) ** 0.5 * (T / T0) ** -0.2
    middle = {T: 2 * round(math.log2(guess(T) / 1e-4)) for T in grid["budgets"]}
    least = {(j + step, T) for T, j in middle.items() for step in range(-3, 4)}
    rule = lambda self, known: search(self.loss(known), middle)
    return Series(fields, grid["budgets"], by_lr, least, rule)


def power_series(grid: dict, fields: dict) -> Series:
    """Power's loss against a, with b at the center, and against b, with a at the center."""
    center = config_at(fields, grid["budgets"][-1])
    pairs = [(float(f"{center.power_a * factor:.4g}"), center.power_b) for factor in grid["a"]]
    pairs += [(center.power_a, round(center.power_b + step, 4)) for step in grid["b"]]
    knobs = lambda pair: dict(zip(("power_a", "power_b"), pair))
    runs = set(itertools.product(pairs, grid["budgets"]))
    return Series(fields, grid["budgets"], knobs, runs, chosen=())


TUNING_SEEDS = (100, 101, 102)  # no seed of a comparison


def tuned(trials: list[Series], known: dict):
    """The setting with the lowest mean loss over seeds; None while a trial is missing."""
    if any(one.missing(known) for one in trials):
        return None
    return min(sorted(trials[0].least), key=lambda run: sum(o.loss(known)(*run) for o in trials))[0]


def best_again(search: Series, fields: dict) -> Series:
    """The best learning rates of a finished search, with another seed, each up to its longest T."""

    def rule(self, known):
        if search.missing(known):
            return None
        runs, loss = sorted(search.rule(search, known)), search.loss(known)
        best = {min((r for r in runs if r[1] == T), key=lambda r: loss(*r)) for T in search.budgets}
        return {(j, shorter) for j, T in best for shorter in search.budgets if shorter <= T}

    return Series(fields, search.budgets, by_lr, {(0, T) for T in search.budgets}, rule)


def compare_series(grid: dict, fields: Callable[..., dict]) -> list[Series]:
    """Cosine, WSD and Power, tuned once in one cell with equally many trials, and the baseline.

    At 2^d times the tuned batch size we train cosine and WSD with the tuned learning rate and as
    common practice scales it, ∝ sqrt(batch) and ∝ batch. Power scales itself ∝ batch; we also train
    it ∝ sqrt(batch). "ours" is Power with b and q of a law measured at this scale instead of the
    paper's. Both are also trained without a decay, averaging their weights. The baseline is WSD
    with the best learning rate of every cell, searched with seed 0 and trained with all seeds.
    """
    budgets, (tuned_shape, tuned_batch, tuned_T) = grid["budgets"], grid["tune"]
    our_b, our_q = grid.get("ours", (None, 1))
    by_a = lambda j: {"power_a": float(f"{2 ** (j / 2):.4g}")}
    knobs = dict(cosine=by_lr, wsd=by_lr, power=by_a, ours=lambda j: by_a(j) | {"power_b": our_b})
    own = lambda kind, *row: fields("power" if kind == "ours" else kind, *row)

    def trial(kind, seed):
        runs = {(j, tuned_T) for j in grid["trials"][kind]}
        return Series(own(kind, tuned_shape, tuned_batch, seed), [tuned_T], knobs[kind], runs)

    def at_tuned(kind, row, steps, more):
        """Runs at the tuned setting, moved by these steps of sqrt(2)."""

        def rule(self, known):
            j = tuned(trials[kind], known)
            return None if j is None else {(j + step, T) for step in steps for T in budgets}

        runs = set(itertools.product(steps, budgets))
        return Series(own(kind, *row) | more, budgets, knobs[kind], runs, rule)

    trials = {kind: [trial(kind, seed) for seed in TUNING_SEEDS] for kind in grid["trials"]}
    series, baseline = sum(trials.values(), []), None
    average = dict(average=True, decay_tokens=0, decay_share=None)
    for shape, batch, seed in rows_of(grid):
        row, d = (shape, batch, seed), round(math.log2(batch / tuned_batch))
        takes_back = {round(2 * d * (our_q - 1))}  # a step of a takes some of Power's ∝ batch back
        scaled = {0, d, 2 * d}  # not at all, ∝ sqrt(batch), ∝ batch
        lines = [("cosine", scaled, {}), ("wsd", scaled, {}), ("power", {0, -d}, {})]
        lines += [("power", {0}, average), ("ours", takes_back, {}), ("ours", takes_back, average)]
        series += [at_tuned(kind, row, *line) for kind, *line in lines if kind in trials]
        wsd = fields("wsd", *row)
        baseline = wsd_series(grid, wsd) if seed == 0 else baseline
        series.append(best_again(baseline, wsd) if seed else baseline)
    return series


def rows_of(grid: dict) -> list[tuple[dict, int, int]]:
    """(shape, batch size, seed), ..."""
    return [(s, b, seed) for s, batches, n in grid["rows"] for b in batches for seed in range(n)]


def series_of(experiment: str, grid: dict, typed: dict) -> list[Series]:
    """All series of an experiment, with the typed fields in them. Raises ValueError."""
    check_typed(experiment, grid, typed, READS)
    schedules, _ = EXPERIMENTS[experiment]

    def fields(schedule, shape, batch_size, seed):
        ignored = set().union(*READS.values()) - READS[schedule]
        row = dict(schedule=schedule, batch_size=batch_size, seed=seed, data_seed=seed)
        row = grid["common"] | shape | row | typed
        return {name: value for name, value in row.items() if name not in ignored}

    if experiment == "compare":
        return compare_series(grid, fields)
    make = power_series if experiment == "power" else wsd_series
    series = [make(grid, fields(*schedules, *row)) for row in rows_of(grid)]
    runs = [one.run(*run) for one in series for run in one.least]
    if len(set(runs)) < len(runs):
        raise ValueError("--sweep: two values make the same run; sweep a field that changes runs")
    return series


# -- Training what is missing ----------------------------------------------------------------------


def config_of(record: dict) -> TrainConfig:
    """The config that a record was made with; fields that it lacks get their defaults."""
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    return TrainConfig(**{name: value for name, value in record.items() if name in names})


def losses_of(records: list[dict]) -> dict[frozenset, float]:
    """Identity of a run -> its loss; infinite if it diverged."""
    loss = lambda record: math.inf if record["diverged"] else record["val_loss"]
    return {identity(vars(config_of(record))): loss(record) for record in records}


def plan(series: list[Series], known: dict) -> tuple[list, list]:
    """-> the runs of each series as far as the losses tell, and those of them that are done."""
    runs = [max(one.rule(one, known) or set(), one.least, key=len) for one in series]
    configs = [[one.config(*run) for run in some] for one, some in zip(series, runs)]
    return configs, [[c for c in some if identity(vars(c)) in known] for some in configs]


def prepare_worker(device: str, data: str | None, tokenizer: str) -> Callable:
    """Called once in each worker; returns the function that trains a job there."""
    if device == "cpu":
        torch.set_num_threads(1)
    corpus = train.data.load_corpus(data, tokenizer)

    def work(job, must_stop):
        runs, look_at, trunks = job
        runs = [train.resolve_device(dataclasses.replace(cfg, device=device)) for cfg in runs]
        yield from train_trunk(runs, corpus, trunks, must_stop, look_at)

    return work


def sweep(series: list[Series], known: dict, folder: Path, workers: list, must_stop) -> None:
    """Train what is missing, until must_stop(); write records and curves as they come.

    known: identity of a run -> its loss; grows. EOFError or ConnectionError: a worker died.
    """
    trunks, owner = folder / "trunks", {}

    def jobs() -> dict:
        """trunk -> (its runs, where to evaluate it on the way, folder), the long ones first."""
        jobs = {}
        for one in series:
            for trunk, runs in by_trunk(one.missing(known) or []).items():
                longest = runs[-1].schedule in PLANNED and runs[-1].total_tokens == one.budgets[-1]
                jobs[trunk], owner[trunk] = (runs, one.budgets[:-1] if longest else [], trunks), one
        work = lambda job: tokens_of(job[1][0]) * job[1][0][0].n_embd
        return dict(sorted(jobs.items(), key=work, reverse=True))

    tokens = lambda: [sum(map(tokens_of, some)) for some in plan(series, known)]
    total, done = tokens()
    seconds = 0.5 if sys.stderr.isatty() else 60
    bar = tqdm(initial=done, total=total, bar_format=BAR, mininterval=seconds)
    lines, curves = (append_to(folder / f"{name}.jsonl") for name in ("records", "curves"))
    with lines, curves, bar:
        for trunk, result in deal(workers, jobs, must_stop):
            if result:
                record, curve = result
                columns = dict(zip(("tokens", "loss", "lr"), zip(*curve)))
                curves.write(json.dumps(settings(record) | {"curve": columns}) + "\n")
                lines.write(json.dumps(record) + "\n")
                known |= losses_of([record])
                bar.total, done = tokens()
                bar.set_postfix_str(f"{len(known):,} runs", refresh=False)
                bar.update(done - bar.n)
            elif owner[trunk].missing(known) == []:  # then its trunks are of no more use
                one = owner[trunk]
                for run in one.rule(one, known):
                    (trunks / f"{trunk_of(one.config(*run))}.pt").unlink(missing_ok=True)


BAR = "{percentage:3.0f}% |{bar:30}| {elapsed} gone, {remaining} left{postfix}"

# -- The command line ------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
    """Command line -> (our own arguments, the typed fields of train.py)."""
    parser = program_parser("sweep.py", __doc__)
    add_sweep_flags(parser, lambda name, text: train.parse([f"--{name}={text}"])[0][name])
    add_flags(parser, TrainConfig, {}, "laptop")
    args = parser.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if name in FIELDS}
    args.out = Path(typed.pop("out", f"runs/{args.experiment}-{args.scale}"))
    share = {} if args.decay_share is None else {"decay_share": args.decay_share}
    return args, typed | share


def prepare(args: argparse.Namespace, typed: dict) -> tuple[list[Series], dict]:
    """-> the series of our shard, and all known losses. Raises ValueError or OSError.

    typed: gets the device, and the tokenizer of its --data.
    """
    if "data" in typed and "tokenizer" in typed:
        raise ValueError(f"--tokenizer {typed['tokenizer']}: --data has its own; leave it out")
    typed["device"] = pick_device(typed.get("device", "auto"))
    named = GRIDS[args.experiment][args.scale]
    grid = change(named, args.widths, args.batches, args.budgets, args.seeds, args.sweep)
    series_of(args.experiment, grid, typed)  # raises before a corpus is prepared
    corpus = train.data.load_corpus(typed.get("data"), typed.get("tokenizer", "bytes"))
    if "data" in typed:
        typed["data"] = train.data.format_mixture(train.data.parse_mixture(typed["data"]))
        typed["tokenizer"] = corpus.meta["tokenizer"]
    series = series_of(args.experiment, grid, typed)
    for one, source in itertools.product(series, corpus.sources.values()):
        train.check_corpus(one.config(*max(one.least)), source)
    records = read_records(args.out)
    own, data = [], {"fingerprint": corpus.meta["fingerprint"]}
    for each in (grid, named):  # a part of a named grid may write into the folder of the whole
        with contextlib.suppress(ValueError):  # its run lengths may not go with the typed fields
            for one in series_of(args.experiment, each, typed):
                own += [(vars(one.config(*run)) | data, one.chosen) for run in one.least]
    full = [vars(config_of(r)) | {"fingerprint": r["fingerprint"]} for r in records]
    check_belongs(full, own, args.out)
    first, n = args.shard
    if first > len(series):
        raise ValueError(f"--shard {first}/{n}: only {len(series)} series to divide; use fewer")
    return series[first - 1 :: n], losses_of(records)


def start_workers(typed: dict, number: int | None) -> list:
    """One worker per GPU or CPU core, or as many as asked for."""
    device = typed["device"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n = {"cpu": cores, "cuda": torch.cuda.device_count()}.get(device, 1)
    devices = [f"cuda:{i % n}" if device == "cuda" else device for i in range(number or n)]
    corpus = typed.get("data"), typed.get("tokenizer", "bytes")
    return [start_worker(prepare_worker, each, *corpus) for each in devices]


def claim(folder: Path):
    """Make the folder and lock it against other sweeps; return the lock. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock(folder)
    except BlockingIOError:
        raise BlockingIOError(f"--out {folder}: another sweep is writing there") from None
    except OSError as error:
        raise OSError(f"--out {folder}: cannot be written ({error.strerror})") from None


def main(argv: list[str] | None = None) -> int:
    args, typed = parse(argv)
    folder = args.out / ("" if args.shard == (1, 1) else "shard-{}-of-{}".format(*args.shard))
    try:
        series, known = prepare(args, typed)
        held = None if args.dry_run else claim(folder)  # noqa: F841  held until we end
    except (ValueError, OSError) as error:
        return fail("sweep.py", error)

    every, done = plan(series, known)
    runs, tokens = sum(every, []), sum(map(tokens_of, every))
    separate = sum(cfg.total_tokens for cfg in runs)
    print(f"{args.out}: {len(series)} series (shape, batch size, seed), at least {len(runs):,} "
          f"runs, of which {sum(map(len, done)):,} are done\n{tokens:.3g} tokens, thanks to "
          f"trunks; {separate:.3g} as separate runs", flush=True)  # fmt: skip
    if args.dry_run:
        return 0
    with stop_request(None) as must_stop:
        todo = any(one.missing(known) for one in series)
        workers = start_workers(typed, args.workers) if todo else []
        try:
            sweep(series, known, folder, workers, must_stop)
        except (EOFError, ConnectionError):
            advice = "out of memory or disk? The same command resumes"
            return fail("sweep.py", f"a worker died; {advice}")
        finally:
            for worker in workers:
                worker.close()  # it notices; if it still trains, it saves its trunk first
        if must_stop():
            print("stopped and saved; the same command resumes")
            return 3
    if any(one.missing(known) is None for one in series):
        print("the other runs wait for runs of other shards; after those, repeat this command")
        return 3
    print(f"finished: {len(known):,} records; next: python fit.py {shlex.quote(str(args.out))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
