"""The order of changes: which one of a key is its last one, and what becomes of a table's rows by it.

Which of two changes of a key is the later one: in a partition the one with the larger incarnation and offset. A key
that is in several partitions, as its topic got more of them, goes by the records' timestamps, then by the number of the
partition; of each partition only the last change counts, so that clocks in no order bring back nothing. Changes with an
order of their own, a text in the column `_klog_order`, go by that first. A table keeps the place of each row's last
change, so no older change ever replaces a newer one.

A truncation is a deletion without a key, of all rows and changes that are older.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.tables.mongodb import IMPOSSIBLE, Part, changed_column, json_text

#: How the names of columns begin that are not the user's. Readers have names of their own that begin with "_" only:
#: `_partition`, `_file` and `_deleted` are metadata columns of Iceberg, `_change_type` is one of both formats.
OWN = "_klog_"
INCARNATION, PARTITION = f"{OWN}incarnation", f"{OWN}partition"
OFFSET, TIMESTAMP = f"{OWN}offset", f"{OWN}timestamp"
#: The columns that a table has beside those of its rows.
PLACE = pa.schema(
    [
        pa.field(INCARNATION, pa.int32()),
        pa.field(PARTITION, pa.int32()),
        pa.field(OFFSET, pa.int64()),
        pa.field(TIMESTAMP, pa.timestamp("us", tz="UTC")),
    ]
)
#: One more of a table whose changes have an order of their own. Its texts, by `order_texts`, are compared byte by byte.
ORDER = f"{OWN}order"
#: Whether a change is the deletion of its row; the table itself does not have this column.
DELETED = f"{OWN}deleted"
#: Of changes only: which columns have no value, as the source does not have it, and what is kept of the record if no
#: row has one; of an update with changed fields only (`mongodb.UPDATE`) the parts of columns that it changes, by column
#: as JSON. Null of all others.
LACKING = f"{OWN}lacking"
LACKING_TYPE = pa.struct(
    [
        pa.field("columns", pa.list_(pa.string())),
        pa.field("letter", pa.string()),
        pa.field("parts", pa.string()),
    ]
)
#: The parts of an update that has changed whole columns.
NO_PARTS = "{}"
#: Rows of a table, with some of its columns: all that have one of some keys, and maybe others.
Rows = Callable[[Sequence[str], pa.Table], Iterable[pa.RecordBatch]]
#: Between the texts of several fields: it comes before all that texts have.
_SEPARATOR = "\x1f"
_WHOLE_NUMBER = r"^-?[0-9]+$"
_COMPLEMENT = str.maketrans("0123456789", "9876543210")


def names_of_record(columns: Collection[str]) -> tuple[str, ...]:
    """What the topic, partition, offset and timestamp of a row's record are called in a table with these columns; it
    need not have all of them."""
    prefix = OWN if OFFSET in columns else ""  # else `topic` may be a field of the values
    return tuple(f"{prefix}{name}" for name in ("topic", "partition", "offset", "timestamp"))


def place_of(schema: pa.Schema) -> list[str]:
    """The names of the columns that tell the place of a change or a row."""
    return [*PLACE.names, *([ORDER] if ORDER in schema.names else [])]


def order_texts(fields: Sequence[pa.Array]) -> pa.Array:
    """Texts that are in the order of the fields, the first one before the others; null if all of them are null.

    Whole numbers are in their order, also as texts of digits, and before other texts; nulls are first.
    """
    texts = [pc.coalesce(_sortable(_text(field)), "") for field in fields]
    has_none = pc.invert(fields[0].is_valid())
    for field in fields[1:]:
        has_none = pc.and_(has_none, field.is_null())
    return pc.if_else(has_none, None, pc.binary_join_element_wise(*texts, _SEPARATOR))


def _text(field: pa.Array) -> pa.Array:
    kind = field.type
    if pa.types.is_date32(kind):
        field = field.cast(pa.int32())
    elif pa.types.is_temporal(kind):
        field = field.cast(pa.int64())
    return field.cast(pa.string())


def _sortable(texts: pa.Array) -> pa.Array:
    """A whole number as the count of its digits and these: 7 is 01:7, 12 is 02:12."""
    is_number = pc.match_substring_regex(texts, _WHOLE_NUMBER)
    digits = pc.utf8_ltrim(pc.utf8_ltrim(texts, "-"), "0")
    length = pc.utf8_lpad(pc.utf8_length(digits).cast(pa.string()), 2, "0")
    made = pc.if_else(
        is_number,
        pc.binary_join_element_wise(length, digits, ":"),
        pc.binary_join_element_wise("~", texts, ""),
    )
    is_below = mask(pc.and_(pc.and_(is_number, pc.starts_with(texts, "-")), pc.not_equal(digits, "")))
    if is_below.any():
        below = [f"-{text.translate(_COMPLEMENT)}" for text in made.filter(pa.array(is_below)).to_pylist()]
        made = pc.replace_with_mask(made, pa.array(is_below), pa.array(below, made.type))
    return made


def mask(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    """A column of booleans, false for null."""
    filled = column.fill_null(False)
    array: NDArray[np.bool_] = (
        filled.to_numpy(zero_copy_only=False) if isinstance(filled, pa.Array) else filled.to_numpy()
    )
    return array


def numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    """A column of integers or times without nulls."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    array: NDArray[np.int64] = (
        column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    )
    return array


def without_sign(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """A column in which zeros have no sign: Arrow takes -0.0 and 0.0 for two keys, SQL for one."""
    return pc.add(column, pa.scalar(0.0, column.type)) if pa.types.is_floating(column.type) else column


# ----- the last change of a key


def last_changes(changes: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last change of each key in each partition, and the last truncation of each, in no order of keys.

    What a truncation has emptied is a deletion. A column that a change lacks is that of the change before it. Updates
    of parts of a row that may be impossible are all left, after the change before them: their row decides.
    """
    if not len(changes):
        return changes
    names = [*key, PARTITION]
    changes = _in_order(truncated(changes, truncations_of(changes, key)), names, (OFFSET, INCARNATION))
    rows = last_rows(changes, names)
    last = _with_values_before(changes, names, rows).take(pa.array(rows))
    if LACKING not in changes.schema.names or last[LACKING].null_count == len(last):
        return last
    return _with_undecided(changes, last, rows, names)


def _with_undecided(changes: pa.Table, last: pa.Table, rows: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
    """The `last` changes, whose numbers among all are `rows`. One that still lacks values has the letters of all that
    it was made of; in place of one that changes parts, too, these are left."""
    groups, is_start = _groups(changes, names), changes[LACKING].is_null().to_numpy() | mask(changes[DELETED])
    by = np.argsort(groups, kind="stable")
    places, at = np.empty(len(by), np.int64), np.arange(len(by))
    places[by] = at
    is_first = np.append(True, np.diff(groups[by]) != 0)
    starts = np.maximum.accumulate(np.where(is_first | is_start[by], at, 0))
    texts = pc.struct_field(changes[LACKING].combine_chunks(), 1)
    letters = pc.struct_field(last[LACKING].combine_chunks(), 1).to_pylist()
    parts, deleted = _parts(last), mask(last[DELETED])
    is_left, numbers_left = np.ones(len(last), np.bool_), []
    for number in np.flatnonzero(last[LACKING].is_valid().to_numpy()).tolist():
        place = places[rows[number]]
        made_of = by[starts[place] : place + 1]
        if len(made_of) == 1:
            continue
        if parts.get(number) and not deleted[number]:
            is_left[number] = False
            numbers_left.append(made_of)
        else:
            letters[number] = "\n".join(filter(None, texts.take(pa.array(made_of)).to_pylist())) or None
    columns, _, changed_parts = last[LACKING].combine_chunks().flatten()
    arrays = [columns, pa.array(letters, pa.string()), changed_parts]
    lacks_none = last[LACKING].combine_chunks().is_null()
    last = _with(last, LACKING, pa.StructArray.from_arrays(arrays, fields=list(LACKING_TYPE), mask=lacks_none))
    left = np.concatenate([np.zeros(0, np.int64), *numbers_left])
    order = np.argsort(np.append(rows[is_left], left), kind="stable")
    of_both = np.append(np.flatnonzero(is_left), left + len(last))
    return pa.concat_tables([last, changes]).take(pa.array(of_both[order]))


def ordered(changes: pa.Table, key: Sequence[str]) -> pa.Table:
    """`last_changes` of which those of a key are one after the other."""
    partitions, times = numbers(changes[PARTITION]), numbers(changes[TIMESTAMP])
    if not np.ptp(partitions) or len(last_rows(changes, key)) == len(changes):
        return changes
    groups = _groups(changes, [*key, PARTITION])
    of_last = np.empty(int(groups.max()) + 1, np.int64)
    of_last[groups] = times  # changes that are left of one partition stay in their order
    return _by_order(changes.take(pa.array(np.lexsort((partitions, of_last[groups])))), key)


def truncations_of(changes: pa.Table, key: Sequence[str]) -> pa.Table:
    """The truncations among changes, in which no column of the key is null otherwise."""
    column = changes[key[0]]
    return changes.filter(column.is_null()) if column.null_count else changes.slice(0, 0)


def truncated(changes: pa.Table, truncations: pa.Table) -> pa.Table:
    """The changes, of which those are deletions that are older than one of the truncations."""
    gone = outlived(changes, truncations)
    if not gone.any():
        return changes
    if LACKING in changes.schema.names:
        changes = _with(changes, LACKING, pc.if_else(pa.array(gone), None, changes[LACKING]))
    return _with(changes, DELETED, pa.array(mask(changes[DELETED]) | gone))


def outlived(rows: pa.Table, truncations: pa.Table) -> NDArray[np.bool_]:
    """Which rows, or changes, are older than one of the truncations; a row without a place is."""
    gone = np.zeros(len(rows), np.bool_)
    for number in range(len(truncations) if len(rows) else 0):
        gone |= newer(truncations.take(pa.array(np.full(len(rows), number))), rows)
    return gone


def all_outlived(bounds: Mapping[str, tuple[Any, Any]], truncations: pa.Table) -> bool | None:
    """Whether all rows whose places are within these bounds are older than one of the truncations, or, False, none is
    older than any; None if that is not known. Times are microseconds."""
    if ORDER in truncations.schema.names or not set(PLACE.names) <= bounds.keys():
        return None
    (inc, last_inc), (part, last_part), (at, last_at), (time, last_time) = (bounds[name] for name in PLACE.names)
    columns = [numbers(truncations[name]).tolist() for name in PLACE.names]
    may_be = False
    for of_inc, of_part, of_at, of_time in zip(*columns, strict=True):
        is_in, is_all_in = part <= of_part <= last_part, part == of_part == last_part
        older_in = of_inc > last_inc or (of_inc == inc == last_inc and of_at > last_at)
        if (older_in or not is_in) and (of_time > last_time or is_all_in):
            return True
        later_in = of_inc < inc or (of_inc == inc == last_inc and of_at <= at)
        may_be |= not ((later_in or not is_in) and (of_time < time or is_all_in))
    return None if may_be else False


def _in_order(changes: pa.Table, group: Sequence[str], place: Sequence[str]) -> pa.Table:
    """The changes one after the other by their order, then by `place`, whose last column counts most.

    One without an order (a tombstone) comes after the one before it in its group by `place`, and has its order if that
    is the deletion that it repeats.
    """
    first, *others = (numbers(changes[name]) for name in place)
    if any(np.ptp(column) for column in others) or not bool(np.all(first[1:] >= first[:-1])):
        changes = changes.take(pa.array(np.lexsort((first, *others))))
    return _by_order(changes, group)


def _by_order(changes: pa.Table, group: Sequence[str]) -> pa.Table:
    if ORDER not in changes.schema.names:
        return changes
    # nulls come first
    ranks = numbers(pc.rank(changes[ORDER].fill_null(""), "ascending", tiebreaker="dense").cast(pa.int64()))
    lacks = changes[ORDER].is_null().to_numpy()
    if lacks.any():
        groups = _groups(changes, group)
        by = np.argsort(groups, kind="stable")
        is_first = np.append(True, np.diff(groups[by]) != 0)
        givers = np.empty(len(by), np.int64)
        givers[by] = by[np.maximum.accumulate(np.where(~lacks[by] | is_first, np.arange(len(by)), 0))]
        rows = np.where(lacks, givers, np.arange(len(by)))
        ranks = ranks[rows]
        rows = np.where(mask(changes[DELETED])[rows], rows, np.arange(len(by)))
        changes = _with(changes, ORDER, changes[ORDER].take(pa.array(rows)))
    return changes.take(pa.array(np.argsort(ranks, kind="stable")))


def _with(changes: pa.Table, name: str, column: pa.ChunkedArray | pa.Array) -> pa.Table:
    return changes.set_column(changes.schema.get_field_index(name), changes.schema.field(name), column)


def _groups(table: pa.Table, names: Sequence[str]) -> NDArray[np.int64]:
    """A number of each row, which rows with the same values share."""
    made = np.zeros(len(table), np.int64)
    for name in names:
        codes = without_sign(table[name]).combine_chunks().dictionary_encode("encode")
        codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
        values = codes.indices.to_numpy().astype(np.int64)
        made = np.unique(made * (int(values.max(initial=0)) + 1) + values, return_inverse=True)[1].astype(np.int64)
    return made


def _with_values_before(changes: pa.Table, group: Sequence[str], wanted: NDArray[np.int64]) -> pa.Table:
    """The changes, which are in order, with those values that they lack and a change before them in the group has.

    One that comes after the deletion of its row, and still lacks values, is a deletion itself. Parts that have changed
    are put together for the `wanted` changes alone.
    """
    if LACKING not in changes.schema.names or changes[LACKING].null_count == len(changes):
        return changes
    groups = _groups(changes, group)
    by = np.argsort(groups, kind="stable")
    changes, groups = changes.take(pa.array(by)), groups[by]
    at, deleted = np.arange(len(by)), mask(changes[DELETED])
    is_first = np.append(True, groups[1:] != groups[:-1])
    is_after = np.append(False, deleted[:-1]) & ~is_first
    lacks, parts, is_row = lacking(changes), _parts(changes), changes[LACKING].is_null().to_numpy()
    start = np.maximum.accumulate(np.where(is_first | is_after | is_row, at, 0))
    is_wanted = np.isin(by, wanted)
    for name, lacks_it in lacks.items():
        giver = np.maximum.accumulate(np.where(lacks_it, -1, at))
        has_giver = lacks_it & (giver >= start) & ~deleted
        changes = _with(changes, name, changes[name].take(pa.array(np.where(has_giver, giver, at))))
        lacks[name] = lacks_it & ~has_giver
        so_far: list[Part] = []
        given: dict[int, list[Part]] = {}
        for row in np.flatnonzero(lacks_it).tolist() if any(name in each for each in parts.values()) else ():
            if row == start[row] or not lacks_it[row - 1]:
                so_far = []
            so_far += parts.get(row, {}).pop(name, ())
            if so_far and is_wanted[row]:
                if has_giver[row]:
                    given[row] = list(so_far)
                else:
                    parts.setdefault(row, {})[name] = list(so_far)
        changes, bad = _with_parts(changes, name, given)
        for row in bad:
            lacks[name][row] = True
            parts.setdefault(row, {})[name] = [IMPOSSIBLE]
    changes = with_lacking(changes, lacks, parts)
    is_gone = np.logical_or.reduce(list(lacks.values())) & is_after[start] & ~is_row[start]
    changes = _with(changes, DELETED, pa.array(deleted | is_gone))
    back = np.empty(len(by), np.int64)
    back[by] = at
    return changes.take(pa.array(back))


def lacking(changes: pa.Table) -> dict[str, NDArray[np.bool_]]:
    """By column which changes lack its value; columns that none lacks are left out."""
    if LACKING not in changes.schema.names or changes[LACKING].null_count == len(changes):
        return {}
    lists = pc.struct_field(changes[LACKING].combine_chunks(), 0)
    rows, names = numbers(pc.list_parent_indices(lists)), pc.list_flatten(lists)
    made = {}
    for name in names.unique().to_pylist():
        made[name] = np.zeros(len(changes), np.bool_)
        made[name][rows[mask(pc.equal(names, name))]] = True
    return made


def _parts(changes: pa.Table) -> dict[int, dict[str, list[Part]]]:
    """By the numbers of changes the parts of columns that they change."""
    texts = pc.struct_field(changes[LACKING].combine_chunks(), 2)
    rows = np.flatnonzero(mask(pc.not_equal(texts, NO_PARTS)))
    known = zip(rows.tolist(), texts.take(pa.array(rows)).to_pylist(), strict=True)
    return {row: json.loads(text, parse_float=Decimal) for row, text in known}


def _with_parts(changes: pa.Table, name: str, given: Mapping[int, list[Part]]) -> tuple[pa.Table, list[int]]:
    """The changes, in whose values of a column these parts are changed, and the numbers of those that have no such."""
    if not given:
        return changes, []
    rows = np.array(sorted(given), np.int64)
    column = changes[name].combine_chunks()
    made, is_bad = changed_column(column.take(pa.array(rows)), name, [given[row] for row in rows.tolist()])
    places = np.arange(len(changes))
    places[rows] = len(changes) + np.arange(len(rows))
    return _with(changes, name, pa.chunked_array([column, made]).take(pa.array(places))), rows[is_bad].tolist()


def with_lacking(
    changes: pa.Table, lacks: Mapping[str, NDArray[np.bool_]], parts: Mapping[int, dict[str, list[Part]]]
) -> pa.Table:
    """The changes, of which only these lack values, and change these parts of some."""
    _, letters, texts = changes[LACKING].combine_chunks().flatten()
    if parts:
        made = texts.to_pylist()
        for row, of_row in parts.items():
            made[row] = json_text(of_row)
        texts = pa.array(made, pa.string())
    return _with(changes, LACKING, lacking_column(lacks, len(changes), letters, texts))


def lacking_column(
    lacks: Mapping[str, NDArray[np.bool_]],
    length: int,
    letters: pa.Array | None = None,
    parts: pa.Array | None = None,
) -> pa.StructArray:
    """The column `_klog_lacking` of changes that lack these values."""
    matrix = np.array(list(lacks.values()), np.bool_).reshape(len(lacks), length).T
    ends = np.append(0, np.cumsum(matrix.sum(axis=1))).astype(np.int32)
    names = pa.array(list(lacks), pa.string()).take(pa.array(np.nonzero(matrix)[1]))
    lists = pa.ListArray.from_arrays(pa.array(ends), names)
    letters, parts = (pa.nulls(length, pa.string()) if each is None else each for each in (letters, parts))
    arrays = [lists, letters, parts]
    return pa.StructArray.from_arrays(arrays, fields=list(LACKING_TYPE), mask=pa.array(~matrix.any(axis=1)))


def of_rows(
    changes: pa.Table,
    key: Sequence[str],
    truncations: pa.Table,
    kinds: pa.Schema,
    rows: Rows,
    *,
    has_values: bool = True,
) -> tuple[pa.Table, NDArray[np.bool_]]:
    """The changes with those values that they lack and that the row before has, and which of them have no such row.

    `rows` are those of the table, whose key and place are of `kinds`. Changes that are older than their row may be left
    out. Without values only the second is right. A row that has not what a change has changed a part of is none.
    """
    if not (lacks := lacking(changes)):
        return changes, np.zeros(len(changes), np.bool_)
    has_values |= any(_parts(changes).values())
    names, wanted = list(lacks) if has_values else [], [*key, *place_of(changes.schema)]
    kinds = pa.schema([kinds.field(name).remove_metadata() for name in wanted])
    places = changes.select(wanted).cast(kinds)
    asked = places.filter(pa.array(np.logical_or.reduce(list(lacks.values()))))
    like = pa.schema([*kinds, *(changes.schema.field(name) for name in names)])
    batches = [like.empty_table()]
    for batch in rows(like.names, asked.select(key)):
        part = pa.Table.from_batches([batch]).select(like.names).cast(like)  # deltalake's views of texts have no take
        batches.append(part.take(pa.array(np.unique(matching(part, asked, key)[0]))))
    known = pa.concat_tables(batches)
    known = known.filter(pa.array(~outlived(known, truncations)))
    in_rows, in_changes = matching(known, places, key)
    is_left = np.ones(len(changes), np.bool_)
    is_left[in_changes[~newer(places.take(pa.array(in_changes)), known.take(pa.array(in_rows)))]] = False
    changes = changes.filter(pa.array(is_left))
    # the rows, as changes before the others
    columns = [
        known[field.name].cast(field.type) if field.name in known.column_names else pa.nulls(len(known), field.type)
        for field in changes.schema
    ]
    before = _with(pa.table(columns, changes.schema), DELETED, pa.array(np.zeros(len(known), np.bool_)))
    both = pa.concat_tables([before, changes])
    made = _with_values_before(both, key, last_rows(both, [*key, PARTITION])).slice(len(before))
    lost, is_last = np.zeros(len(made), np.bool_), np.zeros(len(made), np.bool_)
    is_last[last_rows(made, key)] = True
    has_none = np.logical_or.reduce([lost, *lacking(made).values()])
    # those before it, too
    last = made.filter(pa.array(is_last & has_none & ~mask(made[DELETED])))
    lost[matching(last, made, key)[1]] = True
    lost = has_none & (lost | is_last)
    impossible = [
        row for row, of_row in _parts(made).items() if any(not part[0] for each in of_row.values() for part in each)
    ]
    if not impossible:
        return made, lost
    of_key = np.unique(matching(made.take(pa.array(impossible)), made, key)[1])
    of_both = np.unique(matching(made.take(pa.array(impossible)), both, key)[1])
    one_by_one, is_lost = _one_by_one(both.take(pa.array(of_both)), key)
    is_change = of_both >= len(before)
    lost[of_key] = is_lost[is_change]
    numbers_made = np.arange(len(made))
    numbers_made[of_key] = len(made) + np.flatnonzero(is_change)
    return pa.concat_tables([made, one_by_one]).take(pa.array(numbers_made)), lost


def _one_by_one(changes: pa.Table, key: Sequence[str]) -> tuple[pa.Table, NDArray[np.bool_]]:
    """The changes, of which some are impossible, each with the values that it lacks and the one before it leaves, and
    which of them there is none for: these leave what was there."""
    lost, made, before = np.zeros(len(changes), np.bool_), [], dict[int, pa.Table]()
    for number, group in enumerate(_groups(changes, key).tolist()):
        known = before.get(group, changes.slice(0, 0))
        both = pa.concat_tables([known, changes.slice(number, 1)])
        now = _with_values_before(both, key, np.array([len(known)])).slice(len(known))
        lost[number] = not now[LACKING].null_count
        made.append(now)
        if not lost[number] or now[DELETED][0].as_py():
            before[group] = now
    return pa.concat_tables(made), lost


def last_rows(table: pa.Table, names: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of those rows after which none has the same values, in their order."""
    places = numbered(table, names)
    rows = places.group_by(places.column_names[:-1], use_threads=False).aggregate([(places.column_names[-1], "max")])
    return np.sort(numbers(rows[-1]))


def numbered(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Some columns, called by their numbers, and the number of each row. Of floats -0.0 is 0.0."""
    columns = [*(without_sign(table[name]) for name in names), pa.array(np.arange(len(table)))]
    return pa.table(columns, names=[str(number) for number in range(len(columns))])


def matching(rows: pa.Table, changes: pa.Table, key: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of rows and of changes that have the same key, pair by pair."""
    mine, theirs = numbered(rows, key), numbered(changes, key)
    *names, last = mine.column_names
    pairs = mine.join(theirs.rename_columns([*names, f"{last} of changes"]), names, join_type="inner")
    return numbers(pairs[last]), numbers(pairs[f"{last} of changes"])


class Outcome:
    """Which changes of a table's rows come to be its rows. `changes` are those of `ordered`.

    `replace` is given all rows that may have one of the keys, in any number of calls; then `latest` is the result.
    """

    def __init__(self, changes: pa.Table, key: Sequence[str], kinds: pa.Schema) -> None:
        """`kinds` has the types of the key and of the place in the table."""
        names = [*key, *place_of(changes.schema)]
        self._key = key
        self._places = changes.select(names).cast(pa.schema([kinds.field(name).remove_metadata() for name in names]))
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
        ranks = np.where(is_past, -1, of_changes)
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
        return left[last_rows(self._places.take(pa.array(left)), self._key)]


def newer(changes: pa.Table, rows: pa.Table) -> NDArray[np.bool_]:
    """Which changes are later than the rows beside them, by the places of both. A row without a place is the older.

    If both have an order, that counts first.
    """
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
    later = np.where(part == part_of_row, within, across)
    if ORDER in changes.schema.names and ORDER in rows.schema.names:
        orders = changes[ORDER], rows[ORDER]
        later = mask(pc.greater(*orders)) | (later & ~mask(pc.less(*orders)))
    result: NDArray[np.bool_] = is_lost | later
    return result
