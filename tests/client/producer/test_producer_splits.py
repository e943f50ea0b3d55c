"""The producer splits batches that are too large for the broker and sends them again, in order, once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest

from spark_klog.client import Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.sender import Sender
from spark_klog.errors import ErrorCode, ProtocolError
from tests.support.brokers.faults import dropped, error, lost, sound
from tests.support.brokers.kafka_python_wire import Message, make_records
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.brokers.sound_brokers import NOW

pytestmark = pytest.mark.usefixtures("driver")

LIMIT = 1000
SETTINGS = {"linger.ms": "600000", "retry.backoff.ms": "1"}


class Brokers(ScriptedCluster):
    """Brokers that reject batches of more than `limit` bytes before they look for duplicates, as Kafka does."""

    limit = LIMIT
    _lowered_after: int | None = None

    def lower_after(self, requests: int) -> None:
        """Set the limit to LIMIT after this number of Produce requests in all."""
        self._lowered_after = requests

    def _on_Produce(self, node: int, asked: Message, is_applied: bool) -> Message | None:
        if self._lowered_after is not None and self.count("Produce") > self._lowered_after:
            self.limit = LIMIT
        taken, refused = [], []
        for topic in asked["topic_data"]:
            for data in topic["partition_data"]:
                (refused if len(data["records"]) > self.limit else taken).append(
                    {"name": topic["name"], "partition_data": [data]}
                )
        answer = super()._on_Produce(node, asked | {"topic_data": taken}, is_applied)
        for topic in refused if answer is not None else ():
            entry = {"index": topic["partition_data"][0]["index"], "error_code": ErrorCode.MESSAGE_TOO_LARGE}
            answer["responses"].append({"name": topic["name"], "partition_responses": [entry | {"base_offset": -1}]})
        return answer


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    with Brokers({"t": 2}) as running:
        yield running


def _settings(brokers: ScriptedCluster, **more: str) -> dict[str, str]:
    return (
        {"bootstrap.servers": brokers.bootstrap_servers} | SETTINGS | {k.replace("_", "."): v for k, v in more.items()}
    )


@pytest.mark.parametrize("idempotence", ["true", "false"])
@pytest.mark.parametrize("codec", ["none", pytest.param("gzip", marks=pytest.mark.test_all("codec"))])
def test_many_batches_in_flight(brokers: Brokers, idempotence: str, codec: str) -> None:
    """Some batches fit, others don't; each record is written once, in order, and its delivery has its offset."""
    draw = random.Random(7)
    values = [[draw.randbytes(draw.choice([1, 30, 900])) for _ in range(150)] for _ in range(2)]
    told: list[list[int]] = [[], []]
    settings = _settings(brokers, enable_idempotence=idempotence, batch_size="3000", compression_type=codec)
    with Producer(settings) as producer:
        brokers.on("Produce", error(ErrorCode.NOT_LEADER_OR_FOLLOWER), lost() if idempotence == "true" else error(6))
        deliveries = [
            [
                producer.send("t", value, partition=partition, on_delivery=lambda _, at, to=to: to.append(at.offset))  # type: ignore[union-attr,misc]
                for value in values[partition]
            ]
            for partition, to in enumerate(told)
        ]
        producer.flush()
        offsets = [[delivery.result(0).offset for delivery in some] for some in deliveries]
    for partition in range(2):
        assert brokers.values("t", partition) == values[partition]
        assert offsets[partition] == told[partition] == list(range(150))


def test_rows_of_arrow_in_a_transaction(brokers: Brokers) -> None:
    with Producer(_settings(brokers, transactional_id="x")) as producer:
        producer.init_transactions()
        for number in range(2):
            producer.begin_transaction()
            values = [b"%d %d " % (number, row) * 10 for row in range(200)]
            producer.send_arrow(pa.table({"value": values, "partition": [0] * 200}), "t")
            producer.commit_transaction()
            assert brokers.values("t", 0)[200 * number :] == values


def test_a_single_record_is_refused_and_those_before_it_are_confirmed(brokers: Brokers) -> None:
    with Producer(_settings(brokers)) as producer:
        deliveries = [producer.send("t", value, partition=0) for value in (b"0", b"1", bytes(LIMIT), b"3")]
        with pytest.raises(
            ProtocolError, match=r"t-0, \d{4} bytes: MESSAGE_TOO_LARGE.*max\.message\.bytes: raise that"
        ):
            producer.flush()
        assert [delivery.result(0).offset for delivery in deliveries[:2]] == [0, 1]
        for delivery in deliveries[2:]:
            with pytest.raises(ProtocolError):
                delivery.result(0)
        producer.abort()
    assert brokers.values("t", 0) == [b"0", b"1"]


@pytest.mark.parametrize("is_transactional", [False, True])
def test_a_batch_that_is_written_is_not_written_again(brokers: Brokers, is_transactional: bool) -> None:
    """The response is lost and the limit lowered: the broker does not recognise the halves as duplicates."""
    brokers.limit = 1 << 20
    producer = Producer(_settings(brokers, **{"transactional_id": "x"} if is_transactional else {}))
    if is_transactional:
        producer.init_transactions()
        producer.begin_transaction()
    brokers.on("Produce", sound(), lost())
    producer.send("t", b"first", partition=0)
    producer.flush()
    values = [b"%d" % number * 300 for number in range(4)]
    deliveries = [producer.send("t", value, partition=0) for value in values]
    brokers.lower_after(2)
    with pytest.raises(ProtocolError, match=r"OUT_OF_ORDER_SEQUENCE_NUMBER.*probably written.*max\.message\.bytes"):
        producer.flush()
    for delivery in deliveries:
        with pytest.raises(ProtocolError):
            delivery.result(0)
    producer.abort()
    assert brokers.values("t", 0) == [b"first", *values]


def test_a_batch_that_may_be_written_but_is_not(brokers: Brokers) -> None:
    """The broker accepts the halves, so that the producer raises no error."""
    with Producer(_settings(brokers)) as producer:
        brokers.on("Produce", sound(), dropped())
        values = [b"%d" % number * 300 for number in range(8)]
        producer.send("t", b"first", partition=0)
        producer.flush()
        deliveries = [producer.send("t", value, partition=0) for value in values]
        producer.flush()
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(1, 9))
    assert brokers.values("t", 0) == [b"first", *values]


def test_a_batch_of_another_log_is_not_split(brokers: Brokers) -> None:
    """A mirror has noted its offsets: records of other producers must not come between."""
    with Cluster.connect(_settings(brokers)) as cluster:
        sender = Sender(cluster)
        sender.add_batch(("t", 0), bytearray(make_records(2, [bytes(600)] * 2, NOW)), 2)
        with pytest.raises(ProtocolError, match="MESSAGE_TOO_LARGE"):
            sender.flush()
    assert brokers.values("t", 0) == []
