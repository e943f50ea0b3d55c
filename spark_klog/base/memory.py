"""Memory that several threads share, where one waits until others have done; and rest for the garbage collector."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Where a container's limit stands: of cgroup version 2, and of version 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """The memory that this process may have: the machine's, or its container's."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            sizes.append(int(Path(path).read_text("ascii")))
    return min(sizes)


@contextmanager
def uncollected(*, freezes: bool = False) -> Iterator[None]:
    """Create many objects without a search for cycles, of which they have none.

    With `freezes` they live long, and no later collection looks at them.
    """
    if freezes:
        gc.collect(1)  # what is garbage now would stay for ever
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.freeze()
        if was_enabled:
            gc.enable()


class MemoryRoom:
    """Room for `most` bytes in all. Whoever came first gets it first; one who needs more than that has it alone."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Hold so many bytes; waits until there are so many."""
        size, mine = min(size, self.most), object()
        with self._changed:
            self._waiting.append(mine)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is mine and self._held + size <= self.most)
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
