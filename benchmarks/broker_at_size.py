"""The broker with thousands of partitions, waiting consumers and idle connections."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.broker_inside import Client, create_topics, delete_topics, frame, longest_pause
from benchmarks.brokers import KlogBroker
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import record_batches
from spark_klog.protocol.apis import API_VERSIONS, FETCH, PRODUCE

_PARTITIONS, _CONSUMERS, _CONNECTIONS, _ROUNDS = 5_000, 500, 1_000, 20
_ROUND_SECONDS = 0.3
_LAST_PERCENT = 0.99


def _seconds(pid: int | None) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _megabytes(pid: int | None) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _at_size(bench: Bench) -> Iterator[Result]:
    scale = 1 if bench.records >= 1_000_000 else 10
    sides: dict[tuple[str, str], Side] = {}
    for turn in range(bench.repeat):
        folder = bench.folder(f"at-size-{turn}")
        for key, figure in (*_partitions(folder, _PARTITIONS // scale), *_clients(folder / "clients", scale)):
            sides.setdefault(key, Side("klog")).samples.append(figure)
    for (name, unit), side in sides.items():
        yield Result(name, unit, side, None, bench.command, False)


def _partitions(folder: Path, count: int) -> Iterator[tuple[tuple[str, str], float]]:
    names = [f"topic-{number}" for number in range(count // 10)]
    for kind, (topics, partitions) in product(("alone", "in a shared folder"), ((["wide"], count), (names, 10))):
        what = f"{len(topics)} topics of {partitions:,} partitions {kind}"
        broker = KlogBroker(folder / f"{kind}-{len(topics)}", is_alone=kind == "alone")
        broker.start()
        before = _megabytes(broker.pid)
        for verb, work in (
            ("created", partial(create_topics, names=topics, partitions=partitions)),
            ("deleted", partial(delete_topics, names=topics)),
        ):
            if verb == "deleted":
                yield (f"memory of {what}", "MB"), _megabytes(broker.pid) - before
                yield (f"open files of {what}", "files"), float(len(os.listdir(f"/proc/{broker.pid}/fd")))
                broker.stop(kills=True)
                broker.start()
                yield (f"start after a kill with {what}", "s"), broker.ready_seconds
                started = time.perf_counter()
                broker.stop()
                yield (f"first stop with {what}", "s"), time.perf_counter() - started
                broker.start()
                yield (f"start with {what}", "s"), broker.ready_seconds
            with closing(Client(broker.bootstrap_servers)) as client:
                began, started = _seconds(broker.pid), time.perf_counter()
                _, pause = longest_pause(broker, partial(work, client))
                yield (f"{what} {verb}", "s"), time.perf_counter() - started
                yield (f"{what} {verb}", "processor s"), _seconds(broker.pid) - began
                yield (f"longest pause meanwhile, {what} {verb}", "ms"), pause
        broker.stop()


def _clients(folder: Path, scale: int) -> Iterator[tuple[tuple[str, str], float]]:
    broker = KlogBroker(folder)
    broker.start()
    host, _, port = broker.bootstrap_servers.rpartition(":")

    def connected(opened: ExitStack, count: int) -> list[socket.socket]:
        return [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]

    count = _CONNECTIONS // scale
    with ExitStack() as opened:
        before = _megabytes(broker.pid)
        for connection in connected(opened, count):
            connection.sendall(frame(API_VERSIONS, 0, {}))
            _receive(connection)
        yield (f"memory of {count:,} idle connections", "MB"), _megabytes(broker.pid) - before
    count = _CONSUMERS // scale
    with ExitStack() as opened, closing(Client(broker.bootstrap_servers)) as client:
        for topic, partitions in (("one", 1), ("many", count)):
            create_topics(client, [topic], partitions)
            work = f"a record reaches {count} waiting consumers of {partitions} partitions, p99"
            yield (work, "ms"), _wait(client, connected(opened, count), topic, partitions)
    broker.stop()


def _receive(connection: socket.socket) -> None:
    (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
    connection.recv(size, socket.MSG_WAITALL)


def _wait(client: Client, consumers: list[socket.socket], topic: str, partitions: int) -> float:
    """Milliseconds until all but one of a hundred waiting consumers have the record that is produced for them."""
    batch, times = record_batches("none", 1, 1), list[float]()
    data = [{"index": number, "records": batch} for number in range(partitions)]
    produce = frame(
        PRODUCE, 7, {"acks": 1, "timeout_ms": 1000, "topic_data": [{"name": topic, "partition_data": data}]}
    )
    selector = selectors.DefaultSelector()
    for number, connection in enumerate(consumers):
        selector.register(connection, selectors.EVENT_READ, number % partitions)
    for offset in range(_ROUNDS + 1):
        if offset == 1:  # the first records of a partition make its files
            times.clear()
        for number, connection in enumerate(consumers):
            connection.sendall(_fetch(topic, number % partitions, offset))
        time.sleep(_ROUND_SECONDS)  # until all wait
        started, left = time.perf_counter(), len(consumers)
        client.send(produce)
        while left:
            for key, _ in selector.select():
                times.append(time.perf_counter() - started)
                assert isinstance(key.fileobj, socket.socket)
                _receive(key.fileobj)
                left -= 1
        client.receive()
    return 1000 * sorted(times)[int(len(times) * _LAST_PERCENT)]


def _fetch(topic: str, partition: int, offset: int) -> bytes:
    entry = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    topics = [{"topic": topic, "partitions": [entry]}]
    limits = {"max_wait_ms": 30_000, "min_bytes": 1, "max_bytes": 1 << 20}
    return frame(FETCH, 4, {"replica_id": -1, **limits, "isolation_level": 0, "topics": topics})


AT_SIZE = Work(
    "at_size",
    _at_size,
    (
        f"At size: {_PARTITIONS:,} partitions without records, of one topic or of {_PARTITIONS // 10} topics in one "
        "request, of a broker that is alone or that shares a folder with others; wanted: 3 s each. Pauses are as "
        "above; wanted: 10 ms. Consumers wait in Fetch on connections of their own, "
        "and one Produce has a record for each partition, twenty times; wanted: 20 ms for all but one of a hundred. "
        "Idle connections have asked for ApiVersions; wanted: 20 MB for a thousand.",
    ),
)
