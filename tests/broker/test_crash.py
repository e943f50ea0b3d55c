"""Brokers that are killed, stopped, or can't start."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import offset_range
from spark_klog.client.producer.producer import Producer as OurProducer
from spark_klog.errors import ConnectionFailed, OffsetOutOfRange, RequestTimedOut
from spark_klog.records.contract import Record
from tests.support.brokers.batches import read_records
from tests.support.clients.tools import kcat
from tests.support.servers.broker import KlogBroker, broker_command, refusal
from tests.support.servers.kafka import HOST, free_port

_KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "4"))


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    settings = ["--set", "internal.segment.bytes=100000", "--set", "log.index.interval.bytes=500"]
    with KlogBroker(server_dir, *settings) as running:
        yield running


def _create(broker: KlogBroker, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)


def _read(broker: KlogBroker, topic: str, partition: int) -> list[Record]:
    """Read all records of a partition with our own client."""
    records: list[Record] = []
    with Cluster.connect({"bootstrap.servers": broker.bootstrap_servers}) as cluster:
        start, end = offset_range(cluster, topic, partition)
        for fetched in fetch_range(cluster, topic, partition, start, end):
            records += read_records(bytes(fetched.data))
    return records


def _kcat(broker: KlogBroker, topic: str, partition: int) -> list[tuple[int, int, str]]:
    arguments = ("-b", broker.bootstrap_servers, "-t", topic, "-p", str(partition))
    output = kcat("-C", *arguments, "-o", "beginning", "-e", "-q", "-J", "-X", "check.crcs=true")
    lines = [json.loads(line) for line in output.splitlines()]
    return [(line["offset"], line["ts"], line["payload"]) for line in lines]


def _kill_at_random(broker: KlogBroker, seed: int, is_writing: threading.Event) -> None:
    rng = random.Random(seed)
    for _ in range(_KILLS):
        assert is_writing.wait(30)
        is_writing.clear()
        time.sleep(rng.uniform(0, 0.25))
        broker.kill()
        broker.start()


def _check(broker: KlogBroker, partitions: int, acknowledged: list[list[int]]) -> None:
    """All acknowledged numbers are there, in order except for what was sent twice; kcat sees the same."""
    for partition in range(partitions):
        records = _read(broker, "t", partition)
        assert [record.offset for record in records] == list(range(len(records)))
        numbers = [int(record.value or b"") for record in records]
        assert set(acknowledged[partition]) <= set(numbers)
        firsts = list(dict.fromkeys(numbers))
        assert firsts == sorted(firsts)
        expected = [(record.offset, record.timestamp, (record.value or b"").decode()) for record in records]
        assert _kcat(broker, "t", partition) == expected


def test_nothing_that_was_acknowledged_to_confluent_is_lost(broker: KlogBroker) -> None:
    _create(broker, "t", 2)
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "acks": "all",
            "linger.ms": 1,
            "batch.num.messages": 50,
            "max.in.flight": 1,
            "retry.backoff.ms": 20,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 50,
            "message.timeout.ms": 60_000,
            "log_level": 0,
        }
    )
    acknowledged: list[list[int]] = [[], []]
    failures: list[KafkaError] = []
    is_writing, done = threading.Event(), threading.Event()

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)
            return
        acknowledged[message.partition() or 0].append(int(message.value() or b""))
        is_writing.set()

    def write() -> None:
        number = 0
        while not done.is_set():
            producer.produce("t", str(number), partition=number % 2, on_delivery=delivered)
            number += 1
            producer.poll(0.001)
        assert producer.flush(60) == 0

    writer = threading.Thread(target=write)
    writer.start()
    try:
        _kill_at_random(broker, 1, is_writing)
    finally:
        done.set()
        writer.join(90)
    assert failures == []
    assert min(map(len, acknowledged)) > _KILLS
    _check(broker, 2, acknowledged)


def test_nothing_that_was_acknowledged_to_us_is_lost(broker: KlogBroker) -> None:
    _create(broker, "t", 1)
    settings = {"bootstrap.servers": broker.bootstrap_servers, "retry.backoff.ms": "20", "batch.size": "500"}
    acknowledged: list[int] = []
    is_writing, done = threading.Event(), threading.Event()

    def write() -> None:
        with OurProducer(settings) as producer:
            number = 0
            while not done.is_set():
                numbers = range(number, number + 100)
                for number in numbers:
                    producer.send("t", str(number).encode(), partition=0)
                producer.flush()
                acknowledged.extend(numbers)
                is_writing.set()
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        _kill_at_random(broker, 2, is_writing)
    finally:
        done.set()
        writer.join(90)
    assert len(acknowledged) >= 100 * _KILLS
    _check(broker, 1, [acknowledged])


def test_a_clean_stop(broker: KlogBroker) -> None:
    assert broker.ready_line == f"klog broker 0 ready on {HOST}:{broker.port}\n"
    kcat("-P", "-b", broker.bootstrap_servers, "-t", "t", stdin=b"a\nb\n")
    marker = broker.data_dir / ".kafka_cleanshutdown"
    assert not marker.exists()
    assert broker.stop() == 0
    assert marker.exists()
    broker.start()
    assert not marker.exists()
    assert kcat("-C", "-b", broker.bootstrap_servers, "-t", "t", "-e", "-q") == b"a\nb\n"
    broker.kill()
    assert not marker.exists()


def test_a_stop_waits_for_no_client(broker: KlogBroker) -> None:
    """Neither a connected client nor a waiting fetch delays the stop."""
    with socket.create_connection((HOST, broker.port)):
        _create(broker, "t", 1)
        settings = {"bootstrap.servers": broker.bootstrap_servers, "request.timeout.ms": "2000"}
        with Cluster.connect({**settings, "socket.connection.setup.timeout.ms": "1000"}) as cluster:
            waiting = threading.Thread(target=_wait_for_a_record, args=(cluster,))
            waiting.start()
            begin = time.monotonic()
            assert broker.stop() == 0
            assert time.monotonic() - begin < 20
            waiting.join(20)
    assert (broker.data_dir / ".kafka_cleanshutdown").exists()
    assert "requests under way" not in broker.log.read_text()  # a stop waits for them for five seconds
    assert "Traceback" not in broker.log.read_text()


def _wait_for_a_record(cluster: Cluster) -> None:
    with pytest.raises((ConnectionFailed, OffsetOutOfRange, RequestTimedOut)):
        next(fetch_range(Cluster(cluster.config), "t", 0, 0, 1))


def test_a_data_directory_in_use(broker: KlogBroker) -> None:
    command = broker_command(broker.data_dir, free_port())
    assert refusal(command, code=1) == (
        f"klog: data directory {broker.data_dir} is in use by another broker or tool; stop that one, "
        "or choose another --data-dir"
    )
    kcat("-L", "-b", broker.bootstrap_servers)  # the first broker is still there


def test_a_data_directory_of_another_broker(broker: KlogBroker) -> None:
    broker.stop()
    told = refusal(broker_command(broker.data_dir, free_port(), "--broker-id", "5"), code=1)
    assert told.startswith(f"klog: data directory {broker.data_dir} belongs to broker 0, not 5;")


def test_a_port_in_use(broker: KlogBroker, server_dir: Path) -> None:
    told = refusal(broker_command(server_dir / "other", broker.port), code=1)
    assert told == f"klog: can't listen on {HOST}:{broker.port}: Address already in use; choose another --listen"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("no.such.setting=1", "klog: unknown setting 'no.such.setting'; it is not known to this version, which "),
        ("num.partitions=many", "klog: setting num.partitions=many must be a number"),
        ("num.partitions=0", "klog: setting num.partitions=0 must be 1 or more"),
        ("auto.create.topics.enable=maybe", "klog: setting auto.create.topics.enable=maybe must be true or false"),
        ("num.partitions", "klog: setting 'num.partitions' is not NAME=VALUE"),
    ],
)
def test_a_bad_setting(tmp_path: Path, setting: str, told: str) -> None:
    assert refusal(broker_command(tmp_path / "data", free_port(), "--set", setting)).startswith(told)
    assert not (tmp_path / "data").exists()


def test_a_bad_address(tmp_path: Path) -> None:
    command = broker_command(tmp_path / "data", 0)
    command[command.index("--listen") + 1] = "nowhere"
    assert refusal(command) == "klog: --listen: 'nowhere' is not HOST:PORT"
