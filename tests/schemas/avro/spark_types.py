"""Every Avro type, and what Spark calls and has for an Arrow type."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Any

import pyarrow as pa

from .support import record, written


def case_of(writer: Any, reader: Any, rows: list[bytes]) -> dict[str, Any]:
    return {"writer": json.dumps(writer), "reader": json.dumps(reader), "rows": [row.hex() for row in rows]}


def _logical(kind: str, logical: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


def every_type() -> dict[str, Any]:
    """A record with every type, and its values."""
    fields = {
        "boolean": ("boolean", True),
        "int": ("int", -(2**31)),
        "long": ("long", 2**63 - 1),
        "float": ("float", 1.5),
        "double": ("double", -1e300),
        "string": ("string", "\u20ac\U0001f600"),
        "bytes": ("bytes", b"\x00\xff"),
        "fixed": ({"type": "fixed", "name": "F", "size": 3}, b"abc"),
        "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B"),
        "date": (_logical("int", "date"), dt.date(1970, 1, 2)),
        "time_millis": (_logical("int", "time-millis"), dt.time(1)),
        "time_micros": (_logical("long", "time-micros"), dt.time(1)),
        "millis": (_logical("long", "timestamp-millis"), dt.datetime(2024, 5, 6, 7, tzinfo=dt.timezone.utc)),
        "micros": (_logical("long", "timestamp-micros"), dt.datetime(2024, 5, 6, 7, tzinfo=dt.timezone.utc)),
        "local_millis": (_logical("long", "local-timestamp-millis"), dt.datetime(2024, 5, 6, 7)),
        "local_micros": (_logical("long", "local-timestamp-micros"), dt.datetime(2024, 5, 6, 7)),
        "nanos": (_logical("long", "timestamp-nanos"), 5),
        "uuid": (_logical("string", "uuid"), "00000000-0000-0000-0000-000000000007"),
        "duration": ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, bytes(12)),
        "decimal": (_logical("bytes", "decimal", precision=10, scale=2), decimal.Decimal("-12.34")),
        "wide": (
            {"type": "fixed", "name": "W", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 9},
            decimal.Decimal("-1.000000001"),
        ),
        "array": ({"type": "array", "items": ["null", "int"]}, [1, None]),
        "map": ({"type": "map", "values": {"type": "array", "items": "string"}}, {"k": ["v"]}),
        "record": (record(("x", ["null", "int"]), name="I"), {"x": 1}),
        "nullable": (["string", "null"], None),
        "longs": (["int", "long"], 5),
        "doubles": (["float", "null", "double"], 5.0),
        "member": (["null", "string", "int", record(("y", "int"), name="J")], {"y": 1}),
    }
    schema = record(*((name, kind) for name, (kind, _) in fields.items()))
    row = {name: value for name, (_, value) in fields.items()}
    return case_of(schema, schema, written(schema, row))


def plain(value: Any, kind: pa.DataType) -> Any:
    """Our value as spark_avro.py has it."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            kind.field(index).name: plain(value[kind.field(index).name], kind.field(index).type)
            for index in range(kind.num_fields)
        }
    if pa.types.is_map(kind):
        # Java keeps the last value of a key
        return sorted([key, plain(item, kind.item_type)] for key, item in dict(value).items())
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.datetime):
        return str(value.replace(tzinfo=None))
    if isinstance(value, dt.date | decimal.Decimal):
        return str(value)
    return repr(value) if isinstance(value, float) else value


def spark_type(kind: pa.DataType) -> str:
    """The name that Spark has for an Arrow type."""
    if pa.types.is_struct(kind):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return f"struct<{','.join(f'{field.name}:{spark_type(field.type)}' for field in fields)}>"
    if pa.types.is_map(kind):
        return f"map<string,{spark_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{spark_type(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    names = {"int32": "int", "int64": "bigint", "bool": "boolean", "date32[day]": "date", "null": "void"}
    return names.get(str(kind), str(kind))
