"""Records without a schema id, beside others that have one: by the latest version of their subject, if asked."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from spark_klog.base.names import Format
from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.run import MaxBad
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.schemas.prefix import id_prefix
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.schemas.registry.schemas import Schema
from spark_klog.schemas.registry.settings import registry_config
from spark_klog.security.config import Settings
from tests.load.support import run
from tests.spark.support import Sent, create_topic, produce


@pytest.fixture
def url(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


def _avro(*names: str) -> str:
    fields = [{"name": name, "type": ["string", "null"], "default": ""} for name in names]
    return json.dumps({"type": "record", "name": "R", "fields": fields})


def _row(text: str, **values: str) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(json.loads(text)), values)
    return buffer.getvalue()


def _format(url: str, kind: Format, subject: str | None, **options: str) -> ColumnFormat:
    return ColumnFormat("value", kind, RegistrySettings(Settings({"url": url, **options})), subject=subject)


def _register(url: str, subject: str, kind: Format, *texts: str) -> list[int]:
    with RegistryClient(registry_config({"url": url})) as client:
        return [client.register(subject, Schema(text, kind)) for text in texts]


def _decoded(form: ColumnFormat, *rows: bytes | None) -> tuple[list[Any], dict[int, str]]:
    values, bad = form.reader().decoder().decode(pa.array(rows, pa.binary()), None)
    return values.to_pylist(), dict(bad)


_PROTO = 'syntax = "proto3"; message R { string name = 1; }'
_JSON = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}})


@pytest.mark.parametrize(
    ("kind", "text", "row"),
    [
        ("protobuf", _PROTO, b"\x0a\x03Ada"),
        ("json-schema", _JSON, b'{"name": "Ada"}'),
    ],
)
def test_bare_rows(url: str, topic: str, kind: Format, text: str, row: bytes) -> None:
    subject = f"{topic}-{kind}"
    [number] = _register(url, subject, kind, text)
    prefix = id_prefix(number) + (b"\0" if kind == "protobuf" else b"")
    values, bad = _decoded(_format(url, kind, subject, bare="latest"), prefix + row, row, None)
    assert (values, bad) == ([{"name": "Ada"}, {"name": "Ada"}, None], {})
    values, bad = _decoded(_format(url, kind, subject), prefix + row, row, None)
    assert values == [{"name": "Ada"}, None, None]
    assert "not with a schema id" in bad[1]


def test_which_version_bare_rows_are_of(url: str, topic: str) -> None:
    """The latest one, whichever the rows are read by; what is none of it is bad."""
    first, second = _avro("name"), _avro("name", "mail")
    ids = _register(url, topic, "avro", first, second)
    new = b"\x80"  # a union's branch that is no id, and no branch
    rows = [id_prefix(ids[0]) + _row(first, name="Ada"), b"", new]
    form = _format(url, "avro", topic, bare="latest")
    values, bad = _decoded(form, *rows)
    assert values == [{"name": "Ada", "mail": ""}, None, None]
    assert sorted(bad) == [1, 2]
    assert bad[2].startswith("without a schema id, by the latest version of its subject: ")
    # read by another text, without a subject
    with_text = ColumnFormat("value", "avro", form.registry, text=first)
    _, bad = _decoded(with_text, *rows)
    assert "no subject is named" in bad[2]


def test_a_load_of_bare_records(cluster: EmbeddedCluster, url: str, topic: str, tmp_path: Path) -> None:
    create_topic(cluster.bootstrap_servers, topic)
    [number] = _register(url, f"{topic}-value", "json-schema", _JSON)
    rows = [id_prefix(number) + b'{"name": "a"}', b'{"name": "b"}', b'{"name": 5}']
    produce(cluster.bootstrap_servers, topic, [Sent(row) for row in rows])
    form = _format(url, "json-schema", f"{topic}-value", bare="latest")
    loaded = run(cluster.bootstrap_servers, tmp_path, topic, formats=(form,), max_bad=MaxBad(1))
    assert loaded.bad == 1
    found = ds.dataset(tmp_path / topic).to_table()["value"].to_pylist()
    assert found == [{"name": "a"}, {"name": "b"}]
