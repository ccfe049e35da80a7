"""Where jobs run: in this process, in one process per core or GPU, or on a Slurm cluster.

An engine is a context. It yields submit(job, *arguments), which returns a future as those
of concurrent.futures, and stop(), which asks all running jobs to stop. A job is a
function that takes, after its arguments, the device to use and must_stop(). Once that is
true, it should save what it has and return.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from pathlib import Path

from tools.flags import UserError
from tools.signals import stop_request

ROOT = Path(__file__).parent.parent


def was_stopped(error: Exception) -> bool:
    """Did a job end without a result because we stopped it? Else the error is its own.

    A worker ends after a SIGTERM, which may reach all our processes. The error of a
    canceled job of submitit, which need not be installed, has this name.
    """
    name = type(error).__name__
    return isinstance(error, BrokenExecutor) or name == "UncompletedJobError"


@contextlib.contextmanager
def in_this_process(device: str, must_stop: Callable) -> Iterator[tuple]:
    """Do every job at once. What makes must_stop() true stops it."""

    def submit(job: Callable, *args) -> Future:
        future: Future = Future()
        try:
            future.set_result(job(*args, device, must_stop))
        except Exception as error:
            future.set_exception(error)
        return future

    yield submit, lambda: None


# -- In several processes of this machine ------------------------------------------------


@contextlib.contextmanager
def in_processes(devices: list[str]) -> Iterator[tuple]:
    """Start a process per device."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    try:
        stop_event = context.Event()
        free = context.SimpleQueue()
        pool = ProcessPoolExecutor(
            len(devices), context, start_worker, (stop_event, free)
        )
    except OSError as error:
        raise UserError(
            f"--workers {len(devices)}: several processes need shared memory in /dev/shm "
            f"({error.strerror}); mount it, or use --workers 1"
        ) from None
    for device in devices:
        free.put(device)

    # Ctrl-C and a lost terminal reach all processes of ours. Workers inherit that these
    # signals wait, for ever, and we ask them to stop. For us they wait until all have
    # started. (The pool starts a process for every job, while none is idle.)
    others = multiprocessing.active_children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    for _ in devices:
        pool.submit(os.getpid)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    workers = [p.pid for p in multiprocessing.active_children() if p not in others]

    def stop() -> None:
        stop_event.set()
        names = ", ".join(map(str, workers))
        print(f"stopping, processes {names} save their progress", file=sys.stderr)

    with pool:
        try:
            yield functools.partial(pool.submit, do_in_worker), stop
        finally:
            stop_event.set()


def start_worker(stop_event, free) -> None:
    """In a new worker, before its first job."""
    global device, stop
    device = free.get()
    stop = stop_event
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def do_in_worker(job: Callable, *args):
    """Do a job, and end after a SIGTERM, which we get if another worker has died."""
    with stop_request() as told:
        try:
            return job(*args, device, lambda: told() or stop.is_set())
        finally:
            if told():
                os._exit(1)


# -- On a cluster ------------------------------------------------------------------------


@contextlib.contextmanager
def on_slurm(folder: Path, options: dict, device: str) -> Iterator[tuple]:
    """Start a job of Slurm for every job.

    options: parameters of submitit, such as timeout_min or slurm_partition. Without
    Slurm, submitit starts its jobs on this machine.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--engine slurm: needs submitit; pip install submitit") from None
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    # jobs import us
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    executor = submitit.AutoExecutor(folder)
    try:
        executor.update_parameters(name="sweep", **options)
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"--slurm: {str(error).splitlines()[0]}") from None
    jobs = []

    def submit(job: Callable, *args):
        jobs.append(executor.submit(do_on_cluster, device, job, *args))
        return jobs[-1]

    def stop() -> None:
        for job in jobs:
            if not job.done():
                job.cancel(check=False)

    try:
        yield submit, stop
    finally:
        stop()


def do_on_cluster(device: str, job: Callable, *args):
    """Slurm sends SIGTERM if we cancel a job, and submitit SIGUSR2 before its time limit."""
    with stop_request(None, signal.SIGUSR2) as must_stop:
        return job(*args, device, must_stop)
