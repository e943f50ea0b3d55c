"""The columns of a table: those of the records of all topics, or a column for each field of their values.

records   key, value, topic, partition, offset, timestamp, timestampType, headers
values    the fields of the value, then _klog_key, _klog_topic, _klog_partition, _klog_offset, _klog_timestamp
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import pyarrow as pa

from spark_klog.errors import LoadError
from spark_klog.load.rows import fitted, merged
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.values import name_now
from spark_klog.schemas.json_schema.columns import VARIANT
from spark_klog.tables.change_order import OWN, TIMESTAMP
from spark_klog.tables.changes import ChangeFormat
from spark_klog.tables.partitions import BY_TIME, layout_text, parse_terms, terms_of
from spark_klog.tables.table import aliases_of, with_aliases

#: Columns of records beside the fields of values, in which their names begin with `OWN`.
BESIDE_VALUES = ("key", "topic", "partition", "offset", "timestamp")


def table_columns(settings: WriteSettings, topics: Sequence[str]) -> pa.Schema:
    """The columns of all topics' records.

    `LoadError` if two topics have a field of two types or a union of other branches, or if values have no fields.
    """
    made: dict[str, pa.Field] = {}
    for topic in topics:
        columns = settings.columns(topic)
        for field in _of_values(columns, topic) if settings.table_columns == VALUES else columns:
            kind = merged(made.get(field.name, field).type, field.type, field.name, moves=False)
            made[field.name] = field.with_type(kind)
    if settings.is_variant:
        made["value"] = made["value"].with_type(VARIANT)
    if settings.table_columns == VALUES:  # fields that a later topic has stand before these
        made |= {name: made.pop(name) for name in [f"{OWN}{name}" for name in BESIDE_VALUES]}
    return pa.schema(made.values())


def run_columns(settings: WriteSettings, topics: Sequence[str]) -> pa.Schema:
    """The columns of a table that a run of these topics needs; errors as of `table_columns`.

    Its fields do not have those aliases by which a topic of the load that the run does not have, has a field now.
    """
    others = sorted({row.topic for row in settings.rows}.difference(topics))
    columns = _columns(settings, topics)
    return pa.schema(_without_names(columns, [field for topic in others for field in _columns(settings, [topic])]))


def _columns(settings: WriteSettings, topics: Sequence[str]) -> pa.Schema:
    changes = settings.change_format(topics[0])
    return table_columns(settings, topics) if changes is None else row_columns(changes)


def _without_names(fields: Iterable[pa.Field], others: Iterable[pa.Field]) -> list[pa.Field]:
    """The fields without the aliases that are names of `others`; so are those in them."""
    known: dict[str, list[pa.DataType]] = {}
    for other in others:
        known.setdefault(other.name, []).append(other.type)
    return [
        with_aliases(
            field.with_type(_type_without(field.type, known.get(field.name, []))).remove_metadata(),
            [name for name in aliases_of(field) if name not in known],
        )
        for field in fields
    ]


def _type_without(kind: pa.DataType, others: Sequence[pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct(_without_names(kind, chain.from_iterable(each for each in others if pa.types.is_struct(each))))
    if pa.types.is_list(kind):
        items = [other.value_type for other in others if pa.types.is_list(other)]
        return pa.list_(kind.value_field.with_type(_type_without(kind.value_type, items)))
    if pa.types.is_map(kind):
        items = [other.item_type for other in others if pa.types.is_map(other)]
        return pa.map_(kind.key_field, kind.item_field.with_type(_type_without(kind.item_type, items)))
    return kind


def row_columns(changes: ChangeFormat) -> pa.Schema:
    """The columns of rows that records change, with the aliases that the fields of keys and values have."""
    value = changes.value_type
    row = value.field("after").type if changes.envelope == "debezium" else value
    aliases = {
        field.name: field.metadata for kind in (changes.key_type, row) if pa.types.is_struct(kind) for field in kind
    }
    return pa.schema([field.with_metadata(aliases.get(field.name)) for field in changes.row])


def _of_values(columns: pa.Schema, topic: str) -> list[pa.Field]:
    kind = columns.field("value").type
    if not pa.types.is_struct(kind):
        raise LoadError(f"the values of topic {topic} are {kind}, without fields: --table-columns records has them")
    beside = [pa.field(f"{OWN}{name}", columns.field(name).type) for name in BESIDE_VALUES]
    names = {field.name.lower() for field in beside}
    for field in kind:
        if field.name.lower() in names:
            raise LoadError(
                f"the values of topic {topic} have the field {field.name}, as the column of their records is named: "
                "--table-columns records has both"
            )
    return [*kind, *beside]


def time_column(settings: WriteSettings) -> str:
    """The path of the column that decides on the partitions."""
    if settings.table_columns == VALUES:
        return settings.event_time or TIMESTAMP
    return f"value.{settings.event_time}" if settings.event_time else "timestamp"


def dated_columns(settings: WriteSettings, *, has_ids: bool) -> set[str]:
    """The paths of the columns whose times, if they are some, need a date: a table whose columns have ids computes its
    partitions of them, and in others texts of dates are the partitions."""
    if not has_ids and settings.layout in BY_TIME:
        return set()
    terms = terms_of(settings.layout, time_column(settings))
    return {term.column for term in terms if term.is_of_time or not has_ids}


def layout_now(settings: WriteSettings, columns: pa.Schema) -> str:
    """The layout, by the names that its columns have now, if they are some of these: they may have got others."""
    if settings.layout in BY_TIME:
        return settings.layout
    kind = pa.struct(list(columns))
    return layout_text([replace(term, column=name_now(kind, term.column)) for term in parse_terms(settings.layout)])


def as_columns(batch: pa.RecordBatch, columns: pa.Schema, is_of_values: bool) -> pa.RecordBatch:
    """A batch with the columns of a table: those that it has not are null, narrow numbers become wide.

    Of a null value all fields are null.
    """
    if is_of_values:
        values = batch["value"]
        arrays = dict(zip([field.name for field in values.type], values.flatten(), strict=True))
        arrays |= {f"{OWN}{name}": batch[name] for name in BESIDE_VALUES}
    else:
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    made = [
        fitted(arrays[field.name], field.type) if field.name in arrays else pa.nulls(len(batch), field.type)
        for field in columns
    ]
    return pa.RecordBatch.from_arrays(made, schema=columns)
