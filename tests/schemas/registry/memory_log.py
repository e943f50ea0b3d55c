"""A registry's log in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from spark_klog.schemas.registry.server.records import Record, dumps
from spark_klog.schemas.registry.server.state import State


class MemoryLog:
    """A log in memory, in place of `SchemaLog`."""

    def __init__(self) -> None:
        self.state = State()
        self.lock = threading.Condition(threading.RLock())
        self.records: list[tuple[bytes, bytes | None]] = []

    def catch_up(self) -> None:
        pass

    def append(self, records: Sequence[Record]) -> None:
        for key, value in records:
            self.records.append((self.state.spelled(key), None if value is None else dumps(value)))
            self.state.apply(*self.records[-1], timestamp=0)
