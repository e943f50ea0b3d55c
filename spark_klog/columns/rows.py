"""Check the rows that a producer takes from Arrow, and cast them to the types of `columns/schema.py`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from spark_klog.columns.schema import FULL, is_bytes, is_text
from spark_klog.errors import InvalidRecords, RecordTooLargeToSend
from spark_klog.records.partitioning import MOST_LENGTHS, OVERHEAD, VARINT_BOUNDS

_Sizes = np.ndarray[Any, np.dtype[np.int64]]
#: Rows are taken in slices of at most so many rows, and of about so many bytes.
_SLICE_ROWS, _SLICE_BYTES = 1 << 16, 32 << 20


class RecordRows:
    """Rows that can be records, in batches of the columns and types of records: iterate for (first row, batch).

    The columns are value (binary), and, if present, key, topic, partition, timestamp (int64, ms) and headers.
    """

    def __init__(
        self,
        rows: pa.Table | pa.RecordBatch,
        topic: str | None,
        size_limit: tuple[int, str],
        *,
        first: int = 0,
        is_any_time: bool = False,
    ) -> None:
        """`topic`, if given, replaces the column; `size_limit`: the most bytes of a record, and the setting's name.

        `InvalidRecords`, with the row's number counted from `first`, for a value that can't be cast, a topic that is
        null or not UTF-8, a header without key or, unless `is_any_time`, a negative timestamp (but -1: none).
        `RecordTooLargeToSend` for a row beyond the limit, `TypeError` if `rows` is not of Arrow.
        """
        if not isinstance(rows, pa.Table | pa.RecordBatch):
            raise TypeError(f"rows must be a pyarrow Table or RecordBatch, not {type(rows).__name__}")
        _check_columns(rows.schema, topic)
        self._rows, self._first = rows, first
        #: What replaces the column topic.
        self.topic = topic
        # a few rows are cast once; of many only a slice is in memory, so they are cast again
        self._few = list(self._batches()) if rows.num_rows <= _SLICE_ROWS else None
        names: dict[str, None] = {}
        for number, batch in self._few or self._batches():
            if topic is None:
                names |= dict.fromkeys(_topic_names(batch.column("topic"), number))
            _check_values(batch, number, is_any_time)
            _check_sizes(batch, number, topic, *size_limit)
        #: The names of the rows' topics.
        self.topics = list(names) if topic is None else [topic] if rows.num_rows else []

    def __iter__(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        return iter(self._batches() if self._few is None else self._few)

    def _batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        names = [name for name in self._rows.schema.names if name in _COLUMNS]
        rows, first = self._rows.select(names), self._first
        size = max(1, min(_SLICE_ROWS, _SLICE_BYTES * rows.num_rows // max(1, rows.nbytes)))
        for start in range(0, rows.num_rows, size):
            part = rows.slice(start, size)
            for batch in [part] if isinstance(part, pa.RecordBatch) else part.combine_chunks().to_batches():
                for place, name in enumerate(names):
                    if batch.column(place).type != _COLUMNS[name][2]:
                        array = _checked_cast(batch.column(place), name, first)
                        batch = batch.set_column(place, name, array)
                yield first, batch
                first += batch.num_rows

    def check_partitions(self, counts: Mapping[str, int]) -> None:
        """Raise `InvalidRecords` for a row whose topic does not have its partition; `counts` by topic."""
        if "partition" not in self._rows.schema.names:
            return
        for first, batch in self:
            numbers = batch.column("partition")
            for name in self.topics if numbers.null_count < batch.num_rows else ():
                wrong = pc.or_(pc.less(numbers, 0), pc.greater_equal(numbers, counts[name]))
                if self.topic is None:
                    wrong = pc.and_(wrong, pc.equal(batch.column("topic"), name))
                if pc.any(wrong).as_py():
                    row = _first(wrong)
                    there = f"it has partitions 0 to {counts[name] - 1}"
                    what = f"row {first + row}: partition {numbers[row].as_py()} of topic {name}: {there}"
                    raise InvalidRecords(what, "partition", first + row)


def _is_text(kind: pa.DataType) -> bool:
    if kinds.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    plain = kind.value_type if kinds.is_dictionary(kind) else kind
    return is_bytes(plain, or_fixed=True) or _is_text(kind)


def _is_headers(kind: pa.DataType) -> bool:
    if not (kinds.is_list(kind) or kinds.is_large_list(kind)) or not kinds.is_struct(kind.value_type):
        return False
    entry = kind.value_type
    names = [entry.field(number).name for number in range(entry.num_fields)]
    return names == ["key", "value"] and _is_text(entry.field(0).type) and _is_bytes(entry.field(1).type)


def _is_time(kind: pa.DataType) -> bool:
    return bool(kinds.is_timestamp(kind) or kinds.is_int64(kind))


#: For each column that a record is made of: whether its type is accepted, the accepted types in words, the type it is
#: cast to.
_COLUMNS: dict[str, tuple[Callable[[pa.DataType], bool], str, pa.DataType]] = {
    "key": (_is_bytes, "string or binary", FULL.field("key").type),
    "value": (_is_bytes, "string or binary", FULL.field("value").type),
    "topic": (_is_text, "string", FULL.field("topic").type),
    "partition": (kinds.is_integer, "an integer", FULL.field("partition").type),
    "timestamp": (_is_time, "a timestamp, or int64 in ms", pa.int64()),
    "headers": (_is_headers, "list<struct<key: string, value: binary>>", FULL.field("headers").type),
}
#: Columns of fetched rows that a producer ignores.
_IGNORED = frozenset(FULL.names) - _COLUMNS.keys()


def _check_columns(schema: pa.Schema, topic: str | None) -> None:
    """Raise `InvalidRecords` if no records can be made of these columns; `topic`, if given, replaces the column."""
    names = schema.names
    shown = ", ".join(names) or "none"
    for name in names:
        if names.count(name) > 1:
            raise InvalidRecords(f"there are two columns '{name}'", name)
        if name not in _COLUMNS and name not in _IGNORED:
            known = ", ".join(_COLUMNS)
            raise InvalidRecords(f"unknown column '{name}' of type {schema.field(name).type}: known are {known}", name)
    if "value" not in names:
        raise InvalidRecords(f"no column 'value': the columns are {shown}", "value")
    if topic is None and "topic" not in names:
        raise InvalidRecords(f"no topic: pass topic, or add a column 'topic'; the columns are {shown}", "topic")
    for name, (is_accepted, wanted, kind) in _COLUMNS.items():
        own = schema.field(name).type if name in names else kind
        if own != kind and not (is_accepted(own) or kinds.is_null(own)):
            raise InvalidRecords(f"column '{name}' must be {wanted}, not {own}: cast it", name)


def _checked_cast(array: Any, name: str, first: int) -> Any:
    kind = _COLUMNS[name][2]
    try:
        return _cast(array, kind)
    except pa.ArrowNotImplementedError as error:
        raise InvalidRecords(f"column '{name}' of type {array.type}: {error}", name) from None
    except pa.ArrowInvalid as error:
        row = first + bisect_left(range(len(array)), True, key=lambda row: not _can_cast(array.slice(0, row + 1), kind))
        raise InvalidRecords(f"row {row}: column '{name}' of type {array.type}: {error}", name, row) from None


def _can_cast(array: Any, kind: pa.DataType) -> bool:
    try:
        _cast(array, kind)
    except pa.ArrowInvalid:
        return False
    return True


def _cast(array: Any, kind: pa.DataType) -> Any:
    return _milliseconds(array) if kinds.is_timestamp(array.type) else array.cast(kind)


def _milliseconds(times: Any) -> Any:
    """The milliseconds since 1970 in which the times lie, rounded down as Spark rounds: -1 ms and a half is -2 ms."""
    kind = pa.timestamp("ms", times.type.tz)
    # safe for whole seconds: they may overflow; finer units lose digits
    rounded = times.cast(kind, safe=times.type.unit == "s")
    result = rounded.cast(pa.int64())
    if times.type.unit in ("us", "ns"):  # Arrow rounds towards 0
        result = pc.subtract(result, pc.less(times, rounded.cast(times.type)).cast(pa.int64()))
    return result


def _topic_names(topics: Any, first: int) -> list[str]:
    """The distinct names in column 'topic'; `InvalidRecords`, its row counted from `first`, for a null or bad UTF-8."""
    if topics.null_count:
        row = first + _first(topics.is_null())
        raise InvalidRecords(f"row {row} has a null topic: give every row a topic, or all rows one", "topic", row)
    try:
        names: list[str] = pc.unique(topics).to_pylist()
    except UnicodeDecodeError as error:
        row = first + pc.index(topics.cast(pa.binary()), error.object).as_py()
        text = f"row {row}: column 'topic' is {error.object!r}, which is not UTF-8"
        raise InvalidRecords(text, "topic", row) from None
    return names


def _check_values(rows: pa.RecordBatch, first: int, is_any_time: bool) -> None:
    names = rows.schema.names
    if "timestamp" in names and not is_any_time:
        wrong = pc.less(rows.column("timestamp"), -1)
        if pc.any(wrong).as_py():
            row = _first(wrong)
            time = rows.column("timestamp")[row].as_py()
            text = (
                f"row {first + row}: timestamp {time} ms is negative: no record is older than 1970; null is the present"
            )
            raise InvalidRecords(text, "timestamp", first + row)
    if "headers" in names:
        _check_headers(rows.column("headers"), first)


def _check_headers(headers: Any, first: int) -> None:
    keys = pc.struct_field(pc.list_flatten(headers), "key")  # of a null entry, too
    if keys.null_count:
        # not list_parent_indices: it counts the entries behind a null list, which list_flatten leaves out
        ends = np.cumsum(pc.list_value_length(headers).fill_null(0).to_numpy(zero_copy_only=False))
        row = first + int(np.searchsorted(ends, _first(keys.is_null()), side="right"))
        raise InvalidRecords(f"row {row} has a header without key", "headers", row)


def _first(mask: Any) -> int:
    """The position of the first true."""
    return int(np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))[0])


def _check_sizes(rows: pa.RecordBatch, first: int, topic: str | None, limit: int, setting: str) -> None:
    names = rows.schema.names
    has_headers = "headers" in names and rows.column("headers").null_count < rows.num_rows
    room = limit - OVERHEAD - MOST_LENGTHS
    if not has_headers and (rows.nbytes <= room or sum(_longest(rows, name) for name in ("key", "value")) <= room):
        return  # nearly always: the exact sizes take longer
    sizes = _sizes(rows, has_headers)
    too_large = np.flatnonzero(sizes > limit)
    if len(too_large):
        row = int(too_large[0])
        name = rows.column("topic")[row].as_py() if topic is None else topic
        raise RecordTooLargeToSend(name, int(sizes[row]), limit, setting, first + row)


def _longest(rows: pa.RecordBatch, name: str) -> int:
    return pc.max(pc.binary_length(rows.column(name))).as_py() or 0 if name in rows.schema.names else 0


def _sizes(rows: pa.RecordBatch, has_headers: bool) -> _Sizes:
    """The size of each row's record, see `largest_size`."""
    sizes = np.full(rows.num_rows, OVERHEAD, np.int64)
    for name in ("key", "value"):
        sizes += _field_sizes(rows.column(name)) if name in rows.schema.names else 1
    if not has_headers:
        return sizes + 1
    headers = rows.column("headers")
    counts = _numbers(pc.list_value_length(headers))
    entries = pc.list_flatten(headers)
    of_entries = _field_sizes(pc.struct_field(entries, "key")) + _field_sizes(pc.struct_field(entries, "value"))
    ends = np.concatenate(([0], np.cumsum(of_entries)))[np.cumsum(counts)]
    return sizes + _varint_sizes(counts) + np.diff(ends, prepend=0)


def _field_sizes(column: pa.Array) -> _Sizes:
    lengths = _numbers(pc.binary_length(column))
    sizes: _Sizes = lengths + _varint_sizes(lengths)  # of a null: the one byte of -1
    return sizes


def _numbers(column: pa.Array) -> _Sizes:
    """The numbers, 0 for nulls."""
    numbers: _Sizes = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _varint_sizes(lengths: _Sizes) -> _Sizes:
    return 1 + np.searchsorted(VARINT_BOUNDS, lengths, side="right")
