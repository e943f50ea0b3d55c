"""Garbage collection in a broker: long-lived objects are scanned only once.

A collection stops all threads while it scans; a full one scans all objects: 50 ms for 2,000 topics, a second for a
million offsets. So the survivors of a slow full collection are frozen (`gc.freeze`), and later collections skip them.
Frozen objects are still freed when their last reference goes, but frozen cycles never are: logs, topics, groups and
connections must not leave cycles behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Processor time of a full collection above which its survivors are frozen.
_LONG_SECONDS = 0.005
_FULL = 2


@contextmanager
def short_collections() -> Iterator[None]:
    """Freeze the survivors of slow full collections while the context is open."""
    started = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if info["generation"] != _FULL:
            return
        if phase == "start":
            started = time.thread_time()
        elif time.thread_time() - started >= _LONG_SECONDS:
            gc.freeze()

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


@contextmanager
def uncollected() -> Iterator[None]:
    """Create many long-lived objects without collections, and freeze them at the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
