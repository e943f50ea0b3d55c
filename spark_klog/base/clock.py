"""The system's clock, and pauses."""

from __future__ import annotations

import time

_MOST_DOUBLINGS = 30


def system_ms() -> int:
    """The current time in ms since the epoch."""
    return time.time_ns() // 1_000_000


def doubled(first: float, longest: float, failures: int) -> float:
    """The pause after `failures` in a row: the first one, which each failure doubles up to `longest`."""
    return float(min(first * 2 ** min(failures - 1, _MOST_DOUBLINGS), longest))
