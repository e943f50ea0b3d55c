"""Keys whose schema changes between runs: each change finds the row of its key, or the run is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyiceberg.catalog import load_catalog

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.security.config import Settings
from tests.load.support import run
from tests.load.test_upserts import address_of, content, environment
from tests.spark.support import Sent, create_topic, produce

__all__ = ["environment"]


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        SchemaRegistryClient({"url": running.url}).set_compatibility(level="NONE")
        yield running.url


def _avro(kind: Any, name: str = "id", *more: Any, **options: Any) -> tuple[str, Any]:
    fields = [{"name": name, "type": kind, **options}, *more]
    return "AVRO", {"type": "record", "name": "Key", "fields": fields}


_TENANT = {"name": "tenant", "type": "string", "default": "main"}
_LONG = _avro("long")
_JSON = {"type": "object", "properties": {"id": {"type": "integer"}}, "additionalProperties": False}


class _Keys:
    """A topic of changes, and their table: keys by schemas of a registry, and values of JSON; or only such values."""

    def __init__(self, servers: str, url: str, topic: str, address: str, sort: str, column: Any) -> None:
        self.servers, self.topic, self.address, self._client = (
            servers,
            topic,
            address,
            SchemaRegistryClient({"url": url}),
        )
        form: Any = {"AVRO": "avro", "PROTOBUF": "protobuf", "JSON": "json-schema"}[sort]
        self._format = ColumnFormat(column, form, RegistrySettings(Settings({"url": url})), subject=f"{topic}-key")
        create_topic(servers, topic)

    def send(self, schema: tuple[str, Any], key: dict[str, Any], name: str | None) -> None:
        sort, text = schema
        parsed = text if isinstance(text, str) else json.dumps(text)
        number = self._client.register_schema(f"{self.topic}-key", Schema(parsed, sort))
        body = BytesIO(b"\0" + number.to_bytes(4, "big"))
        body.seek(5)
        if sort == "AVRO":
            fastavro.schemaless_writer(body, fastavro.parse_schema(text), key)
        elif sort == "JSON":
            body.write(json.dumps(key).encode())
        else:
            tenant = key.get("tenant", "").encode()
            body.write(bytes([0, 8, key["id"]]) + (bytes([0x12, len(tenant)]) + tenant if tenant else b""))
        value = None if name is None else json.dumps({"name": name}).encode()
        sent = Sent(value, body.getvalue()) if self._format.column == "key" else Sent(body.getvalue(), b"")
        produce(self.servers, self.topic, [sent])

    def load(self, evolution: Any = "latest", **options: Any) -> Any:
        options = {"settings": WriteSettings(schema="name string", upsert_key="key"), **options}
        formats = (self._format,)
        return run(self.servers, self.address, self.topic, formats=formats, evolution=evolution, **options)

    def rows(self, name: str = "id") -> list[Any]:
        found = content(self.address)
        return sorted(zip(found[name].to_pylist(), found["name"].to_pylist(), strict=True))


@pytest.fixture
def make(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any) -> Any:
    def made(kind: str, sort: str = "AVRO", column: str = "key") -> _Keys:
        return _Keys(cluster.bootstrap_servers, registry, topic, address_of(kind, tmp_path), sort, column)

    return made


def test_a_key_that_gets_a_field(make: Any) -> None:
    """By the new schema no change would find the rows; by the old one two keys of the new one may be the same."""
    first, second = _LONG, _avro("long", "id", _TENANT)
    keys = make("delta", first[0])
    for number in (1, 2):
        keys.send(first, {"id": number}, f"user {number}")
    keys.load()
    before = keys.rows()
    keys.send(first, {"id": 1}, "Ada")
    keys.send(second, {"id": 2, "tenant": "other"}, None)
    with pytest.raises(LoadError, match="has rows by the key id, and the changes are by id, tenant"):
        keys.load()
    assert keys.rows() == before
    assert "tenant" not in content(keys.address).column_names
    with pytest.raises(LoadError, match="has records of version 2 now, which version 1, the load's, can't read"):
        keys.load("keep")
    with pytest.raises(LoadError, match="has rows by the key id, and the changes are by id, tenant"):
        keys.load()
    assert keys.rows() == before


def _enum(*symbols: str) -> Any:
    kind = {"type": "enum", "name": "Kind", "symbols": ["X", *symbols], "default": "X"}
    return _avro("long", "id", {"name": "kind", "type": kind})


def _proto(fields: str) -> Any:
    return "PROTOBUF", f'syntax = "proto3"; message Key {{ {fields} }}'


def _json(name: str) -> Any:
    return "JSON", {**_JSON, "properties": {**_JSON["properties"], name: {"type": "string", "default": "?"}}}


_REGION, _ZONE = ({"name": name, "type": "string", "default": "?"} for name in ("region", "zone"))


@pytest.mark.parametrize(
    ("old", "new", "first", "second"),
    [
        (_avro("long", "id", _REGION), _avro("long", "id", _ZONE), {"id": 1, "region": "eu"}, {"zone": "eu"}),
        (_avro("long", "id", _REGION), _LONG, {"id": 1, "region": "eu"}, {}),
        (_enum("A"), _enum("A", "B"), {"id": 1, "kind": "A"}, {"kind": "B"}),
        (_proto("int64 id = 1;"), _proto("int64 uid = 2;"), {"id": 1}, {}),
        (_proto("int32 id = 1;"), _proto("int64 id = 1;"), {"id": 1}, {}),
        (_json("region"), _json("zone"), {"id": 1, "region": "eu"}, {"zone": "eu"}),
    ],
    ids=["renamed", "dropped", "symbols", "numbers", "bits", "JSON"],
)
def test_keys_that_the_older_schema_would_make_the_same(make: Any, old: Any, new: Any, first: Any, second: Any) -> None:
    keys = make("delta", old[0])
    keys.send(old, first, "Ada")
    keys.load()
    before = keys.rows()
    for number in (2, 3):
        keys.send(new, {"id": number, **second}, "another")
    with pytest.raises(LoadError, match="has records of version 2 now, which version 1, the load's, can't read"):
        keys.load("keep")
    assert keys.rows() == before


@pytest.mark.parametrize("envelope", ["none", "debezium"])
def test_values_without_the_field_that_is_the_key(make: Any, envelope: Any) -> None:
    keys = make("delta", column="value")

    def send(field: str, name: str) -> None:
        fields = [{"name": field, "type": "long", "default": 0}, {"name": "name", "type": "string"}]
        row: Any = {"type": "record", "name": "Row", "fields": fields}
        value: dict[str, Any] = {field: len(name), "name": name}
        if envelope == "debezium":
            sides = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Row"]}]
            row = {"type": "record", "name": "Change", "fields": [*sides, {"name": "op", "type": "string"}]}
            value = {"before": None, "after": value, "op": "c"}
        keys.send(("AVRO", row), value, None)

    settings = WriteSettings(upsert_key="id", envelope=envelope)
    send("id", "Ada")
    keys.load(settings=settings)
    for name in ("Bob", "Charles"):
        send("uid", name)
    with pytest.raises(LoadError, match="has records of version 2 now, which version 1, the load's, can't read"):
        keys.load("keep", settings=settings)
    assert keys.rows() == [(3, "Ada")]


def test_an_alias_of_the_readers_key_is_a_field_of_it(make: Any) -> None:
    """The load reads by version 2, and the records of version 1 have the former name."""
    keys = make("delta")
    keys.send(_avro("long", "uid", aliases=["id"]), {"uid": 1}, "Ada")
    keys.load("keep")
    for number in (1, 2):
        keys.send(_LONG, {"id": number}, f"user {number}")
    keys.load("keep")
    assert keys.rows("uid") == [(1, "user 1"), (2, "user 2")]


def test_a_number_of_protobuf_is_a_field_of_the_key_by_any_name(make: Any) -> None:
    keys = make("delta", "PROTOBUF")
    keys.send(_proto("int64 id = 1;"), {"id": 1}, "Ada")
    keys.load()
    for number in (1, 2):
        keys.send(_proto("int64 uid = 1;"), {"id": number}, f"user {number}")
    keys.load("keep")
    assert keys.rows() == [(1, "user 1"), (2, "user 2")]


def test_a_key_that_gets_a_field_before_there_is_a_row(make: Any) -> None:
    keys = make("delta")
    keys.send(_LONG, {"id": 1}, None)
    keys.load()
    keys.send(_avro("long", "id", _TENANT), {"id": 1, "tenant": "other"}, "Ada")
    keys.load()
    assert keys.rows("tenant") == [("other", "Ada")]
    keys.send(_LONG, {"id": 1}, "Bob")
    keys.load()
    assert keys.rows("tenant") == [("main", "Bob"), ("other", "Ada")]


@pytest.mark.parametrize(
    ("kind", "old", "new", "message"),
    [
        ("delta", _LONG, _avro("string"), "id is string by the new schema, and int64 in the load's files"),
        ("delta", _LONG, _avro({"type": "record", "name": "R", "fields": []}), "by the new schema"),
        ("delta", _avro("float"), _avro("double"), "id is float in the table and double in the load"),
        ("iceberg", _avro("float"), _avro("double"), "in which 0.1 is another number"),
        ("delta", _LONG, _avro("long", "uid", aliases=["id"]), "by the key id, and the changes are by id, uid"),
    ],
)
def test_a_key_of_another_type_or_name(make: Any, kind: str, old: Any, new: Any, message: str) -> None:
    keys = make(kind)
    keys.send(old, {"id": 1}, "Ada")
    keys.load()
    before = keys.rows()
    name, inner = new[1]["fields"][0]["name"], new[1]["fields"][0]["type"]
    keys.send(new, {name: {} if isinstance(inner, dict) else "1" if inner == "string" else 1}, None)
    with pytest.raises((LoadError, ConfigError), match=message):
        keys.load()
    assert keys.rows() == before


def test_a_key_that_may_be_null(make: Any) -> None:
    keys, nullable = make("delta"), _avro(["null", "long"])
    for number in (1, 2):
        keys.send(_LONG, {"id": number}, "user")
    keys.load()
    for value, name in ((1, None), (2, "Bob"), (None, "nobody")):
        keys.send(nullable, {"id": value}, name)
    keys.load(max_bad=MaxBad(1))
    assert keys.rows() == [(2, "Bob")]


def test_a_key_that_a_table_can_rename_or_widen(make: Any) -> None:
    keys = make("iceberg")
    keys.send(_avro("int"), {"id": 1}, "user")
    keys.load()
    keys.send(_LONG, {"id": 1}, "Ada")
    keys.send(_LONG, {"id": 1 << 40}, "Bob")
    keys.load()
    assert keys.rows() == [(1, "Ada"), (1 << 40, "Bob")]
    keys.send(_avro("long", "uid", aliases=["id"]), {"uid": 1}, None)
    keys.load()
    assert keys.rows("uid") == [(1 << 40, "Bob")]


@pytest.mark.parametrize(
    ("how", "is_old"),
    [
        ("renamed", False),
        ("dropped and added", False),
        ("renamed", True),
    ],
)
def test_a_column_of_the_key_that_others_change(make: Any, how: str, is_old: bool) -> None:
    """`is_old`: the table is of a version of the program that did not note the key."""
    keys = make("iceberg")
    keys.send(_LONG, {"id": 1}, "user")
    keys.load()
    table = load_catalog("local").load_table("space.rows")
    name = "_klog_partition" if how == "the place" else "id"
    if is_old:
        with table.transaction() as transaction:
            transaction.remove_properties("klog.key")
    with table.update_schema(allow_incompatible_changes=True) as update:
        if how in ("renamed", "the place"):
            update.rename_column(name, "other")
        else:
            update.delete_column(name)
    if how == "dropped and added":
        with table.update_schema() as update:
            update.add_column("id", table.metadata.schemas[0].find_type("id"))
    names = content(keys.address).column_names
    keys.send(_LONG, {"id": 1}, "Ada")
    message = f"has rows by its column {name}, which was {'dropped' if 'drop' in how else 'renamed to other'}"
    for _ in range(2):
        with pytest.raises(LoadError, match="has rows without id" if is_old else message):
            keys.load()
        assert (content(keys.address).column_names, len(content(keys.address))) == (names, 1)
    if "drop" not in how:
        with load_catalog("local").load_table("space.rows").update_schema() as update:
            update.rename_column("other", name)
        keys.load()
        assert keys.rows() == [(1, "Ada")]
