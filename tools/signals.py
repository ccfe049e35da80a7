"""Ctrl-C and other signals as a request to stop, which a program fulfills when it can."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator


def never() -> bool:
    """Must we stop? No."""
    return False


@contextlib.contextmanager
def stop_request(time_limit: float | None = None, *more: int) -> Iterator[Callable]:
    """Yield a function that is true after Ctrl-C, SIGTERM, SIGHUP or time_limit seconds.

    more: further signals. SIGHUP comes if the terminal is closed, and from `flags.say` if
    nobody reads our output any more.
    """
    end = time.perf_counter() + (math.inf if time_limit is None else time_limit)
    signals = []

    def note(number, _frame):
        signals.append(number)
        if number == signal.SIGINT:  # a second Ctrl-C kills, but clusters repeat SIGTERM
            signal.signal(number, signal.SIG_DFL)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # started with nohup
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}

    def must_stop() -> bool:
        return bool(signals) or time.perf_counter() > end

    try:
        yield must_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
