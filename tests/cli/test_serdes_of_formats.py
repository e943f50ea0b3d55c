"""`klog consume -s` and `klog produce -s` with Protobuf: confluent-kafka's serializers on the other side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.embedded import EmbeddedCluster
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.prefix import id_prefix
from tests.schemas.protobuf.support import WIDE, message_class, order, schema
from tests.support.clients.klog import klog_bytes


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


def test_records_of_another_format(cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    """Their ids tell, whether or not their bytes look like the indexes of a message."""
    servers, client = cluster.bootstrap_servers, SchemaRegistryClient({"url": registry})
    avro, unknown = client.register_schema(f"{topic}-avro", Schema('"long"', "AVRO")), 900_000
    protobuf = client.register_schema(f"{topic}-value", Schema(WIDE, "PROTOBUF"))
    values = [id_prefix(avro) + payload for payload in (b"\1", b"", b"\2\2", b"\0")]
    values += [id_prefix(unknown) + b"\1", id_prefix(protobuf) + b"\1"]
    producer = confluent_kafka.Producer({"bootstrap.servers": servers})
    reading = ("consume", topic, "-s", "value=protobuf", "-r", registry, "-b", servers)
    for written, more in ((values[:1], ()), (values[1:], ()), ([], ("--value-schema-id", str(protobuf)))):
        for value in written:
            producer.produce(topic, value, partition=0)
        assert producer.flush(30) == 0
        done = klog_bytes(*reading, *more)
        assert (done.returncode, done.stdout) == (1, b"")
        reasons = [line.partition(" value: ")[2] for line in done.stderr.decode().splitlines()[:-1]]
        assert reasons[:4] == [f"schema id {avro}: it is avro, not protobuf"] * (1 if written == values[:1] else 4)
        if len(reasons) > 1:
            assert reasons[4].startswith(f"schema id {unknown}: the schema registry")
            assert reasons[5].startswith(f"schema id {protobuf}: -1 message indexes: the record is no Protobuf")
    done = klog_bytes(*reading, "--group", f"{topic}-group")
    assert f"group {topic}-group stays before it" in done.stderr.decode()


@pytest.mark.test_all("long")
def test_messages(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    servers, client = cluster.bootstrap_servers, SchemaRegistryClient({"url": registry})

    def klog(command: str, name: str, *arguments: str, stdin: bytes = b"") -> list[Any]:
        chosen = ("-s", "value=protobuf", "-r", registry, "-b", servers)
        done = klog_bytes(command, name, *chosen, *arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.splitlines()

    first = schema(WIDE)
    messages = [order(first, number) for number in range(4)]
    other = message_class(schema(WIDE, "shop.Other"))(id=7)
    producer = confluent_kafka.Producer({"bootstrap.servers": servers})
    context = SerializationContext(topic, MessageField.VALUE, [])
    for message in (*messages, other):
        serialize = ProtobufSerializer(type(message), client, {"use.deprecated.format": False})
        producer.produce(topic, serialize(message, context))
    assert producer.flush(30) == 0
    # each record is of the message that it names
    lines = klog("consume", topic)
    assert json.loads(lines[-1]) == {"id": 7}
    assert [json.loads(line)["id"] for line in lines] == [0, 1, 2, 3, 7]
    file = tmp_path / "order.proto"
    file.write_text(WIDE)
    copy = f"{topic}-copy"
    klog("produce", copy, "--value-schema", str(file), stdin=b"\n".join(lines[:-1]))
    assert klog("consume", copy) == lines[:-1]
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "reader"})
    consumer.assign([confluent_kafka.TopicPartition(copy, 0, 0)])
    read = consumer.consume(len(messages), 30)
    consumer.close()
    deserialize = ProtobufDeserializer(message_class(first), {"use.deprecated.format": False}, client)
    for message in messages:
        message.ClearField("nothing")  # a message without fields has no column
    assert [deserialize(one.value(), context) for one in read] == messages
    # another message than the first
    klog("produce", copy, "--value-message", "Other", stdin=lines[-1])
    assert klog("consume", copy) == lines
    only = klog_bytes(
        *("consume", copy, "-s", "value=protobuf", "-r", registry, "-b", servers),
        *("--value-schema", str(file), "--value-message", "shop.Other"),
    )
    assert (only.returncode, only.stdout.splitlines()) == (1, lines[-1:])
    assert only.stderr.count(b"another one than shop.Other") == len(messages)
