"""Processes for tests: forks of one that has imported train, which takes seconds."""

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

import train

context = multiprocessing.get_context("forkserver")
# the first optimizer imports torch._dynamo, and the first figure pyplot
context.set_forkserver_preload(
    ["train", "torch._dynamo", "matplotlib.pyplot", "pytest", "test_train"]
)


def start(function: Callable, *args, **environment: str) -> BaseProcess:
    """Call a function in a new process, whose exit status is what the function returns.

    What it prints is in PID.out and PID.err.
    """
    process = context.Process(target=call, args=(function, args, environment))
    with pytest.MonkeyPatch.context() as patch:
        # the first start is also that of the server. It forgets sys.path in Python 3.11
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        process.start()
    return process


def call(function: Callable, args: tuple, environment: dict) -> None:
    for stream, ending in enumerate(("out", "err"), start=1):
        os.dup2(os.open(f"{os.getpid()}.{ending}", os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    torch.set_num_threads(1)
    train.sample = partial(train.sample, max_new_tokens=20)  # as in conftest
    sys.exit(function(*args))


def die_before_rename(k: int, function: Callable, *args) -> int:
    """Call a function, and end like a killed process before it renames its k-th file."""
    renames = itertools.count(1)
    replace = os.replace

    def counted(*paths) -> None:
        if next(renames) == k:
            os._exit(9)
        replace(*paths)

    os.replace = counted
    return function(*args)


def printed(process: BaseProcess) -> tuple[str, str]:
    """Its standard output and standard error."""
    files = [Path(f"{process.pid}.{ending}") for ending in ("out", "err")]
    return tuple(file.read_text() for file in files)
