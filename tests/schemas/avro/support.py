"""Schemas and values in short, decoded by each kernel."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from spark_klog.schemas.avro.columns import Types
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.rows import Decoded


@pytest.fixture(params=["native", "reference"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kernels, one after the other."""
    from tests.schemas.oracles import use_kernel

    use_kernel(request.param, monkeypatch)
    return str(request.param)


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    """A record of fields (name, type), (name, type, default), or whole ones."""
    made = []
    for field in fields:
        if isinstance(field, tuple):
            field = dict(zip(("name", "type", "default"), field, strict=False))
        made.append(field)
    return {"type": "record", "name": name, "fields": made, **more}


def written(schema: Any, *rows: Any) -> list[bytes]:
    """Rows in Avro's binary form, by fastavro."""
    parsed = fastavro.parse_schema(schema)
    result = []
    for row in rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, row)
        result.append(stream.getvalue())
    return result


def decode(writer: Any, values: list[bytes | None], reader: Any = None, types: Types = "spark") -> Decoded:
    """Decode values with the kernel of the environment."""
    decoder = AvroDecoder(parse_schema(writer if reader is None else reader), types)
    result = decoder.decode(pa.array(values, pa.binary()), [decoder.program(parse_schema(writer))])
    result.values.validate(full=True)
    return result


def rows(writer: Any, values: list[bytes | None], reader: Any = None, types: Types = "spark") -> list[Any]:
    """The decoded rows; none may be bad."""
    result = decode(writer, values, reader, types)
    assert not result.bad
    return result.values.to_pylist()  # type: ignore[no-any-return]


def encode(schema: Any, values: pa.Array, prefix: bytes = b"") -> list[bytes | None]:
    """Encoded rows."""
    return AvroEncoder(parse_schema(schema), values.type).encode(values, prefix).to_pylist()  # type: ignore[no-any-return]
