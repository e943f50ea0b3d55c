"""Arrow rows encoded one by one by fastavro: the same bytes as the native kernel's, which is compared with it."""

from __future__ import annotations

import io
import struct
from array import array
from decimal import Decimal
from itertools import count, pairwise
from typing import Any

import fastavro
import pyarrow as pa

from spark_klog.errors import EncodeError
from spark_klog.schemas.avro.columns import UNITS, unit_of
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.opcodes import TEXTS, Reason
from spark_klog.schemas.avro.schema import AvroSchema
from spark_klog.schemas.avro.writing import WriteBranch, WriteItems, WriteMembers, WritePlan, WriteRecord, WriteValue

from .fastavro_rows import same_bytes

_INT64 = 1 << 63
_DURATION = struct.Struct("<III")


class FastavroEncoder(AvroEncoder):
    """As `AvroEncoder`."""

    def _written(self, values: pa.Array, prefix: bytes) -> tuple[bytes, bytes]:
        return encode(self._program.plan, values, prefix)


def encode(plan: WritePlan, values: pa.Array, prefix: bytes) -> tuple[bytes, bytes]:
    """Offsets and data of the records, as `_avro.encode` returns them; an `EncodeError` does not tell its row."""
    schema = same_bytes(plan.schema, count())
    parsed = fastavro.parse_schema(schema)
    present = values.drop_null()
    stream = io.BytesIO()
    offsets = array("i", [0])
    rows = iter(_values(plan, schema, present, ""))
    for value in values.is_valid().to_pylist():
        if value:
            stream.write(prefix)
            fastavro.schemaless_writer(stream, parsed, next(rows))
        if stream.tell() >= 1 << 31:
            raise EncodeError(TEXTS[Reason.TOO_LARGE])
        offsets.append(stream.tell())
    return offsets.tobytes(), stream.getvalue()


def _refused(path: str, reason: Reason) -> EncodeError:
    return EncodeError(f"field {path or 'of the root'}: {TEXTS[reason]}")


def _values(plan: WritePlan, node: Any, given: pa.Array, path: str) -> list[Any]:
    """What fastavro writes for each value by the part of `same_bytes` that is the plan's."""
    if isinstance(plan, WriteBranch):
        return _of_branch(plan, node, given, path)
    if isinstance(plan, WriteMembers):
        return _of_members(plan, node, given, path)
    if given.null_count and plan.schema.kind != "null":
        raise _refused(path, Reason.IS_NULL)
    if isinstance(plan, WriteRecord):
        return _of_record(plan, node, given, path)
    if isinstance(plan, WriteItems):
        return _of_items(plan, node, given, path)
    return _leaves(plan, given, path)


def _of_branch(plan: WriteBranch, node: list[Any], given: pa.Array, path: str) -> list[Any]:
    if given.null_count and plan.null < 0:
        raise _refused(path, Reason.IS_NULL)
    branch = node[plan.branch]
    present = iter(_values(plan.plan, branch["fields"][0]["type"], given.drop_null(), path))
    null = (node[plan.null]["name"], {"f0": None})
    return [(branch["name"], {"f0": next(present)}) if valid else null for valid in given.is_valid().to_pylist()]


def _of_members(plan: WriteMembers, node: list[Any], given: pa.Array, path: str) -> list[Any]:
    columns = [given.filter(given.is_valid()).field(index) for index in range(len(plan.members))]
    members = []
    for (branch, step), column in zip(plan.members, columns, strict=True):
        name, kind = node[branch]["name"], node[branch]["fields"][0]["type"]
        present = iter(_values(step, kind, column.drop_null(), path))
        valid = column.is_valid().to_pylist()
        members.append([(name, {"f0": next(present)}) if is_valid else None for is_valid in valid])
    rows = iter(list(zip(*members, strict=True)))
    result = []
    for valid in given.is_valid().to_pylist():
        chosen = [member for member in next(rows) if member is not None] if valid else []
        if len(chosen) > 1:
            raise _refused(path, Reason.SEVERAL_MEMBERS)
        if not chosen and plan.null < 0:
            raise _refused(path, Reason.IS_NULL)
        result.append(chosen[0] if chosen else (node[plan.null]["name"], {"f0": None}))
    return result


def _of_record(plan: WriteRecord, node: Any, given: pa.Array, path: str) -> list[Any]:
    columns = []
    for field, (index, step), entry in zip(plan.schema.fields, plan.steps, node["fields"], strict=True):
        if isinstance(step, bytes):
            default = fastavro.schemaless_reader(
                io.BytesIO(step), fastavro.parse_schema(entry["type"]), None, return_record_name=True
            )
            columns.append([default] * len(given))
        else:
            below = f"{path}.{field.name}" if path else field.name
            columns.append(_values(step, entry["type"], given.field(index), below))
    names = [entry["name"] for entry in node["fields"]]
    return [dict(zip(names, (column[row] for column in columns), strict=True)) for row in range(len(given))]


def _of_items(plan: WriteItems, node: Any, given: pa.Array, path: str) -> list[Any]:
    if not len(given):
        return []
    ends = given.offsets.to_pylist()
    is_map = plan.schema.kind == "map"
    inside = slice(ends[0], ends[-1])
    kind = node["items"]["fields"][1]["type"] if is_map else node["items"]
    items = (given.items if is_map else given.values)[inside]
    values = _values(plan.item, kind, items, path + ("{}" if is_map else "[]"))
    if is_map:
        keys = given.keys[inside].to_pylist()
        values = [{"f0": key.encode(), "f1": value} for key, value in zip(keys, values, strict=True)]
    return [values[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]


def _leaves(plan: WriteValue, given: pa.Array, path: str) -> list[Any]:
    schema, kind = plan.schema, plan.type
    if schema.kind in ("int", "long"):
        numbers = given.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
        return numbers if not plan.unit else [_scaled(plan, number, path) for number in numbers]
    values = given.to_pylist()
    if schema.kind == "boolean":
        return [bytes([value]) for value in values]
    if schema.kind == "enum":
        indexes = {symbol: index for index, symbol in enumerate(schema.symbols)}
        if any(value not in indexes for value in values):
            raise _refused(path, Reason.NOT_A_SYMBOL)
        return [indexes[value] for value in values]
    if schema.kind == "string":
        return [value.encode() for value in values]
    if schema.logical == "decimal":
        return [_decimal(schema, value, path) for value in values]
    if kind == pa.month_day_nano_interval():
        return [_duration(value, path) for value in values]
    if schema.kind == "fixed" and any(len(value) != schema.size for value in values):
        raise _refused(path, Reason.WRONG_SIZE)
    return values  # type: ignore[no-any-return]


def _scaled(plan: WriteValue, number: int, path: str) -> int:
    unit = UNITS[unit_of(plan.schema.logical or "")]
    number *= max(unit // plan.unit, 1)
    if not -_INT64 <= number < _INT64:
        raise _refused(path, Reason.TIME_TOO_LARGE)
    return number // max(plan.unit // unit, 1)


def _decimal(schema: AvroSchema, value: Decimal, path: str) -> bytes:
    sign, digits, _ = value.as_tuple()
    number = int("".join(map(str, digits))) * (-1 if sign else 1)
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    if schema.kind == "fixed":
        if size > schema.size:
            raise _refused(path, Reason.DECIMAL_TOO_LARGE)
        size = schema.size
    return number.to_bytes(size, "big", signed=True)


def _duration(value: Any, path: str) -> bytes:
    months, days, nanoseconds = value
    if min(value) < 0 or nanoseconds // 1_000_000 >= 1 << 32:
        raise _refused(path, Reason.TIME_TOO_LARGE)
    return _DURATION.pack(months, days, nanoseconds // 1_000_000)
