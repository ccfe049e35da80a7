"""Worker processes, which receive jobs through a pipe and send back results as they come."""

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Callable, Iterator

import torch


def serve(connection, prepare: Callable, args: tuple) -> None:
    """Run in a worker. prepare(*args) returns the function (job, must_stop) -> result.

    End when the parent closes the pipe or dies. A message during a job means stop.
    """
    work = prepare(*args)
    with contextlib.suppress(EOFError, ConnectionError):
        while (job := connection.recv()) != "stop":
            connection.send(work(job, connection.poll))


@contextlib.contextmanager
def start_workers(device: str, number: int | None, prepare: Callable, *args):
    """Start processes that call prepare(device, *args). Yield our ends of their pipes.

    number: None is one per GPU, or one per CPU core. At the end, wait until all have ended.
    """
    n = {"cpu": torch.get_num_threads(), "cuda": torch.cuda.device_count()}.get(device, 1)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    # Ctrl-C reaches all processes, but workers inherit that they ignore it, and the parent decides
    before = {x: signal.signal(x, signal.SIG_IGN) for x in (signal.SIGINT, signal.SIGTERM)}
    workers = []
    for i in range(number or n):
        ours, theirs = context.Pipe()
        one = f"cuda:{i % n}" if device == "cuda" else device
        context.Process(target=serve, args=(theirs, prepare, (one, *args)), daemon=True).start()
        theirs.close()  # or we would not notice that the worker died
        workers.append(ours)
    for x, handler in before.items():
        signal.signal(x, handler)
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()  # if it still trains after an error, it saves its trunk and ends
        for process in multiprocessing.active_children():
            process.join()


def deal(workers: list, jobs: Callable[[], dict], must_stop: Callable) -> Iterator:
    """Give out jobs until none is left, or must_stop(). Yield the results, except None.

    jobs() returns {name: job} of the jobs that may start now. We call it again after every result.
    Raises EOFError or ConnectionError if a worker dies.
    """
    running: dict = {}  # worker -> name of its job
    stopping = False
    while True:
        if must_stop() and not stopping:
            stopping = True
            for worker in running:
                worker.send("stop")
        idle = [worker for worker in workers if worker not in running and not stopping]
        ready = jobs() if idle else {}
        ready = {name: job for name, job in ready.items() if name not in running.values()}
        for worker, (name, job) in zip(idle, ready.items()):
            worker.send(job)
            running[worker] = name
        if not running:
            return
        for worker in multiprocessing.connection.wait(list(running), timeout=0.5):
            del running[worker]
            if (result := worker.recv()) is not None:
                yield result
