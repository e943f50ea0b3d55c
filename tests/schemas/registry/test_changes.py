"""Registries whose ids and versions change under a process, and contexts, whose ids are others'.

Schemas come and go by plain HTTP requests; records are confluent-kafka's.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark import cloudpickle
from pyspark.sql.types import StructType

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ConnectionFailed, SchemaChanged
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas import column_format
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.schemas.column_writing import WriteFormat
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.schemas.registry.settings import registry_config
from spark_klog.security.config import Settings
from spark_klog.spark.read import row_columns
from spark_klog.spark.read.row_columns import analysed_readers, readers_of, with_rows
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.write.sink import BatchQueryWriter
from spark_klog.spark.write.sink_options import sink_options

from .asking import ask, register

pytestmark = pytest.mark.peer
_VALUE = SerializationContext("clicks", MessageField.VALUE)
Rows = list[dict[str, Any] | None]


def _record(name: str, *fields: str, **defaults: Any) -> str:
    """A record of longs, those of `defaults` with defaults."""
    made: list[dict[str, Any]] = [{"name": field, "type": "long"} for field in fields]
    made += [{"name": field, "type": "long", "default": value} for field, value in defaults.items()]
    return json.dumps({"type": "record", "name": name, "fields": made}, separators=(",", ":"))


def _format(url: str, subject: str, **more: Any) -> ColumnFormat:
    return ColumnFormat("value", "avro", RegistrySettings(Settings({"url": url})), subject=subject, **more)


def _decoded(source: ColumnFormat, values: list[bytes], schema_id: int | None = None) -> Rows:
    decoded = source.reader(schema_id).decoder().decode(pa.array(values, pa.binary()), None)
    assert decoded.bad == []
    rows: Rows = decoded.values.to_pylist()
    return rows


def _written(url: str, subject: str, schema: str, row: dict[str, Any]) -> bytes:
    conf = {"subject.name.strategy": lambda *_: subject}
    value = AvroSerializer(SchemaRegistryClient({"url": url}), schema, conf=conf)(row, _VALUE)
    assert value is not None
    return value


def _delete(url: str, *subjects: str) -> None:
    for subject in subjects:
        for path in (f"/subjects/{subject}", f"/subjects/{subject}?permanent=true"):
            status, answer = ask(url, "DELETE", path)
            assert status == 200, answer


def test_ids_of_contexts_are_kept_apart(registry: str) -> None:
    subject = ":.staging:contexts-value"
    register(registry, "contexts-value", _record("Click", "amount", "fee"))
    register(registry, "contexts-value", _record("Click", "amount", "fee", x=0))
    first, second = _record("Click", "fee", "amount"), _record("Click", "fee", "amount", y=0)
    values = [
        _written(registry, subject, first, {"fee": 1, "amount": 100}),
        _written(registry, subject, second, {"fee": 2, "amount": 200, "y": 3}),
    ]
    with RegistryClient(registry_config({"url": registry})) as client:
        assert client.latest(subject).schema != client.schema(client.latest(subject).id)
        assert client.latest(subject).schema == client.schema(client.latest(subject).id, subject)
    rows = [{"fee": 1, "amount": 100, "y": 0}, {"fee": 2, "amount": 200, "y": 3}]
    source = _format(registry, subject)
    assert _decoded(source, values) == rows
    assert _decoded(source, values, int.from_bytes(values[1][1:5], "big")) == rows
    assert _decoded(_format(f"{registry}/contexts/.staging", "contexts-value"), values) == rows
    kind = pa.struct([("fee", pa.int64()), ("amount", pa.int64()), ("y", pa.int64())])
    by_id = WriteFormat(_format(registry, subject, schema_id=int.from_bytes(values[1][1:5], "big"))).writer(kind)
    conf = {"subject.name.strategy": lambda *_: subject}
    read = AvroDeserializer(SchemaRegistryClient({"url": registry}), conf=conf)
    assert [read(value, _VALUE) for value in by_id.encoder().encode(pa.array(rows, kind)).to_pylist()] == rows


def test_references_within_a_context(registry: str) -> None:
    register(registry, "user", _record("User", "wrong"))
    register(registry, ":.refs:user", _record("User", "id"))
    outer = json.dumps({"type": "record", "name": "Outer", "fields": [{"name": "user", "type": "User"}]})
    reference = [{"name": "User", "subject": "user", "version": 1}]
    number = register(registry, ":.refs:outer-value", outer, references=reference)
    value = b"\0" + number.to_bytes(4, "big") + b"\4"
    assert _decoded(_format(registry, ":.refs:outer-value"), [value]) == [{"user": {"id": 2}}]


@pytest.mark.parametrize("registers", [True, False])
def test_a_subject_that_was_deleted_for_good(registry: str, registers: bool) -> None:
    subject, kind = f"gone-{registers}-value", pa.struct([("a", pa.int64())])
    write = WriteFormat(_format(registry, subject), registers=registers)

    def register_it() -> None:
        if not registers:
            register(registry, subject, write.source.codec.schema_of(kind))

    register_it()
    write.writer(kind)
    _delete(registry, subject)
    register_it()
    number = write.writer(kind).id
    assert ask(registry, "GET", f"/subjects/{subject}/versions/latest")[1]["id"] == number
    assert ask(registry, "GET", f"/schemas/ids/{number}")[0] == 200


def test_a_reference_that_was_deleted_for_good(registry: str) -> None:
    outer = json.dumps({"type": "record", "name": "A", "fields": [{"name": "u", "type": "Used"}]})
    reference = [{"name": "Used", "subject": "used", "version": 1}]
    source = _format(registry, "a-value")
    for kind, shown in (("int", "int32"), ("string", "string")):
        used = json.dumps({"type": "record", "name": "Used", "fields": [{"name": "n", "type": kind}]})
        register(registry, "used", used)
        register(registry, "a-value", outer, references=reference)
        assert str(source.reader().decoder().type) == f"struct<u: struct<n: {shown} not null> not null>"
        _delete(registry, "a-value", "used")


@contextmanager
def _serving(cluster: EmbeddedCluster, port: int, topic: str) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, str(port), topic) as running:
        yield running.url


def test_a_registry_that_was_made_anew(cluster: EmbeddedCluster) -> None:
    """At the same address, in the life of a process: ids have other schemas, that of the reader has the same."""
    last = _record("Click", "a", "b", c=0)
    port = 0
    rows: list[Rows] = []
    for topic, first in (("life-1", _record("Click", "a", "b")), ("life-2", _record("Click", "b", "a"))):
        with _serving(cluster, port, topic) as url:
            port = int(url.rpartition(":")[2])
            value = _written(url, "anew-value", first, {"a": 1, "b": 2})
            register(url, "anew-value", last)
            rows.append(_decoded(_format(url, "anew-value"), [value]))
            assert value[:5] == b"\0\0\0\0\1"
    assert rows == [[{"a": 1, "b": 2, "c": 0}]] * 2


def test_each_id_is_asked_for_once_a_query(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    send: Callable[..., Any] = RegistryClient._request

    def counting(self: RegistryClient, method: str, path: str, *rest: Any) -> Any:
        asked.append(path)
        return send(self, method, path, *rest)

    value = _written(registry, "counted-value", _record("C", "a"), {"a": 1})
    register(registry, "counted-value", _record("C", "a", b=0))
    monkeypatch.setattr(RegistryClient, "_request", counting)
    reader = _format(registry, "counted-value").reader()
    for _ in range(3):  # tasks
        reader.decoder().decode(pa.array([value, b"\0\0\xff\xff\xffx", b"\0\xff\xff\xff\xffx"], pa.binary()), None)
    number = int.from_bytes(value[1:5], "big")
    assert asked == ["/subjects/counted-value/versions/latest", f"/schemas/ids/{number}", f"/schemas/ids/{0xFFFFFF}"]
    with pytest.raises(AssertionError, match="no schema has a negative id"):
        _decoded(_format(registry, "counted-value"), [b"\0\xff\xff\xff\xff\1"])


def _row(schema_id: int, *longs: int) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + bytes(2 * number for number in longs)


def test_a_version_that_was_taken_back(registry: str) -> None:
    """A stream that ended because of it goes on once it is gone."""
    for fields in ({"a": 0}, {"a": 0, "b": 0}):
        register(registry, "back-value", _record("C", **fields))
    source = _format(registry, "back-value", evolution="restart")
    reader = source.reader()
    number = register(registry, "back-value", _record("C", a=0, b=0, c=0))
    values = pa.array([_row(number, 1, 2, 3)])
    with pytest.raises(SchemaChanged, match=r"has records of version 3 now, .* from a new load\(\)"):
        reader.decoder().decode(values, None)
    assert ask(registry, "DELETE", "/subjects/back-value/versions/3")[0] == 200
    reader = source.reader()
    assert reader.version == 2
    assert reader.decoder().decode(values, None).values.to_pylist() == [{"a": 1, "b": 2}]


def test_an_old_schema_that_is_a_new_version(registry: str) -> None:
    source = _format(registry, "again-value", evolution="restart")
    old = _record("C", a=0)
    register(registry, "again-value", old)
    assert source.reader().version == 1
    number = register(registry, "again-value", _record("C", a=0, b=0))
    assert source.reader().version == 2
    assert ask(registry, "DELETE", "/subjects/again-value/versions/1")[0] == 200
    register(registry, "again-value", old)
    reader = source.reader()
    assert reader.version == 3
    assert reader.decoder().decode(pa.array([_row(number, 1, 2)]), None).values.to_pylist() == [{"a": 1}]


@pytest.mark.parametrize("is_permissive", [False, True])
def test_a_newer_version_that_the_query_can_not_read(registry: str, is_permissive: bool) -> None:
    """BACKWARD allows a field without a default to go: such records are not lost, but read by the next start."""
    subject = f"backward-{is_permissive}-value"
    old = register(registry, subject, _record("C", "a", "b"))
    ending = _format(registry, subject, ends_at_unreadable=True, is_permissive=is_permissive)
    plain, pinned = _format(registry, subject), _format(registry, subject, schema_id=old, ends_at_unreadable=True)
    readers = [source.reader() for source in (ending, plain, pinned)]
    new = register(registry, subject, _record("C", "a"))
    other = register(registry, f"other-{subject}", _record("Other", "x"))
    values = pa.array([_row(old, 1, 2), _row(other, 1), _row(new, 3), _row(old, 1)])
    with pytest.raises(SchemaChanged, match=r"version 2 now, and the query reads by version 1: .* can't read one of"):
        readers[0].decoder().decode(values, None)
    for reader in readers[1:]:
        decoded = reader.decoder().decode(values, None)
        assert decoded.values.to_pylist() == [{"a": 1, "b": 2}, None, None, None]
        assert ["start again to read by the new one" in reason for _, reason in decoded.bad] == [
            False,
            reader is readers[1],
            False,
        ]
    assert _decoded(ending, [_row(old, 1, 2), _row(new, 3)]) == [{"a": 1}, {"a": 3}]
    # the same of a row that is cut off
    newest = register(registry, subject, _record("C", "a", c=0))
    reader = ending.reader()
    register(registry, subject, _record("C", "a", c=0, d=0))
    assert len(reader.decoder().decode(pa.array([_row(newest)]), None).bad) == 1
    with pytest.raises(SchemaChanged):
        reader.decoder().decode(pa.array([_row(newest + 1)]), None)


def test_the_schema_of_the_analysis(registry: str) -> None:
    """Planning takes it, unless the metadata is of another query, or another registry."""
    fields = StructType().add("value", "binary")
    source = _format(registry, "analysed-value")
    first = register(registry, "analysed-value", _record("C", "a"))
    readers = analysed_readers([source])
    analysed = with_rows(fields, readers)
    second = register(registry, "analysed-value", _record("C", "a", b=0))
    (reader,), types = readers_of([source], analysed)
    assert (reader.id, reader.version, types["value"].num_fields) == (first, 1, 1)
    (reader,), _ = readers_of([_format(registry, "analysed-value", evolution="restart")], analysed)
    assert (reader.id, reader.version) == (first, 1)
    with pytest.raises(ConfigError, match="the query's schema says struct<a:bigint>"):
        readers_of([_format(registry, "analysed-value", schema_id=second)], analysed)
    (reader,), _ = readers_of([source], analysed, analysed_readers([source]))  # those of another query
    assert (reader.id, reader.version) == (first, 1)
    register(registry, "analysed-other", _record("C", "a", z=0))
    with pytest.raises(ConfigError, match="column value is struct<a:bigint,z:bigint> by its schema"):
        readers_of([_format(registry, "analysed-other")], analysed)
    elsewhere = f"{registry}/contexts/.elsewhere"
    register(registry, ":.elsewhere:analysed-value", _record("C", x=0))
    assert ask(registry, "PUT", "/config/:.elsewhere:analysed-value", {"compatibility": "NONE"})[0] == 200
    number = register(registry, ":.elsewhere:analysed-value", _record("C", "a"))
    (reader,), _ = readers_of([_format(elsewhere, "analysed-value")], analysed)
    assert (reader.id, reader.version) == (number, 2)


def test_a_plan_asks_no_registry(cluster: EmbeddedCluster) -> None:
    """The data source brings what analysis has found into the process that plans, where the registry may be away."""
    registry = SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "127.0.0.1:0", topic="plans")
    with registry:
        register(registry.url, "plans-value", _record("C", "a"))
        options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": "plans", "valueFormat": "avro"}
        source = KlogDataSource(options | {"schemaRegistryUrl": registry.url})
        schema = source.schema()
    plan = (
        "import sys; from pyspark import cloudpickle; source, schema = cloudpickle.loads(sys.stdin.buffer.read()); "
        "print(source.reader(schema)._options.readers[0].version, 'httpx' in sys.modules)"
    )
    command = [sys.executable, "-c", plan]
    done = subprocess.run(command, input=cloudpickle.dumps((source, schema)), capture_output=True, timeout=60)
    assert done.stdout.split() == [b"1", b"False"], done.stderr.decode()


def test_an_id_that_is_there_later(registry: str) -> None:
    """A decoder of a consumer lives long: it asks again, though not for each batch."""
    first = register(registry, "later-value", _record("Later", "a"))
    source = _format(registry, "later-value")
    decoder = source.reader().decoder()
    values = pa.array([_row(first + 1, 5, 6)])
    ((_, reason),) = decoder.decode(values, None).bad
    assert "does not have it" in reason
    assert register(registry, "later-value", _record("Later", "a", b=0)) == first + 1
    assert len(decoder.decode(values, None).bad) == 1
    assert source.registry is not None
    source.registry.registry()._absent.clear()  # 10 s later
    assert decoder.decode(values, None).values.to_pylist() == [{"a": 5}]


@pytest.mark.parametrize("by", ["type", "latest", "id"])
def test_a_stream_writes_on_while_the_registry_is_away(
    by: str, cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks for each micro-batch; the id that it had is right as long as nobody can delete it."""
    kind = pa.struct([("a", pa.int64())])
    with _serving(cluster, 0, f"away-{by}") as url:
        settings = Settings({"url": url, "retries.deadline.ms": "1000"})
        source = ColumnFormat("value", "avro", RegistrySettings(settings), subject="away-value")
        number = register(url, "away-value", source.codec.schema_of(kind))
        given = dataclasses.replace(source, schema_id=number if by == "id" else None)
        write = WriteFormat(given, uses_latest=by == "latest")
        assert write.writer(kind).id == number
    began = time.monotonic()
    assert [write.writer(kind).id for _ in range(20)] == [number] * 20
    assert time.monotonic() - began < 15  # 20 s if each waits for the registry
    assert caplog.messages[-1].endswith("what it said before counts")
    other = WriteFormat(dataclasses.replace(given, subject="away-other"))
    with pytest.raises(ConnectionFailed):
        other.writer(kind)


def test_planning_waits_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (row_columns, column_format):
        monkeypatch.setattr(module, "PLANNING_MS", 200)
    source, fields = _format("http://127.0.0.1:1", "s"), StructType().add("value", "binary")
    with pytest.raises(ConnectionFailed, match=r"in 0\.2 s"):
        analysed_readers([source])
    with pytest.raises(ConnectionFailed, match=r"in 0\.2 s"):
        readers_of([source], fields)
    options = {
        "kafka.bootstrap.servers": "a:1",
        "topic": "t",
        "valueFormat": "avro",
        "schemaRegistryUrl": "http://127.0.0.1:1",
    }
    with pytest.raises(ConnectionFailed, match=r"in 0\.2 s"):
        BatchQueryWriter(sink_options(options), StructType().add("value", StructType().add("a", "long")))
