"""Transactions that another process ends, seen by a read_committed consumer at our broker and Kafka's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client.admin.admin import Admin
from spark_klog.client.producer.producer import Producer
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.errors import ErrorCode, InvalidTransactionState, ProtocolError
from tests.support.clients.transactional.readers import by_confluent
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST, versions
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")

PARTITIONS = 3
_SECONDS = 60
_GONE = {ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH}


@pytest.fixture(
    scope="module",
    params=["ours", *(pytest.param(version, marks=pytest.mark.peer) for version in versions(NEWEST, "3.9.1"))],
)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


@pytest.fixture
def admin(servers: str) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": servers}) as made:
        yield made


def connect(servers: str, name: str, **settings: str) -> Producer:
    return Producer(
        {"bootstrap.servers": servers, "transactional.id": name}
        | {key.replace("_", "."): value for key, value in settings.items()}
    )


def send(producer: Producer, topic: str, *values: bytes) -> None:
    for number, value in enumerate(values):
        producer.send(topic, value, partition=number % PARTITIONS)


def committed(servers: str, topic: str) -> list[bytes]:
    return sorted(value.encode() for n in range(PARTITIONS) for value in by_confluent(servers, topic, n))


def prepared(producer: Producer, topic: str, *values: bytes) -> PreparedTransaction:
    producer.init_transactions()
    producer.begin_transaction()
    send(producer, topic, *values)
    found = producer.prepare_transaction()
    assert found is not None
    return found


def code_of(admin: Admin, one: PreparedTransaction, *, commits: bool) -> ErrorCode:
    error = admin.end_transactions([one], commits=commits).failures.get(one)
    assert error is None or isinstance(error, ProtocolError)
    return ErrorCode.NONE if error is None else error.code


def test_another_process_commits_and_aborts(servers: str, topic: str, admin: Admin) -> None:
    admin.create_topic(topic, PARTITIONS)
    producers = [connect(servers, f"{topic}-{number}") for number in range(3)]
    wanted: list[bytes] = []
    for turn in range(3):
        values = [[b"%d %d %d" % (turn, n, i) for i in range(4)] for n in range(3)]
        found = [prepared(one, topic, *part) for one, part in zip(producers, values, strict=True)]
        assert committed(servers, topic) == sorted(wanted)
        admin.end_transactions(found[:2], commits=True).check()
        admin.end_transactions(found[2:], commits=False).check()
        wanted += values[0] + values[1]
        for one in found[:2]:  # repeating is allowed, the opposite is not
            assert code_of(admin, one, commits=True) == ErrorCode.NONE
            assert code_of(admin, one, commits=False) == ErrorCode.INVALID_TXN_STATE
        assert code_of(admin, found[2], commits=False) == ErrorCode.NONE
        assert code_of(admin, found[2], commits=True) == ErrorCode.INVALID_TXN_STATE
        assert _committed_when_there(servers, topic, len(wanted)) == sorted(wanted)
    for one in producers:
        one.close()


def _committed_when_there(servers: str, topic: str, count: int) -> list[bytes]:
    """Wait for `count` committed values: coordinators answer EndTxn before the markers are written."""
    deadline = time.monotonic() + _SECONDS
    while len(found := committed(servers, topic)) < count:
        assert time.monotonic() < deadline
    return found


def test_its_producer_may_end_first(servers: str, topic: str, admin: Admin) -> None:
    admin.create_topic(topic, PARTITIONS)
    with connect(servers, topic) as producer:
        found = prepared(producer, topic, b"a", b"b")
    admin.end_transactions([found], commits=True).check()
    assert _committed_when_there(servers, topic, 2) == [b"a", b"b"]


def test_what_the_producer_may_do_meanwhile(servers: str, topic: str, admin: Admin) -> None:
    admin.create_topic(topic, PARTITIONS)
    with connect(servers, topic) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        assert producer.prepare_transaction() is None  # nothing was written
        producer.begin_transaction()
        send(producer, topic, b"first")
        first = producer.prepare_transaction()
        assert first is not None
        for call in (producer.begin_transaction, producer.commit_transaction, producer.abort_transaction):
            with pytest.raises(InvalidTransactionState, match="prepared"):
                call()
        second = prepared(producer, topic, b"second")  # aborts the first
        assert second.epoch > first.epoch
        assert code_of(admin, first, commits=True) in _GONE
        assert code_of(admin, first, commits=False) in _GONE
        assert code_of(admin, second, commits=True) == ErrorCode.NONE
    assert _committed_when_there(servers, topic, 1) == [b"second"]


def test_the_broker_aborts_after_the_timeout(servers: str, topic: str, admin: Admin) -> None:
    admin.create_topic(topic, PARTITIONS)
    with connect(servers, topic, transaction_timeout_ms="1000") as producer:
        found = prepared(producer, topic, b"late")
        deadline = time.monotonic() + _SECONDS
        while admin.describe_transactions([topic])[topic].state == "Ongoing":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert code_of(admin, found, commits=True) in _GONE
        again = prepared(producer, topic, b"in time")
        admin.end_transactions([again], commits=True).check()
    assert _committed_when_there(servers, topic, 1) == [b"in time"]


def test_an_id_that_the_broker_does_not_know(topic: str, admin: Admin) -> None:
    unknown = PreparedTransaction(f"{topic}-unknown", 7, 0)
    assert code_of(admin, unknown, commits=True) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
