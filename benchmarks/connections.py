"""Many connections, each producing small batches, at our broker and at Kafka."""

from __future__ import annotations

import itertools
import logging
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.broker_pair import broker_pair, compare, topic
from benchmarks.broker_process import Broker
from benchmarks.compiler import compile_c
from benchmarks.data import PARTITIONS
from benchmarks.record_batches import record_batches
from benchmarks.report import Result
from benchmarks.sides import SideFailed
from benchmarks.work import Bench, Work

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("connections.c")
_CONNECTIONS = 200
_RECORDS = 10
_PRODUCE, _VERSION = 0, 7
_CLIENT_ID = b"bench"
_TIMEOUT_MS = 30_000


def _connections(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("connections")
    program, frames = folder / "connections", folder / "frames"
    seconds = 10 if bench.records >= 1_000_000 else 2
    batch = record_batches("none", 1, _RECORDS)
    names = (f"connections-{number}" for number in itertools.count())
    compile_c(_SOURCE, program)

    def run(broker: Broker) -> float:
        with topic(broker, next(names)) as name:
            frames.write_bytes(b"".join(_frame(name, number, batch) for number in range(PARTITIONS)))
            port = broker.bootstrap_servers.rpartition(":")[2]
            command = [str(program), port, str(_CONNECTIONS), str(seconds), str(frames)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
        if done.returncode:
            raise SideFailed(f"{_SOURCE.name} ended with {done.returncode}: {done.stderr.strip()}")
        answered, elapsed = map(float, done.stdout.split())
        log.info("%.0f requests in %.2f s by %s", answered, elapsed, broker.bootstrap_servers)
        return answered / elapsed

    with broker_pair(folder) as brokers:
        sides = compare(brokers, bench.repeat, run)
    work = f"Produce by {_CONNECTIONS} connections, a batch of {_RECORDS} records of 100 B each, acks=1"
    yield Result(work, "requests/s", *sides, bench.command)


def _frame(topic_name: str, partition: int, batch: bytes) -> bytes:
    """A Produce request of version 7 with one batch."""
    name = topic_name.encode()
    body = b"".join(
        (
            struct.pack(">hhih", _PRODUCE, _VERSION, 1, len(_CLIENT_ID)) + _CLIENT_ID,
            struct.pack(">hhi", -1, 1, _TIMEOUT_MS),  # no transactional id, acks
            struct.pack(">ih", 1, len(name)) + name,
            struct.pack(">iii", 1, partition, len(batch)) + batch,
        )
    )
    return struct.pack(">i", len(body)) + body


CONNECTIONS = Work(
    "connections",
    _connections,
    (
        f"Connections: one thread of C with epoll and {_CONNECTIONS} connections, each of which sends the same Produce "
        "request (version 7) again when it is answered; the connections share 4 partitions evenly. Wanted: a ratio of "
        "0.5.",
    ),
)
