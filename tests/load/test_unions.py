"""Unions of Avro records over versions of a subject: an event type stays in the column that it had, or is refused.

Records are written by fastavro; which member of a row's struct has an event is found by the names of its fields.
"""

from __future__ import annotations

import copy
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import pyarrow as pa
import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError, SchemaError
from spark_klog.load.audit import status
from spark_klog.load.rows import merged, named_type
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, ReaderSchema, RegistrySettings
from spark_klog.schemas.native_kernel import native_kernel
from spark_klog.security.config import Settings
from tests.load.support import run
from tests.load.test_upserts import FORMATS, address_of, content, environment
from tests.schemas.registry.asking import ask
from tests.spark.support import Sent, create_topic, produce

__all__ = ["environment"]


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        ask(running.url, "PUT", "/config", {"compatibility": "NONE"})
        yield running.url


def _event(name: str, field: str = "", **more: Any) -> dict[str, Any]:
    short = name.rpartition(".")[2]
    return {"type": "record", "name": name, "fields": [{"name": field or f"{short}_id", "type": "long"}], **more}


def _envelope(*events: Any) -> dict[str, Any]:
    """A union as a field, in an array, and in a map."""
    names = [one["name"] if isinstance(one, dict) else one for one in events]
    items = [name for name in names if name != "null"]
    return {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "event", "type": list(events)},
            {"name": "list", "type": {"type": "array", "items": items}},
            {"name": "map", "type": {"type": "map", "values": items}},
        ],
    }


class _Topic:
    def __init__(self, servers: str, topic: str, registry: str) -> None:
        self.servers, self.topic, self.registry = servers, topic, registry
        create_topic(servers, topic)

    def send(self, schema: dict[str, Any], *events: tuple[str, Any]) -> None:
        """Records with an event each, written by the next version of the subject."""
        body = {"schema": json.dumps(schema)}
        code, answer = ask(self.registry, "POST", f"/subjects/{self.topic}-value/versions", body)
        assert code == 200, answer
        parsed = fastavro.parse_schema(copy.deepcopy(schema))
        records = []
        for event in events:
            out = io.BytesIO()
            row = {"event": event, "list": [event, event], "map": {"k": event}}
            fastavro.schemaless_writer(out, parsed, row)
            records.append(Sent(b"\0" + answer["id"].to_bytes(4, "big") + out.getvalue()))
        produce(self.servers, self.topic, records)

    def load(self, output: Path | str, **options: Any) -> Any:
        settings = RegistrySettings(Settings({"url": self.registry}))
        formats = (ColumnFormat("value", "avro", settings, subject=f"{self.topic}-value"),)
        return run(self.servers, output, self.topic, formats=formats, **{"evolution": "latest", **options})


def _places(rows: Sequence[dict[str, Any]]) -> dict[str, set[str]]:
    """By each field of an event the members that have it."""
    places: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for union in (row["event"], *row["list"], dict(row["map"])["k"]):
            [(member, event)] = [(name, value) for name, value in union.items() if value is not None]
            fields = event if isinstance(event, dict) else {"text": event}
            [field] = [name for name, value in fields.items() if value is not None]
            places[field].add(member)
    return dict(places)


_PAID, _SENT, _REFUNDED = _event("Paid"), _event("Sent"), _event("Refunded")


@pytest.mark.parametrize("kind", ["files", *FORMATS])
def test_event_types_keep_their_columns(
    cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path, environment: Any, kind: str
) -> None:
    """Others come first, between and instead of them; a record moves to another namespace, one is renamed."""
    source = _Topic(cluster.bootstrap_servers, topic, registry)
    output = tmp_path / "files" if kind == "files" else address_of(kind, tmp_path)
    options = {} if kind == "files" else {"settings": WriteSettings(table_columns=VALUES)}
    source.send(_envelope("null", _PAID, _SENT), ("Paid", {"Paid_id": 1}), ("Sent", {"Sent_id": 2}))
    source.load(output, **options)
    source.send(
        _envelope(_REFUNDED, _PAID, "null", _SENT),
        ("Paid", {"Paid_id": 3}),
        ("Refunded", {"Refunded_id": 4}),
        ("Sent", {"Sent_id": 5}),
    )
    source.load(output, **options)
    source.send(_envelope(_SENT, _REFUNDED), ("Sent", {"Sent_id": 6}), ("Refunded", {"Refunded_id": 7}))
    source.load(output, **options)
    moved = [_event("Returned", "Refunded_id", aliases=["Refunded"]), "string", _event("shop.Paid", "Paid_id")]
    source.send(
        _envelope(*moved),
        ("Returned", {"Refunded_id": 8}),
        ("string", "nine"),
        ("shop.Paid", {"Paid_id": 10}),
    )
    source.load(output, **options)
    if kind == "files":
        with duckdb.connect() as connection:
            query = f"FROM read_parquet('{output}/**/*.parquet', union_by_name=true) ORDER BY \"offset\""
            rows = [row["value"] for row in connection.sql(query).to_arrow_table().to_pylist()]
    else:
        rows = content(str(output)).sort_by("_klog_offset").to_pylist()
    assert len(rows) == 10
    assert _places(rows) == {
        "Paid_id": {"member0"},
        "Sent_id": {"member1"},
        "Refunded_id": {"member2"},
        "text": {"member3"},
    }
    assert status(str(output)).findings == []


def _type(schema: Any) -> pa.DataType:
    return named_type(ReaderSchema(ColumnFormat("value", "avro"), json.dumps(schema)))


def test_a_schema_without_a_type_is_refused_by_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a run has a plan, as is what needs the native kernel where there is none."""
    digits = {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2}
    with pytest.raises(SchemaError, match=r"column value.*field d.* 38 digits"):
        _type({"type": "record", "name": "R", "fields": [{"name": "d", "type": digits}]})
    monkeypatch.setitem(sys.modules, "spark_klog.schemas.avro._avro", None)
    native_kernel.cache_clear()
    with pytest.raises(ConfigError, match="native kernel"):
        _type({"type": "record", "name": "Alone", "fields": [{"name": "d", "type": "int"}]})


def test_a_type_and_a_union_of_types() -> None:
    """Another type beside the only one moves it into a member, so that it is refused; a second null moves nothing."""
    one, two = _type(_envelope("null", _PAID)), _type(_envelope("null", _PAID, _SENT))
    for old, new in ((one, two), (two, one)):
        with pytest.raises(LoadError, match=r"value\.event is of one type by one schema, and a union of several by"):
            merged(old, new, "value")
    assert merged(two, _type(_envelope(_PAID, "null", _SENT)), "value") == merged(two, two, "value")
    widened = merged(_type(["int", "string"]), _type(["string", "long"]), "value", widens=True)
    assert widened == pa.struct([("member0", pa.int64()), ("member1", pa.string())])


def test_two_topics_of_a_table(cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path) -> None:
    """One column can't have two orders of types."""
    topics = [_Topic(cluster.bootstrap_servers, f"{topic}-{number}", registry) for number in range(3)]
    for each, events in zip(topics, [(_PAID, _SENT), (_PAID, _SENT, _REFUNDED), (_SENT, _PAID)], strict=True):
        each.send(_envelope(*events), ("Paid", {"Paid_id": 1}))
    formats = (ColumnFormat("value", "avro", RegistrySettings(Settings({"url": registry}))),)
    names = [each.topic for each in topics]
    run(cluster.bootstrap_servers, f"delta:{tmp_path}/fits", *names[:2], formats=formats)
    rows = [row["value"] for row in content(f"delta:{tmp_path}/fits").to_pylist()]
    assert _places(rows) == {"Paid_id": {"member0"}}
    with pytest.raises(LoadError, match=r"value\.event is a union of other types, or in another order, in two topics"):
        run(cluster.bootstrap_servers, f"delta:{tmp_path}/other", *names[1:], formats=formats)
