"""Topics that validate schemas, as confluent-kafka with its serializers, Java, our client and raw requests see them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message as Delivered, Producer as Confluent
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.broker import schema_validation
from spark_klog.broker.schema_validation import RegistryAway, SchemaValidator, check_validation
from spark_klog.broker.settings.config import broker_config
from spark_klog.client import Admin, ConfigResource, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ProtocolError, RequestTimedOut
from spark_klog.log.config import LogConfig
from spark_klog.protocol import apis
from spark_klog.records.contract import Headers
from spark_klog.records.reading.produced import RejectedRecords
from spark_klog.security.config import Settings
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.client import Record
from tests.support.clients.java import Java44
from tests.support.clients.process import ClientFailed
from tests.support.waiting import wait_until

_NOW = 1_700_000_000_000
_ORDER = json.dumps({"type": "record", "name": "shop.Order", "fields": [{"name": "id", "type": "int"}]})
_OTHER = json.dumps({"type": "record", "name": "shop.Other", "fields": [{"name": "id", "type": "int"}]})
_CLICK = 'syntax = "proto3"; package web; message Page { int32 id = 1; } message Click { Page page = 1; }'
_OK, _NOT_LEADER, _INVALID_RECORD = 0, 6, 87
_VALUE, _KEY = "confluent.value.schema.validation", "confluent.key.schema.validation"
_STRATEGY = "confluent.value.subject.name.strategy"


@pytest.fixture(scope="module")
def shop(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(data_dir=module_server_dir / "cluster", schema_registry=True) as cluster:
        yield cluster


@pytest.fixture
def schemas(shop: EmbeddedCluster) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": shop.schema_registry_url})


@pytest.fixture
def checked(shop: EmbeddedCluster, topic: str) -> str:
    """A topic that validates its values."""
    _create(shop, topic, {_VALUE: "true"})
    return topic


def _create(cluster: EmbeddedCluster, topic: str, settings: dict[str, str]) -> None:
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(topic, 1, configs=settings)


def _port(cluster: EmbeddedCluster) -> int:
    return int(cluster.bootstrap_servers.rpartition(":")[2])


def _named(schema: int, payload: bytes = b"\2") -> bytes:
    return b"\0" + schema.to_bytes(4, "big") + payload


def _produce(
    cluster: EmbeddedCluster,
    topic: str,
    pairs: list[tuple[bytes | None, bytes | None]],
    headers: Headers = (),
    codec: str = "none",
    version: int = 9,
    **numbers: int,
) -> tuple[int, list[int], str]:
    """The error's code, the numbers of the records that are named, and why the first of them is refused."""
    records = bytes(make_batch(pairs, [_NOW] * len(pairs), codec, headers=headers, **numbers))
    data = [{"name": topic, "partition_data": [{"index": 0, "records": records}]}]
    with RawClient(_port(cluster)) as client:
        answer = client.request(apis.PRODUCE, version, {"acks": -1, "timeout_ms": 9000, "topic_data": data})
    entry = answer["responses"][0]["partition_responses"][0]
    errors = entry.get("record_errors") or []
    reason = errors[0]["batch_index_error_message"] if errors else entry.get("error_message") or ""
    return entry["error_code"], [each["batch_index"] for each in errors], reason


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_records_that_are_refused_are_named(
    shop: EmbeddedCluster, schemas: SchemaRegistryClient, checked: str, codec: str
) -> None:
    ours = schemas.register_schema(f"{checked}-value", Schema(_ORDER, "AVRO"))
    foreign = schemas.register_schema(f"{checked}-key", Schema(_OTHER, "AVRO"))
    good = b"k", _named(ours)
    assert _produce(shop, checked, [good, (None, None), (b"k", None)], codec=codec)[0] == _OK
    bad = [good, (b"k", b"plain"), good, (b"k", b""), (b"k", _named(ours)[:4]), (b"k", b"\2" + _named(ours)[1:])]
    assert _produce(shop, checked, bad, codec=codec) == (_INVALID_RECORD, [1, 3, 4, 5], "the value has no schema id")
    code, indexes, reason = _produce(shop, checked, [good] * 3000 + [(b"k", _named(foreign))], codec=codec)
    assert (code, indexes) == (_INVALID_RECORD, [3000])
    assert reason == f"schema id {foreign} of the value is not of the subject {checked}-value"
    assert _produce(shop, checked, [(b"k", _named(1 << 30))], codec=codec)[:2] == (_INVALID_RECORD, [0])
    assert _produce(shop, checked, [(b"k", _named(1 << 31))], codec=codec)[:2] == (_INVALID_RECORD, [0])
    assert _produce(shop, checked, [(b"k", b"plain")], codec=codec, version=7) == (_INVALID_RECORD, [], "")
    with RawClient(_port(shop)) as client:  # nothing is there of what was refused
        assert client.produce(checked, bytes(make_batch([good], [_NOW])), 8) == (_OK, 3)


def test_a_schema_that_is_registered_later(shop: EmbeddedCluster, schemas: SchemaRegistryClient, checked: str) -> None:
    number = schemas.register_schema(f"{checked}-elsewhere", Schema(_OTHER, "AVRO"))
    assert _produce(shop, checked, [(None, _named(number))])[0] == _INVALID_RECORD
    assert schemas.register_schema(f"{checked}-value", Schema(_OTHER, "AVRO")) == number
    # the broker keeps what the registry said for a second
    wait_until(lambda: _produce(shop, checked, [(None, _named(number))])[0] == _OK)


def test_a_batch_that_is_sent_again(shop: EmbeddedCluster, topic: str) -> None:
    """Its answer was lost; meanwhile its records are no longer valid, as if their schema had been deleted."""
    _create(shop, topic, {})
    again, batch = {"producer_id": 4_000_000, "producer_epoch": 0}, [(b"k", b"plain")] * 2
    assert _produce(shop, topic, batch, base_sequence=0, **again)[0] == _OK
    with Admin({"bootstrap.servers": shop.bootstrap_servers}) as admin:
        admin.alter_configs({ConfigResource("topic", topic): {_VALUE: "true"}}).check()
    wait_until(lambda: _produce(shop, topic, batch)[0] == _INVALID_RECORD)
    assert _produce(shop, topic, batch, base_sequence=0, **again)[0] == _OK
    assert _produce(shop, topic, batch, base_sequence=2, **again)[0] == _INVALID_RECORD


def test_ids_and_guids_in_headers(shop: EmbeddedCluster, schemas: SchemaRegistryClient, checked: str) -> None:
    number = schemas.register_schema(f"{checked}-value", Schema(_ORDER, "AVRO"))
    guid = b"\1" + bytes.fromhex(str(schemas.get_latest_version(f"{checked}-value").guid).replace("-", ""))
    name = "__value_schema_id"
    for headers in (((name, guid),), ((name, _named(number, b"")),), ((name, b"x"), ("other", b""), (name, guid))):
        assert _produce(shop, checked, [(None, b"bare")], headers) == (_OK, [], "")
    assert _produce(shop, checked, [(None, guid + b"\2"), (None, _named(number))]) == (_OK, [], "")
    assert _produce(shop, checked, [(None, _named(number))], ((name, b"x"),))[0] == _INVALID_RECORD
    assert _produce(shop, checked, [(None, _named(number))], ((name, None), ("__key_schema_id", b"x")))[0] == _OK
    assert _produce(shop, checked, [(None, b"\1" + bytes(16))])[:2] == (_INVALID_RECORD, [0])


def test_keys_and_the_names_of_records(shop: EmbeddedCluster, schemas: SchemaRegistryClient, topic: str) -> None:
    settings = {_VALUE: "true", _KEY: "true", _STRATEGY: "TopicRecordNameStrategy"}
    _create(shop, topic, settings | {"confluent.key.subject.name.strategy": "RecordNameStrategy"})
    key = schemas.register_schema("web.Click", Schema(_CLICK, "PROTOBUF"))
    value = schemas.register_schema(f"{topic}-shop.Order", Schema(_ORDER, "AVRO"))
    misnamed = schemas.register_schema(f"{topic}-shop.Order2", Schema(_OTHER, "AVRO"))
    assert _produce(shop, topic, [(_named(key), _named(value)), (None, _named(value))]) == (_OK, [], "")
    assert _produce(shop, topic, [(_named(value), _named(value))])[:2] == (_INVALID_RECORD, [0])
    code, indexes, reason = _produce(shop, topic, [(None, _named(misnamed)), (b"", _named(value))])
    assert (code, indexes) == (_INVALID_RECORD, [1, 0]) or (code, indexes) == (_INVALID_RECORD, [0, 1])
    assert "no schema id" in reason or "that its record's name calls for" in reason


def test_settings_are_validated_and_shown(shop: EmbeddedCluster, checked: str) -> None:
    strategy = "io.confluent.kafka.serializers.subject.RecordNameStrategy"
    place = ConfigResource("topic", checked)
    with Admin({"bootstrap.servers": shop.bootstrap_servers}) as admin:
        admin.alter_configs({place: {_STRATEGY: strategy}}).check()
        shown = admin.describe_configs([place]).check()[place]
        assert [shown[name].value for name in (_VALUE, _KEY, _STRATEGY)] == ["true", "false", strategy]
        for settings in ({_VALUE: "yes"}, {_STRATEGY: "MyStrategy"}):
            with pytest.raises(ProtocolError, match=f"{next(iter(settings))}.*must be"):
                admin.alter_configs({place: settings}).check()
        admin.alter_configs({place: {_VALUE: "false"}}).check()
    assert _produce(shop, checked, [(None, b"plain")])[0] == _OK


def test_confluents_producer(shop: EmbeddedCluster, schemas: SchemaRegistryClient, checked: str) -> None:
    seen: list[KafkaError | None] = []

    def note(error: KafkaError | None, message: Delivered) -> None:
        seen.append(error)

    producer = Confluent({"bootstrap.servers": shop.bootstrap_servers, "linger.ms": 0})
    for conf in ({}, {"schema.id.serializer": header_schema_id_serializer}):
        headers: list[tuple[str, bytes]] = []
        value = AvroSerializer(schemas, _ORDER, conf=conf)(
            {"id": 1}, SerializationContext(checked, MessageField.VALUE, headers)
        )
        producer.produce(checked, value, headers=headers, on_delivery=note)
    producer.flush(60)
    assert seen == [None, None]
    producer.produce(checked, b"plain", on_delivery=note)
    producer.flush(60)
    refused = seen[2]
    assert refused is not None
    assert (refused.code(), refused.retriable()) == (KafkaError.INVALID_RECORD, False)


def test_our_producer(shop: EmbeddedCluster, checked: str) -> None:
    servers, url = {"bootstrap.servers": shop.bootstrap_servers}, shop.schema_registry_url
    rows = {"value.serializer": "avro", "value.schema": _ORDER, "schema.registry.url": url}
    with Producer(servers | rows) as producer:
        assert producer.send(checked, {"id": 1}).result(60).offset == 0
    with (
        pytest.raises(ProtocolError, match=r"the value has no schema id.*INVALID_RECORD"),
        Producer(servers) as producer,
    ):
        producer.send(checked, b"plain").result(60)


@pytest.mark.test_all("client")
def test_javas_producer(shop: EmbeddedCluster, schemas: SchemaRegistryClient, checked: str) -> None:
    good = Record(_NOW, None, _named(schemas.register_schema(f"{checked}-value", Schema(_ORDER, "AVRO"))))
    java = Java44(shop.bootstrap_servers)
    try:
        assert java.produce(checked, 0, "none", [good, good]) == [0, 1]
        with pytest.raises(ClientFailed, match="InvalidRecordException: the value has no schema id"):
            java.produce(checked, 0, "none", [good._replace(value=b"plain"), good])
    finally:
        java.close()


def test_a_registry_that_is_away(server_dir: Path) -> None:
    with EmbeddedCluster(data_dir=server_dir / "cluster", schema_registry=True) as cluster:
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        _create(cluster, "orders", {_VALUE: "true"})
        number = SchemaRegistryClient({"url": cluster.schema_registry_url}).register_schema(
            "orders-value", Schema(_ORDER, "AVRO")
        )
        cluster.kill_schema_registry()
        assert _produce(cluster, "orders", [(None, b"plain")])[0] == _INVALID_RECORD
        code, indexes, reason = _produce(cluster, "orders", [(None, _named(number))])
        assert (code, indexes) == (_NOT_LEADER, [])
        assert "the schema can't be looked up" in reason
        hasty = Producer(servers | {"delivery.timeout.ms": 2000, "request.timeout.ms": 1000})
        with pytest.raises(RequestTimedOut), hasty as producer:
            producer.send("orders", _named(number)).result(60)
        with Producer(servers) as producer:
            sent = producer.send("orders", _named(number))
            cluster.restart_schema_registry()
            sent.result(100)
        cluster.kill_schema_registry()  # what it said counts
        assert _produce(cluster, "orders", [(None, _named(number))])[0] == _OK


def test_the_settings_of_a_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    url, info = "confluent.schema.registry.url", "confluent.basic.auth.user.info"
    config = broker_config({url: "https://u:hidden1@sr:8081", info: "u:hidden2"}, {}, data_dir=tmp_path)
    assert config.schema_registry == {"url": "https://u:hidden1@sr:8081", "basic.auth.user.info": "u:hidden2"}
    assert "hidden" not in caplog.text.replace("[hidden]", "")
    for settings, text in (
        ({info: "u:p"}, f"{url} is required"),
        ({url: "sr:8081"}, f"{url} must be http://"),
        ({"confluent.basic.auth.usr.info": "u:p"}, f"unknown setting.*{info}"),
    ):
        with pytest.raises(ConfigError, match=text):
            broker_config(settings, {}, data_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"{_KEY} or {_VALUE}: the broker knows no schema registry, set its {url}"):
        check_validation(LogConfig(key_schema_validation=True, value_schema_validation=True), {})


def test_ids_while_the_registry_is_away(server_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confirmed ones pass whatever else is asked, long after; of others nobody knows, even if they were refused."""
    for name in ("_KEPT_SECONDS", "_REFUSED_SECONDS"):
        monkeypatch.setattr(schema_validation, name, 0.0)
    with EmbeddedCluster(data_dir=server_dir / "cluster", schema_registry=True) as cluster:
        url = cluster.schema_registry_url
        number = SchemaRegistryClient({"url": url}).register_schema("t-value", Schema(_ORDER, "AVRO"))
        validator = SchemaValidator(Settings({"url": url}))
        confirmed, refused, new = (_named(each)[:5] for each in (number, number + 1, number + 2))
        try:
            asyncio.run(_check(validator, [confirmed]))
            with pytest.raises(RejectedRecords):
                asyncio.run(_check(validator, [refused]))
            cluster.kill_schema_registry()
            for schema in (new, refused):
                with pytest.raises(RegistryAway):
                    asyncio.run(_check(validator, [schema]))
                asyncio.run(_check(validator, [confirmed]))
        finally:
            validator.close()


async def _check(validator: SchemaValidator, ids: list[bytes | None]) -> None:
    await validator.check("t", {"value": "topic"}, {"value": {schema: [row] for row, schema in enumerate(ids)}})


def test_a_broker_that_has_lost_its_setting() -> None:
    validator = SchemaValidator(Settings())
    try:
        asyncio.run(_check(validator, [None]))
        with pytest.raises(RegistryAway, match=r"set its confluent\.schema\.registry\.url"):
            asyncio.run(_check(validator, [b"\0\0\0\0\1"]))
        # many ids that are none: few are looked at
        with pytest.raises(RejectedRecords) as refused:
            asyncio.run(_check(validator, [b"%d" % number for number in range(5000)]))
        assert list(refused.value.reasons) == list(range(16))
    finally:
        validator.close()
