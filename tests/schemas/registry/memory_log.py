"""A registry's log in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from spark_klog.registry.records import Record, dumps
from spark_klog.registry.state import State


class MemoryLog:
    """A log in memory, in place of `SchemaLog`."""

    cluster_id = "memory"

    def __init__(self) -> None:
        self.state = State()
        self.lock = threading.Condition(threading.RLock())
        #: Keys, values, and whether they are restored.
        self.records: list[tuple[bytes, bytes | None, bool]] = []

    def catch_up(self, deadline: float) -> None:
        pass

    def check_topic(self) -> None:
        pass

    def wait_until_read(self) -> None:
        pass

    def append(self, records: Sequence[Record], deadline: float = 0) -> None:
        for key, value, is_restored in records:
            self.records.append((self.state.spelled(key), None if value is None else dumps(value), is_restored))
        self.state = self.replayed(self.records[-len(records) :], self.state)

    @staticmethod
    def replayed(records: Sequence[tuple[bytes, bytes | None, bool]], state: State | None = None) -> State:
        """The state that records make, after those that made `state`."""
        state = State() if state is None else state
        for key, value, is_restored in records:
            state.apply(key, value, timestamp=0, is_restored=is_restored)
        return state

    def compacted(self, clean: int | None = None) -> list[tuple[bytes, bytes | None, bool]]:
        """The records after the cleaner has reached offset `clean`: before it the last one of each key is left, and
        no tombstone.
        """
        clean = len(self.records) if clean is None else clean
        last = {key: offset for offset, (key, *_) in enumerate(self.records[:clean])}
        return [
            (key, *rest)
            for offset, (key, *rest) in enumerate(self.records)
            if offset >= clean or (last[key] == offset and rest[0] is not None)
        ]
