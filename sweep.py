"""The experiments of the paper as grids of training runs, at the size of your machine.

    python sweep.py wsd --scale quick              the best learning rate over T and batch size
    python sweep.py wsd --scale laptop --dry_run   a larger one: how many runs and tokens?
    python sweep.py power --scale quick            a and b of the Power schedule
    python sweep.py transfer --scale quick         several widths, with and without muP
    python sweep.py compare --scale quick          cosine, WSD and Power, each tuned once
    python sweep.py wsd --widths 32,64 --batches 2,8 --budgets 320k,1.28M --sweep weight_decay=0,0.1

Ctrl-C stops a sweep and the same command resumes it. Fit its records with python fit.py FOLDER.

A WSD or Power run does not depend on its length T until its decay begins. So we train one *trunk*
for each shape, batch size, learning rate and seed, and at every T a *branch* leaves it and decays.
Each branch is, bit for bit, the run that train.py would make, for about half the tokens in all. A
cosine needs a separate run for every T. Read `train_run`, then `search`, the rule that chooses
the learning rates. The grids are in tools/grids.py.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import NamedTuple

import tools.threads  # noqa: F401  before torch

import torch
from tqdm import tqdm

import data
import train
from tools import engines, grids
from tools.compare import LINES, Line, best_of, fields_of, tuning_seeds
from tools.config import UserError, add_flags, fail, format_mixture, parse_mixture
from tools.config import program_parser, say
from tools.devices import all_devices, pick_device, reason_of, resolve_device
from tools.files import append_to, lock
from tools.records import identity, loss_of, records_in, settings
from tools.runs import origin, read_checkpoint, stop_request, write_checkpoint
from train import FIELDS, PLANNED, READS, TrainConfig, make_config

# -- A trunk and its branches ----------------------------------------------------------------------

POINTS = 200  # of a curve, at most


def advance(cfg: TrainConfig, state, corpus, until: int, curve: list, must_stop) -> None:
    """Train to `until` tokens, or less if must_stop() or if the loss diverges.

    Append (tokens, mean training loss since the last point, learning rate) to the curve.
    """
    if must_stop():  # an earlier call was stopped
        return
    losses = []
    for lr, loss, _, _ in train.training_steps(cfg, state, corpus, until):
        losses.append(loss)
        if train.crossed(math.ceil(cfg.total_tokens / POINTS), state):
            mean = torch.stack(losses).mean().item()
            curve.append((state.tokens, mean if math.isfinite(mean) else None, lr))
            losses.clear()
        if must_stop() or (train.crossed(cfg.log_every, state) and not math.isfinite(loss)):
            return  # as in train.py, which checks the loss for divergence at every log_every


def train_run(
    cfg: TrainConfig, corpus, trunks: Path, must_stop=lambda: False, look_at=()
) -> tuple[dict, list] | None:
    """Train a trunk up to the decay of a run, save it there, and decay. Return record and curve.

    The next run of this trunk starts from there. If must_stop(), we save the trunk as far as it is
    and return None. At every T in look_at, the loss without a decay goes into val_loss_at_T.
    """
    state, saved, looks, curve, commits = train.build(cfg), None, {}, [], []
    made = origin(cfg.device, corpus.meta["fingerprint"]) | {"parent": None}
    checkpoint = trunks / f"{trunk_of(cfg)}.pt"
    with contextlib.suppress(UserError):  # no checkpoint yet, or a damaged one
        saved = read_checkpoint(checkpoint)
    if saved and saved["fingerprint"] == made["fingerprint"] and saved["tokens"] <= cfg.decay_start:
        train.restore(saved, state)
        looks, curve, commits = saved["looks"], saved["curve"], saved.get("commits", [])
    commits = list(dict.fromkeys([*commits, made["git_commit"]]))  # of all code that trained it

    began, start = time.perf_counter(), state.tokens
    for T in look_at:
        advance(cfg, state, corpus, T, curve, must_stop)
        if f"val_loss_at_{T}" not in looks and not must_stop():
            looks[f"val_loss_at_{T}"] = train.evaluate(cfg, state, corpus)[1]["val_loss"]
    advance(cfg, state, corpus, cfg.decay_start, curve, must_stop)  # the trunk
    saved = train.checkpoint(cfg, corpus, state) | {"looks": looks, "curve": curve}
    saved["commits"] = commits
    write_checkpoint(checkpoint, saved)
    advance(cfg, state, corpus, cfg.total_tokens, curve, must_stop)  # a branch
    if must_stop():
        return None
    _, record = train.evaluate(cfg, state, corpus)
    seconds = time.perf_counter() - began  # without those of earlier runs of the trunk
    speed = round((state.tokens - start) / seconds)
    made["git_commit"] = ", ".join(commit for commit in commits if commit) or None
    record |= looks | made | {"seconds": round(seconds, 1), "tokens_per_second": speed}
    return record, curve[:: max(1, math.ceil(len(curve) / POINTS))]


@functools.cache
def identity_of(cfg: TrainConfig) -> frozenset:
    return identity(vars(cfg))


@functools.cache
def trunk_of(cfg: TrainConfig) -> str:
    """Name of the trunk of a run, from its settings. A planned schedule has one for every T."""
    end = () if cfg.schedule in PLANNED else ("total_tokens", "decay_tokens")
    same = sorted(identity(vars(cfg), without=end))
    return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def by_trunk(runs: list[TrainConfig]) -> dict[str, list[TrainConfig]]:
    """Group runs by their trunk, in the order in which they leave it."""
    trunks: dict = {}
    for cfg in sorted(runs, key=lambda cfg: cfg.decay_start):
        trunks.setdefault(trunk_of(cfg), []).append(cfg)
    return trunks


def tokens_of(runs: list[TrainConfig]) -> int:
    """Tokens to train for these runs, in trunks up to their last branch and in all decays."""
    stable = sum(trunk[-1].decay_start for trunk in by_trunk(runs).values())
    return stable + sum(cfg.decay_tokens for cfg in runs)


# -- Which learning rates to try -------------------------------------------------------------------


def nth_lr(j: int) -> float:
    """Learning rate number j, in steps of sqrt(2) from 1e-4. The paper's eight are 2, 4, ... 16."""
    return float(f"{1e-4 * 2 ** (j / 2):.4g}")


def search(loss: Callable, middle: dict[int, int]) -> set[tuple[int, int]]:
    """Find the best learning rate of a series, for each run length T separately:

    1. Try three learning rates a factor of 2 apart, around a guess, nth_lr(middle[T]).
    2. While the best is the lowest or the highest tried, try the next one, a factor of 2 beyond.
    3. Fill in the three neighbors on each side of the best, a factor of sqrt(2) apart. If one of
       them is better, return to step 2.

    The search ends when the best learning rate has three worse neighbors on each side. A diverged
    run counts as worse than any other. A trunk passes every shorter T, so we run these, too.
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
            more |= {(best + step, T) for step in steps if 1e-6 < nth_lr(best + step) < 2}
    return wanted


# -- The experiments -------------------------------------------------------------------------------
# Every series (one shape, batch size and seed) has a rule, a pure function of the losses so far. It
# gets loss(config), None if that run is not done yet, and returns all runs that it wants by now.
# Series may want the same runs. Whatever order the runs are made in, these are the same runs.


@functools.cache
def config(**fields) -> TrainConfig:
    """The config of a run, without those fields that its schedule does not read."""
    unread = set().union(*READS.values()) - READS[fields["schedule"]]
    share = fields.pop("decay_share", None)
    if share is not None:  # at most all tokens after the warmup
        total, warm = fields["total_tokens"], fields["warmup_tokens"]
        fields["decay_tokens"] = min(round(share * total), max(0, total - warm))
    return make_config(**{name: value for name, value in fields.items() if name not in unread})


def guess(grid: dict, cfg: TrainConfig) -> int:
    """Number of the learning rate at which the search for the best one starts."""
    longer = cfg.total_tokens / grid["budgets"][0]
    lr = grid["guess"] * (cfg.batch_tokens / 1024) ** 0.5 * longer**-0.2  # ∝ √batch, T^-0.2
    return 2 * round(math.log2(lr / nth_lr(0)))  # even, as the paper's learning rates are


def wsd_runs(grid: dict, base: dict, loss: Callable) -> list[TrainConfig]:
    """WSD with the best learning rate of every T."""
    run = lambda j, T: config(**base | dict(schedule="wsd", lr=nth_lr(j), total_tokens=T))
    middle = {T: guess(grid, run(0, T)) for T in grid["budgets"]}
    return [run(j, T) for j, T in sorted(search(lambda j, T: loss(run(j, T)), middle))]


def power_runs(grid: dict, base: dict, _loss: Callable) -> list[TrainConfig]:
    """Power with several a at the central b, and with several b at the central a."""
    run = lambda T, **scanned: config(**base | dict(schedule="power", total_tokens=T) | scanned)
    center = run(grid["budgets"][-1])
    scan = [{"power_a": float(f"{center.power_a * factor:.4g}")} for factor in grid["a"]]
    scan += [{"power_b": round(center.power_b + step, 4)} for step in grid["b"]]
    return [run(T, **scanned) for scanned in scan for T in grid["budgets"]]


def run_of(grid: dict, line: Line, lr: float, base: dict, T: int) -> TrainConfig:
    """The run of a line, a schedule with a learning-rate rule, that was tuned to lr."""
    _, batch_size, (first, _) = grid["tune"]
    seq_len = config(**base | dict(schedule="constant", total_tokens=T)).seq_len
    fields = fields_of(line, lr, base["batch_size"], T, (batch_size, seq_len, first))
    return config(**base | fields | dict(total_tokens=T))


def trials_of(grid: dict, line: Line, seed: int) -> dict[float, list[TrainConfig]]:
    """Learning rate -> runs of a line in the two cells that tune it, with two separate seeds."""
    shape, batch_size, lengths = grid["tune"]
    bases = [grids.base_of(grid, shape, batch_size, trial) for trial in tuning_seeds(seed)]
    return {
        lr: [run_of(grid, line, lr, base, T) for base in bases for T in lengths]
        for lr in map(nth_lr, grid["trials"])
    }


def compare_runs(grid: dict, base: dict, loss: Callable) -> list[TrainConfig]:
    """The trials of all lines, then every line at the learning rate with the lowest mean loss."""
    runs = []
    for line in LINES.values():
        trials = trials_of(grid, line, base["seed"])
        runs += sum(trials.values(), [])
        if best := best_of({lr: [loss(cfg) for cfg in some] for lr, some in trials.items()}):
            runs += [run_of(grid, line, best, base, T) for T in grid["budgets"]]
    return runs


def series_of(experiment: str, grid: dict) -> list[Callable]:
    """The rules of all series. Each maps loss to the runs that it wants by now."""
    rule = {"power": power_runs, "compare": compare_runs}.get(experiment, wsd_runs)
    return [functools.partial(rule, grid, base) for base in grids.bases_of(grid)]


# -- Training what is missing ----------------------------------------------------------------------


class Plan(NamedTuple):
    """A sweep, from what is known to what we train next."""

    grid: dict
    series: list[Callable]  # their rules
    known: dict[frozenset, float]  # identity of a run -> its loss, infinite if it diverged

    def missing(self, made_up=lambda cfg: None) -> list[TrainConfig]:
        """The runs that we can train now. made_up(config) is the loss of an unknown run."""
        loss = lambda cfg: self.known.get(identity_of(cfg), made_up(cfg))
        wanted = dict.fromkeys(cfg for rule in self.series for cfg in rule(loss))
        return [cfg for cfg in wanted if identity_of(cfg) not in self.known]

    def left(self) -> list[TrainConfig]:
        """All runs to come, if all unknown losses are high, and lowest at our guess."""
        from_guess = lambda cfg: abs(2 * math.log2(cfg.lr / nth_lr(0)) - guess(self.grid, cfg))
        return self.missing(made_up=lambda cfg: 100 + from_guess(cfg))

    def jobs(self) -> dict[str, tuple]:
        """{trunk: (its next run, T at which to look at the loss without a decay)}, longest first.

        We look at the longest cosine at all shorter T, to know what it is worth if cut short there.
        """
        *shorter, longest = self.grid["budgets"]
        cut_short = lambda cfg: cfg.schedule in PLANNED and cfg.total_tokens == longest
        cost = lambda item: tokens_of(item[1]) * item[1][0].n_embd
        todo = sorted(by_trunk(self.missing()).items(), key=cost, reverse=True)
        return {trunk: (runs[0], shorter if cut_short(runs[0]) else []) for trunk, runs in todo}


NEEDED = [f.name for f in dataclasses.fields(TrainConfig) if f.default is dataclasses.MISSING]


def config_of(record: dict) -> TrainConfig:
    """The config of a record. Fields that it lacks get their defaults, if they have one."""
    if missing := [name for name in NEEDED if name not in record]:
        raise UserError(f"a record lacks {missing[0]}, so no run of a sweep made it")
    return TrainConfig(**{name: value for name, value in record.items() if name in FIELDS})


def losses_of(records: list[dict]) -> dict[frozenset, float]:
    return {identity_of(config_of(record)): loss_of(record) for record in records}


def do_job(cfg: TrainConfig, trunks: Path, look_at: list[int], device: str, must_stop: Callable):
    """Make a run, wherever an engine wants it. Returns (record, curve), or None if stopped."""
    corpus = open_corpus(cfg.data, cfg.tokenizer)
    tokenizer = train.tokenizer_of(cfg, corpus)
    cfg = resolve_device(dataclasses.replace(cfg, device=device, tokenizer=tokenizer))
    threads = torch.get_num_threads()
    try:
        if cfg.device == "cpu":
            torch.set_num_threads(1)  # a worker per core
        return train_run(cfg, corpus, trunks, must_stop, look_at)
    finally:
        torch.set_num_threads(threads)


@functools.cache
def open_corpus(data_flag: str | None, tokenizer: str) -> data.Corpus:
    return data.load_corpus(data_flag, tokenizer)


def train_missing(plan: Plan, folder: Path, submit: Callable, slots: int, must_stop, stop) -> None:
    """Make the runs that the plan lacks, at most `slots` at a time. Only we write their records.

    submit: an engine (tools/engines.py). stop: asks its jobs to stop, once must_stop().
    """
    running: dict = {}  # trunk -> the future of its next run
    before, todo, stopping = len(plan.known), plan.jobs(), False
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=len(plan.left()), unit=" runs"))
        curves = stack.enter_context(append_to(folder / "curves.jsonl"))
        records = stack.enter_context(append_to(folder / "records.jsonl"))
        while todo or running:
            if must_stop() and not stopping:
                stopping, todo = True, {}
                bar.write(f"stopping, {len(running)} jobs save what they have", file=sys.stderr)
                stop()
            for trunk in [trunk for trunk in todo if trunk not in running]:
                if len(running) < slots:
                    cfg, look_at = todo[trunk]
                    running[trunk] = submit(do_job, cfg, folder.resolve() / "trunks", look_at)

            done, errors = [trunk for trunk, future in running.items() if future.done()], []
            for trunk in done:
                try:
                    result = running.pop(trunk).result()
                except Exception as error:
                    errors.append(error)
                    continue
                if result:
                    record, curve = result
                    curve = dict(zip(("tokens", "loss", "lr"), zip(*curve)))
                    curves.write(json.dumps(settings(record) | {"curve": curve}) + "\n")
                    records.write(json.dumps(record) + "\n")
                    plan.known.update(losses_of([record]))
            if errors and not stopping:  # after a request to stop, an engine may cancel jobs
                raise errors[0]
            if not done:
                time.sleep(0.02)
                continue
            todo = {} if stopping else plan.jobs()
            finished = len(plan.known) - before
            bar.total = finished + len(plan.left())
            bar.update(finished - bar.n)


# -- The command line ------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
    """Command line -> (our own arguments, the typed fields of train.py)."""
    parser = program_parser("sweep.py", __doc__)
    fields = program_parser("sweep.py --sweep", "")  # reads the values like their flags
    add_flags(fields, TrainConfig, {})
    grids.add_own_flags(parser, lambda name, x: vars(fields.parse_args([f"--{name}={x}"]))[name])
    add_flags(parser, TrainConfig, {})
    args = parser.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if name in FIELDS}
    args.out = Path(typed.pop("out", f"runs/{args.experiment}-{args.scale}"))
    return args, typed


def prepare(args: argparse.Namespace, typed: dict) -> Plan:
    """Check the command line and the records in --out. Raises UserError or OSError."""
    if "data" in typed:
        typed["data"] = format_mixture(parse_mixture(typed["data"]))
    if args.slurm and args.engine != "slurm":
        raise UserError(f"--slurm {args.slurm[0][0]}: has no effect without --engine slurm")
    if args.engine == "local":
        typed["device"] = pick_device(typed.get("device", "auto"))
    if data.tokenizer_file(typed.get("tokenizer", "")):
        typed["tokenizer"] = str(Path(typed["tokenizer"]).resolve())
    grid = grids.changed(grids.GRIDS[args.experiment][args.scale], args, typed)
    series = series_of(args.experiment, grid)
    runs = Plan(grid, series, {}).left()
    asked = {name: [value] for name, value in typed.items()} | dict(args.sweep)
    grids.check_fields(asked, runs, READS)
    _, corpus = train.load_data(max(runs, key=lambda cfg: (cfg.seq_len, cfg.n_embd)), typed, None)
    records = records_in(args.out)
    found = [vars(config_of(r)) | {"fingerprint": r["fingerprint"]} for r in records]
    own = [vars(cfg) | {"fingerprint": corpus.meta["fingerprint"]} for cfg in runs]
    free = () if args.experiment == "power" else ("lr", "power_a")  # found by a search, or tuned
    grids.check_belongs(found, own, free, args.out)
    return Plan(grid, series, losses_of(records))


def main(argv: list[str] | None = None, submit: Callable | None = None) -> int:
    """submit: an engine in place of --engine, as in docs/scale.md, for --workers jobs at a time.

    It must not do the jobs in our main thread, which would not notice a Ctrl-C.
    """
    args, typed = parse(argv)
    try:
        plan = prepare(args, typed)
        if not args.dry_run:
            args.out.mkdir(parents=True, exist_ok=True)
            held = lock(args.out / ".lock")
            if not held:
                raise UserError(f"--out {args.out}: another sweep is running there")
    except (UserError, OSError) as error:
        return fail("sweep.py", error)
    runs = plan.left()
    todo = f"at least {len(runs):,} with {tokens_of(runs):.3g} tokens are left"
    todo = f"{args.out}: {len(plan.known):,} runs are done, {todo}"
    if args.dry_run:
        say(todo)
        return 0
    try:
        with held, stop_request(None) as must_stop:
            say(todo)
            if runs:
                with engine(args, runs[0].device, submit, must_stop) as (submit, slots, stop):
                    train_missing(plan, args.out, submit, slots, must_stop, stop)
            return conclude(args.out, plan, must_stop())
    except BrokenExecutor:
        return fail("sweep.py", "a worker died; out of memory? The same command resumes")
    except UserError as error:
        return fail("sweep.py", error)
    except Exception as error:
        if (reason := reason_of(error)) is None:
            raise
        return fail("sweep.py", f"{reason}. The same command resumes")


def conclude(out: Path, plan: Plan, stopped: bool) -> int:
    """Say how the sweep ended, and return the exit status."""
    if stopped:
        say("stopped and saved; the same command resumes")
        return 3
    shutil.rmtree(out / "trunks", ignore_errors=True)
    say(f"finished: {len(plan.known):,} runs; next: python fit.py {shlex.quote(str(out))}")
    return 0


@contextlib.contextmanager
def engine(args, device: str, submit: Callable | None, must_stop: Callable):
    """Yield submit, the number of jobs at a time, and a function that asks all jobs to stop."""
    no_stop = lambda: None
    asked = getattr(args, "device", "auto")  # for another machine
    if submit:
        yield functools.partial(submit, engines.do_anywhere, asked), args.workers or 1, no_stop
    elif args.engine == "slurm":
        with engines.on_slurm(args.out / "slurm", dict(args.slurm), asked) as (submit, stop):
            yield submit, args.workers or 1, stop
    else:
        devices = all_devices(device, args.workers)
        if len(devices) == 1:
            yield engines.in_this_process(devices[0], must_stop), 1, no_stop
        else:
            with engines.in_processes(devices) as (submit, stop):
                yield submit, len(devices), stop


if __name__ == "__main__":
    import sweep  # so that other processes find the functions of jobs in a module

    sys.exit(sweep.main())
