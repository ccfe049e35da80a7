"""Where jobs run: in this process, in one process per core or GPU, or on a Slurm cluster.

An engine is a function submit(job, *arguments) that returns a future with done() and result(), like
those of concurrent.futures. A job is a function that takes, after its arguments, the device to use
and must_stop(). Once that is true, it should save what it has and return None.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from tools.config import UserError
from tools.runs import stop_request

ROOT = Path(__file__).parent.parent

# -- In this process -------------------------------------------------------------------------------


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


# -- In several processes of this machine ----------------------------------------------------------


@contextlib.contextmanager
def in_processes(devices: list[str]) -> Iterator[tuple[Callable, Callable]]:
    """Start a process per device. Yield submit, and a function that asks all jobs to stop."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    stop, free = context.Event(), context.SimpleQueue()
    for device in devices:
        free.put(device)
    pool = ProcessPoolExecutor(len(devices), context, Worker.start, (stop, free))
    # processes inherit that we ignore signals, until Worker.start decides for itself
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    pool.submit(os.getpid)  # starts them
    for number, handler in before.items():
        signal.signal(number, handler)
    try:
        with pool:
            try:
                yield lambda job, *args: pool.submit(Worker.do, job, *args), stop.set
            finally:
                stop.set()
    finally:
        free.close()


class Worker:
    """The state of a worker process. It outlives neither its parent nor a SIGTERM.

    Ctrl-C and a lost terminal reach the parent too, which then asks us to stop.
    """

    busy = ending = False
    stop = device = None
    parent = None

    @classmethod
    def start(cls, stop, free) -> None:
        cls.stop, cls.device = stop, free.get()
        cls.parent = multiprocessing.parent_process()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: cls.end())
        threading.Thread(target=lambda: (cls.parent.join(), cls.end()), daemon=True).start()

    @classmethod
    def end(cls) -> None:
        """End now, or after the job has saved what it has."""
        cls.ending = True
        if not cls.busy:
            os._exit(1)

    @classmethod
    def do(cls, job: Callable, *args):
        cls.busy = True
        result = job(*args, cls.device, lambda: cls.ending or cls.stop.is_set())
        cls.busy = False
        if cls.ending:
            os._exit(1)
        return result


# -- On a cluster ----------------------------------------------------------------------------------


def on_slurm(folder: Path, options: dict) -> tuple[Callable, Callable]:
    """submit, and a function that cancels all jobs. Without Slurm, submitit uses this machine.

    options: parameters of submitit, such as timeout_min or slurm_partition.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--engine slurm: needs submitit; pip install submitit") from None
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)  # jobs import us
    executor, jobs = submitit.AutoExecutor(folder), []
    try:
        executor.update_parameters(name="sweep", **options)
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"--slurm: {str(error).splitlines()[0]}") from None

    def submit(job: Callable, *args):
        jobs.append(executor.submit(do_anywhere, job, *args))
        return jobs[-1]

    def stop() -> None:
        for job in jobs:
            if not job.done():
                job.cancel(check=False)

    return submit, stop


def do_anywhere(job: Callable, *args):
    """Do a job on a machine of a cluster, where a signal asks to stop.

    Slurm sends SIGTERM if we cancel a job, and submitit SIGUSR2 before its time limit.
    """
    if threading.current_thread() is not threading.main_thread():  # as in Dask
        return job(*args, "auto", lambda: False)
    with stop_request(None, signal.SIGUSR2) as must_stop:
        return job(*args, "auto", must_stop)
