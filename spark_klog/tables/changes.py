"""Changes of a table's rows: what records of a topic say about them, and which change of a row is its last one.

A change is a row, or the deletion of one, with its key and its place in the log:

    the row's columns            of a deletion only those of the key count
    _incarnation, _partition     the log: a topic that is created again begins incarnation 1 of its partitions
    _offset, _timestamp          the record in it
    _deleted                     whether the row is gone; the table itself does not have this column

Which of two changes of a key is the later one: in a partition the one with the larger incarnation and offset. A key
that is in several partitions, as its topic got more of them, goes by the records' timestamps, then by the number of the
partition; of each partition only the last change counts, so that clocks in no order bring back nothing. A table keeps
the place of each row's last change, so no older change ever replaces a newer one.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.errors import ConfigError, LoadError
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of

INCARNATION, PARTITION, OFFSET, TIMESTAMP = "_incarnation", "_partition", "_offset", "_timestamp"
DELETED = "_deleted"
#: The columns that a table has beside those of its rows.
PLACE = pa.schema(
    [
        pa.field(INCARNATION, pa.int32()),
        pa.field(PARTITION, pa.int32()),
        pa.field(OFFSET, pa.int64()),
        pa.field(TIMESTAMP, pa.timestamp("us", tz="UTC")),
    ]
)
#: What the value of a record is: the row itself (null: it is deleted), or Debezium's envelope of it.
Envelope = Literal["none", "debezium"]
ENVELOPES: tuple[Envelope, ...] = ("none", "debezium")
#: The name by which `--upsert-key` means the record's key; a field of that name is `value.key`.
RECORD_KEY = "key"
_WRITES, _DELETE, _TRUNCATE = ("c", "u", "r"), "d", "t"
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


def debezium_type(row: pa.DataType) -> pa.DataType:
    """The type of a value in Debezium's JSON, with or without the wrapper of Kafka Connect's schemas, by the row's.

    Fields that are not in it (`source`, `schema`) are left out by the parser.
    """
    fields = [pa.field("before", row), pa.field("after", row), pa.field("op", pa.string())]
    return pa.struct([*fields, pa.field(_JSON_WRAPPER, pa.struct(fields))])


@dataclass(frozen=True)
class ChangeFormat:
    """What a topic's records say about rows. `key_type` and `value_type` are those of the columns key and value.

    `key` has names of the row's fields; without names it is the record's key: the fields of its struct, or the column
    `key` of bytes. `ConfigError` if the row or its key can't be of these types.
    """

    key_type: pa.DataType
    value_type: pa.DataType
    fields: tuple[str, ...] = ()
    envelope: Envelope = "none"

    def __post_init__(self) -> None:
        if self.envelope not in ENVELOPES:
            raise ConfigError(f"envelope {self.envelope!r} must be one of {', '.join(ENVELOPES)}")
        if twice := [name for name in self.fields if self.fields.count(name) > 1]:
            raise ConfigError(f"upsert key {twice[0]!r} is named twice: name each field once")
        row = self._row
        if reserved := [name for name in row if name in {*PLACE.names, DELETED}]:
            raise ConfigError(f"the row has a field {reserved[0]}, which is a column of the table: rename it")
        for name in self.key:
            kind = row.get(name)
            if kind is None:
                raise ConfigError(f"upsert key {name!r}: the row has no such field, only {', '.join(row)}")
            if pa.types.is_nested(kind):
                raise ConfigError(f"upsert key {name!r} is a {kind}: name fields with plain values")

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
        return pa.schema([*(pa.field(name, kind) for name, kind in self._row.items()), *PLACE])

    @property
    def schema(self) -> pa.Schema:
        """The columns of a change."""
        return self.row.append(pa.field(DELETED, pa.bool_()))

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
                raise ConfigError("the envelope's keys are bytes: name the key's fields, or give a key format")
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
            raise ConfigError(f"the envelope's rows are {row}, not records with fields: MongoDB's are not understood")
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
        lacks_key = _mask(value.is_null())
        if self.envelope == "debezium":
            envelope = before, _, op = self._envelope_fields(value)
            lacks_key |= _mask(pc.equal(op, _DELETE)) & ~self._has_key(before)
        if self.fields and pa.types.is_struct(value.type) and not pa.types.is_struct(keys.type):
            keys = self._json_keys(keys, lacks_key)
        if self.envelope == "debezium":
            rows, deleted, numbers = self._unwrapped(value, envelope, keys, reasons)
        else:
            numbers = np.arange(len(records))
            rows = self._row_fields(value)
            deleted = value.is_null()
        places = records.select(["partition", "offset", "timestamp"])
        if len(numbers) != len(records) or self.envelope != "none":
            places, keys = places.take(pa.array(numbers)), keys.take(pa.array(numbers))
        rows |= self._keys(rows, keys, deleted)
        for name in self.key:
            rows[name] = _without_sign(rows[name])
            for row in numbers[_mask(rows[name].is_null())].tolist() if rows[name].null_count else ():
                reasons.setdefault(
                    row,
                    f"has no {name}, which is in the key of its row. One without a value (a tombstone) has only what "
                    "the record's key has",
                )
            if pa.types.is_floating(rows[name].type):
                for row in numbers[_mask(pc.is_nan(rows[name]))].tolist():
                    reasons.setdefault(row, f"has NaN as {name}, which is in the key of its row, and equals nothing")
        if bad is None and reasons:
            first = min(reasons)
            raise LoadError(f"{_place_of(records, first)} {reasons[first]}")
        columns = [rows[name] for name in self._row]
        here = pa.nulls(len(places), pa.int32()).fill_null(incarnation)
        times = places["timestamp"].cast(PLACE.field(TIMESTAMP).type)
        columns += [here, places["partition"], places["offset"], times, deleted]
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
        numbers = np.flatnonzero(wanted & _mask(keys.is_valid()))
        plain, wrapped = (
            JsonDecoder(column_of(shape, DDL)).decode(keys.take(pa.array(numbers)), [None]).values
            for shape in (kind, pa.struct([pa.field(_JSON_WRAPPER, kind)]))
        )
        inner = pc.struct_field(wrapped, 0)
        row = pc.if_else(inner.is_valid(), inner, plain)
        is_whole = np.logical_and.reduce([_mask(column.is_valid()) for column in row.flatten()])
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
        is_known = _mask(pc.is_in(op, pa.array([*_WRITES, _DELETE, _MESSAGE])))
        for row in np.flatnonzero(_mask(value.is_valid()) & ~is_known).tolist():
            name = op[row].as_py()
            bad[row] = f"has the operation {name!r}: an envelope of Debezium has one of c, u, r, d, m"
            if name == _TRUNCATE:
                bad[row] = (
                    "truncates its table, which is not understood: begin another table behind it, or have the "
                    "connector skip it (skipped.operations=t)"
                )
        is_write = _mask(pc.is_in(op, pa.array(_WRITES)))
        is_delete = _mask(pc.equal(op, _DELETE))
        for row in np.flatnonzero(is_write & _mask(after.is_null())).tolist():
            bad[row] = f"has the operation {op[row].as_py()!r} and no row"
            is_write[row] = False
        # A tombstone repeats the deletion before it. It is the only one if the deletion is compacted away.
        is_known = np.ones(len(keys), np.bool_) if pa.types.is_struct(self.key_type) else _mask(keys.is_valid())
        tombstones = _mask(value.is_null()) & is_known
        is_deleted = is_delete | tombstones
        numbers = np.flatnonzero(is_write | is_deleted)
        rows = pc.if_else(pa.array(is_delete), before, after).take(pa.array(numbers))
        deleted = is_deleted[numbers]
        moved = np.flatnonzero(is_write & _mask(before.is_valid()))
        if len(moved):
            moved = moved[self._moves(before.take(pa.array(moved)), after.take(pa.array(moved)))]
        if len(moved):
            rows = pa.concat_arrays([rows, before.take(pa.array(moved))])
            numbers, deleted = np.append(numbers, moved), np.append(deleted, np.ones(len(moved), np.bool_))
        row = self._row_fields(rows)
        self._check_available(row, pa.array(deleted), numbers, bad)
        return row, pa.array(deleted), numbers

    def _envelope_fields(self, value: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
        """The columns before, after and op, wherever they stand."""
        names = ("before", "after", "op")
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
            has &= _mask(columns[name].is_valid()) if name in columns else np.False_
        return has

    def _moves(self, before: pa.Array, after: pa.Array) -> NDArray[np.bool_]:
        """Which updates have another key afterwards. A row before that lacks its key says nothing."""
        old, new = self._row_fields(before), self._row_fields(after)
        differs = np.zeros(len(before), np.bool_)
        for name in self.key:
            if name not in old:
                return np.zeros(len(before), np.bool_)
            differs |= _mask(pc.not_equal(old[name], new[name]))
        return differs & self._has_key(before)

    def _check_available(
        self, row: dict[str, pa.Array], deleted: pa.Array, numbers: NDArray[np.int64], bad: dict[int, str]
    ) -> None:
        for name, column in row.items():
            marks = _unavailable(column) & ~_mask(deleted)
            for number in numbers[marks].tolist() if marks.any() else ():
                bad[number] = (
                    f"has {UNAVAILABLE} as {name}: the connector has not the column's value. Give the database's "
                    "table REPLICA IDENTITY FULL, or the connector a ReselectColumnsPostProcessor"
                )


def _unavailable(column: pa.Array) -> NDArray[np.bool_]:
    """Which values Debezium has put in place of one that it does not have (UnchangedToastedPlaceholder).

    A list of texts or bytes has the placeholder as its only element, a list of numbers has its bytes, a map has it as
    its only key.
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _mask(pc.is_in(column, pa.array(_UNAVAILABLE_TEXTS, kind)))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _mask(pc.equal(column, pa.scalar(UNAVAILABLE.encode(), kind)))
    marks = np.zeros(len(column), np.bool_)
    if pa.types.is_map(kind):
        column = column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return marks
    element = kind.key_type if pa.types.is_map(kind) else kind.value_type
    is_number = pa.types.is_integer(element) or pa.types.is_floating(element) or pa.types.is_decimal(element)
    length = len(UNAVAILABLE) if is_number else 1
    numbers = np.flatnonzero(_mask(pc.equal(pc.list_value_length(column), length)))
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


def _mask(array: pa.Array) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = array.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def _place_of(records: pa.RecordBatch, number: int) -> str:
    topic, partition, offset = (records[name][number].as_py() for name in ("topic", "partition", "offset"))
    return f"the record at {topic}-{partition}, offset {offset},"


def last_changes(changes: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last change of each key in each partition, in no order of keys."""
    if not len(changes):
        return changes
    incarnations, offsets = (numbers(changes[name]) for name in (INCARNATION, OFFSET))
    if np.ptp(incarnations) or not bool(np.all(offsets[1:] >= offsets[:-1])):
        changes = changes.take(pa.array(np.lexsort((offsets, incarnations))))
    return changes.take(pa.array(_last_rows(changes, [*key, PARTITION])))


def _without_sign(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """A column in which zeros have no sign: Arrow takes -0.0 and 0.0 for two keys, SQL for one."""
    return pc.add(column, pa.scalar(0.0, column.type)) if pa.types.is_floating(column.type) else column


def _clock_order(changes: pa.Table) -> NDArray[np.int64]:
    return np.lexsort((numbers(changes[PARTITION]), numbers(changes[TIMESTAMP])))


def _last_rows(table: pa.Table, names: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of those rows after which none has the same values, in their order."""
    places = numbered(table, names)
    rows = places.group_by(places.column_names[:-1], use_threads=False).aggregate([(places.column_names[-1], "max")])
    return np.sort(numbers(rows[-1]))


def numbered(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Some columns, called by their numbers, and the number of each row. Of floats -0.0 is 0.0."""
    columns = [*(_without_sign(table[name]) for name in names), pa.array(np.arange(len(table)))]
    return pa.table(columns, names=[str(number) for number in range(len(columns))])


def matching(rows: pa.Table, changes: pa.Table, key: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of rows and of changes that have the same key, pair by pair."""
    mine, theirs = numbered(rows, key), numbered(changes, key)
    *names, last = mine.column_names
    pairs = mine.join(theirs.rename_columns([*names, f"{last} of changes"]), names, join_type="inner")
    return numbers(pairs[last]), numbers(pairs[f"{last} of changes"])


class Outcome:
    """Which changes of a table's rows come to be its rows. `changes` are `last_changes` of their keys.

    `replace` is given all rows that may have one of the keys, in any number of calls; then `latest` is the result.
    """

    def __init__(self, changes: pa.Table, key: Sequence[str], kinds: pa.Schema) -> None:
        """`kinds` has the types of the key and of the place in the table."""
        names = [*key, *PLACE.names]
        self._key = key
        self._places = changes.select(names).cast(pa.schema([kinds.field(name).remove_metadata() for name in names]))
        self._ranks = np.argsort(_clock_order(changes))
        self._is_left = np.ones(len(changes), np.bool_)

    def replace(self, rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of the rows that go, each with the number of the change that takes its place."""
        rows = rows.select(self._places.column_names).cast(self._places.schema)
        of_rows, of_changes = matching(rows, self._places, self._key)
        if not len(of_rows):
            return of_rows, of_changes
        mine, theirs = self._places.take(pa.array(of_changes)), rows.take(pa.array(of_rows))
        is_newer = newer(mine, theirs)
        is_within = numbers(mine[PARTITION]) == numbers(theirs[PARTITION].fill_null(-1))
        # a change that the row's partition has replaced since, and a row that one of the changes has
        is_past, is_over = is_within & ~is_newer, np.zeros(len(rows), np.bool_)
        is_over[of_rows[is_within & is_newer]] = True
        ranks = np.where(is_past, -1, self._ranks[of_changes])
        best = np.full(len(rows), -1)
        np.maximum.at(best, of_rows, ranks)
        wins = ~is_past & (ranks == best[of_rows]) & (is_newer | is_over[of_rows])
        goes = np.zeros(len(rows), np.bool_)
        goes[of_rows[wins]] = True
        self._is_left[of_changes[is_past | ~goes[of_rows]]] = False
        return of_rows[wins], of_changes[wins]

    @property
    def latest(self) -> NDArray[np.int64]:
        """The numbers of the changes that are left, of each key one."""
        left = np.flatnonzero(self._is_left)
        left = left[np.argsort(self._ranks[left])]
        return left[_last_rows(self._places.take(pa.array(left)), self._key)]


def numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    """A column of integers or times without nulls."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    array: NDArray[np.int64] = (
        column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    )
    return array


def newer(changes: pa.Table, rows: pa.Table) -> NDArray[np.bool_]:
    """Which changes are later than the rows beside them, by the places of both. A row without a place is the older."""
    values = {}
    for name in PLACE.names:
        values[name] = (
            numbers(changes[name]),
            numbers(rows[name].fill_null(pa.scalar(0, pa.int64()).cast(PLACE.field(name).type))),
        )
    is_lost = rows[OFFSET].is_null().to_numpy()
    (inc, inc_of_row), (part, part_of_row) = values[INCARNATION], values[PARTITION]
    (at, at_of_row), (time, time_of_row) = values[OFFSET], values[TIMESTAMP]
    within = (inc > inc_of_row) | ((inc == inc_of_row) & (at > at_of_row))
    across = (time > time_of_row) | ((time == time_of_row) & (part > part_of_row))
    result: NDArray[np.bool_] = is_lost | np.where(part == part_of_row, within, across)
    return result
