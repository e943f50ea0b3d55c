"""Values of records in JSON: their schema, and the time that picks a file's folder.

A schema is DDL (`schemas/json_schema/ddl.py`). It is given again with each call: a load takes one that has more fields,
or room for more.
"""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.errors import ConfigError
from spark_klog.schemas.json_schema.ddl import parse_schema, schema_text, type_text
from spark_klog.tables.changes import debezium_type, envelope_order
from spark_klog.tables.columns import holds
from spark_klog.tables.table import aliases_of

UTC = "UTC"
#: Years 1 to 9999, as Python has them.
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_DAY_US = 86_400_000_000


def check_zone(name: str) -> None:
    """`ConfigError` if there is no such time zone."""
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ConfigError(
            f"time zone {name!r} does not exist: name one of the tz database, as Europe/Berlin or UTC"
        ) from None


def check_field(kind: pa.DataType, path: str) -> None:
    """`ConfigError` unless a schema has the field, and it is a timestamp, a date or a bigint."""
    found = kind
    for name in path.split("."):
        index = found.get_field_index(name) if pa.types.is_struct(found) else -1
        if index < 0:
            raise ConfigError(
                f"event time {path!r}: the schema has no field {name!r}: name one that it has. If the load's files or "
                "rows go by it, register a version of the schema that has it, too, or load into another table"
            )
        found = found.field(index).type
    if not (pa.types.is_timestamp(found) or pa.types.is_date(found) or pa.types.is_int64(found)):
        raise ConfigError(f"event time {path!r} must be a timestamp, a date, or ms since the epoch as a bigint")


def name_now(kind: pa.DataType, path: str) -> str:
    """The path of the field that is called so in a schema, or was before, by `aliases_of`; `path` if there is none."""
    names: list[str] = []
    for name in path.split("."):
        fields = list(kind) if pa.types.is_struct(kind) else []
        named = [one for one in fields if one.name == name] or [one for one in fields if name in aliases_of(one)]
        if not named:
            return path
        names.append(named[0].name)
        kind = named[0].type
    return ".".join(names)


def field_times(values: pa.Array, path: str, otherwise: NDArray[np.int64], zone: str) -> NDArray[np.int64]:
    """The times of a field in microseconds, as of `local_times`; of records that have none `otherwise`, which are UTC.

    A date, and a timestamp without a time zone, are local times of any zone already.
    """
    column = pc.struct_field(values, path.split("."))
    is_local = pa.types.is_date(column.type) or (pa.types.is_timestamp(column.type) and column.type.tz is None)
    column = _clipped(column, 1000) if pa.types.is_int64(column.type) else microseconds(column)
    found = pc.coalesce(column, pa.array(local_times(otherwise, zone) if is_local else otherwise))
    times = np.asarray(found.to_numpy(zero_copy_only=False), np.int64)
    return dated(times) if is_local else local_times(times, zone)


def microseconds(column: pa.Array) -> pa.Array:
    """Timestamps or dates as microseconds. A date that has none is another one before the year 1 or after 9999."""
    if pa.types.is_date32(column.type):
        return _clipped(column.cast(pa.int32()), _DAY_US)
    return column.cast(pa.timestamp("us")).cast(pa.int64())


def _clipped(numbers: pa.Array, unit: int) -> pa.Array:
    """Numbers of a unit (microseconds) as microseconds; those after the year 9999, and as far before 1970, are one."""
    most = LAST_US // unit + 1
    within = pc.max_element_wise(pc.min_element_wise(numbers, most, skip_nulls=False), -most, skip_nulls=False)
    return pc.multiply(within, unit)


def dated(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """The times (microseconds); those that have no date are the first or last one that has."""
    return np.clip(times, FIRST_US, LAST_US)


def local_times(times: NDArray[np.int64], zone: str) -> NDArray[np.int64]:
    """Convert times (microseconds) to the local times of a zone, as if those were UTC. All of them have a date."""
    if zone == UTC:
        return dated(times)
    clipped = np.clip(times, FIRST_US + _DAY_US, LAST_US - _DAY_US)
    local = pc.local_timestamp(pa.array(clipped).cast(pa.timestamp("us", tz=zone)))
    return np.asarray(local.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)


def read_schema(text: str) -> pa.DataType:
    """Parse a schema, or the file that has it, to a struct type; `ConfigError` for one that can't be parsed."""
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a schema may be longer than a file's name
        is_file = False
    try:
        return parse_schema(path.read_text("utf-8") if is_file else text)
    except ConfigError as error:
        raise ConfigError(f"--schema {f'file {text}' if is_file else 'is neither a file nor DDL'}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--schema {text} can't be read: {error}") from None


def evolved_schema(before: str, asked: str, *, widens: bool) -> tuple[str, list[str]]:
    """The schema of a load that had `before` and is to have `asked`, both as `schema_text` has them, and in words what
    hinders that: fields that went, and other types.

    The fields of `before` come first, in their order. With `widens` a type may become one that holds all its values.
    """
    old, new = parse_schema(before), parse_schema(asked)
    if is_enveloped := all(_is_envelope(kind) for kind in (old, new)):
        order = envelope_order(new)
        old, new = (kind.field("after").type for kind in (old, new))
    hindrances: list[str] = []
    kind = _grown(old, new, "", widens, hindrances)
    return schema_text(debezium_type(kind, order) if is_enveloped else kind), hindrances


def _is_envelope(kind: pa.DataType) -> bool:
    """Whether the job has made the schema of a row's."""
    if not pa.types.is_struct(kind):
        return False
    order = envelope_order(kind)
    return kind.get_field_index("after") >= 0 and bool(kind == debezium_type(kind.field("after").type, order))


def _grown(old: pa.DataType, new: pa.DataType, path: str, widens: bool, hindrances: list[str]) -> pa.DataType:
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        asked = {field.name: field.type for field in new}
        fields = []
        for field in old:
            where = f"{path}.{field.name}" if path else field.name
            kind = asked.pop(field.name, None)
            if kind is None:
                hindrances.append(f"{where} is missing")
            else:
                fields.append(pa.field(field.name, _grown(field.type, kind, where, widens, hindrances)))
        return pa.struct([*fields, *(pa.field(name, kind) for name, kind in asked.items())])
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_grown(old.value_type, new.value_type, f"{path}[]", widens, hindrances))
    if old != new and not (widens and holds(new, old)):
        hindrances.append(f"{path or 'the value'} is {type_text(new)}, and was {type_text(old)}")
    return new


def is_dated(column: pa.Array) -> bool:
    """Whether Python, and so a reader of the files, has all times of a column."""
    kind = column.type
    if pa.types.is_struct(kind):
        return all(is_dated(field) for field in column.flatten())
    if pa.types.is_map(kind):
        exact = pa.concat_arrays([column])  # the items of a slice are those of the whole
        return is_dated(exact.keys) and is_dated(exact.items)
    if pa.types.is_list(kind):
        return is_dated(column.flatten())
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return True
    times = pc.min_max(microseconds(column)).as_py()
    return times["min"] is None or FIRST_US <= times["min"] <= times["max"] <= LAST_US
