"""The consumer loses and repeats no record under random faults of scripted brokers.

SPARK_KLOG_FAULT_SECONDS (default 3) is the duration, SPARK_KLOG_FAULT_SEED (default 0) the first seed.
"""

from __future__ import annotations

import random
import re
import socketserver
import threading
import time

import pytest

from spark_klog.client import Consumer
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    KlogError,
    NoOffsetForPartition,
    OffsetOutOfRange,
    RecordTooLarge,
    RequestTimedOut,
)
from tests.support.brokers import faults
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.servers.kafka import free_port

pytestmark = pytest.mark.usefixtures("driver")

_APIS = ("ApiVersions", "Metadata", "ListOffsets", "Fetch", "Fetch", "Fetch", "Fetch")
_CODES = [int(code) for code in ErrorCode if code] + [999]
_PARTITIONS, _RECORDS, _NODES = 4, 60, 3
_DEADLINE = 60.0


def _values(partition: int) -> list[bytes]:
    return [b"%d-%d" % (partition, number) for number in range(_RECORDS)]


def _take(consumer: Consumer, is_arrow: bool) -> list[tuple[int, int, bytes | None]]:
    """Poll once for (partition, offset, value); ignore the faults' errors, but raise those of offsets and sizes."""
    try:
        if not is_arrow:
            return [(record.partition, record.offset, record.value) for record in consumer.poll(0.2)]
        batch = consumer.poll_arrow(0.2)
        rows = [] if batch is None else batch.to_pylist()
        return [(row["partition"], row["offset"], row["value"]) for row in rows]
    except (OffsetOutOfRange, NoOffsetForPartition, RecordTooLarge):
        raise
    except KlogError:
        return []


def _run(seed: int) -> None:
    choose = random.Random(seed)
    with ScriptedCluster.filled(choose, [_values(number) for number in range(_PARTITIONS)], _NODES) as brokers:
        given = {
            "bootstrap.servers": brokers.bootstrap_servers,
            "request.timeout.ms": 1000,
            "fetch.max.wait.ms": choose.choice([0, 50, 500]),
            "retry.backoff.ms": 2,
            "retry.backoff.max.ms": 50,
            "auto.offset.reset": choose.choice(["earliest", "none"]),
            "max.poll.records": choose.choice([1, 10, 500]),
            "max.partition.fetch.bytes": choose.choice([100, 500, 1 << 20]),
        }
        with Consumer(given) as consumer:
            start = {partition: choose.choice([0, 30]) for partition in range(_PARTITIONS)}
            consumer.assign([("t", partition, offset) for partition, offset in start.items()])
            found: dict[int, list[bytes | None]] = {partition: [] for partition in start}
            deadline = time.monotonic() + _DEADLINE
            calm_at = time.monotonic() + 2
            while any(len(found[number]) < _RECORDS - start[number] for number in start):
                assert time.monotonic() < deadline, found
                if time.monotonic() > calm_at:
                    brokers.clear()
                    for partition in start:
                        if brokers.leaders["t", partition] < 0:
                            brokers.leaders["t", partition] = choose.randrange(_NODES)
                elif choose.random() < 0.5:
                    brokers.on(choose.choice(_APIS), faults.chosen(choose, _CODES, has_top_errors=True))
                    brokers.leaders["t", choose.randrange(_PARTITIONS)] = choose.randrange(-1, _NODES)
                for partition, offset, value in _take(consumer, choose.random() < 0.5):
                    assert offset == start[partition] + len(found[partition]), (partition, offset)
                    found[partition].append(value)
            for partition, values in found.items():
                assert values == _values(partition)[start[partition] :]


def _read_before_an_outage(consumer: Consumer, brokers: ScriptedCluster) -> int:
    """Read t-0, then make the brokers close connections; return the number of connections before."""
    consumer.assign([("t", 0)])
    while not consumer.poll(0.2):
        pass
    for api in ("ApiVersions", "Metadata", "Fetch"):
        brokers.always(api, faults.dropped())
    return brokers.count("ApiVersions")


def test_brokers_that_close_connections_are_asked_after_growing_pauses() -> None:
    """The back-off lasts across polls. When each poll had its own, the consumer connected ten times a second."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [b"a"])
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers, "auto.offset.reset": "earliest"}) as consumer:
            before = _read_before_an_outage(consumer, brokers)
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                assert not consumer.poll(0.1)
            # pauses of 0.1 s, 0.2 s, 0.4 s, 0.8 s and 1 s, each for records and for metadata; the last poll may be late
            assert brokers.count("ApiVersions") - before <= 10 + 2 * (time.monotonic() - end)
            brokers.clear()
            brokers.append("t", 0, [b"b"])
            while not (records := consumer.poll(0.2)):
                pass
            assert [record.value for record in records] == [b"b"]


def test_an_address_that_is_no_broker_does_not_end_polls_during_an_outage() -> None:
    class WebServer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(100)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), WebServer) as other, ScriptedCluster({"t": 1}) as brokers:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        brokers.append("t", 0, [b"a"])
        servers = f"{brokers.bootstrap_servers},127.0.0.1:{other.server_address[1]}"
        with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest"}) as consumer:
            before = _read_before_an_outage(consumer, brokers)
            while brokers.count("ApiVersions") < before + 4:
                assert not consumer.poll(0.1)
            brokers.clear()
            brokers.append("t", 0, [b"b"])
            while not (records := consumer.poll(0.2)):
                pass
            assert [record.value for record in records] == [b"b"]
        other.shutdown()


def test_random_faults() -> None:
    faults.run_seeds(_run)


def test_an_outage_makes_no_call_longer() -> None:
    """Only answers that are late make the next look-up wait longer, and not for long."""
    with Consumer({"bootstrap.servers": f"127.0.0.1:{free_port()}", "group.id": "g"}) as consumer:
        consumer.subscribe(re.compile("t.*"))
        group = consumer._group
        assert group is not None
        for _ in range(3):
            consumer.poll(0)
        assert (group._attempts > 0, group.lacking) == (True, 0)
        for late in range(20):
            group._try_again(RequestTimedOut("late"))
            assert group.lacking == 5_000 * min(late + 1, 5)
        group._try_again(ConnectionFailed("refused"))
        assert group.lacking == 0
