"""SimpleConsumer with our broker and with Kafka's, compared with confluent-kafka's records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from spark_klog.classic import EARLIEST_TIME, LATEST_TIME, FetchRequest, SimpleConsumer
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    ErrorCode,
    ProtocolError,
    RecordTooLarge,
    UnsupportedVersionError,
)
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import HOST, NEWEST, free_port
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.servers.shared_tree import create_topic
from tests.support.waiting import wait_until

#: Topics of this module only, since the brokers are shared.
_T, _SEGMENTS = "simple-consumer", "simple-consumer-segments"
_TRANSACTIONS = "simple-consumer-isolation"
#: The last versions of Fetch and ListOffsets of each broker.
_LAST = {"ours": (17, 10), "0.10.2.2": (3, 1), "3.9.1": (17, 9)}


@pytest.fixture(
    scope="module",
    params=[
        "ours",
        *(
            pytest.param(name, marks=[pytest.mark.peer, pytest.mark.test_all("version")])
            for name in ("0.10.2.2", "3.9.1")
        ),
    ],
)
def place(
    request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas
) -> Iterator[tuple[str, str]]:
    """(kind of broker, its address). Topic _T has 30 records in partition 0 and a large one in partition 1; topic
    _SEGMENTS has several segments.
    """
    with serving(request.param, module_server_dir, shared_kafkas) as servers:
        create_topic(servers, _T, 2)
        small = f"{'internal.' if request.param == 'ours' else ''}segment.bytes"
        create_topic(servers, _SEGMENTS, 1, {small: "2000"})
        wait_until(lambda: _is_there(servers, _T, 1) and _is_there(servers, _SEGMENTS, 0))
        producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
        for number in range(30):
            value = None if number == 7 else b"value %d" % number * 20
            producer.produce(_T, value, b"key %d" % number, partition=0, timestamp=1_000_000 + number)
            producer.produce(_SEGMENTS, b"value" * 20, partition=0)
            assert producer.flush(20) == 0  # one batch per record
        producer.produce(_T, b"x" * 300_000, partition=1)
        producer.produce(_T, b"after", partition=1)
        assert producer.flush(20) == 0
        yield request.param, servers


def _is_there(servers: str, topic: str, partition: int) -> bool:
    with _consumer(servers) as consumer:
        try:
            return consumer.get_offsets_before(topic, partition, LATEST_TIME) == [0]
        except ProtocolError:
            return False


def _consumer(servers: str, buffer_size: int = 64 * 1024 * 1024) -> SimpleConsumer:
    return SimpleConsumer(HOST, int(servers.split(":")[1]), buffer_size=buffer_size)


def _expected(number: int) -> tuple[int, bytes, bytes | None]:
    return number, b"key %d" % number, None if number == 7 else b"value %d" % number * 20


def test_every_version(place: tuple[str, str]) -> None:
    kind, servers = place
    last_fetch, last_list = _LAST[kind]
    with _consumer(servers) as consumer:
        for version in [*range(last_fetch + 1), None]:
            found = consumer.fetch(_T, 0, 3, version=version)
            assert [(one.offset, one.key, one.value) for one in found] == [_expected(n) for n in range(3, 30)], version
            assert {one.timestamp for one in found if one.timestamp >= 0} in (set(), set(range(1_000_003, 1_000_030)))
            assert consumer.fetch(_T, 0, 30, version=version) == []
            with pytest.raises(ProtocolError) as raised:
                consumer.fetch(_T, 0, 31, version=version)
            assert raised.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
        for version in [*range(last_list + 1), None]:
            assert consumer.get_offsets_before(_T, 0, LATEST_TIME, version=version) == [30]
            assert consumer.get_offsets_before(_T, 0, EARLIEST_TIME, version=version) == [0]
        for version in range(1, last_list + 1):
            assert consumer.get_offsets_before(_T, 0, 1_000_012, version=version) == [12]
            assert consumer.get_offsets_before(_T, 0, 2_000_000, version=version) == [30]
        if kind != "ours":
            with pytest.raises(UnsupportedVersionError, match=f"does not support ListOffsets {last_list + 1}$"):
                consumer.get_offsets_before(_T, 0, LATEST_TIME, version=last_list + 1)
        with pytest.raises(ConfigError, match="Fetch 99: set a version from 0 to 17"):
            consumer.fetch(_T, 0, 0, version=99)


def test_offsets_before_are_those_of_segments(place: tuple[str, str]) -> None:
    _, servers = place
    with _consumer(servers) as consumer:
        several = consumer.get_offsets_before(_SEGMENTS, 0, LATEST_TIME, 100)
        assert (several[0], several[-1]) == (30, 0)
        assert several == sorted(set(several), reverse=True)
        assert len(several) > 2
        assert consumer.get_offsets_before(_SEGMENTS, 0, LATEST_TIME, 2) == several[:2]


def test_a_fetch_grows_to_its_message_and_no_further_than_the_buffer(place: tuple[str, str]) -> None:
    kind, servers = place
    with _consumer(servers) as consumer, _consumer(servers, buffer_size=100_000) as small:
        for version in range(_LAST[kind][0] + 1):
            found = consumer.fetch(_T, 1, 0, 1000, version=version)
            assert [len(one.value or b"") for one in found][:1] == [300_000]
        for version in range(3):  # later versions return the first batch whole
            with pytest.raises(RecordTooLarge, match=_T + r"-1 at offset 0: .* raise buffer_size") as raised:
                small.fetch(_T, 1, 0, 1000, version=version)
            assert raised.value.size > 300_000


def test_multifetch(place: tuple[str, str]) -> None:
    kind, servers = place
    with _consumer(servers) as consumer:
        for version in range(_LAST[kind][0] + 1):
            requests = [FetchRequest(_T, 1, 0, 500), FetchRequest(_T, 0, 28), FetchRequest(_T, 0, 29)]
            with pytest.raises(ConfigError, match="twice"):
                consumer.multifetch(requests, version=version)
            large, small = consumer.multifetch(requests[:2], version=version)
            assert isinstance(large, list)
            assert isinstance(small, list)
            assert len(large[0].value or b"") == 300_000
            assert [one.offset for one in small] == [28, 29]
            good, bad = consumer.multifetch([requests[1], FetchRequest(_T, 1, 77)], version=version)
            assert isinstance(good, list)
            assert isinstance(bad, ProtocolError)
            assert bad.code == ErrorCode.OFFSET_OUT_OF_RANGE


@pytest.mark.peer
def test_kafka_4(shared_kafkas: SharedKafkas) -> None:
    """Kafka 4 has no Fetch before version 4 and no ListOffsets 0."""
    servers = shared_kafkas.get(NEWEST).bootstrap_servers
    create_topic(servers, _T, 1)
    wait_until(lambda: _is_there(servers, _T, 0))
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    for number in range(30):
        value = None if number == 7 else b"value %d" % number * 20
        producer.produce(_T, value, b"key %d" % number, partition=0, timestamp=1_000_000 + number)
    assert producer.flush(20) == 0
    with _consumer(servers) as consumer:
        for version in [*range(4, 18), None]:
            found = consumer.fetch(_T, 0, 3, version=version)
            assert [(one.offset, one.key, one.value) for one in found] == [_expected(n) for n in range(3, 30)], version
        assert consumer.get_offsets_before(_T, 0, LATEST_TIME, 10) == [30]
        assert consumer.get_offsets_before(_T, 0, EARLIEST_TIME) == [0]
        assert consumer.get_offsets_before(_T, 0, 1_000_012) == [12]
        with pytest.raises(UnsupportedVersionError, match=r"does not support Fetch 3$"):
            consumer.fetch(_T, 0, 0, version=3)
        with pytest.raises(UnsupportedVersionError, match=r"does not support ListOffsets 0$"):
            consumer.get_offsets_before(_T, 0, LATEST_TIME, version=0)


def test_markers_of_transactions_hide_no_message(place: tuple[str, str]) -> None:
    kind, servers = place
    if kind == "0.10.2.2":
        return  # it has no transactions
    topic = f"{_T}-transactions"
    create_topic(servers, topic, 1)
    wait_until(lambda: _is_there(servers, topic, 0))
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(20)
    for value in (b"small", b"x" * 300_000):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.commit_transaction(20)
    with _consumer(servers) as consumer, _consumer(servers, buffer_size=100_000) as small:
        # Kafka writes the last marker after it has answered the commit
        wait_until(lambda: consumer.get_offsets_before(topic, 0, LATEST_TIME) == [4])
        for version in range(_LAST[kind][0] + 1):
            # the response has a marker and the beginning of the large message
            found = consumer.fetch(topic, 0, 1, 1000, version=version)
            assert [(one.offset, len(one.value or b"")) for one in found] == [(2, 300_000)], version
            assert consumer.fetch(topic, 0, 3, version=version) == []
            assert consumer.fetch(topic, 0, 4, version=version) == []
            if version < 3:
                with pytest.raises(RecordTooLarge):
                    small.fetch(topic, 0, 1, 1000, version=version)


def test_send(place: tuple[str, str]) -> None:
    _, servers = place
    with _consumer(servers) as consumer:
        answer = consumer.send("Metadata", {"topics": [{"name": _T}]}, version=0)
        assert [topic["name"] for topic in answer["topics"]] == [_T]
        assert len(answer["topics"][0]["partitions"]) == 2
        with pytest.raises(ConfigError, match="unknown API 'Metadatas'"):
            consumer.send("Metadatas", {})


def test_nobody_there() -> None:
    with (
        SimpleConsumer(HOST, free_port(), so_timeout_ms=2000) as consumer,
        pytest.raises(ConnectionFailed, match="no broker answers at"),
    ):
        consumer.fetch(_T, 0, 0)


@pytest.mark.parametrize(("partition", "offset", "name"), [("0", 0, "partition='0'"), (0, None, "offset=None")])
def test_numbers_that_are_none(partition: Any, offset: Any, name: str) -> None:
    with SimpleConsumer(HOST, 1) as consumer, pytest.raises(ConfigError, match=f"{name}: set a whole number"):
        consumer.fetch(_T, partition, offset)


def test_records_of_transactions_by_isolation_level(place: tuple[str, str]) -> None:
    kind, servers = place
    settings = {"isolation.level": "read_committed"}
    if kind == "0.10.2.2":  # it has no transactions
        with SimpleConsumer(HOST, int(servers.split(":")[1]), settings=settings) as consumer:
            with pytest.raises(UnsupportedVersionError, match="needs Fetch 4 or later, not 3"):
                consumer.fetch(_T, 0, 0)
            with pytest.raises(UnsupportedVersionError, match="needs ListOffsets 2 or later, not 1"):
                consumer.get_offsets_before(_T, 0, LATEST_TIME)
        return
    create_topic(servers, _TRANSACTIONS, 1)
    wait_until(lambda: _is_there(servers, _TRANSACTIONS, 0))
    producer = Producer({"bootstrap.servers": servers, "transactional.id": _TRANSACTIONS, "log_level": 0})
    producer.init_transactions(60)
    for value, end in (
        (b"aborted", producer.abort_transaction),
        (b"committed", producer.commit_transaction),
        (b"undecided", None),
    ):
        producer.begin_transaction()
        producer.produce(_TRANSACTIONS, value, partition=0)
        assert producer.flush(60) == 0
        if end is not None:
            end(60)
    with _consumer(servers) as all_of_them:
        found = [one.value for one in all_of_them.fetch(_TRANSACTIONS, 0, 0)]
        assert found == [b"aborted", b"committed", b"undecided"]
        assert all_of_them.get_offsets_before(_TRANSACTIONS, 0, LATEST_TIME) == [5]
    with SimpleConsumer(HOST, int(servers.split(":")[1]), settings=settings) as consumer:
        for version in [*range(4, _LAST[kind][0] + 1), None]:
            assert [one.value for one in consumer.fetch(_TRANSACTIONS, 0, 0, version=version)] == [b"committed"]
            assert consumer.fetch(_TRANSACTIONS, 0, 4, version=version) == []
        assert consumer.get_offsets_before(_TRANSACTIONS, 0, LATEST_TIME) == [4]
    producer.abort_transaction(60)
