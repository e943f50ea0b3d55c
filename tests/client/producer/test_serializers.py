"""Values of producers that are more than bytes: confluent-kafka reads them, and what fails leaves nothing behind."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import (
    DoubleDeserializer,
    IntegerDeserializer,
    MessageField,
    SerializationContext,
    StringSerializer,
)
from kafka.partitioner.default import murmur2

from spark_klog.client import Admin, Consumer, ConsumerRecord, Producer
from spark_klog.client.settings import of_bytes
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    EncodeError,
    InvalidRecords,
    InvalidTransactionState,
    ProducerClosed,
    RegistryError,
    SchemaError,
)
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat
from tests.support.clients.topics import make_topic

pytestmark = pytest.mark.usefixtures("driver")

_AT = dt.datetime(2024, 5, 6, 7, 8, 9, 10, dt.timezone.utc)
_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": "string"}}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [
                        {"name": "sku", "type": "string"},
                        {"name": "counts", "type": {"type": "map", "values": "int"}},
                    ],
                },
            },
        },
    ],
}
_TEXT = json.dumps(_SCHEMA)


def order(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "name": None if number % 2 else f"\u20ac {number}",
        "price": Decimal("-12.34") * number,
        "at": _AT,
        "kind": "AB"[number % 2],
        "tags": {"k": ["a", "b"], "l": []},
        "lines": [{"sku": "x", "counts": {"a": number}}],
        **more,
    }


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


@pytest.fixture
def settings(cluster: EmbeddedCluster, registry: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.bootstrap_servers,
        "value.serializer": "avro",
        "schema.registry.url": registry,
        "schema.registry.retries.deadline.ms": 20_000,
    }


def records(cluster: EmbeddedCluster, topic: str, count: int, partitions: int = 1, **more: Any) -> list[ConsumerRecord]:
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "auto.offset.reset": "earliest", **more}
    found: list[ConsumerRecord] = []
    with Consumer(settings) as consumer:
        consumer.assign([(topic, number) for number in range(partitions)])
        while len(found) < count:
            found += consumer.poll(10)
    assert len(found) == count
    return found


def of_confluent(registry: str, record: ConsumerRecord, field: str = MessageField.VALUE) -> Any:
    return _deserializer(registry)(record.value, SerializationContext(record.topic, field, list(record.headers)))


@cache
def _deserializer(registry: str) -> AvroDeserializer:
    return AvroDeserializer(SchemaRegistryClient({"url": registry}))


def test_confluent_reads_what_is_written(
    cluster: EmbeddedCluster, registry: str, topic: str, settings: dict[str, Any]
) -> None:
    with Producer(settings | {"value.schema": _TEXT, "key.serializer": "string"}) as producer:
        for number in range(3):
            producer.send(topic, order(number), key=f"k{number}", headers=[("h", b"1")])
        producer.send(topic, None, key="k3")
        values = pa.array(
            [{**order(3), "tags": [], "lines": []}, None], pa.struct([(name, kind) for name, kind in _types().items()])
        )
        producer.send_arrow(pa.table({"key": ["k4", None], "value": values}), topic)
    found = records(cluster, topic, 6)
    last = order(3, tags={}, lines=[])
    assert [of_confluent(registry, one) for one in found] == [order(0), order(1), order(2), None, last, None]
    assert [one.key for one in found] == [b"k0", b"k1", b"k2", b"k3", b"k4", None]
    assert found[0].headers == (("h", b"1"),)
    assert found[3].value is None  # a tombstone
    client = SchemaRegistryClient({"url": registry})
    serializer = AvroSerializer(client, _TEXT)
    context = SerializationContext(topic, MessageField.VALUE, [])
    assert [one.value for one in found[:3]] == [serializer(order(number), context) for number in range(3)]
    assert client.get_versions(f"{topic}-value") == [1]


def _types() -> dict[str, pa.DataType]:
    line = pa.struct([("sku", pa.string()), ("counts", pa.map_(pa.string(), pa.int32()))])
    return {
        "id": pa.int64(),
        "name": pa.string(),
        "price": pa.decimal128(10, 2),
        "at": pa.timestamp("us", "UTC"),
        "kind": pa.string(),
        "tags": pa.map_(pa.string(), pa.list_(pa.string())),
        "lines": pa.list_(line),
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (order(1, id="x"), "field id: it must be an int, not str 'x'"),
        (order(1, id=1 << 63), "field id: "),
        (order(1, id=None), "field id.* is null"),
        ({"id": 1}, "field price: is missing, and the schema has no default"),
        (order(1, kind="C"), "field kind: is not a symbol"),
        (order(1, oops=1), "there is no field 'oops'"),
        (order(1, lines=[{"sku": "x", "counts": {}, "skv": 1}]), r"field lines\[\]: there is no field 'skv'"),
        (order(1, price=Decimal("1.234")), "field price: "),
        ([1], "it must be a dict, not list"),
        (b"bytes", "it must be a dict, not bytes"),
    ],
)
def test_a_value_that_does_not_serialize(
    cluster: EmbeddedCluster, topic: str, settings: dict[str, Any], value: Any, said: str
) -> None:
    topic = "refused"  # one for all: only the good ones are there, without a gap
    with Producer(settings | {"value.schema": _TEXT, "enable.idempotence": True}) as producer:
        first = producer.send(topic, order(1))
        with pytest.raises(EncodeError, match=f"the value of a record for refused does not serialize: .*{said}"):
            producer.send(topic, value).result(60)
        second = producer.send(topic, order(2))
        producer.flush()
    assert second.result(0).offset == first.result(0).offset + 1


def test_keys_and_partitions(cluster: EmbeddedCluster, registry: str, topic: str, settings: dict[str, Any]) -> None:
    make_topic(cluster.bootstrap_servers, topic, 3)
    own = {"key.serializer": "avro", "key.schema": '"string"', "value.schema": _TEXT}
    with Producer(settings | own) as producer:
        with pytest.raises(EncodeError, match="the key of a record for"):
            producer.send(topic, order(0), key=5).result(60)
        deliveries = [producer.send(topic, order(number), key=f"k{number}") for number in range(9)]
        table = pa.table({"key": [f"k{number}" for number in range(9)], "value": [b"x"] * 9})
        with pytest.raises(SchemaError, match="binary can't be written as"):
            producer.send_arrow(table, topic)  # nothing of it is sent
    found = records(cluster, topic, 9, 3)
    for one in found:
        assert one.partition == (murmur2(one.key) & 0x7FFFFFFF) % 3
    assert sorted(delivery.result(0).partition for delivery in deliveries) == sorted(one.partition for one in found)
    keys = {_deserializer(registry)(one.key, SerializationContext(topic, MessageField.KEY, [])) for one in found}
    assert keys == {f"k{number}" for number in range(9)}


def test_a_copied_record_has_no_id_of_its_old_schema(
    cluster: EmbeddedCluster, registry: str, settings: dict[str, Any], topic: str
) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    old = json.dumps({"type": "record", "name": "Old", "fields": [{"name": "x", "type": "long"}]})
    number = SchemaRegistryClient({"url": registry}).register_schema("old-value", Schema(old, "AVRO"))
    stale = b"\0" + number.to_bytes(4, "big")
    headers = [("h", b"1"), ("__value_schema_id", stale), ("__key_schema_id", stale)]
    pairs = [{"key": name, "value": value} for name, value in headers]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    with Producer(settings | {"value.schema": _TEXT}) as producer:
        producer.send(topic, order(1), headers=headers)
        rows = producer_rows([order(2), order(3)])
        producer.send_arrow(rows.append_column("headers", pa.array([pairs, None], kind)), topic)
        producer.send_arrow(
            pa.record_batch({"value": rows["value"].chunk(0), "headers": pa.array([[], pairs], kind)}), topic
        )
    found = records(cluster, topic, 5)
    kept = (headers[0], headers[2])
    assert [one.headers for one in found] == [kept, kept, (), (), kept]
    assert [of_confluent(registry, one)["id"] for one in found] == [1, 2, 3, 2, 3]


def producer_rows(orders: list[dict[str, Any]]) -> pa.Table:
    kind = ColumnFormat("value", "avro", None, _TEXT).reader().decoder().type
    return pa.table({"value": pa.chunked_array([pa.array(orders, kind)])})


def test_objects_and_functions(cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    confluent = AvroSerializer(
        SchemaRegistryClient({"url": registry}), _TEXT, conf={"schema.id.serializer": header_schema_id_serializer}
    )
    own = {"bootstrap.servers": cluster.bootstrap_servers}
    with Producer(own | {"value.serializer": confluent, "key.serializer": StringSerializer()}) as producer:
        producer.send(topic, order(1), key="k", headers=[("h", b"1")])
        producer.send(topic, None)
        with pytest.raises(EncodeError, match=r"the value of a record for .* does not serialize") as caught:
            producer.send(topic, {"id": "x"}).result(60)
        assert caught.value.__cause__ is not None

    def with_context(value: Any, context: Any) -> bytes | None:
        context.headers.append((context.field, context.topic.encode()))
        return None if value == "null" else json.dumps(value).encode()

    class OfKafkaPython:
        def serialize(self, topic: str, value: Any) -> bytes:
            return f"{topic} {value}".encode()

    with Producer(own | {"value.serializer": with_context, "key.serializer": OfKafkaPython()}) as producer:
        producer.send(topic, [1], key=2)
        producer.send(topic, "null")
        with pytest.raises(ConfigError, match=r"value.serializer is a function"):
            producer.send_arrow(pa.table({"value": ["x"]}), topic)
    with (
        Producer(own | {"value.serializer": lambda value: 5}) as producer,
        pytest.raises(EncodeError, match="its serializer returns int, not bytes"),
    ):
        producer.send(topic, 1).result(60)
    # their header's id is read by ours, too
    found = records(cluster, topic, 4)
    assert of_confluent(registry, found[0]) == order(1)
    assert [name for name, _ in found[0].headers] == ["h", "__value_schema_id"]
    assert (found[0].key, found[1].value) == (b"k", None)
    assert (found[2].key, found[2].value, found[2].headers) == (
        f"{topic} 2".encode(),
        b"[1]",
        (("value", topic.encode()),),
    )
    assert found[3].value is None
    ours = {"value.deserializer": "avro", "schema.registry.url": registry, "max.poll.records": 1}
    with Consumer(own | {"auto.offset.reset": "earliest"} | ours) as consumer:
        consumer.assign([(topic, 0)])
        assert consumer.poll(10)[0].value == order(1)


@pytest.mark.parametrize("has_registry", [True, False])
def test_a_message_that_is_not_the_first(
    cluster: EmbeddedCluster, settings: dict[str, Any], topic: str, has_registry: bool
) -> None:
    text = 'syntax="proto3"; package shop; message Created { int64 id = 1; } message Paid { string by = 1; }'
    own = {**settings, "value.schema": text, "value.serializer": "protobuf", "value.message": "shop.Paid"}
    if not has_registry:
        own = {name: value for name, value in own.items() if not name.startswith("schema.registry.")}
    with Producer(own) as producer:
        producer.send(topic, {"by": "ada"})
        producer.send_arrow(pa.table({"value": pa.array([{"by": "bob"}])}), topic)
        with pytest.raises(EncodeError, match="there is no field 'id'"):
            producer.send(topic, {"id": 1}).result(60)
    reading = {"value.deserializer": "protobuf", "value.message": "Paid"}
    reading |= {name: own[name] for name in own if name.startswith("schema.registry.")} or {"value.schema": text}
    assert [one.value for one in records(cluster, topic, 2, **reading)] == [{"by": "ada"}, {"by": "bob"}]
    if has_registry:
        assert [one.value[5:7] for one in records(cluster, topic, 2)] == [b"\2\2"] * 2  # the message's index is 1
    with pytest.raises(ConfigError, match=r"value.message needs value.serializer=protobuf"):
        Producer(own | {"value.serializer": "avro", "value.schema": '"long"'})


def test_a_file_that_confluents_clients_share(cluster: EmbeddedCluster, settings: dict[str, Any]) -> None:
    shared = {
        **settings,
        "value.serializer": "io.confluent.kafka.serializers.KafkaAvroSerializer",
        "value.schema": '"long"',
        "auto.register.schemas": "false",
        "value.subject.name.strategy": "TopicNameStrategy",
        "basic.auth.credentials.source": "USER_INFO",
        "basic.auth.user.info": "bob:hunter2",
    }
    with Producer(shared), Admin(shared) as admin:
        assert admin.list_topics() is not None
    assert of_bytes(shared) == {
        "bootstrap.servers": settings["bootstrap.servers"],
        "schema.registry.url": settings["schema.registry.url"],
        "schema.registry.retries.deadline.ms": 20_000,
        "schema.registry.basic.auth.credentials.source": "USER_INFO",
        "schema.registry.basic.auth.user.info": "bob:hunter2",
    }


def test_plain_types(cluster: EmbeddedCluster, topic: str) -> None:
    own = {"bootstrap.servers": cluster.bootstrap_servers, "key.serializer": "IntegerSerializer"}
    with Producer(own | {"value.serializer": "double"}) as producer:
        producer.send(topic, 1.5, key=-2)
        producer.send_arrow(pa.table({"key": pa.array([7], pa.int8()), "value": [2.5]}), topic)
        for bad in ("x", 1 << 31):
            with pytest.raises(EncodeError, match="the key of a record"):
                producer.send(topic, 1, key=bad).result(60)
        with pytest.raises(EncodeError, match="column value, row 1: "):
            producer.send_arrow(pa.table({"value": [None, "x"]}), topic)
    own["value.serializer"] = "boolean"
    with Producer(own | {"key.serializer": "uuid"}) as producer, pytest.raises(EncodeError, match="must be a bool"):
        producer.send(topic, 1).result(60)
    with Producer(own | {"key.serializer": "uuid"}) as producer, pytest.raises(EncodeError, match="the key of a"):
        producer.send(topic, True, key="no uuid").result(60)
    context = SerializationContext(topic, MessageField.VALUE)
    found = [
        (IntegerDeserializer()(one.key, context), DoubleDeserializer()(one.value, context))
        for one in records(cluster, topic, 2)
    ]
    assert found == [(-2, 1.5), (7, 2.5)]


def test_columns_of_several_topics(
    cluster: EmbeddedCluster, registry: str, topic: str, settings: dict[str, Any]
) -> None:
    table = pa.table(
        {
            "value": pa.array([{"id": number} for number in range(6)], pa.struct([("id", pa.int64())])),
            "topic": [f"{topic}-{number % 2}" for number in range(6)],
        }
    )
    with Producer(settings) as producer:
        producer.send_arrow(table.slice(1), None)
        producer.send_arrow(table.slice(0, 0), topic)  # nothing, and no schema
        with pytest.raises(InvalidRecords, match="no topic"):
            producer.send_arrow(table.select(["value"]))
        nulls = table.set_column(1, "topic", pa.nulls(6, pa.string()))
        with pytest.raises(InvalidRecords, match="null topic"):
            producer.send_arrow(nulls)
    for number, expected in enumerate(([2, 4], [1, 3, 5])):
        found = records(cluster, f"{topic}-{number}", len(expected))
        assert [of_confluent(registry, one)["id"] for one in found] == expected
    client = SchemaRegistryClient({"url": registry})
    subjects = [name for name in client.get_subjects() if name.startswith(topic)]
    assert sorted(subjects) == [f"{topic}-0-value", f"{topic}-1-value"]


def test_which_schema(cluster: EmbeddedCluster, registry: str, topic: str, settings: dict[str, Any]) -> None:
    client = SchemaRegistryClient({"url": registry})
    with Producer(settings) as producer, pytest.raises(SchemaError, match=r"set value.schema, value.schema.id, or use"):
        producer.send(topic, order(1)).result(60)
    latest = settings | {"use.latest.version": True}
    with Producer(latest) as producer:
        with pytest.raises((SchemaError, RegistryError), match=f"{topic}-value"):
            producer.send(topic, order(1)).result(60)
        number = client.register_schema(f"{topic}-value", Schema(_TEXT, "AVRO"))
        producer.send(topic, order(1))  # the error before has changed nothing
    with Producer(settings | {"value.schema.id": number}) as producer:
        producer.send(topic, order(2))
    lookup = settings | {"auto.register.schemas": "false", "value.subject.name.strategy": "RecordNameStrategy"}
    name = f"shop.Order{''.join(filter(str.isalnum, topic))}"
    text = json.dumps({**_SCHEMA, "name": name})
    with Producer(lookup | {"value.schema": text}) as producer:
        with pytest.raises(RegistryError, match=rf"{name}.*; set auto\.register\.schemas=true, use\."):
            producer.send(topic, order(3)).result(60)
        client.register_schema(name, Schema(text, "AVRO"))
        producer.send(topic, order(3))
    assert [of_confluent(registry, one)["id"] for one in records(cluster, topic, 3)] == [1, 2, 3]
    incompatible = json.dumps({**_SCHEMA, "fields": [{"name": "id", "type": "string"}]})
    with Producer(settings | {"value.schema": incompatible}) as producer, pytest.raises(RegistryError) as caught:
        producer.send(topic, {"id": "x"}).result(60)
    assert caught.value.status == 409
    assert "or set use.latest.version=true to write by the subject's schema" in str(caught.value)


def test_transactions(cluster: EmbeddedCluster, registry: str, topic: str, settings: dict[str, Any]) -> None:
    with Producer(settings | {"value.schema": _TEXT, "transactional.id": topic}) as producer:
        with pytest.raises(InvalidTransactionState):
            producer.send(topic, order(0)).result(60)
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, order(1)).result(60)
        with pytest.raises(EncodeError):
            producer.send(topic, {}).result(60)
        producer.send(topic, order(2))
        producer.commit_transaction()  # the caller's decision: the transaction has not failed
        producer.begin_transaction()
        producer.send(topic, order(3))
        producer.abort_transaction()
    found = records(cluster, topic, 2, **{"isolation.level": "read_committed"})
    assert [of_confluent(registry, one) for one in found] == [order(1), order(2)]


def test_a_producer_that_takes_nothing_asks_no_registry(settings: dict[str, Any], topic: str) -> None:
    away = settings | {"schema.registry.url": "http://127.0.0.1:1", "value.schema": _TEXT}
    table = pa.table({"value": [1]})
    with Producer(away | {"transactional.id": topic}) as producer:
        with pytest.raises(InvalidTransactionState):
            producer.send(topic, order(1)).result(60)
        with pytest.raises(InvalidTransactionState):
            producer.send_arrow(table, topic)
    with pytest.raises(ProducerClosed):
        producer.send(topic, order(1)).result(60)
    with pytest.raises(ProducerClosed):
        producer.send_arrow(table, topic)


def test_threads_share_a_producer(
    cluster: EmbeddedCluster, registry: str, topic: str, settings: dict[str, Any]
) -> None:
    with Producer(settings | {"value.schema": _TEXT}) as producer:

        def send(first: int) -> None:
            for number in range(first, first + 50):
                producer.send(topic, order(number))

        threads = [Thread(target=send, args=(first,)) for first in (0, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {of_confluent(registry, one)["id"] for one in records(cluster, topic, 150)} == set(range(150))


@pytest.mark.test_all("kill")
def test_a_registry_that_dies_and_comes_back(make_cluster: Callable[..., EmbeddedCluster], topic: str) -> None:
    cluster = make_cluster(schema_registry=True)
    settings = {
        "bootstrap.servers": cluster.bootstrap_servers,
        "value.serializer": "avro",
        "schema.registry.url": cluster.schema_registry_url,
        "schema.registry.retries.deadline.ms": 1500,
        "value.schema": '"long"',
    }
    with Producer(settings) as producer:
        producer.send(topic, 1).result(60)
        cluster.kill_schema_registry()
        producer.send(topic, 2).result(60)  # the schema is known
        with pytest.raises(ConnectionFailed, match="schema registry"):
            producer.send(f"{topic}-2", 3).result(60)
        with pytest.raises(ConnectionFailed, match="schema registry"):
            producer.send_arrow(pa.table({"value": [3]}), f"{topic}-2")
        producer.send(topic, 3)
        cluster.restart_schema_registry()
        producer.send(f"{topic}-2", 4)
    assert [one.value[-1] for one in records(cluster, topic, 3)] == [2, 4, 6]
    assert [one.value[-1] for one in records(cluster, f"{topic}-2", 1)] == [8]


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"value.serializer": "avro"}, "needs schema.registry.url, or value.schema"),
        ({"value.serializer": "KafkaAvroDeserializer"}, "ends with Serializer"),
        ({"auto.register.schemas": True, "use.latest.version": True}, "exclude each other"),
        ({"value.subject.name.strategy": "Mine"}, "one of TopicNameStrategy, RecordNameStrategy"),
        ({"use.latest.version": "x"}, "use.latest.version"),
        ({"value.schema.id": "x"}, "value.schema.id"),
    ],
)
def test_refused_settings(own: dict[str, Any], said: str) -> None:
    settings = {"bootstrap.servers": "127.0.0.1:1", **own}
    if "value.serializer" not in own:
        settings |= {"value.serializer": "avro", "schema.registry.url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match=said):
        Producer(settings)
