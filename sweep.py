"""The experiments of the paper as grids of training runs, at the size of your machine.

    python sweep.py wsd --scale quick              the best learning rate over T and batch size
    python sweep.py wsd --scale laptop --dry_run   a larger one: how many runs and tokens?
    python sweep.py power --scale quick            a and b of the Power schedule
    python sweep.py transfer --scale quick         several widths, with and without muP
    python sweep.py compare --scale quick          cosine, WSD and Power, all tuned once
    python sweep.py wsd --widths 32,64 --batches 2,8 --budgets 320k,1.28M --sweep weight_decay=0,0.1

Ctrl-C stops a sweep and the same command resumes it. Fit its records with python fit.py
FOLDER.

A WSD or Power run does not depend on its length T until its decay begins. So we train one
*trunk* for every shape, batch size, learning rate and seed, and at every T a *branch*
leaves it and decays. A branch is, bit for bit, the run that train.py would make, for
about half the tokens in all. A cosine needs a separate run for every T. Read `Trunk` and
`make_run`, then `search`, the rule that chooses the learning rates. The grids are in
grids.py.
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

import tools.threads  # noqa: F401  before torch, which reads a variable that it sets

import torch
from tqdm import tqdm

import compare
import config
import data
import grids
import records
import train
from config import TrainConfig, make_config
from schedules import is_planned, unread
from tools import devices, engines, files, flags, runs, sweep_flags
from tools.flags import UserError

# -- A trunk and its branches ------------------------------------------------------------

POINTS = 200  # of a curve, at most


class Trunk:
    """A trunk and the run that leaves it next, as the `run` of train.train.

    A run starts from the checkpoint, which ends where the decay of an earlier run began,
    and saves it again where its decay begins. After that it is the branch, which leaves
    the checkpoint as it is. look_at: run lengths at which to note the loss without a
    decay.
    """

    def __init__(self, cfg: TrainConfig, corpus, folder: Path, look_at: list[int]):
        self.cfg = cfg
        self.path = folder / f"{trunk_of(cfg)}.pt"
        self.origin = runs.origin(cfg.device, corpus.meta["fingerprint"]) | {
            "parent": None
        }
        self.start = None  # a checkpoint
        self.looks: dict = {}  # val_loss_at_T, for every T in look_at
        self.curve: list = []  # of (tokens, mean training loss since the last point, lr)
        self.losses: list = []  # of the steps since the last point of the curve
        self.commits: list = []  # of all code that trained it
        with contextlib.suppress(UserError):  # a missing or damaged checkpoint
            saved = runs.read_checkpoint(self.path)
            same_data = saved["fingerprint"] == self.origin["fingerprint"]
            if same_data and saved["tokens"] <= cfg.decay_start:
                self.start = saved
                self.looks = saved["looks"]
                self.curve = saved["curve"]
                self.losses = [
                    torch.tensor(loss, device=cfg.device)
                    for loss in saved.get("losses", [])
                ]
                self.commits = saved.get("commits", [])
        if self.origin["git_commit"] not in self.commits:
            self.commits = [*self.commits, self.origin["git_commit"]]
        self.look_at = [T for T in look_at if f"val_loss_at_{T}" not in self.looks]
        self.diverged = False

    def after_step(self, state, step: train.Step, last: bool) -> None:
        self.losses.append(step.loss)
        every = math.ceil(self.cfg.total_tokens / POINTS)
        if train.crossed(every, state):
            mean = torch.stack(self.losses).mean().item()
            loss = mean if math.isfinite(mean) else None
            self.curve.append((state.tokens, loss, step.lr))
            self.losses.clear()
        if train.crossed(self.cfg.log_every, state):
            self.diverged = not math.isfinite(step.loss)

    def log_validation(self, tokens: int, losses: dict) -> None:
        T = next(T for T in self.look_at if tokens <= T)
        loss = losses["val_loss"]
        lost = not loss <= math.log(self.cfg.vocab_size)  # also if it is NaN
        self.looks[f"val_loss_at_{T}"] = None if lost else loss

    def save(self, checkpoint: dict) -> None:
        if checkpoint["tokens"] <= self.cfg.decay_start:
            more = {
                "looks": self.looks,
                "curve": self.curve,
                "losses": [loss.item() for loss in self.losses],
                "commits": self.commits,
            }
            runs.write_checkpoint(self.path, checkpoint | more)


def make_run(
    cfg: TrainConfig, corpus, folder: Path, must_stop=runs.never, look_at=()
) -> tuple[dict, list] | None:
    """Continue the trunk of a run to its decay, and decay. Return record and curve.

    The next run of this trunk starts there. If must_stop(), we save the trunk as far as
    it is and return None.
    """
    never = 10**18
    quiet = dataclasses.replace(
        cfg, eval_every=never, save_every=never, eval_tokens=cfg.final_eval_tokens
    )
    trunk = Trunk(cfg, corpus, folder, look_at)
    began = time.perf_counter()
    start = trunk.start["tokens"] if trunk.start else 0
    state = train.train(quiet, corpus, trunk, trunk.start, must_stop)
    if state is None:
        return None
    _, results = train.evaluate(cfg, state, corpus)
    seconds = time.perf_counter() - began  # without earlier runs of the trunk
    results |= trunk.looks
    results["seconds"] = round(seconds, 1)
    results["tokens_per_second"] = round((state.tokens - start) / seconds)
    commits = ", ".join(commit for commit in trunk.commits if commit) or None
    origin = trunk.origin | {"git_commit": commits}
    record = {"config": dataclasses.asdict(cfg), "results": results, "origin": origin}
    every = math.ceil(len(trunk.curve) / POINTS)
    return record, trunk.curve[:: max(1, every)]


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
    skip = unread(fields["schedule"])
    return make_config(
        **{name: value for name, value in fields.items() if name not in skip}
    )


def guess(grid: dict, cfg: TrainConfig) -> int:
    """Number of the learning rate at which the search for the best one starts."""
    longer = cfg.total_tokens / grid["budgets"][0]
    # ∝ √batch, T^-0.2
    lr = grid["guess"] * (cfg.batch_tokens / 1024) ** 0.5 * longer**-0.2
    return 2 * round(math.log2(lr / nth_lr(0)))  # even, as the paper's learning rates are


def wsd_runs(grid: dict, base: dict, loss: Callable) -> list[TrainConfig]:
    """WSD with the best learning rate of every T."""

    def run(j: int, T: int) -> TrainConfig:
        return config_of_run(
            **base | {"schedule": "wsd", "lr": nth_lr(j), "total_tokens": T}
        )

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


# -- Training the missing runs -----------------------------------------------------------


def unknown(cfg: TrainConfig) -> None:
    """The loss of an unfinished run."""
    return None


class Plan(NamedTuple):
    """A sweep, its known losses, and the runs to train next."""

    grid: dict
    series: list[Callable]  # their rules
    # identity of a run -> its loss, infinite if it diverged
    known: dict[frozenset, float]

    def missing(self, made_up: Callable = unknown) -> list[TrainConfig]:
        """The runs that we can train now. made_up(config) is the loss of an unknown run."""

        def loss(cfg: TrainConfig) -> float | None:
            return self.known.get(identity_of(cfg), made_up(cfg))

        wanted: dict = {}  # in the order of the series, without doubles
        for rule in self.series:
            wanted |= dict.fromkeys(rule(loss))
        return [cfg for cfg in wanted if identity_of(cfg) not in self.known]

    def left(self) -> list[TrainConfig]:
        """All runs to come, if all unknown losses are high, and lowest at our guess."""

        def made_up(cfg: TrainConfig) -> float:
            return 100 + abs(2 * math.log2(cfg.lr / nth_lr(0)) - guess(self.grid, cfg))

        return self.missing(made_up)

    def jobs(self) -> dict[str, tuple]:
        """{trunk: (its next run, T at which to look at the loss without a decay)}, longest first.

        We look at the longest cosine at all shorter T, for its loss if cut short there.
        """
        *shorter, longest = self.grid["budgets"]
        cost = {}
        jobs = {}
        for trunk, configs in by_trunk(self.missing()).items():
            cfg = configs[0]
            cut_short = is_planned(cfg.schedule) and cfg.total_tokens == longest
            jobs[trunk] = cfg, shorter if cut_short else []
            cost[trunk] = tokens_of(configs) * cfg.n_embd
        return {trunk: jobs[trunk] for trunk in sorted(jobs, key=cost.get, reverse=True)}

    def learn(self, record: dict) -> None:
        cfg = TrainConfig(**record["config"])
        self.known[identity_of(cfg)] = records.row(record)["loss"]


def do_job(
    cfg: TrainConfig, folder: Path, look_at: list[int], device: str, must_stop: Callable
):
    """Make a run on any machine. Returns (record, curve), or None if stopped."""
    corpus = open_corpus(cfg.data, cfg.tokenizer)
    tokenizer = data.tokenizer_name(cfg, corpus)
    cfg = devices.resolve_device(
        dataclasses.replace(cfg, device=device, tokenizer=tokenizer)
    )
    threads = torch.get_num_threads()
    try:
        if cfg.device == "cpu":
            torch.set_num_threads(1)  # a worker per core
        return make_run(cfg, corpus, folder, must_stop, look_at)
    finally:
        torch.set_num_threads(threads)


@functools.cache
def open_corpus(data_flag: str | None, tokenizer: str) -> data.Corpus:
    return data.load_corpus(data_flag, tokenizer)


def train_missing(
    plan: Plan, folder: Path, submit: Callable, slots: int, must_stop, stop
) -> None:
    """Make the runs that the plan lacks, at most `slots` at a time. Only we write their records.

    submit: an engine (tools/engines.py). stop: called once must_stop(), to stop its jobs.
    """
    trunks = folder.resolve() / "trunks"
    running: dict = {}  # trunk -> the future of its next run
    todo = plan.jobs()
    before = len(plan.known)
    stopping = False
    failure = None
    with (
        tqdm(total=len(plan.left()), unit=" runs") as bar,
        files.append_to(folder / "curves.jsonl") as curves,
        files.append_to(folder / "records.jsonl") as lines,
    ):
        while todo or running:
            # 1. Start jobs, or stop the running jobs
            if must_stop() and not stopping:
                stopping = True
                message = f"stopping, {len(running)} jobs save their progress"
                bar.write(message, file=sys.stderr)
                stop()
            todo = {} if stopping else todo
            for trunk, (cfg, look_at) in todo.items():
                if trunk not in running and len(running) < slots:
                    running[trunk] = submit(do_job, cfg, trunks, look_at)

            # 2. Write the results of the jobs that ended
            done = [trunk for trunk, future in running.items() if future.done()]
            for trunk in done:
                try:
                    result = running.pop(trunk).result()
                except Exception as error:
                    # after a request to stop, an engine may cancel jobs
                    if not stopping or devices.reason_of(error):
                        failure = failure or error
                    continue
                if result:
                    record, curve = result
                    curve = dict(zip(("tokens", "loss", "lr"), zip(*curve)))
                    config = records.settings(record["config"])
                    line = {"config": config, "curve": curve}
                    curves.write(json.dumps(line) + "\n")
                    lines.write(json.dumps(record) + "\n")
                    plan.learn(record)
            if failure and not stopping:  # the others save their progress
                stopping = True
                stop()

            # 3. Plan again with the new losses
            if not done:
                time.sleep(0.02)
                continue
            todo = plan.jobs()
            finished = len(plan.known) - before
            bar.total = finished + len(plan.left())
            bar.update(finished - bar.n)
    if failure:
        raise failure


# -- The command line --------------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict]:
    """Command line -> (our arguments, the typed fields of train.py)."""
    # reads the values like their flags
    fields = flags.program_parser("sweep.py --sweep", "")
    flags.add_flags(fields, TrainConfig, {})

    def parse_field(name: str, text: str):
        return getattr(fields.parse_args([f"--{name}={text}"]), name)

    parser = flags.program_parser("sweep.py", __doc__)
    scales = tuple(grids.GRIDS["wsd"])
    sweep_flags.add_sweep_flags(parser, tuple(grids.GRIDS), scales, parse_field)
    flags.add_flags(parser, TrainConfig, {})
    args = parser.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if name in config.FIELDS}
    args.out = Path(typed.pop("out", f"runs/{args.experiment}-{args.scale}"))
    return args, typed


def prepare(args: argparse.Namespace, typed: dict) -> Plan:
    """Check the command line and the records in --out. Raises UserError or OSError."""
    if args.slurm and args.engine != "slurm":
        raise UserError(
            f"--slurm {args.slurm[0][0]}: has no effect without --engine slurm"
        )
    typed = train.with_vocabulary(train.with_absolute_paths(typed))
    if args.engine == "local":
        typed["device"] = devices.pick_device(typed.get("device", "auto"))
    grid = grids.changed(grids.GRIDS[args.experiment][args.scale], args, typed)
    plan = Plan(grid, series_of(args.experiment, grid), {})
    configs = plan.left()
    asked = {name: [value] for name, value in typed.items()} | dict(args.sweep)
    grids.check_fields(asked, configs)
    largest = max(configs, key=lambda cfg: (cfg.seq_len, cfg.n_embd))
    _, corpus = train.load_data(largest, typed, None)

    found = records.read_records(args.out)
    free = ("seed", "data_seed")  # a folder may have more seeds than a sweep
    if args.experiment != "power":
        free += ("lr", "power_a")  # found by a search, or tuned
    ours = [vars(cfg) for cfg in configs]
    grids.check_belongs(found, ours, corpus.meta["fingerprint"], free, args.out)
    for record in found:
        plan.learn(record)
    return plan


def main(argv: list[str] | None = None, submit: Callable | None = None) -> int:
    """submit: an engine in place of --engine, as in docs/train.md, for --workers jobs at a time.

    It must not do the jobs in our main thread, which would not notice a Ctrl-C.
    """
    args, typed = parse(argv)
    try:
        plan = prepare(args, typed)
        if not args.dry_run:
            args.out.mkdir(parents=True, exist_ok=True)
            held = files.lock(args.out / ".lock")
            if not held:
                raise UserError(f"--out {args.out}: another sweep is running there")
    except (UserError, OSError) as error:
        return flags.fail("sweep.py", error)
    left = plan.left()
    todo = f"at least {len(left):,} with {tokens_of(left):.3g} tokens are left"
    todo = f"{args.out}: {len(plan.known):,} runs are done, {todo}"
    if left:
        first = records.flags_of(vars(left[0]))
        todo += f"\nthe first of them, besides its schedule: {first}"
    if args.dry_run:
        flags.say(todo)
        return 0
    try:
        with held, runs.stop_request(None) as must_stop:
            flags.say(todo)
            if left:
                with engine(args, left[0].device, submit, must_stop) as (
                    submit,
                    slots,
                    stop,
                ):
                    train_missing(plan, args.out, submit, slots, must_stop, stop)
            return conclude(args.out, plan, must_stop())
    except BrokenExecutor:
        return flags.fail(
            "sweep.py", "a worker died; out of memory? The same command resumes"
        )
    except UserError as error:
        return flags.fail("sweep.py", error)
    except Exception as error:
        reason = devices.reason_of(error)
        if reason is None:
            raise
        return flags.fail("sweep.py", f"{reason}. The same command resumes")


def conclude(out: Path, plan: Plan, stopped: bool) -> int:
    """Say how the sweep ended, and return the exit status."""
    if stopped:
        flags.say("stopped and saved; the same command resumes")
        return 3
    shutil.rmtree(out / "trunks", ignore_errors=True)
    folder = shlex.quote(str(out))
    flags.say(f"finished: {len(plan.known):,} runs; next: python fit.py {folder}")
    return 0


@contextlib.contextmanager
def engine(args, device: str, submit: Callable | None, must_stop: Callable):
    """Yield submit, the number of jobs at a time, and a function that stops all jobs."""

    def no_stop() -> None:
        pass

    asked = getattr(args, "device", "auto")  # for another machine
    if submit:
        yield (
            functools.partial(submit, engines.do_anywhere, asked),
            args.workers or 1,
            no_stop,
        )
    elif args.engine == "slurm":
        options = dict(args.slurm)
        with engines.on_slurm(args.out / "slurm", options, asked) as (submit, stop):
            yield submit, args.workers or 1, stop
    else:
        each = devices.all_devices(device, args.workers)
        if len(each) == 1:
            yield engines.in_this_process(each[0], must_stop), 1, no_stop
        else:
            with engines.in_processes(each) as (submit, stop):
                yield submit, len(each), stop


if __name__ == "__main__":
    import sweep  # so that other processes find the functions of jobs in a module

    sys.exit(sweep.main())
