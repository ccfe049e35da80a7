"""A folder as a queue of jobs for any number of processes, on one machine or on several."""

import fcntl
import json
import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.config import UserError
from tools.files import append_to, lock
from tools.runs import stop_request


def join(folder: Path, name: str):
    """Share a folder with processes of the same sweep, until what we return is closed.

    name: of the sweep. Raises UserError if a process of a different sweep is there.
    """
    ours = folder / f".sweep-{name}"
    file = open(ours, "w")
    fcntl.flock(file, fcntl.LOCK_SH)
    if not all(lock(other) for other in folder.glob(".sweep-*") if other != ours):
        raise UserError(f"--out {folder}: a different sweep is running there")
    return file


def do_jobs(folder: Path, jobs: Callable, do: Callable, must_stop: Callable) -> Iterator[None]:
    """Do what is missing, job by job, and yield after each. Other processes may do the same.

    jobs() returns the missing ones, {name: job}. do(job) returns {file: line to append}, or None.
    All processes read and write the files one after the other, under a lock. Each holds a lock on
    the job that it does, which the system removes if the process dies.
    """
    locks = folder / "trunks"
    locks.mkdir(exist_ok=True)
    while not must_stop():
        with lock(folder / ".queue", wait=True):
            missing, held = jobs(), None
            for name in missing:  # find the first that no process does
                if held := lock(locks / f"{name}.lock"):
                    break
        if not missing:
            return
        if not held:  # others do all that is missing, and more may follow from it
            time.sleep(0.5)
            continue
        with held:
            if lines := do(missing[name]):
                with lock(folder / ".queue", wait=True):
                    for file, line in lines.items():
                        with append_to(folder / file) as stream:
                            stream.write(json.dumps(line) + "\n")
        yield


def run_worker(work: Callable, *args) -> None:
    """Exhaust work(*args, must_stop), and stop at Ctrl-C, at SIGTERM, or if our parent has died."""
    parent = multiprocessing.parent_process()
    with stop_request(None) as stop:
        for _ in work(*args, lambda: stop() or not parent.is_alive()):
            pass


def run_workers(all_args: list[tuple], must_stop: Callable) -> Iterator[None]:
    """run_worker(*args) in a process for every args. Yield twice a second until all have ended.

    After must_stop(), or if a process dies, all get SIGTERM. Raises ChildProcessError if one dies.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    # workers inherit that we ignore signals, and ignore them until run_worker handles them
    before = {x: signal.signal(x, signal.SIG_IGN) for x in (signal.SIGINT, signal.SIGTERM)}
    workers = [context.Process(target=run_worker, args=args, daemon=True) for args in all_args]
    for worker in workers:
        worker.start()
    for x, handler in before.items():
        signal.signal(x, handler)
    while running := [worker for worker in workers if worker.is_alive()]:
        multiprocessing.connection.wait([worker.sentinel for worker in running], timeout=0.5)
        if must_stop() or any(worker.exitcode for worker in workers):
            for worker in running:
                worker.terminate()
        yield
    if any(worker.exitcode for worker in workers):
        raise ChildProcessError("a worker died")
