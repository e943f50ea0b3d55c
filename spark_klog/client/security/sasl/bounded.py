"""Calls of libraries that have no timeout of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(deadline: float, work: Callable[[], _T], name: str) -> _T:
    """The result of `work`, which runs in a thread of its own; what it raises is raised here.

    TimeoutError at `deadline`, a reading of `time.monotonic`. The thread then ends by itself, and its result is
    dropped.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised to the caller
            failures.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError
    return results[0]
