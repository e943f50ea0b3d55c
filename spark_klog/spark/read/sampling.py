"""What JSON values are, by a look at some of them: the driver's, before a query or a load has a schema."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal
from uuid import UUID

import pyarrow as pa

from spark_klog.columns.schema import FULL, in_milliseconds
from spark_klog.errors import KlogError
from spark_klog.schemas.json_schema.inference import Seen, grown_schema
from spark_klog.spark.options import SourceOptions
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import read_ranges

_log = logging.getLogger(__name__)
#: Records to look at, of all ranges together and of one; and bytes of values.
_RECORDS, _LEAST, _BYTES = 10_000, 20, 32 * 1024 * 1024


def sample_json(
    options: SourceOptions,
    ranges: Sequence[OffsetRange],
    topic_ids: Mapping[str, UUID],
    column: Literal["key", "value"] = "value",
) -> Seen:
    """What the first and last records of the ranges are, and if they do not tell of any field, those between.

    A range that can't be read is left out; the error is logged. `SchemaError` as of `grown_schema`.
    """
    seen = Seen()
    schema = pa.schema([in_milliseconds(FULL).field(column)])
    each = max(_RECORDS // max(len(ranges), 1), _LEAST)
    left = _BYTES
    for part in _ends(ranges, each):
        for values in _columns(options, part, topic_ids, schema):
            left -= _add(seen, values)
            if left < 0:
                break
    for span in ranges:
        if not grown_schema(None, seen).num_fields:
            for values in _columns(options, span, topic_ids, schema):
                _add(seen, values)
                if grown_schema(None, seen).num_fields:
                    break
    return seen


def _ends(ranges: Iterable[OffsetRange], records: int) -> Iterator[OffsetRange]:
    """The first and last offsets of each range."""
    half = records // 2
    for span in ranges:
        middle = min(span.end, span.start + half)
        yield span._replace(end=middle)
        if middle < span.end:
            yield span._replace(start=max(middle, span.end - half))


def _columns(
    options: SourceOptions, span: OffsetRange, topic_ids: Mapping[str, UUID], schema: pa.Schema
) -> Iterator[pa.Array]:
    try:
        for batch in read_ranges(options, [span], schema, topic_ids):
            yield batch.column(0)
    except KlogError as error:  # whoever reads the range says so
        _log.warning("%s-%d is left out of the sample for the schema: %s", span.topic, span.partition, error)


def _add(seen: Seen, values: pa.Array) -> int:
    """Add rows; returns their bytes."""
    for row in values.to_pylist():
        if row is not None:
            seen.add_row(row)
    seen.bound()
    return int(values.nbytes)
