"""Many connections that each produce small batches, with our broker and with Kafka."""

from __future__ import annotations

import itertools
import logging
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.brokers import KAFKA, broker_pair, partitions_by_leader, topic
from benchmarks.data import PARTITIONS
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import record_batches, take_turns
from benchmarks.sides import SideFailed, compile_c
from spark_klog.client import Producer
from spark_klog.embedded import EmbeddedCluster

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("connections.c")
_CONNECTIONS = 200
_RECORDS = 10
_PRODUCE, _VERSION = 0, 7
_CLIENT_ID = b"bench"
_TIMEOUT_MS = 30_000


def _connections(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("connections")
    seconds = 10 if bench.records >= 1_000_000 else 2
    load = _Load(folder, seconds)
    one, two, peer = Side("klog"), Side("klog, two brokers"), Side(KAFKA)
    with broker_pair(folder) as (klog, kafka), EmbeddedCluster(brokers=2, data_dir=folder / "two") as pair:
        turns = [(one, klog.bootstrap_servers), (two, pair.bootstrap_servers), (peer, kafka.bootstrap_servers)]
        take_turns([(side, partial(load.run, servers)) for side, servers in turns], bench.repeat)
    work = f"Produce by {_CONNECTIONS} connections, a batch of {_RECORDS} records of 100 B each, acks=1"
    yield Result(work, "requests/s", one, peer, bench.command)
    yield Result(f"{work}, two brokers of ours", "requests/s", two, peer, bench.command)


class _Load:
    """Runs the load program: a process per leader, with its share of the connections."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self._folder, self._seconds = folder, seconds
        self._batch = record_batches("none", 1, _RECORDS)
        self._names = (f"connections-{number}" for number in itertools.count())
        compile_c(_SOURCE, folder / _SOURCE.stem)

    def run(self, servers: str) -> float:
        """Return the requests per second."""
        with topic(servers, next(self._names)) as name, ThreadPoolExecutor() as pool:
            with Producer({"bootstrap.servers": servers}) as producer:  # waits until all leaders have made their logs
                for partition in range(PARTITIONS):
                    producer.send(name, b"first", partition=partition)
            leaders = partitions_by_leader(servers, name)
            rate = sum(pool.map(lambda port: self._from(port, name, leaders[port]), leaders))
        log.info("%.0f requests/s by %s", rate, servers)
        return rate

    def _from(self, port: int, name: str, partitions: list[int]) -> float:
        frames = self._folder / f"frames-{port}"
        frames.write_bytes(b"".join(produce_frame(name, partition, self._batch) for partition in partitions))
        count = _CONNECTIONS * len(partitions) // PARTITIONS
        command = [str(self._folder / _SOURCE.stem), str(port), str(count), str(self._seconds), str(frames)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=self._seconds + 60)
        if done.returncode:
            raise SideFailed(f"{_SOURCE.name} ended with {done.returncode}: {done.stderr.strip()}")
        answered, elapsed = map(float, done.stdout.split())
        return answered / elapsed


def produce_frame(topic_name: str, partition: int, batch: bytes) -> bytes:
    """A Produce request of version 7 with one batch."""
    name = topic_name.encode()
    body = b"".join(
        (
            struct.pack(">hhih", _PRODUCE, _VERSION, 1, len(_CLIENT_ID)) + _CLIENT_ID,
            struct.pack(">hhi", -1, 1, _TIMEOUT_MS),  # no transactional id, acks=1
            struct.pack(">ih", 1, len(name)) + name,
            struct.pack(">iii", 1, partition, len(batch)) + batch,
        )
    )
    return struct.pack(">i", len(body)) + body


CONNECTIONS = Work(
    "connections",
    _connections,
    (
        f"Connections: C with epoll and {_CONNECTIONS} connections, each of which sends the same Produce request "
        "(version 7) again when it is answered; the connections share 4 partitions evenly, and go to their leaders. "
        "Wanted: a ratio of 0.6. A broker of ours is one thread of Python, which a request keeps busy for 0.05 ms, a "
        "third of it in the kernel; an asyncio server that only receives, appends and answers takes 0.014 ms. Kafka's "
        "threads use both cores. Two brokers that share the partitions do, too.",
    ),
)
