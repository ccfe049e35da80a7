"""Worker processes, one for each GPU or CPU core."""

import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Callable, Iterator

import torch


def devices_of(device: str, number: int | None) -> list[str]:
    """The device of every worker. number: None is one per GPU, or one per CPU core."""
    n = {"cpu": torch.get_num_threads(), "cuda": torch.cuda.device_count()}.get(device, 1)
    return [f"cuda:{i % n}" if device == "cuda" else device for i in range(number or n)]


def run_workers(target: Callable, all_args: list[tuple], must_stop: Callable) -> Iterator[None]:
    """Call target(*args) in a process for every args. Yield twice a second until all have ended.

    After must_stop(), or if one of them dies, all get SIGTERM. Raises ChildProcessError if one dies.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    # until they can handle signals, workers ignore them. They inherit that from us
    before = {x: signal.signal(x, signal.SIG_IGN) for x in (signal.SIGINT, signal.SIGTERM)}
    workers = [context.Process(target=target, args=args, daemon=True) for args in all_args]
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
