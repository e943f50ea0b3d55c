"""Schemas and values in short."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.encoder import JsonSchemaEncoder
from spark_klog.schemas.json_schema.schema import parse_schema
from spark_klog.schemas.rows import Decoded


def record(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


def kind_of(schema: Any, **references: Any) -> pa.DataType:
    texts = {name: json.dumps(value) for name, value in references.items()}
    return parse_schema(json.dumps(schema), texts).column.type


def decode(schema: Any, *rows: bytes | None, validates: bool = False) -> Decoded:
    parsed = parse_schema(json.dumps(schema))
    decoder = JsonDecoder(parsed.column, validates=validates)
    decoded = decoder.decode(pa.array(rows, pa.binary()), [decoder.program(parsed)])
    decoded.values.validate(full=True)
    assert decoded.values.type == decoder.type
    return decoded


def rows_of(schema: Any, *rows: Any) -> list[Any]:
    """The rows of JSON values, none of which may be bad."""
    decoded = decode(schema, *[row if isinstance(row, bytes | None) else json.dumps(row).encode() for row in rows])
    assert not decoded.bad, decoded.bad
    return decoded.values.to_pylist()  # type: ignore[no-any-return]


def reason(schema: Any, row: bytes, validates: bool = False) -> str:
    """Why a row is bad; the rows beside it are not."""
    decoded = decode(schema, None, row, None, validates=validates)
    (bad,) = decoded.bad
    assert bad.row == 1
    assert decoded.values.to_pylist() == [None] * 3
    return bad.reason


def encode(schema: Any, values: pa.Array, prefix: bytes = b"", validates: bool = False) -> list[bytes | None]:
    encoder = JsonSchemaEncoder(parse_schema(json.dumps(schema)), values.type, validates=validates)
    return encoder.encode(values, prefix).to_pylist()  # type: ignore[no-any-return]
