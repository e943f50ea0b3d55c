"""Python's garbage collection in a broker: what lives long is looked at once.

A collection holds up all threads while it looks at objects, and a full one looks at all of them: 50 ms for 2,000
topics, a second for a million offsets. So what survives a full collection that takes long is frozen (`gc.freeze`):
later ones pass it over. A frozen object is freed as any other when nothing refers to it; a cycle of them would
stay, so logs, topics, groups and connections must not leave any when they go.
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
    """Freeze the survivors of full collections that take long, until the end."""
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
    """Make many objects that stay, without collections; they are frozen at the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
