"""Worker processes: each receives jobs through a pipe and sends back results as they come."""

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Callable, Iterator


def serve(connection, prepare: Callable, args: tuple) -> None:
    """Life of a worker. prepare(*args) -> a function (job, must_stop) -> results.

    It ends when its parent says so, closes the pipe, or dies. What arrives during a job means stop.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    work = prepare(*args)
    with contextlib.suppress(EOFError, ConnectionError):
        while (job := connection.recv()) != "stop":
            for result in work(job, connection.poll):
                connection.send(result)
            connection.send(None)  # done


def start_worker(prepare: Callable, *args):
    """Start a process that serves; return our end of its pipe."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs, prepare, args), daemon=True).start()
    theirs.close()  # or we would not notice that the worker died
    return ours


def deal(workers: list, jobs: Callable[[], dict], must_stop: Callable) -> Iterator[tuple]:
    """Give out jobs until none is left, or must_stop(); yield (name, result), None at a job's end.

    jobs() -> {name: job} of the jobs that can be started now; it is asked again after every result.
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
        names = jobs() if idle else {}
        names = {name: job for name, job in names.items() if name not in running.values()}
        for worker, (name, job) in zip(idle, names.items()):
            worker.send(job)
            running[worker] = name
        if not running:
            return
        for worker in multiprocessing.connection.wait(list(running), timeout=0.5):
            result = worker.recv()
            yield running[worker], result
            if result is None:
                del running[worker]
