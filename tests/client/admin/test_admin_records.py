"""The admin client's records, log directories and transactions, at our broker and Kafka's, beside confluent-kafka."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import Producer as ConfluentProducer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from spark_klog.client import Admin, Consumer
from spark_klog.errors import ErrorCode, ProtocolError, UnsupportedVersionError
from tests.support.clients.admins import error_code
from tests.support.clients.consumers import NOW, SECONDS, Line, Server, short
from tests.support.waiting import wait_until


def _their_offset(theirs: AdminClient, topic: str, spec: OffsetSpec) -> int:
    (future,) = theirs.list_offsets({TopicPartition(topic, 0): spec}).values()
    offset: int = future.result(SECONDS).offset
    return offset


def test_the_cluster(admin: Admin, theirs: AdminClient) -> None:
    described = admin.describe_cluster()
    seen = theirs.list_topics(timeout=SECONDS)
    assert [(one.node, one.host, one.port) for one in described.brokers] == [
        (one.id, one.host, one.port) for one in seen.brokers.values()
    ]
    assert (described.cluster_id, described.controller) == (seen.cluster_id, seen.controller_id)


def test_offsets_by_time(server: Server, admin: Admin, theirs: AdminClient) -> None:
    topic = server.topic(2)
    # the largest timestamp is not the last one
    for number, timestamp in enumerate((NOW, NOW + 2000, NOW + 1000)):
        server.send(topic, [Line(timestamp, None, b"%d" % number, ())])
    key = (topic, 0)

    def found(time: object) -> tuple[int | None, int | None]:
        one = admin.list_offsets({key: time}).check()[key]  # type: ignore[dict-item]
        return one.offset, one.timestamp

    assert found("earliest") == (0, None)
    assert found("latest") == (3, None)
    assert found(NOW + 1) == (1, NOW + 2000)
    assert found(NOW + 9000) == (None, None)
    several = admin.list_offsets({key: "latest", (topic, 1): "latest", (f"{topic}-no", 0): "latest"})
    assert {one: found.offset for one, found in several.successes.items()} == {key: 3, (topic, 1): 0}
    assert error_code(several[f"{topic}-no", 0]) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"ListOffsets by max-timestamp needs Kafka 3\.0"):
            admin.list_offsets({key: "max-timestamp"})
        return
    assert found("max-timestamp") == (_their_offset(theirs, topic, OffsetSpec.max_timestamp()), NOW + 2000)


def test_deleting_records(server: Server, admin: Admin, theirs: AdminClient) -> None:
    topic = server.topic(2)
    server.send(topic, short(10))
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"DeleteRecords.*Kafka 0\.11"):
            admin.delete_records({(topic, 0): 4})
        return
    assert admin.delete_records({(topic, 0): 4}).check() == {(topic, 0): 4}
    assert _their_offset(theirs, topic, OffsetSpec.earliest()) == 4
    outcomes = admin.delete_records({(topic, 0): -1, (topic, 1): 5})
    assert outcomes[topic, 0] == 10
    assert error_code(outcomes[topic, 1]) == ErrorCode.OFFSET_OUT_OF_RANGE


def test_log_directories(server: Server, admin: Admin) -> None:
    topic = server.topic(2)
    server.send(topic, short(100))
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"DescribeLogDirs.*Kafka 1\.0"):
            admin.describe_log_dirs()
        return
    node = admin.describe_cluster().brokers[0].node
    found = admin.describe_log_dirs([node, 4711], [(topic, 0), (topic, 1)])
    assert error_code(found[4711]) == ErrorCode.BROKER_NOT_AVAILABLE
    ((path, directory),) = found.successes[node].items()
    assert path
    assert directory.error is None
    assert set(directory.replicas) == {(topic, 0), (topic, 1)}
    assert directory.replicas[topic, 0].size > 100 > directory.replicas[topic, 1].size
    ((_, everything),) = admin.describe_log_dirs().check()[node].items()
    assert set(directory.replicas) <= set(everything.replicas)


def server_end(admin: Admin, topic: str) -> int:
    return admin.list_offsets({(topic, 0): "latest"}).check()[topic, 0].offset


def test_transactions(server: Server, admin: Admin) -> None:
    topic, name = server.topic(1), f"x-{uuid.uuid4().hex[:10]}"
    if server.is_old:
        with pytest.raises(UnsupportedVersionError, match=r"ListTransactions.*Kafka 3\.0"):
            admin.list_transactions()
        with pytest.raises(UnsupportedVersionError, match=r"DescribeProducers.*Kafka 2\.8"):
            admin.describe_producers([(topic, 0)])
        return
    producer = ConfluentProducer({"bootstrap.servers": server.servers, "transactional.id": name})
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(SECONDS)
    listed = {one.transactional_id: one for one in admin.list_transactions()}
    assert listed[name].state == "Ongoing"
    described = admin.describe_transactions([name, f"{name}-no"])
    assert error_code(described[f"{name}-no"]) == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    ours = described.successes[name]
    assert (ours.state, ours.partitions, ours.producer_id) == ("Ongoing", ((topic, 0),), listed[name].producer_id)
    assert ours.started is not None
    (state,) = admin.describe_producers([(topic, 0)]).check()[topic, 0]
    assert (state.producer_id, state.transaction_start, state.last_sequence) == (ours.producer_id, 0, 0)
    assert name not in {one.transactional_id for one in admin.list_transactions(states=["Empty"])}
    assert name in {one.transactional_id for one in admin.list_transactions(states=["ongoing"])}
    assert [one.transactional_id for one in admin.list_transactions(producer_ids=[ours.producer_id])] == [name]

    committed = {"bootstrap.servers": server.servers, "isolation.level": "read_committed"}
    with Admin(committed) as reader, Consumer(committed | {"auto.offset.reset": "earliest"}) as consumer:
        assert reader.list_offsets({(topic, 0): "latest"}).check()[topic, 0].offset == 0
        with pytest.raises(ProtocolError, match=r"INVALID_TXN_STATE.*it has no open transaction there"):
            admin.abort_transaction((topic, 0), state.producer_id + 1000, 0)
        assert server_end(admin, topic) == 1
        admin.abort_transaction((topic, 0), state.producer_id, state.producer_epoch, state.coordinator_epoch)
        wait_until(lambda: reader.list_offsets({(topic, 0): "latest"}).check()[topic, 0].offset == 2, seconds=30)
        server.send(topic, short(1))
        consumer.assign([(topic, 0)])
        values: list[bytes | None] = []
        wait_until(lambda: bool(values.extend(record.value for record in consumer.poll(0.2)) or values), seconds=30)
        assert values == [b"0"]
    (after,) = [
        one for one in admin.describe_producers([(topic, 0)]).check()[topic, 0] if one.producer_id == ours.producer_id
    ]
    assert after.transaction_start is None
