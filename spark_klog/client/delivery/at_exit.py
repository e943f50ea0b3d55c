"""Write the records that producers still hold when the interpreter exits, for a bounded time."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)
#: For all producers together.
SECONDS = 10.0


class Unclosed(Protocol):
    """A producer that was perhaps not closed."""

    def finish_at_exit(self, until: float) -> None:
        """Write what is left, up to `until`, a reading of `time.monotonic`; warn of what is lost."""


_unclosed: weakref.WeakSet[Unclosed] = weakref.WeakSet()


def remember(producer: Unclosed) -> None:
    """Have `finish_at_exit` called at the interpreter's exit if the producer is still there."""
    _unclosed.add(producer)


@atexit.register
def _finish() -> None:
    until = time.monotonic() + SECONDS
    for producer in list(_unclosed):
        try:
            producer.finish_at_exit(until)
        except Exception:  # the others have their turn
            _log.exception("records that a producer had not written at exit are lost")
