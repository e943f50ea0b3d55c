"""The time of a record by which files are laid out: its timestamp, or a field of its value; in a time zone."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.errors import ConfigError

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
            raise ConfigError(f"event time {path!r}: the schema has no field {name!r}")
        found = found.field(index).type
    if not (pa.types.is_timestamp(found) or pa.types.is_date(found) or pa.types.is_int64(found)):
        raise ConfigError(f"event time {path!r} must be a timestamp, a date, or ms since the epoch as a bigint")


def field_times(values: pa.Array, path: str, otherwise: NDArray[np.int64]) -> NDArray[np.int64]:
    """The times of a field in microseconds; those of records that have none are `otherwise`."""
    column = pc.struct_field(values, path.split("."))
    if pa.types.is_int64(column.type):
        most = LAST_US // 1000
        column = pc.multiply(
            pc.max_element_wise(pc.min_element_wise(column, most, skip_nulls=False), -most, skip_nulls=False), 1000
        )
    else:
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    found = pc.coalesce(column, pa.array(otherwise))
    return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)


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
