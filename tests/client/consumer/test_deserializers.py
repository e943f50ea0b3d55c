"""Values of consumers that are more than bytes: what confluent-kafka writes, what fails, and where reading goes on."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import (
    DoubleSerializer,
    IntegerSerializer,
    MessageField,
    SerializationContext,
    StringDeserializer,
    StringSerializer,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from kafka.serializer import Deserializer as KafkaPythonDeserializer

import spark_klog
from spark_klog.client import Consumer, ConsumerRecord, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    EncodeError,
    RecordDeserializationError,
    RegistryError,
    SchemaError,
)
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.wire.primitives import append_varlong
from tests.support.clients.topics import make_topic

pytestmark = pytest.mark.usefixtures("driver")

_V1 = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
    ],
}
_V2 = {**_V1, "fields": [*_V1["fields"], {"name": "note", "type": "string", "default": "-"}]}  # type: ignore[misc]


def order(number: int, **more: Any) -> dict[str, Any]:
    tags = {"k": ["a", "b"], "l": []} if number % 2 else {}
    return {"id": number, "name": f"\u20ac {number}", "price": Decimal("1.25") * number, "tags": tags, **more}


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


@pytest.fixture
def theirs(registry: str, topic: str) -> Callable[..., bytes]:
    """confluent-kafka's serializer of a schema and of a value of the topic."""
    client = SchemaRegistryClient({"url": registry})

    def serialize(value: Any, schema: Any = _V1, headers: Any = None, **conf: Any) -> bytes:
        serializer = AvroSerializer(client, json.dumps(schema), conf=conf)
        data: bytes = serializer(value, SerializationContext(topic, MessageField.VALUE, headers))
        return data

    return serialize


def write(cluster: EmbeddedCluster, topic: str, *values: bytes | None, **more: Any) -> None:
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for value in values:
            producer.send(topic, value, **more)


def consumer(cluster: EmbeddedCluster, topic: str, **settings: Any) -> Consumer:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    made = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "auto.offset.reset": "earliest", **named})
    made.assign([(topic, 0)])
    return made


def read(cluster: EmbeddedCluster, topic: str, count: int, **settings: Any) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    with consumer(cluster, topic, **settings) as reader:
        while len(records) < count:
            records += reader.poll(10)
    return records


def test_what_confluent_writes_is_read(
    cluster: EmbeddedCluster, registry: str, topic: str, theirs: Callable[..., bytes]
) -> None:
    headers: list[tuple[str, bytes]] = []
    in_header = theirs(order(4), headers=headers, **{"schema.id.serializer": header_schema_id_serializer})
    values = [theirs(order(1)), None, theirs(order(2, note="n"), _V2), theirs(order(3))]
    write(cluster, topic, *values, key=b"k")
    write(cluster, topic, in_header, key=b"k", headers=headers)
    java = "io.confluent.kafka.serializers.KafkaAvroDeserializer"
    settings = {
        "value_deserializer": java,
        "key_deserializer": "org.apache.kafka.common.serialization.StringDeserializer",
        "schema_registry_url": registry,
    }
    expected = [order(1, note="-"), None, order(2, note="n"), order(3, note="-"), order(4, note="-")]
    records = read(cluster, topic, 5, **settings)
    assert [record.value for record in records] == expected  # by the latest version, whoever wrote them
    assert {record.key for record in records} == {"k"}
    # the same rows as columns
    with consumer(cluster, topic, **settings) as reader:
        batches = []
        while sum(batch.num_rows for batch in batches) < 5:
            batch = reader.poll_arrow(10)
            if batch is not None:
                batches.append(batch)
    table = pa.Table.from_batches(batches)
    assert table.column("value").to_pylist(maps_as_pydicts="strict") == expected
    assert table.schema.field("key").type == pa.string()
    assert pa.types.is_struct(table.schema.field("value").type)
    # and by the schema that wrote the first one, which has no note
    subject = SchemaRegistryClient({"url": registry}).get_version(f"{topic}-value", 1)
    own = read(cluster, topic, 5, **settings, value_schema_id=subject.schema_id)
    assert [record.value for record in own] == [order(1), None, order(2), order(3), order(4)]
    # for what takes Arrow streams
    named = {name.replace("_", "."): value for name, value in settings.items()}
    with spark_klog.read(topic, bootstrap_servers=cluster.bootstrap_servers, settings=named) as rows:
        found = duckdb.connect().from_arrow(rows).aggregate("sum(value.id), max(value.note)")
        assert found.fetchall() == [(10, "n")]


def test_records_without_a_registry(cluster: EmbeddedCluster, topic: str) -> None:
    write(cluster, topic, b"\x06", b"\x01")
    records = read(cluster, topic, 2, value_deserializer="avro", value_schema='"long"')
    assert [record.value for record in records] == [3, -1]


def test_objects_and_functions(
    cluster: EmbeddedCluster, registry: str, topic: str, theirs: Callable[..., bytes]
) -> None:
    headers: list[tuple[str, bytes]] = []
    in_header = theirs(order(1), headers=headers, **{"schema.id.serializer": header_schema_id_serializer})
    write(cluster, topic, in_header, key="\u20ac".encode(), headers=headers)
    write(cluster, topic, None)
    confluent = AvroDeserializer(SchemaRegistryClient({"url": registry}))
    first, last = read(cluster, topic, 2, value_deserializer=confluent, key_deserializer=StringDeserializer())
    assert (first.key, first.value, last.key, last.value) == ("\u20ac", order(1), None, None)

    class OfKafkaPython(KafkaPythonDeserializer):  # type: ignore[misc]
        def deserialize(self, topic: str, *more: Any) -> Any:
            return topic, more[-1]

    def with_context(value: bytes, context: Any) -> Any:
        return context.topic, context.field, [name for name, _ in context.headers], value

    first, last = read(cluster, topic, 2, value_deserializer=with_context, key_deserializer=OfKafkaPython())
    assert first.value == (topic, "value", ["__value_schema_id"], in_header)
    assert (first.key, last.key, last.value) == ((topic, "\u20ac".encode()), None, None)
    first, _ = read(cluster, topic, 2, value_deserializer=len, key_deserializer=lambda key: key.decode())
    assert (first.key, first.value) == ("\u20ac", len(in_header))


def _message() -> Any:
    """The class of a message with a number, `id`."""
    file = descriptor_pb2.FileDescriptorProto(name="orders.proto", package="shop", syntax="proto3")
    number = file.message_type.add(name="Order").field.add(name="id", number=1)
    number.type, number.label = number.TYPE_INT64, number.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def test_other_formats_of_confluent(cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    client = SchemaRegistryClient({"url": registry})
    message = _message()
    text = json.dumps({"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}})
    writing = {
        "key.serializer": JSONSerializer(text, client),
        "value.serializer": ProtobufSerializer(message, client, {}),
    }
    with Producer({"bootstrap.servers": cluster.bootstrap_servers, **writing}) as producer:
        producer.send(topic, message(id=5), key={"id": 1})
        with pytest.raises(EncodeError, match="the key of a record for"):
            producer.send(topic, message(id=5), key={"id": "one"})
    reading: dict[str, Any] = {
        "key_deserializer": JSONDeserializer(text, schema_registry_client=client),
        "value_deserializer": ProtobufDeserializer(message, {}, client),
    }
    (record,) = read(cluster, topic, 1, **reading)
    assert (record.key, record.value) == ({"id": 1}, message(id=5))


@pytest.mark.parametrize(
    ("name", "data", "value"),
    [
        ("string", StringSerializer()("\u20ac"), "\u20ac"),
        ("integer", IntegerSerializer()(-5), -5),
        ("org.apache.kafka.common.serialization.LongDeserializer", (1 << 40).to_bytes(8, "big"), 1 << 40),
        ("short", b"\xff\xfe", -2),
        ("double", DoubleSerializer()(1.5), 1.5),
        ("float", b"\x3f\xc0\0\0", 1.5),
        ("boolean", b"\1", True),
        ("uuid", b"12345678-1234-5678-1234-567812345678", uuid.UUID("12345678-1234-5678-1234-567812345678")),
        ("ByteArrayDeserializer", b"\0\1", b"\0\1"),
    ],
)
def test_plain_types(cluster: EmbeddedCluster, topic: str, name: str, data: bytes, value: Any) -> None:
    bad = {"string": b"\xff", "boolean": b"\2"}.get(name, b"1")
    write(cluster, topic, data, None, bad)
    with consumer(cluster, topic, value_deserializer=name) as reader:
        if name == "ByteArrayDeserializer":
            assert [record.value for record in reader.poll(10)] == [value, None, bad]
            return
        assert [record.value for record in reader.poll(10)] == [value, None]
        with pytest.raises(RecordDeserializationError, match=r"offset 2 has a value that does not decode: \w*Error"):
            reader.poll(10)
        reader.seek(topic, 0, 0)
        batch = reader.poll_arrow(10)
        assert batch is not None
        assert batch.column("value").to_pylist() == [str(value) if name == "uuid" else value, None]
        with pytest.raises(RecordDeserializationError) as caught:
            reader.poll_arrow(10)
        assert (caught.value.offset, caught.value.value) == (2, bad)


def test_an_error_tells_all_that_a_dead_letter_needs(cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    write(cluster, topic, b"\0\0\0\x30\x39\0", key=b"k", headers=[("h", b"1")])
    SchemaRegistryClient({"url": registry}).register_schema(f"{topic}-value", _schema('"int"'))
    with consumer(cluster, topic, value_deserializer="avro", schema_registry_url=registry) as reader:
        for poll in (reader.poll, reader.poll_arrow, reader.poll):
            with pytest.raises(
                RecordDeserializationError, match=f"{topic}-0: .* offset 0 .* schema id 12345"
            ) as caught:
                poll(10)
            for error in (caught.value, copy.copy(caught.value)):
                assert (error.topic, error.partition, error.offset, error.column) == (topic, 0, 0, "value")
                assert (error.key, error.value, error.headers) == (b"k", b"\0\0\0\x30\x39\0", (("h", b"1"),))
            assert reader.position(topic, 0) == 0
    with (
        pytest.raises(RecordDeserializationError),
        spark_klog.read(
            topic,
            bootstrap_servers=cluster.bootstrap_servers,
            settings={"value.deserializer": "avro", "schema.registry.url": registry},
        ) as rows,
    ):
        rows.read_all()


def _schema(text: str) -> Any:
    from confluent_kafka.schema_registry import Schema

    return Schema(text, "AVRO")


def test_bad_records_in_sequence(cluster: EmbeddedCluster, topic: str) -> None:
    """Against a model: polls return what is between bad records, and go past these by `seek` only."""
    chance = random.Random(4711)
    count, partitions = 60, 2
    bad = {(partition, offset) for partition in range(partitions) for offset in chance.sample(range(count), 12)}
    make_topic(cluster.bootstrap_servers, topic, partitions)
    good, broken = b"\x02", b""
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for offset in range(count):
            for partition in range(partitions):
                producer.send(topic, broken if (partition, offset) in bad else good, partition=partition)
            if chance.random() < 0.2:
                producer.flush()
    settings = {"group_id": topic, "enable_auto_commit": False, "max_poll_records": 7, "fetch_max_wait_ms": 10}
    settings["value_schema"] = '"long"'
    positions = dict.fromkeys(range(partitions), 0)
    committed = dict(positions)
    errors = 0
    reader = consumer(cluster, topic, value_deserializer="avro", **settings)
    reader.assign([(topic, partition) for partition in range(partitions)])
    for _ in range(250):
        step = chance.choice(["poll", "poll", "poll", "poll_arrow", "commit", "seek", "again"])
        as_arrow = step == "poll_arrow"
        if step == "commit":
            reader.commit()
            committed = dict(positions)
        elif step == "seek":
            partition, offset = chance.randrange(partitions), chance.randrange(count)
            reader.seek(topic, partition, offset)
            positions[partition] = offset
        elif step == "again" and chance.random() < 0.1:
            reader.close()
            reader = consumer(cluster, topic, value_deserializer="avro", **settings)
            reader.assign([(topic, partition) for partition in range(partitions)])
            positions = dict(committed)
        elif min(positions.values()) < count:
            records, error = _polled(reader, as_arrow)
            if error is not None:
                errors += 1
                assert (error.partition, error.offset) in bad
                assert error.offset == positions[error.partition]
                assert error.value == broken
                if chance.random() < 0.5:
                    reader.seek(topic, error.partition, error.offset + 1)
                    positions[error.partition] = error.offset + 1
            else:
                partition = records[0][0]
                offsets = list(range(positions[partition], positions[partition] + len(records)))
                assert records == [(partition, offset, 1) for offset in offsets]
                assert not bad & {(partition, offset) for offset in offsets}
                positions[partition] = offsets[-1] + 1
        assert {partition: reader.position(topic, partition) for partition in range(partitions)} == positions
    reader.commit()
    found = reader.committed([(topic, partition) for partition in range(partitions)])
    assert {partition: one.offset for (_, partition), one in found.items()} == positions
    reader.close()
    assert errors > 15


def _polled(reader: Consumer, as_arrow: bool) -> tuple[list[tuple[int, int, Any]], RecordDeserializationError | None]:
    """(partition, offset, value) of the next records, or the error."""
    names = "partition", "offset", "value"
    while True:
        try:
            if not as_arrow:
                records = reader.poll(5)
                if records:
                    return [(record.partition, record.offset, record.value) for record in records], None
            elif (batch := reader.poll_arrow(5)) is not None:
                return list(zip(*(batch.column(name).to_pylist() for name in names), strict=True)), None
        except RecordDeserializationError as error:
            return [], error


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ({"type": "long", "logicalType": "timestamp-micros"}, 253_402_300_800 * 10**6),
        ({"type": "int", "logicalType": "date"}, 2_932_897),
    ],
)
def test_a_time_after_the_year_9999(cluster: EmbeddedCluster, topic: str, kind: Any, bad: int) -> None:
    written = bytearray()
    append_varlong(written, bad)
    write(cluster, topic, b"\0", bytes(written), b"\2")
    settings = {"value_deserializer": "avro", "value_schema": json.dumps(kind)}
    with consumer(cluster, topic, **settings) as reader:
        while not (first := reader.poll(10)):
            pass
        assert [record.offset for record in first] == [0]
        with pytest.raises(RecordDeserializationError, match="poll_arrow returns it") as caught:
            reader.poll(10)
        assert (caught.value.offset, caught.value.value) == (1, bytes(written))
        assert reader.position(topic, 0) == 1
        reader.seek(topic, 0, 2)
        while not (rest := reader.poll(10)):
            pass
        assert [record.offset for record in rest] == [2]
    with consumer(cluster, topic, **settings) as reader:
        while (batch := reader.poll_arrow(10)) is None:
            pass
        assert (batch.num_rows, batch.column("value").null_count) == (3, 0)


def test_an_automatic_commit_ends_before_the_bad_record(cluster: EmbeddedCluster, topic: str) -> None:
    write(cluster, topic, b"1", b"2", b"x", b"4")
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": topic, "value.deserializer": int}
    for _ in range(2):
        with Consumer({**settings, "auto.offset.reset": "earliest", "auto.commit.interval.ms": 0}) as reader:
            reader.subscribe([topic])
            values: list[Any] = []
            with pytest.raises(RecordDeserializationError) as caught:
                _collect(reader, values)
            assert caught.value.offset == 2
    assert values == []  # the first one committed what it had returned
    with Consumer(settings) as reader:
        assert reader.committed([(topic, 0)])[topic, 0].offset == 2


def test_other_partitions_go_on(cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 2)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for number in range(20):
            producer.send(topic, b"x" if number == 3 else b"1", partition=0)
            producer.send(topic, b"1", partition=1)
    with consumer(cluster, topic, value_deserializer=int, max_poll_records=5) as reader:
        reader.assign([(topic, 0), (topic, 1)])
        errors = 0
        while reader.position(topic, 1) < 20:
            errors += _polled(reader, as_arrow=False)[1] is not None
            assert errors < 20
        assert reader.position(topic, 0) <= 3


def _collect(reader: Consumer, values: list[Any]) -> None:
    while True:
        values += [record.value for record in reader.poll(10)]


@pytest.mark.parametrize("as_arrow", [False, True])
def test_bad_records_are_skipped_without_another_fetch(cluster: EmbeddedCluster, topic: str, as_arrow: bool) -> None:
    make_topic(cluster.bootstrap_servers, topic, 2)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for number in range(101):
            producer.send(topic, b"x" if number < 100 else b"\0\1", partition=0)
        producer.send(topic, b"x", partition=1)
    settings = {"value_deserializer": "short", "fetch_max_wait_ms": 1000}
    with consumer(cluster, topic, **settings) as reader:
        reader.assign([(topic, 0), (topic, 1)])
        begun = time.monotonic()
        errors = dict.fromkeys(range(2), 0)
        records: list[tuple[int, int, Any]] = []
        while not records:
            records, error = _polled(reader, as_arrow)
            if error is not None:
                errors[error.partition] += 1
                if error.partition == 0:
                    reader.seek(topic, 0, error.offset + 1)
        assert records == [(0, 100, 1)]
        assert errors[0] == 100
        assert errors[1] > 20  # both have their turns
        assert time.monotonic() - begun < 20  # and not a second for each
        with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
            producer.send(topic, b"\0\2", partition=0)
            producer.send(topic, b"\0\3", partition=1)
        records = []
        while len(records) < 2:
            more, error = _polled(reader, as_arrow)
            records += more
            if error is not None:
                reader.seek(topic, 1, 1)
        assert sorted(records) == [(0, 101, 2), (1, 1, 3)]


def test_a_registry_that_dies_and_comes_back(make_cluster: Callable[..., EmbeddedCluster], topic: str) -> None:
    cluster = make_cluster(schema_registry=True)
    registry = cluster.schema_registry_url
    assert registry is not None
    client = SchemaRegistryClient({"url": registry})

    def theirs(value: Any, schema: Any) -> bytes:
        context = SerializationContext(topic, MessageField.VALUE, [])
        data: bytes = AvroSerializer(client, json.dumps(schema))(value, context)
        return data

    write(cluster, topic, *[theirs(order(number), _V1) for number in range(3)])
    settings = {
        "value_deserializer": "avro",
        "schema_registry_url": registry,
        "schema_registry_retries_deadline_ms": 1500,
        "max_poll_records": 2,
    }
    with consumer(cluster, topic, **settings) as reader:
        values = [record.value for record in reader.poll(10)]
        write(cluster, topic, theirs(order(3, note="n"), _V2), theirs(order(4), _V1))
        cluster.kill_schema_registry()
        values += [record.value for record in reader.poll(10)]  # known schemas need no registry
        assert values == [order(0), order(1), order(2)]
        for poll in (reader.poll, reader.poll_arrow, reader.poll):
            with pytest.raises(ConnectionFailed, match="schema registry"):
                poll(10)
            assert reader.position(topic, 0) == 3
        cluster.restart_schema_registry()
        while len(values) < 5:
            values += [record.value for record in reader.poll(10)]
        assert values == [order(number) for number in range(5)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"value.deserializer": "avor"}, "value.deserializer=avor is unknown: set one of avro"),
        ({"value.deserializer": "com.example.OwnDeserializer"}, "or a function"),
        ({"value.deserializer": "StringSerializer"}, "a class whose name ends with Deserializer"),
        ({"value.deserializer": 5}, "value.deserializer is of type int"),
        ({"value.deserializer": "avro"}, "value.deserializer=avro needs schema.registry.url, or value.schema"),
        (
            {"value.deserializer": "avro", "schema.registry.url": "http://a", "schema.registry.ulr": "x"},
            "unknown setting schema.reg",
        ),
        ({"schema.registry.url": "http://a"}, "needs value.deserializer or key.deserializer, such as avro"),
        ({"value.deserializer": "avro", "schema.registry.retries.deadline.ms": 1}, "needs schema.registry.url"),
        ({"value.schema": '"int"'}, "value.schema needs value.deserializer"),
        ({"value.deserializer": "string", "value.subject": "s"}, "value.subject needs value.deserializer"),
        ({"value.deserializer": "avro", "value.schema": '"int"', "value.subject": "s"}, "needs schema.registry.url"),
        (
            {"value.deserializer": "avro", "schema.registry.url": "u", "value.schema": "x", "value.schema.id": 1},
            "exclude each other",
        ),
        (
            {
                "value.deserializer": "avro",
                "schema.registry.url": "http://a",
                "basic.auth.user.info": "ada:geheim",
                "schema.registry.basic.auth.user.info": "ada:geheim",
            },
            "are both set",
        ),
    ],
)
def test_refused_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Consumer({"bootstrap.servers": "127.0.0.1:1", **settings})
    assert "geheim" not in str(caught.value)


def test_asynchronous_functions_are_refused(cluster: EmbeddedCluster, topic: str) -> None:
    async def deserialize(value: bytes) -> bytes:
        return value

    with pytest.raises(ConfigError, match="asynchronous"):
        Consumer({"bootstrap.servers": "127.0.0.1:1", "value.deserializer": deserialize})
    write(cluster, topic, b"1")
    with (
        consumer(cluster, topic, value_deserializer=lambda value: deserialize(value)) as reader,
        pytest.raises(RecordDeserializationError, match="asynchronous"),
    ):
        reader.poll(10)


def test_no_schema_to_read_by(cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    write(cluster, topic, b"\0\0\0\0\1\2")
    settings = {"value_deserializer": "avro", "schema_registry_url": registry}
    with (
        consumer(cluster, topic, **settings) as reader,
        pytest.raises((SchemaError, RegistryError), match=f"{topic}-value"),
    ):
        reader.poll(10)
    with consumer(cluster, topic, value_deserializer=len) as reader:
        with pytest.raises(ConfigError, match=r"value.deserializer is a function"):
            reader.poll_arrow(10)
        assert [record.value for record in reader.poll(10)] == [6]
    with pytest.raises(ConfigError, match=r"value.deserializer=avro of several topics needs value.subject"):
        spark_klog.read(
            [topic, "other"],
            bootstrap_servers=cluster.bootstrap_servers,
            settings={"value.deserializer": "avro", "schema.registry.url": registry},
        )


def test_nothing_more_is_imported_without_schemas(cluster: EmbeddedCluster, topic: str) -> None:
    write(cluster, topic, b"\0\0\0\5")
    script = f"""
import sys
from spark_klog.client import Consumer, Producer
settings = {{"bootstrap.servers": {cluster.bootstrap_servers!r}, "auto.offset.reset": "earliest"}}
assert not [name for name in sys.modules if name.startswith("spark_klog.schemas")]
with Consumer(settings | {{"value.deserializer": "integer"}}) as consumer:
    consumer.assign([({topic!r}, 0)])
    assert [record.value for record in consumer.poll(10)] == [5]
with Producer(settings | {{"value.serializer": "integer"}}) as producer:
    producer.send({topic!r}, 6)
assert not [name for name in sys.modules if name.startswith(("pyarrow", "spark_klog.schemas", "httpx"))]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
