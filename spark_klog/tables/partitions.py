"""By which columns a table is partitioned, as `day(ts), bucket(16, id), city`, and the rows of each partition.

A file of a load that is partitioned so has a row of its partition in its metadata, from which the commit has the
partition's values: statistics lack those of long texts, and do not tell a bucket.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

#: Layouts that are no columns: by the time of the records.
BY_TIME = ("none", "day", "hour")
_OF_TIMES = ("year", "month", "day", "hour")
_WITH_WIDTH = ("bucket", "truncate")
_IDENTITY = "identity"
_NAME = r"`[^`]+`|[^\s(),`]+"
_TERM = re.compile(rf"\s*(?:(\w+)\s*\(\s*(?:(\d+)\s*,)?\s*({_NAME})\s*\)|({_NAME}))\s*(,|$)")
_PLAIN = re.compile(r"[^\s(),`]+")
#: In a file's metadata: a row of its partition, as Arrow's IPC format in base64, with the columns of the terms.
_ROW = "klog.partition"
#: The value of a folder's name that is null, as Hive has it.
_NULL = "__HIVE_DEFAULT_PARTITION__"
#: Bytes that a name of a folder may have, and characters of a longer value that are in it.
MOST_NAME, _START = 255, 12


@dataclass(frozen=True)
class Term:
    """A field of a table's partitions: a transform of the column at a path. `width` is that of a truncation, or the
    number of buckets."""

    column: str
    transform: str = _IDENTITY
    width: int = 0

    def __str__(self) -> str:
        name = self.column if _PLAIN.fullmatch(self.column) else f"`{self.column}`"
        if self.transform == _IDENTITY:
            return f"identity({name})" if self.column in BY_TIME else name
        return f"{self.transform}({self.width}, {name})" if self.width else f"{self.transform}({name})"

    @property
    def is_of_time(self) -> bool:
        return self.transform in _OF_TIMES


def parse_terms(text: str) -> tuple[Term, ...]:
    """The terms of a layout; `ConfigError` says what is wrong with it."""
    terms: list[Term] = []
    at, comma = 0, ","
    while comma:
        match = _TERM.match(text, at)
        if match is None:
            raise ConfigError(
                f"partition-by {text!r} must be none, day, hour, or names of columns and transforms of them, such as "
                "'day(ts), bucket(16, id), city'"
            )
        function, width, inner, name, comma = match.groups()
        transform = (function or _IDENTITY).lower()
        transform = transform[:-1] if transform[:-1] in _OF_TIMES else transform  # Spark has days, Iceberg day
        if transform not in (_IDENTITY, *_OF_TIMES, *_WITH_WIDTH):
            known = ", ".join((_IDENTITY, *_OF_TIMES, *_WITH_WIDTH))
            raise ConfigError(f"partition-by {text!r}: there is no transform {function}, but {known}")
        if (0 < int(width or 0) < 1 << 31) != (transform in _WITH_WIDTH):
            form = f"{transform}(16, {inner})" if transform in _WITH_WIDTH else f"{transform}({inner})"
            if str(inner).isdecimal():  # the column is missing, not the width
                form = f"{transform}({inner}, COLUMN)" if transform in _WITH_WIDTH else f"{transform}(COLUMN)"
            raise ConfigError(f"partition-by {text!r}: write {form}")
        terms.append(Term((inner or name).strip("`"), transform, int(width or 0)))
        at = match.end()
    if len(set(terms)) < len(terms):
        raise ConfigError(f"partition-by {text!r} names a partition twice")
    return tuple(terms)


def terms_of(layout: str, time_column: str) -> tuple[Term, ...]:
    """The terms of any layout of a table that computes its partitions; `time_column` is that of `BY_TIME`."""
    if layout in BY_TIME:
        return () if layout == "none" else (Term(time_column, layout),)
    return parse_terms(layout)


def no_column(name: str, names: Collection[str]) -> str:
    """What a table with columns of these names, which lacks one to be partitioned by, says of that."""
    advice = ": fields of the values are columns with --table-columns values" if "value" in names else ""
    return f"has no column {name} to be partitioned by{advice}"


def layout_text(terms: Sequence[Term]) -> str:
    """The layout that these are the terms of."""
    return ", ".join(map(str, terms))


def column_at(rows: pa.RecordBatch | pa.Table, path: str) -> pa.Array:
    """The column at a path, which may be that of a field in a struct, or the name of a column."""
    first, *inner = [path] if path in rows.schema.names else path.split(".")
    column = rows[first]
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pc.struct_field(column, inner) if inner else column


def as_numbers(column: pa.Array) -> pa.Array:
    """Dates and times as the numbers that they are; other columns as they are."""
    if pa.types.is_date(column.type):
        return column.cast(pa.int32())
    return column.cast(pa.int64()) if pa.types.is_temporal(column.type) else column


def grouped(
    parts: Sequence[tuple[Sequence[Any], NDArray[np.int64]]], length: int
) -> Iterator[tuple[tuple[Any, ...], NDArray[np.int64]]]:
    """The values of each partition, and the numbers of its rows. `parts` has the values of each term, and of each of
    so many rows the place of its own in them."""
    codes = np.zeros(length, np.int64)
    for values, places in parts:
        codes = np.unique(codes * len(values) + places, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(codes, kind="stable")
    starts: Any = np.flatnonzero(np.append(True, np.diff(codes[order]) != 0)) if length else []
    for start, end in zip(starts, [*starts[1:], length], strict=False):
        yield tuple(values[places[order[start]]] for values, places in parts), order[start:end]


def distinct(column: pa.Array) -> tuple[list[Any], NDArray[np.int64]]:
    """The distinct values of a column, times as numbers, and the place of each row's in them."""
    codes = as_numbers(column).dictionary_encode("encode")
    return codes.dictionary.to_pylist() or [None], codes.indices.to_numpy().astype(np.int64)


def row_text(row: pa.RecordBatch) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return b64encode(sink.getvalue()).decode()


def file_metadata(row: str) -> dict[str, str]:
    """What a file has in its metadata, of a row as `Splitter.parts` has it."""
    return {_ROW: row}


def partition_row(footer: FileMetaData) -> pa.Table | None:
    """A row of the file's partition, with the columns of the terms; None of a file that is not split by terms."""
    text = (footer.metadata or {}).get(_ROW.encode())
    return None if text is None else pa.ipc.open_stream(b64decode(text)).read_all()


def partition_text(value: Any, kind: pa.DataType) -> str | None:
    """A partition's value as Delta's log has it (PROTOCOL.md, Partition Value Serialization), of a number as of
    `as_numbers`; an empty text is null there."""
    if value is None or value in ("", b""):
        return None
    if pa.types.is_boolean(kind):
        return "true" if value else "false"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _time_text(value, kind)
    return format(value, "f") if pa.types.is_decimal(kind) else str(value)


def hive_folder(name: str, text: str | None) -> str:
    """The folder of a partition with the text of a value, as Hive names it, and deltalake."""
    return f"{quote(name, safe='')}={_NULL if text is None else quote(text, safe='')}"


def delta_folder(name: str, value: Any, kind: pa.DataType) -> str:
    """The folder of a partition of a Delta table, `value` as of `partition_text`.

    Readers have values from the log; but Polars has them from folders. Of a text that is too long for a name it gets
    the start and a digest.
    """
    text = partition_text(value, kind)
    if text is not None and pa.types.is_timestamp(kind):  # of UTC, without a zone
        text = text.removesuffix("Z").replace("T", " ")
    folder = hive_folder(name, text)
    if text is None or (len(folder) <= MOST_NAME and text != _NULL):
        return folder
    return f"{hive_folder(name, text[:_START])}+{sha256(text.encode()).hexdigest()[:16]}"  # no other text has a "+"


def _time_text(value: int, kind: pa.DataType) -> str:
    text = str(np.datetime64(value, "D" if pa.types.is_date(kind) else "us"))
    return f"{text}Z" if pa.types.is_timestamp(kind) and kind.tz else text.replace("T", " ")
