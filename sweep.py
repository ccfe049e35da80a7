"""The experiments of the paper as grids of training runs, at the size of your machine.

    python sweep.py wsd --scale quick              the best learning rate over T and batch size
    python sweep.py wsd --scale laptop --dry_run   a larger one: how many runs and tokens?
    python sweep.py power --scale quick            a and b of the Power schedule
    python sweep.py transfer --scale quick         several widths, with and without muP
    python sweep.py compare --scale quick          cosine, WSD and Power, all tuned once
    python sweep.py wsd --widths 32,64 --batches 2,8 --budgets 320k,1.28M --sweep weight_decay=0,0.1

Ctrl-C stops a sweep and the same command resumes it. Fit its records with python fit.py
FOLDER.

A WSD or Power run does not depend on its length T until its decay begins. So the runs of
one shape, batch size, learning rate and seed share a *trunk*. We train the shortest, and
every other one is a *branch* of a shorter one, from the checkpoint before its decay, as
with `train.py --branch`. It is, bit for bit, the separate run, for about half the tokens
in all. A cosine needs a separate run for every T. Read `make_run` and `start_of`, then
`search`, the rule that chooses the learning rates. The grids are in grids.py.
"""

import signal

if __name__ == "__main__":  # until main() starts, Ctrl-C ends us without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import train  # before torch, for which it sets a variable

import torch
from tqdm import tqdm

import compare
import config
import data
import grids
import records
import runs
from config import TrainConfig, make_config
from model import empty_model
from schedules import is_planned, unread
from tools import devices, engines, files, flags
from tools.signals import stop_request

# -- A run of a sweep --------------------------------------------------------------------

load_corpus = functools.cache(data.load_corpus)  # once for all runs of a worker


def make_run(cfg: TrainConfig, folder: Path, device: str, must_stop) -> bool:
    """Train a run in its folder, as train.py does. Returns whether it is finished."""
    corpus = load_corpus(cfg.data, cfg.tokenizer)
    tokenizer = data.tokenizer_name(cfg, corpus)
    cfg = dataclasses.replace(cfg, device=device, tokenizer=tokenizer)
    cfg = devices.resolve_device(cfg)
    threads = torch.get_num_threads()
    folder.mkdir(parents=True, exist_ok=True)
    with runs.lock(folder):  # a job on a cluster may outlive the sweep that started it
        start = start_of(cfg, folder)
        train.check_text(cfg, corpus, start)
        try:
            if cfg.device == "cpu":
                torch.set_num_threads(1)  # a worker per core
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                return train.train_run(cfg, corpus, folder, start, must_stop)
        finally:
            torch.set_num_threads(threads)


def start_of(cfg: TrainConfig, folder: Path) -> dict:
    """Where to start a run: at its newest checkpoint, or on the trunk, or at 0 tokens."""
    own = runs.checkpoints(folder)
    if own:
        return runs.read_checkpoint(own[-1])
    points = [path for path in trunk_points(folder) if int(path.stem) <= cfg.decay_start]
    if not points:
        return runs.new_start(cfg)
    start = runs.read_checkpoint(points[-1])
    # a trunk that diverged has the same end for all its runs
    return start if start["diverged"] else runs.start_from(start, cfg)


def trunk_points(folder: Path) -> list[Path]:
    """Checkpoints on the trunk of a run in this folder, that no decay has touched, oldest first."""
    found = []
    for sibling in folder.parent.glob("*"):
        saved = runs.read_run(sibling)
        if saved:
            found += runs.before_decay(runs.checkpoints(sibling), saved["config"])
    return sorted(found, key=lambda path: int(path.stem))


def folder_of(cfg: TrainConfig, sweep: Path) -> Path:
    """The folder of a run of this sweep, beside the other runs of its trunk."""
    length = f"{cfg.total_tokens}-{cfg.decay_tokens}"
    return sweep / "runs" / trunk_of(cfg) / length


def take_record(sweep: Path, folder: Path, longest: int) -> dict:
    """Move the record of a finished run to records.jsonl, and delete checkpoints.

    We keep the last point of its trunk, from which the next branch starts. No branch
    starts from a planned schedule, such as a cosine, or from a run of the `longest` T.
    """
    file = folder / "record.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    done = sweep / "records.jsonl"
    line = json.dumps(record)
    # a sweep that was killed here has added the line already
    if not done.exists() or line not in done.read_text(encoding="utf-8"):
        files.append_line(done, line)
    file.unlink()
    cfg = TrainConfig(**record["config"])
    is_last = is_planned(cfg.schedule) or cfg.total_tokens >= longest
    keep = [] if is_last else trunk_points(folder)[-1:]
    for path in folder.parent.glob("*/ckpt/*.pt"):
        if path not in keep:
            path.unlink()
    return record


# -- Equal runs and shared trunks --------------------------------------------------------


@functools.cache
def identity_of(cfg: TrainConfig) -> frozenset:
    return records.identity(vars(cfg))


@functools.cache
def trunk_of(cfg: TrainConfig) -> str:
    """Name of the trunk of a run, from its settings. A planned schedule has one for every T."""
    end = () if is_planned(cfg.schedule) else ("total_tokens", "decay_tokens")
    same = sorted(records.identity(vars(cfg), without=end))
    return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def by_trunk(configs: list[TrainConfig]) -> dict[str, list[TrainConfig]]:
    """Group runs by their trunk, in the order in which they leave it."""
    trunks: dict = {}
    for cfg in sorted(configs, key=lambda cfg: cfg.decay_start):
        trunks.setdefault(trunk_of(cfg), []).append(cfg)
    return trunks


def tokens_of(configs: list[TrainConfig]) -> int:
    """Tokens to train for these runs, in trunks up to their last branch and in all decays."""
    stable = sum(trunk[-1].decay_start for trunk in by_trunk(configs).values())
    return stable + sum(cfg.decay_tokens for cfg in configs)


# -- Which learning rates to try ---------------------------------------------------------


def nth_lr(j: int) -> float:
    """Learning rate number j, in steps of sqrt(2) from 1e-4. The paper's eight are 2, 4, ... 16."""
    return float(f"{1e-4 * 2 ** (j / 2):.4g}")


def search(loss: Callable, middle: dict[int, int]) -> set[tuple[int, int]]:
    """Find the best learning rate of a series, separately for every run length T:

    1. Try three learning rates a factor of 2 apart, around a guess, nth_lr(middle[T]).
    2. While the best is the lowest or the highest tried, try the next one, a factor of 2
       beyond.
    3. Fill in the three neighbors on each side of the best, a factor of sqrt(2) apart. If
       one of them is better, return to step 2.

    We call this again whenever a loss arrives, and it repeats all steps. The search ends
    when the best learning rate has three worse neighbors on each side. A diverged run
    counts as worse than any other. A trunk passes every shorter T, so we run these, too.
    loss(j, T): None if that run is not done yet. Returns all (j, T) to run so far.
    """
    wanted = set()
    more = set()
    for T, j in middle.items():
        more |= {(j - 2, T), (j, T), (j + 2, T)}
    while more - wanted:
        for j, T in more:
            wanted |= {(j, shorter) for shorter in middle if shorter <= T}
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


# -- The experiments ---------------------------------------------------------------------
# Every series (one shape, batch size and seed) has a rule, a pure function of the losses
# so far. It gets loss(config), None if that run is not done yet, and returns all runs
# that it needs so far. Series may need the same runs. The order in which we make the runs
# does not change them.


@functools.cache
def config_of_run(**fields) -> TrainConfig:
    """The config of a run, without the fields that its schedule does not read."""
    fields = fields | {"eval_every": 10**18}  # validate only at the end
    skip = unread(fields["schedule"])
    read = {name: x for name, x in fields.items() if name not in skip}
    return make_config(**read)


def guess(grid: dict, cfg: TrainConfig) -> int:
    """Number of the learning rate at which the search for the best one starts."""
    longer = cfg.total_tokens / grid["budgets"][0]
    # ∝ √batch, T^-0.2
    lr = grid["guess"] * (cfg.batch_tokens / 1024) ** 0.5 * longer**-0.2
    return 2 * round(math.log2(lr / nth_lr(0)))  # even, as the paper's learning rates are


def wsd_runs(grid: dict, base: dict, loss: Callable) -> list[TrainConfig]:
    """WSD with the best learning rate of every T."""

    def run(j: int, T: int) -> TrainConfig:
        fields = {"schedule": "wsd", "lr": nth_lr(j), "total_tokens": T}
        return config_of_run(**base | fields)

    def loss_at(j: int, T: int) -> float | None:
        return loss(run(j, T))

    middle = {T: guess(grid, run(0, T)) for T in grid["budgets"]}
    return [run(j, T) for j, T in sorted(search(loss_at, middle))]


def power_runs(grid: dict, base: dict, loss: Callable) -> list[TrainConfig]:
    """Power with several a at the central b, and with several b at the central a."""
    base = base | {"schedule": "power"}
    center = config_of_run(**base | {"total_tokens": grid["budgets"][-1]})
    scan = [{"power_a": float(f"{center.power_a * factor:.4g}")} for factor in grid["a"]]
    scan += [{"power_b": round(center.power_b + step, 4)} for step in grid["b"]]
    configs = []
    for changed in scan:
        for T in grid["budgets"]:
            configs.append(config_of_run(**base | changed | {"total_tokens": T}))
    return configs


def run_of(grid: dict, line: compare.Line, lr: float, base: dict, T: int) -> TrainConfig:
    """The run of a line, a schedule with a learning-rate rule, tuned to lr."""
    _, batch_size, lengths = grid["tune"]
    seq_len = config_of_run(**base | {"schedule": "constant", "total_tokens": T}).seq_len
    tuned_at = batch_size, seq_len, lengths[0]
    fields = compare.fields_of(line, lr, base["batch_size"], T, tuned_at)
    return config_of_run(**base | fields | {"total_tokens": T})


def trials_of(
    grid: dict, line: compare.Line, seed: int
) -> dict[float, list[TrainConfig]]:
    """Learning rate -> runs of a line in the two cells that tune it, with two separate seeds."""
    shape, batch_size, lengths = grid["tune"]
    bases = [
        grids.base_of(grid, shape, batch_size, trial)
        for trial in compare.tuning_seeds(seed)
    ]
    trials = {}
    for lr in map(nth_lr, grid["trials"]):
        trials[lr] = []
        for base in bases:
            trials[lr] += [run_of(grid, line, lr, base, T) for T in lengths]
    return trials


def compare_runs(grid: dict, base: dict, loss: Callable) -> list[TrainConfig]:
    """The trials of all lines, then every line at the learning rate with the lowest mean loss."""
    configs = []
    for line in compare.LINES.values():
        losses = {}
        for lr, trials in trials_of(grid, line, base["seed"]).items():
            configs += trials
            losses[lr] = [loss(cfg) for cfg in trials]
        best = compare.best_of(losses)
        if best:
            configs += [run_of(grid, line, best, base, T) for T in grid["budgets"]]
    return configs


def series_of(experiment: str, grid: dict) -> list[Callable]:
    """The rules of all series. A rule maps loss to the runs that it needs so far."""
    rule = {"power": power_runs, "compare": compare_runs}.get(experiment, wsd_runs)
    return [functools.partial(rule, grid, base) for base in grids.bases_of(grid)]


# -- The missing runs --------------------------------------------------------------------


class Plan(NamedTuple):
    """A sweep, its known losses, and the runs to train next."""

    grid: dict
    series: list[Callable]  # their rules
    # identity of a run -> its loss, infinite if it diverged
    known: dict[frozenset, float]

    def missing(self, guessed: bool = False) -> list[TrainConfig]:
        """The runs that we can train now, or, with guessed losses, all that are left."""

        def loss(cfg: TrainConfig) -> float | None:
            if identity_of(cfg) in self.known:
                return self.known[identity_of(cfg)]
            if not guessed:
                return None
            # above all known losses, and lowest where the search starts, so it ends there
            return 100 + abs(2 * math.log2(cfg.lr / nth_lr(0)) - guess(self.grid, cfg))

        wanted: dict = {}  # in the order of the series, without doubles
        for rule in self.series:
            wanted |= dict.fromkeys(rule(loss))
        return [cfg for cfg in wanted if identity_of(cfg) not in self.known]

    def left(self) -> list[TrainConfig]:
        """The runs that are left, if the best learning rates are those that we guess."""
        return self.missing(guessed=True)

    def jobs(self) -> dict[str, TrainConfig]:
        """{trunk: its next run}, the longest trunk first."""
        cost = {}
        jobs = {}
        for trunk, configs in by_trunk(self.missing()).items():
            jobs[trunk] = configs[0]
            cost[trunk] = tokens_of(configs) * configs[0].n_embd
        return {trunk: jobs[trunk] for trunk in sorted(jobs, key=cost.get, reverse=True)}

    def learn(self, record: dict) -> None:
        cfg = TrainConfig(**record["config"])
        self.known[identity_of(cfg)] = records.row(record)["loss"]


def make_missing(
    plan: Plan, sweep: Path, submit: Callable, stop: Callable, slots: int, must_stop
) -> None:
    """Make the runs that the plan lacks, at most `slots` at a time, until must_stop().

    submit, stop: see tools/engines.py. After a failure we stop the other runs, and raise
    the error when they have saved their progress.
    """
    running: dict = {}  # trunk -> (folder of its run, future)
    todo = plan.jobs()
    before = len(plan.known)
    stopping = False
    failure = None
    with tqdm(total=len(plan.left()), unit=" runs") as bar:
        while todo or running:
            # 1. Start the next runs of trunks
            if (must_stop() or failure) and not stopping:
                stopping = True
                stop()
            if stopping:
                todo = {}
            for trunk, cfg in todo.items():
                if trunk not in running and len(running) < slots:
                    folder = folder_of(cfg, sweep)
                    running[trunk] = folder, submit(make_run, cfg, folder)

            # 2. Take the results of those that ended. If a cluster stopped a run at a time
            # limit, it is still missing, and starts again
            ended = [trunk for trunk, (_, future) in running.items() if future.done()]
            for trunk in ended:
                folder, future = running.pop(trunk)
                try:
                    if future.result():
                        longest = plan.grid["budgets"][-1]
                        plan.learn(take_record(sweep, folder, longest))
                except Exception as error:
                    if not (stopping and engines.was_stopped(error)):
                        failure = failure or error

            # 3. Plan again with the new losses
            if not ended:
                time.sleep(0.02)
                continue
            todo = plan.jobs()
            finished = len(plan.known) - before
            bar.total = finished + len(plan.left())
            bar.update(finished - bar.n)
    if failure:
        raise failure


# -- The command line --------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """'320k,1.28M' -> [320000, 1280000]"""
    return [flags.whole_number(part) for part in text.split(",")]


def slurm_parameter(text: str) -> tuple[str, int | str]:
    """'timeout_min=5' -> ('timeout_min', 5)"""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE")
    return name, int(value) if value.isdecimal() else value


def swept_field(text: str) -> tuple[str, list]:
    """'weight_decay=0,0.1' -> ('weight_decay', [0.0, 0.1]), with values as train.py reads them."""
    parser = flags.program_parser("sweep.py --sweep", "")
    flags.add_flags(parser, TrainConfig, {})
    name, _, values = text.partition("=")
    found = []
    for value in values.split(","):
        fields = parser.parse_args([f"--{name}={value}"])
        found.append(getattr(fields, name))
    return name, found


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
    """Command line -> (our arguments, the typed fields of train.py)."""
    parser = flags.program_parser("sweep.py", __doc__)
    add = parser.add_argument
    add("experiment", choices=tuple(grids.GRIDS))
    scales = tuple(grids.GRIDS["wsd"])
    add("--scale", choices=scales, default="quick", help="the grid (default: quick)")
    at_least_1 = flags.at_least(1)
    jobs = "jobs at a time (default: one per GPU, or per core)"
    add("--workers", type=at_least_1, help=jobs)
    add("--engine", choices=("local", "slurm"), default="local", help="where jobs run")
    add(
        "--slurm",
        type=slurm_parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of submitit, as in timeout_min=240; may be repeated",
    )
    dry = "print the number of runs and tokens, and stop"
    add("--dry_run", action="store_true", help=dry)
    for name in ("widths", "batches", "budgets"):
        instead = f"{name} in place of the grid's, as in 320k,1.28M"
        add(f"--{name}", type=numbers, metavar="N,N,...", help=instead)
    seeds = "seeds 0 to N-1 in place of the grid's"
    add("--seeds", type=at_least_1, metavar="N", help=seeds)
    add(
        "--sweep",
        type=swept_field,
        action="append",
        default=[],
        metavar="FIELD=V,V,...",
        help="a field with several values; may be repeated",
    )
    flags.add_flags(parser, TrainConfig, {})
    args = parser.parse_args(argv)

    swept = [name for name, _ in args.sweep]
    for name in swept:
        if swept.count(name) > 1:
            parser.error(f"--sweep {name}: twice; name all its values at once")
    typed = {name: value for name, value in vars(args).items() if name in config.FIELDS}
    for name in typed.keys() & set(swept):
        parser.error(f"--{name} {typed[name]}: --sweep {name} has its values already")
    args.out = Path(typed.pop("out", f"runs/{args.experiment}-{args.scale}"))
    return args, typed


def check(args: argparse.Namespace, typed: dict) -> tuple[Plan, list[TrainConfig], str]:
    """A plan for the command line, the configs of its runs, and the fingerprint of its text.

    The runs are those that we would make if our guesses of the learning rates are right.
    Raises UserError or OSError.
    """
    if args.slurm and args.engine != "slurm":
        raise flags.UserError(
            f"--slurm {args.slurm[0][0]}: has no effect without --engine slurm"
        )
    typed = runs.with_vocabulary(runs.with_absolute_paths(typed))
    if args.engine == "local":
        typed["device"] = devices.pick_device(typed.get("device", "auto"))
    grid = grids.changed(grids.GRIDS[args.experiment][args.scale], args, typed)
    plan = Plan(grid, series_of(args.experiment, grid), {})
    configs = plan.left()
    asked = {name: [value] for name, value in typed.items()} | dict(args.sweep)
    grids.check_fields(asked, configs)
    if args.engine == "local":  # a cluster has other machines than this one
        for cfg in one_per_shape(configs):
            devices.check_memory(cfg, empty_model(cfg).n_params())
    longest = max(configs, key=attrgetter("seq_len"))
    _, corpus = train.load_data(longest, typed)  # has it as long a sequence?
    return plan, configs, corpus.meta["fingerprint"]


def one_per_shape(configs: list[TrainConfig]) -> Iterable[TrainConfig]:
    """A config for every shape of a model."""
    found = {}
    for cfg in configs:
        found[tuple(getattr(cfg, name) for name in sorted(config.FIXED))] = cfg
    return found.values()


def read_done(
    args: argparse.Namespace, plan: Plan, configs: list[TrainConfig], fingerprint: str
) -> None:
    """Tell the plan which runs are done. Raises UserError for records of another sweep."""
    file = args.out / "sweep.json"
    if file.exists():
        made_by = json.loads(file.read_text(encoding="utf-8"))["experiment"]
        if made_by != args.experiment:
            raise flags.UserError(
                f"--out {args.out}: is of sweep.py {made_by}; choose another folder"
            )
    found = records.read_records(args.out)
    free = ("seed", "data_seed")  # a folder may have more seeds than a sweep
    if args.experiment != "power":
        free += ("lr", "power_a")  # found by a search, or tuned
    ours = [vars(cfg) for cfg in configs]
    grids.check_belongs(found, ours, fingerprint, free, args.out)
    for record in found:
        plan.learn(record)


def describe(args: argparse.Namespace, finished: bool) -> None:
    """Write sweep.json, which tells fit.py what these runs are."""
    content = {
        "command": shlex.join(["python", *sys.argv]),
        "experiment": args.experiment,
        "finished": finished,
    }
    files.write_json(args.out / "sweep.json", content)


def main(argv: list[str] | None = None) -> int:
    held = contextlib.nullcontext()
    try:
        args, typed = parse(argv)
        plan, configs, fingerprint = check(args, typed)
        if not args.dry_run:
            args.out.mkdir(parents=True, exist_ok=True)
            held = files.lock(args.out / ".lock")  # before we read what is done
            if not held:
                raise flags.UserError(f"--out {args.out}: another sweep is running there")
            for file in args.out.glob("runs/*/*/record.json"):  # of a killed sweep
                take_record(args.out, file.parent, plan.grid["budgets"][-1])
        read_done(args, plan, configs, fingerprint)
    except (flags.UserError, OSError) as error:
        return flags.fail("sweep.py", error)
    except KeyboardInterrupt:
        return flags.fail("sweep.py", "interrupted before the first run", status=130)

    try:
        with held, stop_request() as must_stop:
            left = plan.left()
            todo = f"at least {len(left):,} with {tokens_of(left):.3g} tokens are left"
            flags.say(f"{args.out}: {len(plan.known):,} runs are done, {todo}")
            if args.dry_run:
                return 0
            describe(args, finished=not left)
            if left:
                place, slots = engine(args, left[0].device, must_stop)
                with place as (submit, stop):
                    make_missing(plan, args.out, submit, stop, slots, must_stop)
            if must_stop():
                flags.say("stopped and saved; the same command resumes")
                return 3
            describe(args, finished=True)
    except BrokenExecutor:
        return flags.fail(
            "sweep.py", "a worker died; out of memory? The same command resumes"
        )
    except flags.UserError as error:
        return flags.fail("sweep.py", error)
    except Exception as error:
        reason = devices.reason_of(error)
        if reason is None:
            raise
        return flags.fail("sweep.py", f"{reason}. The same command resumes")
    conclude(args.out, plan)
    return 0


def conclude(out: Path, plan: Plan) -> None:
    """Delete the last checkpoints, and say how the sweep ended."""
    for checkpoints in out.glob("runs/*/*/ckpt"):
        shutil.rmtree(checkpoints)
    n = len(plan.known)
    if min(plan.known.values()) == math.inf:
        flags.say(f"finished, but all {n:,} runs diverged; is the text or a flag wrong?")
    else:
        flags.say(f"finished: {n:,} runs; next: python fit.py {shlex.quote(str(out))}")


def engine(args: argparse.Namespace, device: str, must_stop: Callable):
    """The engine of --engine and --workers, and its number of jobs at a time."""
    if args.engine == "slurm":
        asked = getattr(args, "device", "auto")  # for another machine
        slots = args.workers or 1
        return engines.on_slurm(args.out / "slurm", dict(args.slurm), asked), slots
    each = devices.all_devices(device, args.workers)
    if len(each) == 1:
        return engines.in_this_process(device, must_stop), 1
    return engines.in_processes(each), len(each)


if __name__ == "__main__":
    import sweep  # so that other processes find the functions of jobs in a module

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(sweep.main())
