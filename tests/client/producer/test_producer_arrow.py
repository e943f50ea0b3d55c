"""`Producer.send_arrow`: what confluent-kafka reads back from our broker and from Kafka."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from kafka.partitioner.default import murmur2

from spark_klog.client import Producer
from spark_klog.errors import InvalidRecords, ProducerClosed
from tests.support.brokers.model_cluster import ModelCluster
from tests.support.clients.topics import make_topic
from tests.support.servers.any_broker import serving
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.usefixtures("driver")

_SECONDS = 60
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


@pytest.fixture(scope="module", params=["ours", pytest.param(NEWEST, marks=pytest.mark.peer)])
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with serving(request.param, module_server_dir, shared_kafkas) as address:
        yield address


def written(servers: str, topic: str, partitions: int) -> dict[int, list[Message]]:
    """The records of each partition, in order."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "enable.partition.eof": True, "log_level": 0})
    found: dict[int, list[Message]] = {number: [] for number in range(partitions)}
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in found])
        left, deadline = partitions, time.monotonic() + _SECONDS
        while left:
            assert time.monotonic() < deadline
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is None:
                found[message.partition()].append(message)
            elif message.error().name() == "_PARTITION_EOF":
                left -= 1
    finally:
        consumer.close()
    return found


def test_all_columns(servers: str, topic: str) -> None:
    make_topic(servers, topic, 3)
    rows = pa.table(
        {
            "key": pa.array([b"a", None, b"c", b"a"], pa.large_binary()),
            "value": pa.array(["one", None, "three", ""]).dictionary_encode(),
            "partition": pa.array([None, 2, 0, None], pa.int64()),
            "timestamp": pa.array([1_600_000_000_123_456, None, 0, 7_000], pa.timestamp("us", "UTC")),
            "headers": pa.array([[("x", b"1"), ("x", None)], None, [], [("ü", b"")]], pa.list_(HEADER)),
            "offset": pa.array([9, 9, 9, 9]),
        }
    )
    before = time.time_ns() // 1_000_000
    with Producer({"bootstrap.servers": servers, "compression.type": "lz4"}) as producer:
        producer.send_arrow(rows, topic)
    after = time.time_ns() // 1_000_000
    by_key = (murmur2(b"a") & 0x7FFFFFFF) % 3
    wanted: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    wanted[by_key].append((b"a", b"one", [("x", b"1"), ("x", None)], 1_600_000_000_123))
    wanted[2].append((None, None, [], None))
    wanted[0].append((b"c", b"three", [], 0))
    wanted[by_key].append((b"a", b"", [("ü", b"")], 7))
    found = written(servers, topic, 3)
    for number, messages in found.items():
        assert len(messages) == len(wanted[number])
        for message, (key, value, headers, stamp) in zip(messages, wanted[number], strict=True):
            assert (message.key(), message.value(), message.headers() or []) == (key, value, headers)
            stamped = message.timestamp()[1]
            assert before <= stamped <= after if stamp is None else stamped == stamp


def test_many_chunks_and_topics(servers: str, topic: str) -> None:
    """Rows of each key stay in order; rows without key or partition spread over all partitions."""
    topics = [f"{topic}-a", f"{topic}-b"]
    for name in topics:
        make_topic(servers, name, 2)
    chunks = []
    for start in range(0, 30_000, 1_000):
        numbers = range(start, start + 1_000)
        chunks.append(
            pa.record_batch(
                {
                    "topic": pa.array([topics[number % 2] for number in numbers]),
                    "key": pa.array([b"%d" % (number % 7) if number % 3 else None for number in numbers]),
                    "value": pa.array([b"%06d" % number for number in numbers]),
                }
            )
        )
    with Producer({"bootstrap.servers": servers, "batch.size": "16384"}) as producer:
        producer.send_arrow(pa.Table.from_batches(chunks))
        producer.send_arrow(chunks[0].slice(0, 0))
    for place, name in enumerate(topics):
        found = written(servers, name, 2)
        values = sorted(message.value() or b"" for messages in found.values() for message in messages)
        assert values == [b"%06d" % number for number in range(place, 30_000, 2)]
        for messages in found.values():
            assert len(messages) > 2_000
            by_key: dict[bytes | None, list[bytes]] = {}
            for message in messages:
                by_key.setdefault(message.key(), []).append(message.value() or b"")
            assert all(found_values == sorted(found_values) for found_values in by_key.values())


VALUES = pa.array([b"v", b"w"])
WRONG = [
    ({"key": VALUES}, "value", None, r"no column 'value': the columns are key"),
    ({"value": pa.array([1, 2])}, "value", None, r"column 'value' must be string or binary, not int64: cast it"),
    ({"value": VALUES, "key": pa.array([0.5, 1])}, "key", None, "'key' must be string or binary, not double"),
    ({"value": VALUES, "topic": VALUES}, "topic", None, "'topic' must be string, not binary"),
    ({"value": VALUES, "partition": pa.array(["0", "1"])}, "partition", None, "must be an integer, not string"),
    ({"value": VALUES, "timestamp": pa.array([1, 2], pa.int32())}, "timestamp", None, "int64 in ms, not int32"),
    ({"value": VALUES, "headers": pa.array([["a"], []])}, "headers", None, r"list<struct<key: string.*not list<"),
    ({"value": VALUES, "keys": VALUES}, "keys", None, "unknown column 'keys' of type binary: known are key, value"),
    ({"value": VALUES, "partition": pa.array([0, 2])}, "partition", 1, "row 1: partition 2 of topic t.* 0 to 1"),
    ({"value": VALUES, "partition": pa.array([-1, 0])}, "partition", 0, "row 0: partition -1 of topic t"),
    ({"value": VALUES, "partition": pa.array([1, 1 << 40])}, "partition", 1, "row 1: column .partition. of"),
    ({"value": VALUES, "timestamp": pa.array([1, 1 << 62], pa.timestamp("s"))}, "timestamp", 1, "1: .* out of bounds"),
    ({"value": VALUES, "timestamp": pa.array([None, -2])}, "timestamp", 1, "row 1: timestamp -2 ms is negative"),
    ({"value": VALUES, "timestamp": pa.array([-1_000, -1_001], pa.timestamp("us"))}, "timestamp", 1, "1: .* -2 ms is"),
    (
        {"value": VALUES, "headers": pa.array([[], [("a", b""), (None, b"")]], pa.list_(HEADER))},
        "headers",
        1,
        "row 1 has a header without key",
    ),
    (
        # the null list hides two entries
        {
            "value": VALUES,
            "headers": pa.ListArray.from_arrays(
                pa.array([0, 2, 3], pa.int32()),
                pa.array([("a", b""), (None, b""), (None, b"")], HEADER),
                mask=pa.array([True, False]),
            ),
        },
        "headers",
        1,
        "^row 1 has a header without key",
    ),
]


@pytest.mark.parametrize(("columns", "column", "row", "told"), WRONG, ids=[told for *_, told in WRONG])
def test_rows_that_are_no_records(columns: dict[str, Any], column: str, row: int | None, told: str) -> None:
    """The error names the column or the row, and no row of the table is written."""
    with ModelCluster(1, {"t": 2}) as brokers, Producer({"bootstrap.servers": brokers.servers}) as producer:
        for rows in (pa.table(columns), pa.record_batch(columns)):
            with pytest.raises(InvalidRecords, match=told) as failed:
                producer.send_arrow(rows, "t")
            again = pickle.loads(pickle.dumps(failed.value))  # noqa: S301
            assert (again.column, again.row, str(again)) == (column, row, str(failed.value))
        producer.flush()
        assert not any(brokers.log.values())
        producer.send_arrow(pa.table({"value": VALUES}), "t")
        producer.flush()
        assert sum(map(len, brokers.log.values())) == 2


def test_rows_with_a_wrong_topic_are_named() -> None:
    with ModelCluster(1, {"t": 2, "u": 1}) as brokers, Producer({"bootstrap.servers": brokers.servers}) as producer:
        chunk = pa.table({"value": ["a", "b"], "topic": ["t", "u"], "partition": pa.array([1, 0], pa.int8())})
        no_topic = pa.table(
            {"value": ["c"], "topic": pa.array([None], pa.string()), "partition": pa.array([0], pa.int8())}
        )
        topics = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
        no_utf_8 = pa.table({"value": ["c"], "topic": topics, "partition": pa.array([0], pa.int8())})
        beyond = pa.table({"value": ["c"], "topic": ["u"], "partition": pa.array([1], pa.int8())})
        with pytest.raises(InvalidRecords, match="row 2 has a null topic: give every row a topic"):
            producer.send_arrow(pa.concat_tables([chunk, no_topic]))
        with pytest.raises(InvalidRecords, match=r"row 2: column 'topic' is b'\\xff', which is not UTF-8"):
            producer.send_arrow(pa.concat_tables([chunk, no_utf_8]))
        with pytest.raises(InvalidRecords, match="row 2: partition 1 of topic u: it has partitions 0 to 0"):
            producer.send_arrow(pa.concat_tables([chunk, beyond]))
        with pytest.raises(InvalidRecords, match="no topic: pass topic, or add a column 'topic'"):
            producer.send_arrow(pa.table({"value": ["c"]}))
        with pytest.raises(TypeError, match="pyarrow Table or RecordBatch, not list"):
            producer.send_arrow([1], "t")  # type: ignore[arg-type]
        producer.flush()
        assert not any(brokers.log.values())
    with pytest.raises(ProducerClosed):
        producer.send_arrow(chunk)
