"""The system's clock."""

from __future__ import annotations

import time


def system_ms() -> int:
    """The current time in ms since the epoch."""
    return time.time_ns() // 1_000_000
