"""The Arrow schema of records: the columns of Spark's Kafka connector, with the types that Spark converts them to.

key, value     binary               topic       string      partition     int32
offset         int64                timestamp   timestamp[us, UTC]        timestampType  int32
headers        list<struct<key: string, value: binary>>, null for a record without headers; only on request
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from spark_klog.errors import ConfigError

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

FULL = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
        pa.field("headers", pa.list_(pa.field("element", _HEADER))),
    ]
)

WITHOUT_HEADERS = pa.schema([field for field in FULL if field.name != "headers"])


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is of strings, in any of Arrow's layouts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType, *, or_fixed: bool = False) -> bool:
    """Whether a type is of bytes, in any of Arrow's layouts for any length, or of one length."""
    is_any = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(is_any or (or_fixed and pa.types.is_fixed_size_binary(kind)))


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is of lists, in any of Arrow's layouts without views."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def in_milliseconds(schema: pa.Schema) -> pa.Schema:
    """The schema with the column `timestamp` in ms: all times of Kafka fit."""
    return schema.set(schema.get_field_index("timestamp"), pa.field("timestamp", pa.timestamp("ms", tz="UTC")))


def with_types(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema with other types of the columns key and value, where rows take the place of bytes."""
    return pa.schema([pa.field(field.name, types[field.name]) if field.name in types else field for field in schema])


def subset(names: Sequence[str]) -> pa.Schema:
    """The schema of the named columns, in that order; `ConfigError` for an unknown name."""
    unknown = [name for name in names if name not in FULL.names]
    if unknown:
        raise ConfigError(f"no such columns: {', '.join(unknown)}; the known ones are {', '.join(FULL.names)}")
    return pa.schema([FULL.field(name) for name in names])
