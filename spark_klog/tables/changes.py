"""Changes of a table's rows: what records of a topic say about them. `change_order` says which one is the last.

A change is a row, or the deletion of one, with its key and its place in the log:

    the row's columns            of a deletion only those of the key count; of a truncation they are null
    _klog_incarnation,
    _klog_partition              the log: a topic that is created again begins incarnation 1 of its partitions
    _klog_offset,
    _klog_timestamp              the record in it
    _klog_order                  the text of the fields by which changes are ordered, if there are some
    _klog_deleted                whether the row is gone; the table itself does not have this column
    _klog_lacking                the columns whose values the source does not have, if rows keep theirs; nor this one
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.columns.schema import is_bytes, is_text
from spark_klog.errors import ConfigError, LoadError
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.tables.change_order import (
    DELETED,
    LACKING,
    LACKING_TYPE,
    ORDER,
    PLACE,
    TIMESTAMP,
    lacking_column,
    mask,
    order_texts,
    without_sign,
)
from spark_klog.tables.mongodb import ID, UPDATE, Part, json_text, plain_keys

#: What the value of a record is: the row itself (null: it is deleted), or Debezium's envelope of it.
Envelope = Literal["none", "debezium"]
ENVELOPES: tuple[Envelope, ...] = ("none", "debezium")
#: The name by which `--upsert-key` means the record's key; a field of that name is `value.key`.
RECORD_KEY = "key"
_READ, _DELETE, _TRUNCATE = "r", "d", "t"
_WRITES = "c", "u", _READ
#: Logical messages of PostgreSQL, which are about no row.
_MESSAGE = "m"
#: What Debezium writes in place of a large column that an update has not changed.
UNAVAILABLE = "__debezium_unavailable_value"
#: The same as bytes in JSON, as an hstore in JSON, and in a list of UUIDs.
_UNAVAILABLE_TEXTS = (
    UNAVAILABLE,
    b64encode(UNAVAILABLE.encode()).decode(),
    f'{{"{UNAVAILABLE}":"{UNAVAILABLE}"}}',
    "b68a35a7-17ad-35b3-af2a-ae46edb4545a",
)
_JSON_WRAPPER = "payload"
_UPDATE = pa.field(UPDATE, pa.string())
#: Fields of the envelope that tell an order; others are the row's, also as `after.NAME`.
_OF_ENVELOPE = ("source", "transaction", "ts_ms", "ts_us", "ts_ns")
#: What becomes of a value that the source does not have: the row keeps its own, or the record is bad.
Unavailable = Literal["keep", "dead-letter"]
UNAVAILABLES: tuple[Unavailable, ...] = ("keep", "dead-letter")


def debezium_type(row: pa.DataType, order: Mapping[str, pa.DataType] = MappingProxyType({})) -> pa.DataType:
    """The type of a value in Debezium's JSON, with or without the wrapper of Kafka Connect's schemas, by the row's.

    `order` has the fields, by their paths, that changes are ordered by. Fields that are not in the type (`schema`) are
    left out by the parser.
    """
    fields = [pa.field("before", row), pa.field("after", row), pa.field("op", pa.string()), _UPDATE]
    fields += _nested({path: kind for path, kind in order.items() if _path(path)[0] in _OF_ENVELOPE})
    return pa.struct([*fields, pa.field(_JSON_WRAPPER, pa.struct(fields))])


def envelope_order(kind: pa.DataType) -> dict[str, pa.DataType]:
    """The `order` by which `debezium_type` has made a type."""

    def leaves(field: pa.Field, path: str) -> Iterator[tuple[str, pa.DataType]]:
        if not pa.types.is_struct(field.type):
            yield path, field.type
        for child in field.type if pa.types.is_struct(field.type) else ():
            yield from leaves(child, f"{path}.{child.name}")

    fields = [field for field in kind if field.name in _OF_ENVELOPE]
    return {path: leaf for field in fields for path, leaf in leaves(field, field.name)}


def _nested(fields: Mapping[str, pa.DataType]) -> list[pa.Field]:
    """Fields by their paths, as fields of records."""
    names = dict.fromkeys(path.partition(".")[0] for path in fields)
    made = []
    for name in names:
        inner = {path.partition(".")[2]: kind for path, kind in fields.items() if path.partition(".")[0] == name}
        made.append(pa.field(name, inner[""] if "" in inner else pa.struct(_nested(inner))))
    return made


def _path(name: str) -> list[str]:
    """The path of an order's field in the envelope, or in the row."""
    return name.removeprefix("after.").split(".")


@dataclass(frozen=True)
class ChangeFormat:
    """What a topic's records say about rows. `key_type` and `value_type` are those of the columns key and value.

    `key` has names of the row's fields; without names it is the record's key: the fields of its struct, or the column
    `key` of bytes. `order` are the paths of the fields by which changes are ordered, of the value or Debezium's
    envelope. `ConfigError` if the row, its key or the order can't be of these types.
    """

    key_type: pa.DataType
    value_type: pa.DataType
    fields: tuple[str, ...] = ()
    envelope: Envelope = "none"
    order: tuple[str, ...] = ()
    unavailable: Unavailable = "keep"

    def __post_init__(self) -> None:
        if self.envelope not in ENVELOPES:
            raise ConfigError(f"envelope {self.envelope!r} must be one of {', '.join(ENVELOPES)}")
        if twice := [name for name in self.fields if self.fields.count(name) > 1]:
            raise ConfigError(f"upsert key {twice[0]!r} is named twice: name each field once")
        row = self._row
        own = {*self.schema.names[len(row) :], DELETED}
        if reserved := [name for name in row if name.lower() in own]:
            raise ConfigError(f"the row has a field {reserved[0]}, which is a column of the table: rename it")
        for name in self.key:
            kind = row.get(name)
            if kind is None:
                raise ConfigError(f"upsert key {name!r}: the row has no such field, only {', '.join(row)}")
            if pa.types.is_nested(kind):
                raise ConfigError(f"upsert key {name!r} is a {kind}: name fields with plain values")
        self._check_order()

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the key."""
        return self.fields or tuple(name for name, _ in self._key_fields)

    def key_paths(self, column: Literal["key", "value"]) -> frozenset[tuple[str, ...]]:
        """The paths of the fields of a column that tell rows apart; () is all of it."""
        if column == "key":
            names = [(name,) for name in self.fields if _has(self.key_type, name)]
            return frozenset(names if self.fields else [()])
        if self.envelope == "none":
            return frozenset((name,) for name in self.fields)
        rows: list[tuple[str, ...]] = [("before",), ("after",)]
        rows += [(_JSON_WRAPPER, *path) for path in rows]
        return frozenset((*path, name) for path in rows for name in self.key)

    @property
    def row(self) -> pa.Schema:
        """The columns of a row in the table, with those of its place."""
        fields = [*(pa.field(name, kind) for name, kind in self._row.items()), *PLACE]
        return pa.schema([*fields, pa.field(ORDER, pa.string())] if self.order else fields)

    @property
    def schema(self) -> pa.Schema:
        """The columns of a change."""
        made = self.row.append(pa.field(DELETED, pa.bool_()))
        return made.append(pa.field(LACKING, LACKING_TYPE)) if self._keeps else made

    @property
    def _keeps(self) -> bool:
        """Whether rows keep values that changes of theirs lack."""
        return self.envelope == "debezium" and self.unavailable == "keep"

    def _check_order(self) -> None:
        kinds = {name: pa.nulls(0, kind) for name, kind in self._row.items()}
        for name in self.order:
            try:
                kind = self._order_field(name, pa.nulls(0, self.value_type), kinds).type
            except (KeyError, pa.ArrowException):
                fields = ", ".join([*kinds, *(f"{each}..." for each in _OF_ENVELOPE if self.envelope != "none")])
                raise ConfigError(f"order by {name!r}: there is no such field, only {fields}") from None
            is_whole = pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0)
            if not (is_whole or is_text(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind)):
                raise ConfigError(f"order by {name!r}: it is {kind}; name whole numbers, texts, times or dates")

    def _order_field(self, name: str, value: pa.Array, rows: dict[str, pa.Array]) -> pa.Array:
        """A field of the order; KeyError or pa.ArrowException if there is none."""
        first, *inner = _path(name)
        if self.envelope == "debezium" and first in _OF_ENVELOPE and not name.startswith("after."):
            [column] = self._envelope_fields(value, (first,))
        else:
            column = rows[first]
        return pc.struct_field(column, inner) if inner else column

    @property
    def _key_fields(self) -> list[tuple[str, pa.DataType]]:
        """What the record's key has of a row."""
        if pa.types.is_struct(self.key_type):
            return [(field.name, field.type) for field in self.key_type]
        return [(RECORD_KEY, self.key_type)]

    @property
    def _row(self) -> dict[str, pa.DataType]:
        if self.envelope == "debezium":
            fields = [(field.name, field.type) for field in self._enveloped]
        elif pa.types.is_struct(self.value_type):
            fields = [(field.name, field.type) for field in self.value_type]
        else:
            fields = [("value", self.value_type)]
        row = dict(fields)
        if self.fields:
            return row
        if not pa.types.is_struct(self.key_type):
            if self.envelope == "debezium":
                raise ConfigError(
                    "the envelope's keys are bytes: name the key's fields by an upsert key, or give a key format"
                )
            if RECORD_KEY in row:
                raise ConfigError(f"the row has a field {RECORD_KEY!r}: name the key's fields, or give a key format")
        keys = dict(self._key_fields)
        return keys | row if self.envelope == "debezium" else keys | row | keys

    @property
    def _enveloped(self) -> pa.DataType:
        """The row's type in the envelope."""
        kind = self.value_type
        if _has(kind, _JSON_WRAPPER) and not _has(kind, "after"):
            kind = kind.field(_JSON_WRAPPER).type
        missing = [name for name in ("before", "after", "op") if not _has(kind, name)]
        if missing:
            raise ConfigError(f"values are no envelope of Debezium: they have no field {missing[0]}, but are {kind}")
        row = kind.field("after").type
        if not pa.types.is_struct(row):
            raise ConfigError(
                f"the envelope's rows are {row}, not records with fields: those of MongoDB are read as JSON only, by "
                "the load (--value-format json)"
            )
        return row

    def changes(
        self, records: pa.RecordBatch, incarnation: int = 0, bad: dict[int, str] | None = None
    ) -> pa.RecordBatch:
        """The changes of records with the connector's columns key, value, topic, partition, offset, timestamp.

        A record without a key, or with an operation that is not understood, is left out, and its number and the reason
        are put into `bad`. Without `bad`, `LoadError` names the first one.
        """
        reasons: dict[int, str] = {} if bad is None else bad
        keys, value = records["key"], records["value"]
        lacks_key, updates = mask(value.is_null()), pa.nulls(len(records), pa.string())
        if self.envelope == "debezium":
            envelope = before, after, op = self._envelope_fields(value, ("before", "after", "op"))
            lacks_key |= mask(pc.equal(op, _DELETE)) & ~self._has_key(before)
            if _has(self.value_type, UPDATE):
                [updates] = self._envelope_fields(value, (UPDATE,))
                lacks_key |= mask(updates.is_valid()) & ~self._has_key(after)
        if self.fields and pa.types.is_struct(value.type) and not pa.types.is_struct(keys.type):
            keys = self._json_keys(keys, lacks_key)
        emptied, is_read = np.zeros(len(records), np.bool_), np.zeros(len(records), np.bool_)
        if self.envelope == "debezium":
            rows, deleted, numbers = self._unwrapped(value, envelope, keys, reasons)
            emptied, is_read = (mask(pc.equal(op, name))[numbers] for name in (_TRUNCATE, _READ))
        else:
            numbers = np.arange(len(records))
            rows = self._row_fields(value)
            deleted = value.is_null()
        places = records.select(["partition", "offset", "timestamp"])
        if len(numbers) != len(records) or self.envelope != "none":
            places, keys, value = (each.take(pa.array(numbers)) for each in (places, keys, value))
        rows |= self._keys(rows, keys, deleted)
        for name in self.key:
            rows[name] = without_sign(rows[name])
            if emptied.any():
                rows[name] = pc.if_else(pa.array(emptied), None, rows[name])
            for row in numbers[mask(rows[name].is_null()) & ~emptied].tolist() if rows[name].null_count else ():
                reasons.setdefault(
                    row,
                    f"has no {name}, which is in the key of its row. One without a value (a tombstone) has only what "
                    "the record's key has",
                )
            if pa.types.is_floating(rows[name].type):
                for row in numbers[mask(pc.is_nan(rows[name]))].tolist():
                    reasons.setdefault(row, f"has NaN as {name}, which is in the key of its row, and equals nothing")
        here = pa.nulls(len(places), pa.int32()).fill_null(incarnation)
        times = places["timestamp"].cast(PLACE.field(TIMESTAMP).type)
        columns = [here, places["partition"], places["offset"], times]
        if self.order:
            columns.append(order_texts([self._order_field(name, value, rows) for name in self.order]))
            # what a snapshot reads while changes go on has no place in the database's log, but one in the topic
            for row in numbers[mask(columns[-1].is_null()) & ~mask(deleted) & ~is_read].tolist():
                reasons.setdefault(row, f"has no {' and no '.join(self.order)}, by which its change is ordered")
        columns.append(deleted)
        if self._keeps:
            columns.append(self._lacking(rows, mask(deleted), updates.take(pa.array(numbers))))
        else:
            for row in np.flatnonzero(mask(updates.is_valid())).tolist():
                reasons.setdefault(row, "has the changed fields of a document only: give --unavailable keep")
        if bad is None and reasons:
            first = min(reasons)
            raise LoadError(f"{_place_of(records, first)} {reasons[first]}")
        columns = [*(rows[name] for name in self._row), *columns]
        made = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        return made.filter(pa.array(~np.isin(numbers, list(reasons)))) if reasons else made

    def _row_fields(self, row: pa.Array) -> dict[str, pa.Array]:
        if pa.types.is_struct(row.type):
            return dict(zip((field.name for field in row.type), row.flatten(), strict=True))
        return {"value": row}

    def _keys(self, rows: dict[str, pa.Array], keys: pa.Array, deleted: pa.Array) -> dict[str, pa.Array]:
        """The columns of the key, from the record's key if they are in it."""
        if not pa.types.is_struct(keys.type):
            return {} if self.fields else {RECORD_KEY: keys}
        of_record = dict(zip((field.name for field in keys.type), keys.flatten(), strict=True))
        if not self.fields:
            return of_record if self.envelope == "none" else _filled(rows, of_record)
        # of a deletion without a row
        return _filled(rows, {name: of_record[name] for name in self.fields if name in of_record})

    def _json_keys(self, keys: pa.Array, wanted: NDArray[np.bool_]) -> pa.Array:
        """The fields of the upsert key that keys of bytes have as JSON, with or without Connect's `payload` around it.

        Null where no key is wanted, and where one is no JSON object with all these fields.
        """
        kind = pa.struct([pa.field(name, self._row[name]) for name in self.key])
        if not (pa.types.is_binary(keys.type) or pa.types.is_string(keys.type)):  # in a stream a key may be a number
            return pa.nulls(len(keys), kind)
        numbers = np.flatnonzero(wanted & mask(keys.is_valid()))
        texts = keys.take(pa.array(numbers))
        texts = plain_keys(texts) if self.key == (ID,) else texts
        plain, wrapped = (
            JsonDecoder(column_of(shape, DDL)).decode(texts, [None]).values
            for shape in (kind, pa.struct([pa.field(_JSON_WRAPPER, kind)]))
        )
        inner = pc.struct_field(wrapped, 0)
        row = pc.if_else(inner.is_valid(), inner, plain)
        is_whole = np.logical_and.reduce([mask(column.is_valid()) for column in row.flatten()])
        places = np.full(len(keys), -1)
        places[numbers[is_whole]] = np.flatnonzero(is_whole)
        return row.take(pa.array(places, mask=places < 0))

    def _unwrapped(
        self, value: pa.Array, envelope: tuple[pa.Array, pa.Array, pa.Array], keys: pa.Array, bad: dict[int, str]
    ) -> tuple[dict[str, pa.Array], pa.Array, NDArray[np.int64]]:
        """The rows of an envelope's changes, which of them are deletions, and each one's number of a record.

        An update that changes the key deletes the row of the old key, too: Debezium writes both as records of their
        own, other writers of its envelope do not.
        """
        before, after, op = envelope
        is_known = mask(pc.is_in(op, pa.array([*_WRITES, _DELETE, _TRUNCATE, _MESSAGE])))
        for row in np.flatnonzero(mask(value.is_valid()) & ~is_known).tolist():
            bad[row] = f"has the operation {op[row].as_py()!r}: an envelope of Debezium has one of c, u, r, d, t, m"
        is_write = mask(pc.is_in(op, pa.array(_WRITES)))
        is_delete = mask(pc.equal(op, _DELETE))
        for row in np.flatnonzero(is_write & mask(after.is_null())).tolist():
            bad[row] = f"has the operation {op[row].as_py()!r} and no row"
            is_write[row] = False
        # A tombstone repeats the deletion before it. It is the only one if the deletion is compacted away.
        is_known = np.ones(len(keys), np.bool_) if pa.types.is_struct(self.key_type) else mask(keys.is_valid())
        tombstones = mask(value.is_null()) & is_known
        is_deleted = is_delete | tombstones | mask(pc.equal(op, _TRUNCATE))
        numbers = np.flatnonzero(is_write | is_deleted)
        rows = pc.if_else(pa.array(is_delete), before, after).take(pa.array(numbers))
        deleted = is_deleted[numbers]
        moved = np.flatnonzero(is_write & mask(before.is_valid()))
        if len(moved):
            moved = moved[self._moves(before.take(pa.array(moved)), after.take(pa.array(moved)))]
        if len(moved):
            rows = pa.concat_arrays([rows, before.take(pa.array(moved))])
            numbers, deleted = np.append(numbers, moved), np.append(deleted, np.ones(len(moved), np.bool_))
        row = self._row_fields(rows)
        self._check_available(row, deleted, numbers, bad)
        return row, pa.array(deleted), numbers

    def _envelope_fields(self, value: pa.Array, names: Sequence[str]) -> tuple[pa.Array, ...]:
        """Columns of the envelope, such as before, after and op, wherever they stand."""
        if not _has(value.type, _JSON_WRAPPER):
            return tuple(pc.struct_field(value, name) for name in names)
        wrapped = pc.struct_field(value, _JSON_WRAPPER)
        inner = [pc.struct_field(wrapped, name) for name in names]
        if not _has(value.type, "after"):
            return tuple(inner)
        outer = [pc.struct_field(value, name) for name in names]
        is_wrapped = wrapped.is_valid()
        return tuple(pc.if_else(is_wrapped, own, other) for own, other in zip(inner, outer, strict=True))

    def _has_key(self, rows: pa.Array) -> NDArray[np.bool_]:
        """Which rows have all fields of the key."""
        columns, has = self._row_fields(rows), np.ones(len(rows), np.bool_)
        for name in self.key:
            has &= mask(columns[name].is_valid()) if name in columns else np.False_
        return has

    def _moves(self, before: pa.Array, after: pa.Array) -> NDArray[np.bool_]:
        """Which updates have another key afterwards. A row before that lacks its key says nothing."""
        old, new = self._row_fields(before), self._row_fields(after)
        differs = np.zeros(len(before), np.bool_)
        for name in self.key:
            if name not in old:
                return np.zeros(len(before), np.bool_)
            differs |= mask(pc.not_equal(old[name], new[name]))
        return differs & self._has_key(before)

    def _check_available(
        self, row: dict[str, pa.Array], deleted: NDArray[np.bool_], numbers: NDArray[np.int64], bad: dict[int, str]
    ) -> None:
        for name in row if not self._keeps else self.key:
            marks = _unavailable(row[name]) & ~deleted if name in row else np.zeros(len(deleted), np.bool_)
            for number in numbers[marks].tolist() if marks.any() else ():
                bad[number] = no_value(name)

    def _lacking(self, rows: dict[str, pa.Array], deleted: NDArray[np.bool_], updates: pa.Array) -> pa.Array:
        """The column `LACKING`: which columns have a placeholder instead of their value, or are not in an update."""
        lacks = {name: _unavailable(rows[name]) & ~deleted for name in self._row}
        partial = np.flatnonzero(mask(updates.is_valid()) & ~deleted)
        parts = np.full(len(deleted), None, object)
        for row, text in zip(partial.tolist(), updates.take(pa.array(partial)).to_pylist(), strict=True):
            update = json.loads(text, parse_float=Decimal)
            of_row: dict[str, list[Part]] = {}
            for name in set(lacks).difference(update["fields"], self.key):
                lacks[name][row] = True
            for part in update["changes"]:
                if (name := part[0][0]) in lacks:
                    of_row.setdefault(name, []).append(part)
            parts[row] = json_text(of_row)
        marked = {name: marks for name, marks in lacks.items() if marks.any()}
        return lacking_column(marked, len(deleted), parts=pa.array(parts, pa.string()))


def no_value(name: str) -> str:
    """Why a record without the value of a column is bad."""
    return (
        f"has {UNAVAILABLE} as {name}: the connector has not the column's value, and there is no row that has it. Give "
        "the database's table REPLICA IDENTITY FULL, or the connector a ReselectColumnsPostProcessor"
    )


def no_row() -> str:
    """Why an update of a row that is not there is bad, if it has its changed fields only."""
    return (
        "updates a row that is not there, or that has not what it changes a part of: load the connector's snapshot "
        "first, or give it capture.mode=change_streams_update_full"
    )


def _unavailable(column: pa.Array) -> NDArray[np.bool_]:
    """Which values Debezium has put in place of one that it does not have (UnchangedToastedPlaceholder).

    A list of texts or bytes has the placeholder as its only element, a list of numbers has its bytes, a map has it as
    its only key.
    """
    kind = column.type
    if is_text(kind):
        return mask(pc.is_in(column, pa.array(_UNAVAILABLE_TEXTS, kind)))
    if is_bytes(kind):
        return mask(pc.equal(column, pa.scalar(UNAVAILABLE.encode(), kind)))
    marks = np.zeros(len(column), np.bool_)
    if pa.types.is_map(kind):
        column = column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return marks
    element = kind.key_type if pa.types.is_map(kind) else kind.value_type
    is_number = pa.types.is_integer(element) or pa.types.is_floating(element) or pa.types.is_decimal(element)
    length = len(UNAVAILABLE) if is_number else 1
    numbers = np.flatnonzero(mask(pc.equal(pc.list_value_length(column), length)))
    if not len(numbers):
        return marks
    elements = pc.list_flatten(column.take(pa.array(numbers)))
    if pa.types.is_map(kind):
        elements = pc.struct_field(elements, 0)
    if is_number:
        rows = np.array(elements.to_pylist(), object).reshape(-1, length)
        marks[numbers] = np.all(rows == list(UNAVAILABLE.encode()), axis=1)
    else:
        marks[numbers] = _unavailable(elements)
    return marks


def _has(kind: pa.DataType, name: str) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index(name) >= 0)


def _filled(rows: dict[str, pa.Array], keys: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """The key's columns of rows; those of deletions that have no row are from the record's key."""
    filled = {}
    for name, column in keys.items():
        of_row = rows.get(name)
        filled[name] = column if of_row is None else pc.coalesce(of_row, column.cast(of_row.type))
    return filled


def _place_of(records: pa.RecordBatch, number: int) -> str:
    topic, partition, offset = (records[name][number].as_py() for name in ("topic", "partition", "offset"))
    return f"the record at {topic}-{partition}, offset {offset},"
