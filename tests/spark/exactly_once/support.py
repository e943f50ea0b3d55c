"""Helpers for exactly-once tests: produce numbers to TOPIC-from, and count each number in a topic."""

from __future__ import annotations

from collections import Counter

from tests.spark.support import Sent, consume, produce

PARTITIONS = 3


def fill(servers: str, topic: str, first: int, end: int) -> None:
    produce(servers, f"{topic}-from", [Sent(b"%d" % n, partition=n % PARTITIONS) for n in range(first, end)])


def read(servers: str, topic: str, *, committed: bool = True) -> Counter[str]:
    level = "read_committed" if committed else "read_uncommitted"
    return Counter((record.value or b"").decode() for record in consume(servers, topic, isolation_level=level))


def once(records: int) -> Counter[str]:
    return Counter(str(n) for n in range(records))
