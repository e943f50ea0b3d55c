"""Error messages for setting names of other clients."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer, Producer as ConfluentProducer
from kafka import KafkaConsumer, KafkaProducer

from spark_klog import aio, classic
from spark_klog.classic import ConsumerConnector
from spark_klog.client import Admin, Consumer, Producer
from spark_klog.client.settings import (
    KAFKA_PYTHONS,
    LIBRDKAFKAS,
    LIBRDKAFKAS_COUNTS,
    LIBRDKAFKAS_OWN,
    client_config,
    is_known,
)
from spark_klog.errors import ConfigError
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.topic_reader import read


def _said(name: str, prefix: str = "") -> str:
    with pytest.raises(ConfigError) as refused:
        client_config({"bootstrap.servers": "h:1", name: "1"}, prefix)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sasl.user", "did you mean sasl.username?"),
        ("sasl.pass", "did you mean sasl.password?"),
        ("bootstrap", "did you mean bootstrap.servers?"),
        (
            "compression.level",
            "it is librdkafka's: set that of the codec, compression.gzip.level, compression.lz4.level",
        ),
        (
            "errors.deadletterqueue.topic.name",
            "it is Kafka Connect's: set dead.letter.topic; of a load --dead-letters",
        ),
        ("consumer.override.auto.offset.reset", "it is Kafka Connect's: set auto.offset.reset; of a load --from-time"),
        ("errors.tolerance", "it is Kafka Connect's: set dead.letter.topic, and dead.letter.deserialization"),
        ("queue.buffering.max.kbytes", "it is librdkafka's: set buffer.memory, in bytes"),
        ("queue.buffering.max.messages", "it is librdkafka's: set buffer.memory, in bytes"),
        ("batch.num.messages", "it is librdkafka's: set batch.size, in bytes"),
        ("topic.metadata.refresh.interval.ms", "it is librdkafka's, Kafka's name for it is metadata.max.age.ms"),
        ("enable.auto.offset.store", "it is librdkafka's: the consumer commits up to where poll has read, so "),
        ("error_cb", "it is librdkafka's: remove it: there are no callbacks, errors are raised by the calls"),
        ("debug", "it is librdkafka's: remove it, the client logs by Python's logging: "),
        ("sasl_plain_username", "it is kafka-python's, write sasl.username"),
        ("ssl_cafile", "it is kafka-python's, write ssl.ca.location"),
        ("ssl", "remove it"),  # the prefix of many names
        ("ackz", "did you mean acks?"),
        ("akcs", "did you mean acks?"),
        ("nonsense", "remove it"),
        ("consumer.security.protocol", "write security.protocol"),  # of Connect and Streams
        ("producer.override.acks", "write acks"),
        ("spring.kafka.properties.security.protocol", "write security.protocol"),
        ("kafka.consumer.isolation.level", "write isolation.level"),
        ("value_serializer", "it is kafka-python's, write value.serializer"),
        ("key_deserializer", "it is kafka-python's, write key.deserializer"),
        ("properties.group.id", "write group.id"),  # of Flink SQL
    ],
)
def test_names_of_other_clients(name: str, hint: str) -> None:
    assert f"unknown client setting {name!r}; {hint}" in _said(name)


def test_a_serializer_that_is_a_function() -> None:
    with pytest.raises(ConfigError, match="serializer is of type type: leave it out, keys and values are bytes:"):
        client_config({"bootstrap.servers": "h:1", "value.serializer": str})


def test_all_wrong_names_at_once() -> None:
    """The error lists all wrong names, so that users correct a pasted configuration once, not name by name."""
    settings = {"bootstrap.servers": "a:1", "linger.msec": 1, "socket.timeout.ms": 1, "transactional.ids": 1}
    with pytest.raises(ConfigError) as error:
        client_config(settings | {"broker.address.family": "v4", "config.providers": "env"})
    for name in ("linger.msec", "socket.timeout.ms", "transactional.ids", "broker.address.family", "config.providers"):
        assert name in str(error.value)


def test_a_hint_has_the_prefix_of_the_user() -> None:
    assert "set kafka.buffer.memory, in bytes" in _said("queue.buffering.max.kbytes", "kafka.")
    assert "write kafka.ssl.ca.location" in _said("ssl_cafile", "kafka.")


def test_the_names_are_those_of_the_clients() -> None:
    ConfluentProducer({name: 1 for name in LIBRDKAFKAS_COUNTS if name.startswith(("queue.", "batch."))})
    both = {"debug": "plugin", "log_level": 0, "error_cb": print, "stats_cb": print, "broker.address.family": "v4"}
    both |= {"socket.keepalive.enable": True, "statistics.interval.ms": 0}
    produces = {"delivery.report.only.error": True, "on_delivery": print}
    consumes = {"enable.auto.offset.store": False, "enable.partition.eof": True, "on_commit": print}
    assert {*both, *produces, *consumes} == LIBRDKAFKAS_OWN.keys()
    ConfluentProducer(both | produces)
    ConfluentConsumer(both | consumes | {"group.id": "g"}).close()
    with pytest.raises(Exception, match=re.escape("no.such.name")):
        ConfluentProducer({"no.such.name": 1})
    theirs = KafkaConsumer.DEFAULT_CONFIG.keys() | KafkaProducer.DEFAULT_CONFIG.keys()
    assert theirs >= KAFKA_PYTHONS.keys()
    hinted = {*LIBRDKAFKAS.values(), *LIBRDKAFKAS_COUNTS.values(), *KAFKA_PYTHONS.values()}
    assert [name for name in hinted if not is_known(name)] == []


_CLIENTS = [Producer, Consumer, Admin, SchemaRegistry, partial(read, "t"), ConsumerConnector, classic.Producer]


@pytest.mark.parametrize("settings", ["host:9092", None, 3, [("bootstrap.servers", "h:1")], {1: "x"}], ids=str)
@pytest.mark.parametrize("client", _CLIENTS)
def test_what_is_no_dict_of_settings(client: Callable[..., Any], settings: Any) -> None:
    name = getattr(client, "__name__", "read")
    if (name, settings) == ("read", None):
        return  # its default
    words = {"settings": settings} if name == "read" else {}
    with pytest.raises(ConfigError, match=f"^{name} takes a dict of settings .*, not (a dict with|str|None|int|list)"):
        client(**words) if words else client(settings)


@pytest.mark.parametrize("client", [Producer, Consumer, Admin, aio.Producer, aio.Consumer, aio.Admin])
def test_settings_as_arguments(client: Callable[..., Any]) -> None:
    """As kafka-python's and aiokafka's clients take them."""
    told = re.escape(f'write {client.__name__}({{"bootstrap.servers": ..., "client.id": ...}}), not ')
    with pytest.raises(ConfigError, match=told) as refused:
        client(bootstrap_servers="user:hunter2@h:1", client_id="x")
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="nowhere"):
        client(settings={"bootstrap.servers": "nowhere"})
    with pytest.raises(TypeError, match=f"^{client.__name__} has no argument setting: did you mean settings"):
        client(setting={})
