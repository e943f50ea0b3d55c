"""What JSON values are, by a look at some of them: the driver's, before a query or a load has a schema."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal
from uuid import UUID

import pyarrow as pa

from spark_klog.columns.schema import FULL, in_milliseconds
from spark_klog.errors import KlogError, SchemaError
from spark_klog.schemas.column_format import ColumnFormat
from spark_klog.schemas.json_schema.ddl import INFER, schema_text
from spark_klog.schemas.json_schema.inference import Seen, grown_schema
from spark_klog.spark.options import PREFIX, SUBSCRIPTIONS, SourceOptions, source_options
from spark_klog.spark.read.broker_source import open_source
from spark_klog.spark.read.ranges import OffsetRange, nonempty_ranges
from spark_klog.spark.read.tasks import read_ranges

_log = logging.getLogger(__name__)
#: Records to look at, of all ranges together and of one; and bytes of values.
_RECORDS, _LEAST, _BYTES = 10_000, 20, 32 * 1024 * 1024


#: Options that say what there is to read, beside Kafka's settings.
_OF_SOURCE = frozenset(name.lower() for name in ("cluster", "path", *SUBSCRIPTIONS))


def inferred_formats(options: Mapping[str, str], formats: Sequence[ColumnFormat]) -> tuple[ColumnFormat, ...]:
    """The formats of a read, by its options, with the schemas of those that are to be inferred: of a sample of all
    records that there are.

    `SchemaError` if they do not tell; other errors as of a batch query's.
    """
    if not any(form.text == INFER for form in formats):
        return tuple(formats)
    named = {name: value for name, value in options.items() if name.lower().startswith(PREFIX)}
    named |= {name: value for name, value in options.items() if name.lower() in _OF_SOURCE}
    asked = source_options({**named, "failOnDataLoss": "false", "badRecords": "skip"}, streaming=False)
    with closing(open_source(asked)) as source:
        partitions = source.partitions()
        ranges = nonempty_ranges(source.earliest(partitions), source.latest(partitions))
        return tuple(_inferred(form, asked, ranges, source.topic_ids) for form in formats)


def _inferred(
    form: ColumnFormat, options: SourceOptions, ranges: Sequence[OffsetRange], topic_ids: Mapping[str, UUID]
) -> ColumnFormat:
    if form.format != "json" or form.text != INFER:
        return form
    try:
        kind = grown_schema(None, sample_json(options, ranges, topic_ids, form.column))
        if not kind.num_fields:
            raise SchemaError("no record is a JSON object with a field that is not null or empty")
    except SchemaError as error:
        raise SchemaError(
            f"option {form.column}Schema=infer: {error}; give the schema as DDL, 'id bigint, at timestamp'"
        ) from None
    return replace(form, text=schema_text(kind))


def sample_json(
    options: SourceOptions,
    ranges: Sequence[OffsetRange],
    topic_ids: Mapping[str, UUID],
    column: Literal["key", "value"] = "value",
    plain: Callable[[pa.Array], pa.Array] | None = None,
) -> Seen:
    """What the first and last records of the ranges are, by what `plain` makes of them, and if they do not tell of any
    field, those between.

    A range that can't be read is left out; the error is logged. `SchemaError` as of `grown_schema`.
    """
    seen = Seen()
    schema = pa.schema([in_milliseconds(FULL).field(column)])
    each = max(_RECORDS // max(len(ranges), 1), _LEAST)
    left = _BYTES
    for part in _ends(ranges, each):
        for values in _columns(options, part, topic_ids, schema):
            left -= _add(seen, values if plain is None else plain(values))
            if left < 0:
                break
    for span in ranges:
        if not grown_schema(None, seen).num_fields:
            for values in _columns(options, span, topic_ids, schema):
                _add(seen, values if plain is None else plain(values))
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
