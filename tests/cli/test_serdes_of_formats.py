"""`klog consume -s` and `klog produce -s` with Protobuf: confluent-kafka's serializers on the other side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.embedded import EmbeddedCluster
from spark_klog.schema_registry import SchemaRegistry
from tests.schemas.protobuf.support import WIDE, message_class, order, schema
from tests.support.clients.klog import klog_bytes


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


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
