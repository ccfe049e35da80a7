"""Where jobs run: in this process, in one process per core or GPU, or on a Slurm cluster.

An engine is a function submit(job, *arguments) that returns a future with done() and
result(), like those of concurrent.futures. A job is a function that takes, after its
arguments, the device to use and must_stop(). Once that is true, it should save what it
has and return None.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from tools.flags import UserError
from tools.runs import never, stop_request

ROOT = Path(__file__).parent.parent

# -- In this process ---------------------------------------------------------------------


def in_this_process(device: str, must_stop: Callable) -> Callable:
    """The engine that does a job at once."""

    def submit(job: Callable, *args) -> Future:
        future: Future = Future()
        try:
            future.set_result(job(*args, device, must_stop))
        except Exception as error:
            future.set_exception(error)
        return future

    return submit


# -- In several processes of this machine ------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def in_processes(devices: list[str]) -> Iterator[tuple[Callable, Callable]]:
    """Start a process per device. Yield submit, and a function that asks all jobs to stop."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    stop = context.Event()
    free = context.SimpleQueue()
    for device in devices:
        free.put(device)
    pool = ProcessPoolExecutor(len(devices), context, start_worker, (stop, free))
    # Processes inherit that signals wait, until start_worker has decided about them. Ours
    # wait only until all processes have started, so that an early Ctrl-C is not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for _ in devices:
        # the pool starts a process for every job, while none is idle
        pool.submit(os.getpid)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with pool:
        try:
            yield functools.partial(pool.submit, do_in_worker), stop.set
        finally:
            stop.set()


worker = SimpleNamespace(busy=False, ending=False)  # the state of a worker process


def start_worker(stop, free) -> None:
    """Ctrl-C and a lost terminal reach our parent too, which then asks us to stop.

    A worker ends after a SIGTERM, and if its parent has died.
    """
    worker.stop = stop
    worker.device = free.get()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_worker)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    end_worker()


def end_worker(*_) -> None:
    """End now, or after the job has saved what it has."""
    worker.ending = True
    if not worker.busy:
        os._exit(1)


def must_stop() -> bool:
    return worker.ending or worker.stop.is_set()


def do_in_worker(job: Callable, *args):
    worker.busy = True
    try:
        return job(*args, worker.device, must_stop)
    finally:
        worker.busy = False
        if worker.ending:
            os._exit(1)


# -- On a cluster ------------------------------------------------------------------------


@contextlib.contextmanager
def on_slurm(
    folder: Path, options: dict, device: str
) -> Iterator[tuple[Callable, Callable]]:
    """Yield submit, and a function that cancels all jobs.

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
    jobs = []
    try:
        executor.update_parameters(name="sweep", **options)
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"--slurm: {str(error).splitlines()[0]}") from None

    def submit(job: Callable, *args):
        jobs.append(executor.submit(do_anywhere, device, job, *args))
        return jobs[-1]

    def stop() -> None:
        for job in jobs:
            if not job.done():
                job.cancel(check=False)

    try:
        yield submit, stop
    finally:
        stop()


def do_anywhere(device: str, job: Callable, *args):
    """Do a job on a machine of a cluster, where a signal asks to stop.

    Slurm sends SIGTERM if we cancel a job, and submitit SIGUSR2 before its time limit.
    """
    if threading.current_thread() is not threading.main_thread():  # as in Dask
        return job(*args, device, never)
    with stop_request(None, signal.SIGUSR2) as must_stop:
        return job(*args, device, must_stop)
