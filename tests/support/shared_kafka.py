"""Apache Kafka brokers that the tests of a process share, since a start costs five seconds of CPU.

Each test uses its own topics, groups and transactional ids. A test that stops its broker, or looks at all topics or
groups, starts its own `Kafka`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.kafka import Kafka, Version

_SETTINGS = {
    "delete.topic.enable": "true",  # before 1.0 the default is false
    "log.cleaner.backoff.ms": 250,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
}
#: The most brokers that run at once. A module uses at most two.
_LIMIT = 3

Key = tuple[Version, tuple[tuple[str, object], ...]]


class SharedKafkas:
    """Starts a broker on first use of its version and settings; beyond the limit stops the least recently used one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[Key, Kafka] = {}  # the least recently used one first
        self._started = 0

    def get(self, version: Version, settings: Mapping[str, object] | None = None) -> Kafka:
        """Return a running broker; `settings` are broker properties added to those of all shared brokers."""
        key = version, tuple(sorted((settings or {}).items()))
        kafka = self._running.pop(key, None)
        if kafka is None:
            while len(self._running) >= _LIMIT:
                self._running.pop(next(iter(self._running))).close()
            self._started += 1
            folder = self._folder / f"kafka-{version}-{self._started}"
            kafka = Kafka(version, folder, {**_SETTINGS, **(settings or {})}).__enter__()
        self._running[key] = kafka
        return kafka

    def close(self) -> None:
        for kafka in self._running.values():
            kafka.close()
        self._running.clear()
