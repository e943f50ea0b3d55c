"""Consumers whose offsets a producer commits with its records (KIP-447): read, transform, write exactly once.

Also consumers that wait for an open transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker.faults import ErrorAnswer, Fault
from spark_klog.client import Consumer, ConsumerRecord, GroupMetadata, Producer
from spark_klog.client.letter_topics import Choice, LetterTopic
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import CommitFailed, ErrorCode, ProtocolError
from tests.support.clients.consumers import SECONDS, Server, next_offsets, running, servers, short
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")


@pytest.fixture(scope="module", params=servers("3.9.1"))
def server(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[Server]:
    with running(request.param, module_server_dir / request.param, shared_kafkas) as there:
        yield there


def _member(server: Server, topic: str, **settings: Any) -> Consumer:
    given: dict[str, Any] = {"group_id": f"g-{topic}", "auto_offset_reset": "earliest", "enable_auto_commit": "false"}
    consumer = server.consumer(isolation_level="read_committed", **given, **settings)
    consumer.subscribe([topic])
    return consumer


@pytest.mark.parametrize("commits", [True, False])
def test_a_new_owner_waits_for_offsets_in_an_open_transaction(server: Server, commits: bool) -> None:
    topic, output = server.topic(), server.topic()
    server.send(topic, short(10))
    with (
        Producer({"bootstrap.servers": server.servers, "transactional.id": topic}) as producer,
        _member(server, topic) as consumer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(output, b"made of 6")
        producer.flush()
        producer.send_offsets_to_transaction({(topic, 0): 6}, f"g-{topic}")
        deadline = time.monotonic() + SECONDS
        while not consumer.assignment():
            assert time.monotonic() < deadline
            assert consumer.poll(0.1) == []
        for _ in range(10):
            assert consumer.poll(0.1) == []
        if commits:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
        first = 6 if commits else 0
        assert next_offsets(consumer, 10 - first) == list(range(first, 10))


def _work(producer: Producer, consumer: Consumer, records: list[ConsumerRecord], output: str) -> None:
    """Write the records and commit their offsets in one transaction."""
    producer.begin_transaction()
    for record in records:
        producer.send(output, record.value)
    last = records[-1]
    producer.send_offsets_to_transaction({(last.topic, last.partition): last.offset + 1}, consumer.group_metadata())
    producer.commit_transaction()


def _records(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    found: list[ConsumerRecord] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline
        found += consumer.poll(0.2)
    return found


def test_a_lost_member_commits_nothing(server: Server) -> None:
    topic, output = server.topic(), server.topic()
    server.send(topic, short(6))
    settings = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 300}
    with (
        Producer({"bootstrap.servers": server.servers, "transactional.id": f"{topic}-a"}) as first,
        Producer({"bootstrap.servers": server.servers, "transactional.id": f"{topic}-b"}) as second,
        _member(server, topic, max_poll_interval_ms=1500, **settings) as lost,
        _member(server, topic, **settings) as owner,
    ):
        for producer in (first, second):
            producer.init_transactions()
        read = _records(lost, 6)
        # 1.5 s without a poll later `lost` stops its heartbeats and leaves the group
        _work(second, owner, _records(owner, 6), output)
        with pytest.raises(ProtocolError) as refused:
            _work(first, lost, read, output)
        assert refused.value.code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION)
        first.abort_transaction()
        assert owner.committed([(topic, 0)])[topic, 0].offset == 6
    with server.consumer(isolation_level="read_committed") as reader:
        reader.assign([(output, 0, 0)])
        found = _records(reader, 6)
        for _ in range(5):
            found += reader.poll(0.2)
        assert [record.value for record in found] == [line.value for line in short(6)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_letters_and_retries_go_with_the_offsets(server: Server, protocol: str) -> None:
    """As of our broker in test_dead_letters.py; of a replay, too."""
    if protocol == "consumer" and server.version == "3.9.1":
        pytest.skip("groups of KIP-848 came with Kafka 4")
    topic, dead, later = server.topic(), server.topic(), server.topic()
    server.send(topic, short(3))
    named = {"dead_letter_topic": dead, "retry_topics": later, "retry_delays_ms": "100", "group_protocol": protocol}
    with _member(server, topic, **named) as consumer:
        for record in _records(consumer, 3):
            consumer.retry(record, "later") if record.offset else consumer.dead_letter(record, ValueError("never"))
        consumer.commit()
        for record in _records(consumer, 2):
            assert record.topic == later
            consumer.retry(record, "again")
        consumer.commit()
        committed = consumer.committed([(topic, 0), (later, 0)])
        assert committed[topic, 0].offset == 3
        # behind both records, or also behind the marker of their transaction, if it came with them
        assert committed[later, 0].offset in (2, 3)
    letters = LetterTopic({"bootstrap.servers": server.servers}, dead)
    assert [each.said.attempts for each in letters.letters() if each.said is not None] == [1, 2, 2]
    assert letters.replay(Choice("ValueError")) == (1, 0)
    assert letters.replay() == (2, 0)
    assert letters.replay() == (0, 0)
    with server.consumer(isolation_level="read_committed") as reader:
        reader.assign([(topic, 0, 3)])
        assert [record.value for record in _records(reader, 3)] == [line.value for line in short(3)]


def test_group_metadata_without_membership(server: Server) -> None:
    topic = server.topic()
    with _member(server, topic) as consumer:
        with pytest.raises(CommitFailed, match="not a member"):
            consumer.group_metadata()
    with server.consumer(group_id="g") as consumer:
        assert consumer.group_metadata() == GroupMetadata("g", -1, "", None)


def test_a_position_in_an_open_transaction_is_in_range() -> None:
    """A wrong OFFSET_OUT_OF_RANGE does not move the consumer back to the last stable offset."""
    refusal = Fault(ErrorAnswer("OFFSET_OUT_OF_RANGE"), api="Fetch", count=1)
    with EmbeddedCluster(faults=[refusal]) as cluster:
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        reads = {"isolation.level": "read_committed", "auto.offset.reset": "earliest"}
        with Producer({**servers, "transactional.id": "x"}) as producer, Consumer({**servers, **reads}) as consumer:
            producer.init_transactions()
            producer.begin_transaction()
            for number in range(10):
                producer.send("t", b"%d" % number, partition=0)
            producer.flush()
            consumer.assign([("t", 0, 5)])
            for _ in range(5):
                assert consumer.poll(0.2) == []
            assert consumer.position("t", 0) == 5
            producer.commit_transaction()
            assert next_offsets(consumer, 5) == list(range(5, 10))
