"""Brokers killed in transactions; transactions over several brokers; Apache Kafka and its tools on our directory."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.embedded import EmbeddedCluster
from spark_klog.protocol import apis
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.dump import dump_files
from tests.support.clients.transactional.confluent import ConfluentClient
from tests.support.clients.transactional.java import JavaClient, JavaError
from tests.support.clients.transactional.readers import by_confluent, by_kafka_python
from tests.support.servers.broker import KlogBroker
from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import NEWEST, Kafka

#: `make soak` sets this.
_KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "4"))
SETTINGS = ["--set", "transaction.abort.timed.out.transaction.cleanup.interval.ms=100"]


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(server_dir, *SETTINGS) as running:
        yield running


def _create(servers: str, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)


def _log_file(broker: KlogBroker, folder: str) -> Path:
    (path,) = (broker.data_dir / folder).glob("*.log")
    return path


def _cut_last(path: Path) -> None:
    """Cut the last batch off the file."""
    data = path.read_bytes()
    *_, (header, _) = iter_batches(data)
    path.write_bytes(data[: -header.size])


def _transaction(servers: str, end: str, topic: str) -> None:
    with ConfluentClient(servers) as client:
        client.ask("open", "p", "transactional.id=cut")
        client.ask("init", "p")
        client.ask("begin", "p")
        for partition in ("0", "1"):
            client.ask("send", "p", topic, partition, "a", "b")
        client.ask(end, "p")


@pytest.mark.parametrize(
    ("point", "end"),
    [
        ("one marker", "commit"),
        ("no marker", "abort"),
        *(
            pytest.param(*each, marks=pytest.mark.test_all("kill"))
            for each in (
                ("one marker", "abort"),
                ("no marker", "commit"),
                ("all markers", "commit"),
                ("all markers", "abort"),
            )
        ),
    ],
)
def test_what_was_decided_is_completed_after_a_kill(broker: KlogBroker, topic: str, end: str, point: str) -> None:
    """The broker is killed after it has written the decision: the files are cut to what they held at that point."""
    _create(broker.bootstrap_servers, topic, 2)
    _transaction(broker.bootstrap_servers, end, topic)
    broker.kill()
    _cut_last(_log_file(broker, "__transaction_state-0"))  # the record of the completion
    for partition in {"all markers": (), "one marker": (1,), "no marker": (0, 1)}[point]:
        _cut_last(_log_file(broker, f"{topic}-{partition}"))
    broker.start()
    expected = ["a", "b"] if end == "commit" else []
    for partition in (0, 1):
        assert by_confluent(broker.bootstrap_servers, topic, partition) == expected
        assert by_kafka_python(broker.bootstrap_servers, topic, partition) == expected
    assert "completing transaction cut" in broker.log.read_text()
    # the next transaction succeeds
    _transaction(broker.bootstrap_servers, "commit", topic)
    assert by_confluent(broker.bootstrap_servers, topic, 0) == [*expected, "a", "b"]


def test_what_was_not_decided_is_aborted_by_the_next_instance(broker: KlogBroker, topic: str) -> None:
    _create(broker.bootstrap_servers, topic, 2)
    _transaction(broker.bootstrap_servers, "commit", topic)
    broker.kill()
    for folder in ("__transaction_state-0", "__transaction_state-0", f"{topic}-0", f"{topic}-1"):
        _cut_last(_log_file(broker, folder))
    broker.start()
    assert by_confluent(broker.bootstrap_servers, topic, 0) == []
    _transaction(broker.bootstrap_servers, "commit", topic)
    for partition in (0, 1):
        assert by_confluent(broker.bootstrap_servers, topic, partition) == ["a", "b"]
        assert by_confluent(broker.bootstrap_servers, topic, partition, committed=False) == ["a", "b"] * 2


@pytest.mark.test_all("kill")
def test_one_that_was_open_at_the_kill_times_out(broker: KlogBroker, topic: str) -> None:
    with ConfluentClient(broker.bootstrap_servers) as client:
        client.ask("open", "p", "transactional.id=open", "transaction.timeout.ms=1500")
        client.ask("init", "p")
        client.ask("begin", "p")
        client.ask("send", "p", topic, "0", "lost")
        broker.kill()
        broker.start()
        broker.wait_for_log("aborting transaction open")
        assert by_confluent(broker.bootstrap_servers, topic, 0) == []
        with pytest.raises(KafkaException):
            client.ask("commit", "p")


def _write(
    client: ConfluentClient | JavaClient, topic: str, stop: threading.Event, committed: list[str], unsure: list[str]
) -> None:
    """Write transactions of two records, one in each partition; after an error a new producer of the id goes on."""
    number = 0
    is_open = False
    while not stop.is_set():
        values = [f"{number}-{partition}" for partition in (0, 1)]
        is_committing = False
        try:
            if not is_open:
                quick = ("retry.backoff.ms=20", "reconnect.backoff.ms=20")
                client.ask("open", "p", f"transactional.id={topic}", *quick)
                client.ask("init", "p")
                is_open = True
            client.ask("begin", "p")
            for partition, value in enumerate(values):
                client.ask("send", "p", topic, str(partition), value)
            if number % 5 == 4:
                client.ask("abort", "p")
            else:
                is_committing = True
                client.ask("commit", "p")
                committed += values
        except (KafkaException, JavaError):
            is_open = False
            client.ask("close", "p")
            if is_committing:
                unsure += values
        number += 1


def _client(kind: str, servers: str, folder: Path) -> ConfluentClient | JavaClient:
    return ConfluentClient(servers) if kind == "confluent" else JavaClient("3.9.1", servers, folder / "java.log")


def _wait_for_more(committed: list[str]) -> None:
    before, deadline = len(committed), time.monotonic() + 30
    while len(committed) < before + 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.test_all("kill")
@pytest.mark.parametrize("kind", ["confluent", pytest.param("3.9.1", marks=pytest.mark.peer)])
def test_kills_at_any_time(server_dir: Path, topic: str, kind: str) -> None:
    """Committed records are read once; of the others only those may be read whose commit got no answer."""
    rng = random.Random(8)
    committed: list[str] = []
    unsure: list[str] = []
    stop = threading.Event()
    with KlogBroker(server_dir, *SETTINGS) as broker:
        _create(broker.bootstrap_servers, topic, 2)
        with _client(kind, broker.bootstrap_servers, server_dir) as client:
            writer = threading.Thread(target=_write, args=(client, topic, stop, committed, unsure))
            writer.start()
            try:
                for _ in range(_KILLS):
                    _wait_for_more(committed)
                    time.sleep(rng.uniform(0, 0.1))
                    broker.kill()
                    broker.start()
                _wait_for_more(committed)
            finally:
                stop.set()
                writer.join(60)
        found = [by_confluent(broker.bootstrap_servers, topic, partition) for partition in (0, 1)]
    values = [value for part in found for value in part]
    assert len(values) == len(set(values))
    assert set(committed) <= set(values) <= {*committed, *unsure}
    assert [value[:-2] for value in found[0]] == [value[:-2] for value in found[1]]  # both partitions or none
    numbers = [int(value[:-2]) for value in found[0]]
    assert numbers == sorted(numbers)
    assert len(committed) >= (_KILLS + 1) * 6


def _ids(port: int, count: int) -> list[int]:
    with RawClient(port) as raw:
        request = {"transactional_id": None, "transaction_timeout_ms": 1}
        answers = [raw.request(apis.INIT_PRODUCER_ID, 1, request) for _ in range(count)]
    assert {(answer["error_code"], answer["producer_epoch"]) for answer in answers} == {(0, 0)}
    return [answer["producer_id"] for answer in answers]


def test_no_producer_id_is_given_twice(broker: KlogBroker) -> None:
    found = _ids(broker.port, 1001)
    for _ in range(2):
        broker.kill()
        broker.start()
        found += _ids(broker.port, 3)
    assert len(set(found)) == len(found)


def test_ids_that_logs_know_are_not_given(broker: KlogBroker, topic: str) -> None:
    """A directory may come from a cluster whose ids were counted elsewhere."""
    _ids(broker.port, 5)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True})
    producer.produce(topic, b"v")
    assert producer.flush(20) == 0
    broker.stop()
    (broker.data_dir / "latest_producer_id_block").unlink()
    broker.start()
    assert _ids(broker.port, 1) == [6]


def test_a_transaction_over_several_brokers(make_cluster: Callable[..., EmbeddedCluster], topic: str) -> None:
    """The coordinator makes the others write their markers; it asks a dead broker again when that is back."""
    cluster = make_cluster(2)
    servers = cluster.bootstrap_servers
    _create(servers, topic, 2)
    leaders = {
        partition: entry.leader
        for partition, entry in AdminClient({"bootstrap.servers": servers})
        .list_topics(topic, 10)
        .topics[topic]
        .partitions.items()
    }
    assert sorted(leaders.values()) == [0, 1]
    with ConfluentClient(servers) as client:
        client.ask("open", "p", "transactional.id=wide")
        client.ask("init", "p")
        for end in ("commit", "abort", "commit"):
            client.ask("begin", "p")
            for partition in leaders:
                client.ask("send", "p", topic, str(partition), end)
            client.ask(end, "p")
        assert _soon(servers, topic, leaders, 2) == [["commit", "commit"]] * 2
        places = AdminClient({"bootstrap.servers": servers}).list_topics("__transaction_state", 10)
        coordinator = places.topics["__transaction_state"].partitions[0].leader
        dead = next(broker for broker in leaders.values() if broker != coordinator)
        client.ask("begin", "p")
        for partition in leaders:
            client.ask("send", "p", topic, str(partition), "last")
        cluster.kill(dead)
        client.ask("commit", "p")
        cluster.restart(dead)
        assert _soon(servers, topic, leaders, 3) == [["commit", "commit", "last"]] * 2


def _soon(servers: str, topic: str, partitions: dict[int, int], count: int) -> list[list[str]]:
    """Read until each partition has `count` records: markers on other brokers are written after the answer."""
    deadline = time.monotonic() + 60
    while True:
        found = [by_confluent(servers, topic, partition) for partition in sorted(partitions)]
        if all(len(values) >= count for values in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.mark.peer
def test_kafkas_tool_finds_and_aborts_transactions(broker: KlogBroker, topic: str) -> None:
    """TransactionsCommand: list, describe-producers, and abort of one that hangs."""
    _create(broker.bootstrap_servers, topic)
    with JavaTools(NEWEST) as tools, ConfluentClient(broker.bootstrap_servers) as client:

        def tool(*arguments: str) -> list[list[str]]:
            words = ("--bootstrap-server", broker.bootstrap_servers, *arguments)
            code, output = tools.run("org.apache.kafka.tools.TransactionsCommand", *words)
            assert code == 0, output
            return [line.split() for line in output.splitlines()[1:]]

        client.ask("open", "p", "transactional.id=hangs")
        client.ask("init", "p")
        client.ask("begin", "p")
        client.ask("send", "p", topic, "0", "x")
        ((listed, coordinator, producer_id, state),) = tool("list")
        assert (listed, coordinator, state) == ("hangs", "0", "Ongoing")
        place = ("--topic", topic, "--partition", "0")
        (active,) = tool("describe-producers", *place)
        assert (active[0], active[-1]) == (producer_id, "0")
        tool("abort", *place, "--start-offset", "0")
    assert by_confluent(broker.bootstrap_servers, topic, 0) == []


def test_a_damaged_log_of_transactions_is_not_served(broker: KlogBroker, topic: str) -> None:
    """Served as if empty, its ids would start again with epochs that fence nobody."""
    _create(broker.bootstrap_servers, topic, 2)
    _transaction(broker.bootstrap_servers, "commit", topic)
    broker.stop()
    path = _log_file(broker, "__transaction_state-0")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    broker.start()
    with RawClient(broker.port) as raw:
        request = {"transactional_id": "cut", "transaction_timeout_ms": 1000}
        answer = raw.request(apis.INIT_PRODUCER_ID, 1, request)
    assert answer["error_code"] in (14, 15)
    broker.wait_for_log("can't be read, and are not served")


@pytest.mark.peer
def test_kafkas_tool_reads_the_transactions(broker: KlogBroker, topic: str) -> None:
    _create(broker.bootstrap_servers, topic, 2)
    _transaction(broker.bootstrap_servers, "commit", topic)
    broker.stop()
    output = dump_files(NEWEST, [_log_file(broker, "__transaction_state-0")], "--transaction-log-decoder")
    found = re.findall(r'key: .*"transactionalId":"cut".* payload: (\{.*\})$', output, re.MULTILINE)
    values = [json.loads(value)["data"] for value in found]
    states = ["Empty", "Ongoing", "Ongoing", "PrepareCommit", "CompleteCommit"]
    assert [value["transactionStatus"] for value in values] == states
    partitions = [
        [(entry["topic"], sorted(entry["partitionIds"])) for entry in value["transactionPartitions"] or ()]
        for value in values
    ]
    both = [(topic, [0, 1])]
    assert partitions == [[], [(topic, [0])], both, both, []]
    markers = dump_files(NEWEST, [_log_file(broker, f"{topic}-0")], "--deep-iteration", "--print-data-log")
    assert "endTxnMarker: COMMIT coordinatorEpoch: 0" in markers


def _kafka_with(data_dir: Path, server_dir: Path) -> Kafka:
    """A Kafka of a cluster of its own, with a copy of our directory."""
    kafka = Kafka("3.9.1", server_dir / "kafka")
    shutil.copytree(data_dir, kafka.log_dir)
    for path in [kafka.log_dir / "meta.properties", *kafka.log_dir.glob("*/partition.metadata")]:
        path.unlink()  # its cluster has other ids
    return kafka


@pytest.mark.test_all("version")
@pytest.mark.peer
def test_a_real_kafka_goes_on_with_our_directory(server_dir: Path, topic: str) -> None:
    """Kafka completes what we had decided, and the transactional id goes on."""
    with KlogBroker(server_dir) as broker:
        _create(broker.bootstrap_servers, topic, 2)
        _transaction(broker.bootstrap_servers, "abort", topic)
        _transaction(broker.bootstrap_servers, "commit", topic)
        broker.kill()
    _cut_last(_log_file(broker, "__transaction_state-0"))
    _cut_last(_log_file(broker, f"{topic}-1"))
    kafka = _kafka_with(broker.data_dir, server_dir)
    with kafka:
        kafka.create_topic(topic, 2)
        kafka.create_topic("__transaction_state", 1, {"cleanup.policy": "compact"})
        assert _soon(kafka.bootstrap_servers, topic, {0: 0, 1: 0}, 2) == [["a", "b"]] * 2
        _transaction(kafka.bootstrap_servers, "commit", topic)
        assert by_confluent(kafka.bootstrap_servers, topic, 1) == ["a", "b"] * 2


def _numbered(producer_id: int, sequence: int) -> bytes:
    """A record with the current time: Kafka forgets producers whose last one is a day old."""
    body = bytearray()
    append_record(body, 0, 0, None, b"v")
    now = time.time_ns() // 1_000_000
    numbers = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence}
    return build_batch(body, 1, base_timestamp=now, max_timestamp=now, **numbers)


@pytest.mark.test_all("version")
@pytest.mark.peer
def test_a_real_kafka_takes_our_snapshots(server_dir: Path, topic: str) -> None:
    """After a clean stop Kafka knows of producers what our snapshots say."""
    with KlogBroker(server_dir) as broker:
        _create(broker.bootstrap_servers, topic)
        _create(broker.bootstrap_servers, f"{topic}-open")
        (producer_id,) = _ids(broker.port, 1)
        with RawClient(broker.port) as raw:
            for number in range(7):
                assert raw.produce(topic, _numbered(producer_id, number), 8) == (0, number)
        with ConfluentClient(broker.bootstrap_servers) as client:
            client.ask("open", "p", "transactional.id=left")
            client.ask("init", "p")
            client.ask("begin", "p")
            for value in "abc":
                client.ask("send", "p", f"{topic}-open", "0", value)
            broker.stop()
    snapshot = dump_files("3.9.1", list((broker.data_dir / f"{topic}-0").glob("*.snapshot")))
    assert snapshot.count(f"producerId: {producer_id} ") == 5, snapshot
    kafka = _kafka_with(broker.data_dir, server_dir)
    with kafka:
        kafka.create_topic(topic)
        kafka.create_topic(f"{topic}-open")
        kafka.create_topic("__transaction_state", 1, {"cleanup.policy": "compact"})
        with RawClient(int(kafka.bootstrap_servers.rsplit(":", 1)[1])) as raw:
            sent = [raw.produce(topic, _numbered(producer_id, number), 8) for number in (9, 6, 7)]
        assert sent == [(45, -1), (0, 6), (0, 7)]
        assert by_confluent(kafka.bootstrap_servers, f"{topic}-open", 0) == []
        with ConfluentClient(kafka.bootstrap_servers) as client:  # its next instance aborts what is open
            client.ask("open", "p", "transactional.id=left")
            client.ask("init", "p")
            client.ask("begin", "p")
            client.ask("send", "p", f"{topic}-open", "0", "d")
            client.ask("commit", "p")
        assert _soon(kafka.bootstrap_servers, f"{topic}-open", {0: 0}, 1) == [["d"]]
