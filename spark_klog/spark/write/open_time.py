"""Warnings of an exactly-once sink whose transactions are open for long: read_committed readers wait for them.

The driver decides no micro-batch that took more than half of the transactions' timeout. The warnings come after a
quarter: of a task that writes still, and of a micro-batch that was late but will be decided.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_CURE = (
    "read_committed readers of its topics wait meanwhile, and after half of kafka.transaction.timeout.ms (%g s) "
    "nothing is written: write less at a time, or set it higher"
)


def _warned_after(timeout_ms: int) -> float:
    return timeout_ms / 4000


@contextmanager
def warning_of_open_transaction(timeout_ms: int, what: str, task: int) -> Iterator[None]:
    """Log a warning if the block, in which a task writes, takes a quarter of the transaction's timeout.

    A thread does so, as the task may wait for its next row for long.
    """
    seconds = _warned_after(timeout_ms)
    text = f"task %d of %s has written for %g s: {_CURE}"
    timer = threading.Timer(seconds, _log.warning, (text, task, what, seconds, timeout_ms / 2000))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn_if_late(took: float, timeout_ms: int, what: str) -> None:
    """Log a warning if what is written took more than a quarter of the timeout in seconds until its decision."""
    if took > _warned_after(timeout_ms):
        _log.warning(f"%s took %.1f s until it was decided: {_CURE}", what, took, timeout_ms / 2000)
