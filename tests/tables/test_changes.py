"""Records become changes of rows, and the last change of a key wins, as a model in plain Python says."""

from __future__ import annotations

import json
import math
import random
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.errors import ConfigError, LoadError
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.tables import change_files
from spark_klog.tables.change_order import Outcome, last_changes, newer, order_texts, ordered
from spark_klog.tables.changes import UNAVAILABLE, ChangeFormat, debezium_type
from tests.tables.change_support import (
    FORMAT,
    Change,
    applied,
    change_batch,
    is_later,
    records,
    rows_in,
    rows_of,
    written,
)

ROW = pa.struct([pa.field("id", pa.int64()), pa.field("name", pa.string())])
ENVELOPE = debezium_type(ROW)
ID = pa.struct([pa.field("id", pa.int32())])


@st.composite
def logs(draw: st.DrawFn) -> list[Change]:
    """Changes of few keys in some partitions, in the order in which their records were appended."""
    ends: dict[tuple[int, int], int] = {}
    made = []
    for time in range(draw(st.integers(1, 40))):
        place = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        ends[place] = ends.get(place, 0) + draw(st.integers(1, 3))
        name = draw(st.sampled_from([None, "a", "b"]))
        made.append(Change(draw(st.integers(0, 6)), name, place[1], ends[place], time // 2, place[0]))
    return made


@settings(deadline=None, max_examples=15)
@given(logs(), st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from([300, 1 << 27]))
def test_the_last_changes_of_each_key_are_in_one_slice(log: list[Change], random: Any, files: int, size: int) -> None:
    """However the log is dealt out to files, one of each partition."""
    dealt: list[list[Change]] = [[] for _ in range(files)]
    for one in log:
        dealt[random.randrange(files)].append(one)
    with TemporaryDirectory() as folder:
        found = list(written(Path(folder), (change_batch(each) for each in dealt if each), size).slices())
    last = {(one.id, one.partition): one for one in sorted(log, key=lambda one: (one.incarnation, one.offset))}
    names = ("id", "_klog_partition", "_klog_incarnation", "_klog_offset")
    kept = [[tuple(row.values()) for row in each.select(names).to_pylist()] for each in found]
    assert sorted(change for each in kept for change in each) == sorted(
        (one.id, one.partition, one.incarnation, one.offset) for one in last.values()
    )
    assert sum(len({change[0] for change in each}) for each in kept) == len({one.id for one in log})


@settings(deadline=None, max_examples=15)
@given(logs(), logs())
def test_a_change_is_compared_with_the_row_in_the_table(one: list[Change], other: list[Change]) -> None:
    pairs = list(zip(one, other, strict=False))
    changes, rows = (pa.Table.from_batches([change_batch([pair[side] for pair in pairs])]) for side in (0, 1))
    assert newer(changes, rows).tolist() == [is_later(*pair) for pair in pairs]


@settings(deadline=None, max_examples=25)
@given(logs(), logs(), st.randoms(use_true_random=False), st.booleans())
def test_which_changes_become_rows(before: list[Change], log: list[Change], random: Any, is_again: bool) -> None:
    """By a model, of clocks in any order, and of logs that begin before the rows' own changes."""
    before, log = ([one._replace(time=random.randrange(10)) for one in each] for each in (before, log))
    rows = applied({}, before)
    if is_again:  # a place of a log has one record
        places = {(change.incarnation, change.partition, change.offset) for change in before}
        others = [change for change in log if (change.incarnation, change.partition, change.offset) not in places]
        log = [*before[len(before) // 2 :], *others]
    changes = ordered(last_changes(pa.Table.from_batches([change_batch(log)]), FORMAT.key), FORMAT.key)
    outcome = Outcome(changes, FORMAT.key, FORMAT.row)
    gone: set[int] = set()
    parts = [part for part in ([*rows.values()][::2], [*rows.values()][1::2]) if part]
    for part in parts:
        of_rows, of_changes = outcome.replace(pa.Table.from_batches([change_batch(part)]))
        gone |= {part[number].id for number in of_rows.tolist()}
        assert changes["id"].take(pa.array(of_changes)).to_pylist() == [part[number].id for number in of_rows.tolist()]
    kept = pa.Table.from_batches([change_batch([one for one in rows.values() if one.id not in gone])])
    new = changes.take(pa.array(outcome.latest))
    left = pa.concat_tables([kept, new.filter(pa.compute.invert(new["_klog_deleted"]))])
    expected = [(one.id, one.name, one.offset / 2, one.partition, one.offset) for one in applied(rows, log).values()]
    assert rows_in(left) == sorted(expected)


def test_a_writer_holds_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_files, "_MOST_HELD", 4_000)
    paths: list[tuple[Path, int]] = []
    writer = change_files.ChangeWriter(FORMAT.key, tmp_path, lambda *file: paths.append(file))
    log = [Change(number * number % 300, f"name-{number}", 0, number) for number in range(2000)]
    for start in range(0, len(log), 50):
        writer.add(change_batch(log[start : start + 50]))
    writer.finish()
    assert len(paths) > 3
    assert sum(changes for _, changes in paths) < len(log)
    monkeypatch.setattr(change_files, "_MOST_HELD", 1 << 20)
    files = change_files.ChangeFiles(pa.fs.LocalFileSystem(), [str(path) for path, _ in paths], FORMAT.key, 1_000)
    found = list(files.slices())
    assert len(found) > 3
    assert rows_in(pa.concat_tables(found)) == rows_of(log)


def test_a_slice_may_be_one_slot(tmp_path: Path) -> None:
    log = [Change(number, "a", 0, number) for number in range(5)]
    found = list(written(tmp_path, [change_batch(log[:3]), change_batch(log[2:])], 1).slices())
    assert len(found) == 5
    assert rows_in(pa.concat_tables(found)) == rows_of(log)


def test_files_of_an_older_schema(tmp_path: Path) -> None:
    """A run that has met a newer schema on its way keeps what its tasks have written by the older one."""
    place = pa.struct([pa.field("city", pa.string())])
    wider = pa.struct([*place, pa.field("zip", pa.string())])
    paths: list[str] = []
    for offset, kind in enumerate((place, wider)):
        value = pa.struct([pa.field("at", kind), *([pa.field("more", pa.int64())] if offset else [])])
        plain = records([Change(offset, "a", 0, offset)])
        columns = dict(zip(plain.schema.names, plain.columns, strict=True))
        columns["value"] = pa.array([{"at": {"city": "x", "zip": "1"}, "more": 5}], value)
        writer = change_files.ChangeWriter(("id",), tmp_path, lambda path, _changes: paths.append(str(path)))
        writer.add(ChangeFormat(plain["key"].type, value).changes(pa.RecordBatch.from_pydict(columns)))
        writer.finish()
    [found] = change_files.ChangeFiles(pa.fs.LocalFileSystem(), paths, ("id",)).slices()
    assert sorted(found.select(["id", "at", "more"]).to_pylist(), key=lambda row: row["id"]) == [
        {"id": 0, "at": {"city": "x", "zip": None}, "more": None},
        {"id": 1, "at": {"city": "x", "zip": "1"}, "more": 5},
    ]


def envelopes(*values: Any, keys: list[Any] | None = None) -> pa.RecordBatch:
    """Records with these values, as text of JSON, parsed as a load parses them; None is a tombstone."""
    texts = pa.array([None if value is None else json.dumps(value).encode() for value in values], pa.binary())
    parsed, bad = JsonDecoder(column_of(ENVELOPE, DDL)).decode(texts, [None])
    assert not bad
    plain = records([Change(0, "", 1, 10 + number) for number in range(len(values))])
    columns = dict(zip(plain.schema.names, plain.columns, strict=True)) | {"value": parsed}
    columns["key"] = pa.nulls(len(values), pa.binary()) if keys is None else pa.array(keys, ID)
    return pa.RecordBatch.from_pydict(columns)


def shown(changes: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """(id, name, offset, whether it is deleted), of deletions without the name."""
    rows = changes.select(["id", "name", "_klog_offset", "_klog_deleted"]).to_pylist()
    return [
        (row["id"], None if row["_klog_deleted"] else row["name"], row["_klog_offset"], row["_klog_deleted"])
        for row in rows
    ]


ADA, BOB, BEA = {"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}, {"id": 2, "name": "Bea"}


def test_debeziums_operations() -> None:
    by_id = ChangeFormat(pa.binary(), ENVELOPE, ("id",), "debezium")
    found = by_id.changes(
        envelopes(
            {"before": None, "after": ADA, "op": "r", "source": {"snapshot": "first"}, "ts_ms": 5},
            {"schema": {"type": "struct"}, "payload": {"before": None, "after": BOB, "op": "c"}},
            {"before": BOB, "after": BEA, "op": "u"},
            {"op": "m", "message": {"prefix": "x"}},
            {"payload": {"before": BEA, "after": None, "op": "d"}},
            None,
        )
    )
    assert shown(found) == [
        (1, "Ada", 10, False),
        (2, "Bob", 11, False),
        (2, "Bea", 12, False),
        (2, None, 14, True),
    ]
    assert by_id.key == ("id",)
    assert by_id.row.names == ["id", "name", "_klog_incarnation", "_klog_partition", "_klog_offset", "_klog_timestamp"]


def test_an_update_that_changes_the_key_deletes_the_row_of_the_old_one() -> None:
    by_id = ChangeFormat(pa.binary(), ENVELOPE, ("id",), "debezium")
    lost = {"id": None, "name": None}
    found = by_id.changes(
        envelopes({"before": ADA, "after": BOB, "op": "u"}, {"before": lost, "after": BEA, "op": "u"})
    )
    assert sorted(shown(found), key=str) == [(1, None, 10, True), (2, "Bea", 11, False), (2, "Bob", 10, False)]
    last = last_changes(pa.Table.from_batches([found]), ["id"])
    assert sorted(shown(last.to_batches()[0]), key=str) == [(1, None, 10, True), (2, "Bea", 11, False)]


def test_a_tombstone_deletes_by_the_records_key() -> None:
    """Of a log that is compacted only the tombstone may be left."""
    by_key = ChangeFormat(ID, ENVELOPE, (), "debezium")
    values = [{"before": None, "after": ADA, "op": "c"}, {"before": None, "op": "d"}, None]
    found = by_key.changes(envelopes(*values, keys=[{"id": 1}, {"id": 2}, {"id": 3}]))
    assert shown(found) == [(1, "Ada", 10, False), (2, None, 11, True), (3, None, 12, True)]
    assert found.schema.field("id").type == pa.int64(), "the row's own type"


def test_a_tombstone_deletes_by_a_key_of_json() -> None:
    """With or without Connect's wrapper. What is no key of the row is skipped: it has a deletion before it."""
    wide = debezium_type(pa.struct([*ROW, pa.field("day", pa.date32())]))
    keys = [
        b'{"id": 1}',
        b'{"schema": {"type": "struct"}, "payload": {"id": 2}}',
        b'{"id": 3, "of": "another"}',
        *(b"[" * 100_000, b"k", b"7", None, b"{}", b'{"id": null}', b'{"id": "x"}', b'{"id": 1} {"id": 2}', b"\xff"),
        b'{"id": 9, "day": "2026-01-05"}',
        b'{"id": 9, "day": "2026-01-06Z"}',
    ]
    batch = envelopes(*[None] * len(keys)).set_column(0, "key", pa.array(keys, pa.binary()))
    assert shown(ChangeFormat(pa.binary(), ENVELOPE, ("id",), "debezium").changes(batch)) == [
        (1, None, 10, True),
        (2, None, 11, True),
        (3, None, 12, True),
        (9, None, 22, True),
        (9, None, 23, True),
    ]
    batch = batch.set_column(1, "value", pa.nulls(len(keys), wide))
    found = ChangeFormat(pa.binary(), wide, ("id", "day"), "debezium").changes(batch)
    assert found.select(["id", "day"]).to_pylist() == [
        {"id": 9, "day": date(2026, 1, 5)},
        {"id": 9, "day": date(2026, 1, 6)},
    ]


def test_a_deletion_without_its_row_goes_by_a_key_of_json() -> None:
    keys = pa.array([b'{"id": 1}', b'{"id": 7}', b'{"id": 3}'], pa.binary())
    lost = {"id": None, "name": None}
    batch = envelopes({"before": None, "op": "d"}, {"before": BOB, "op": "d"}, {"before": lost, "op": "d"})
    found = ChangeFormat(pa.binary(), ENVELOPE, ("id",), "debezium").changes(batch.set_column(0, "key", keys))
    assert shown(found) == [(1, None, 10, True), (2, None, 11, True), (3, None, 12, True)]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([b'{"id": 7}', b'{"id": 2}', b'{"payload": {"id": 3}}', b"k"], pa.binary()),
        pa.array(['{"id": 7}', '{"id": 2}', '{"payload": {"id": 3}}', None]),
    ],
)
def test_a_tombstone_of_a_plain_row_goes_by_a_key_of_json(keys: pa.Array) -> None:
    plain = records([Change(0, "", 1, 5 + number) for number in range(4)])
    rows = pa.array([ADA, None, None, None], ROW)
    columns = dict(zip(plain.schema.names, plain.columns, strict=True)) | {"key": keys, "value": rows}
    batch = pa.RecordBatch.from_pydict(columns)
    by_id = ChangeFormat(keys.type, ROW, ("id",))
    assert shown(by_id.changes(batch.slice(0, 3))) == [(1, "Ada", 5, False), (2, None, 6, True), (3, None, 7, True)]
    with pytest.raises(LoadError, match="offset 8, has no id"):
        by_id.changes(batch)
    numbers = batch.set_column(0, "key", pa.array([1, 2, 3, 4]))
    with pytest.raises(LoadError, match="offset 6, has no id"):
        ChangeFormat(pa.int64(), ROW, ("id",)).changes(numbers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"op": "x", "after": ADA}, "rows-1, offset 10, has the operation 'x'"),
        ({"after": ADA}, "has the operation None"),
        ({"op": "u", "before": ADA}, "has the operation 'u' and no row"),
        ({"op": "d", "after": ADA}, "has no id"),
        ({"op": "u", "after": {"id": 3, "name": UNAVAILABLE}}, "REPLICA IDENTITY FULL"),
    ],
)
def test_records_that_are_no_changes_are_named(value: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        ChangeFormat(pa.binary(), ENVELOPE, ("id",), "debezium", unavailable="dead-letter").changes(envelopes(value))


def test_a_truncation_is_a_deletion_without_a_key() -> None:
    by_id = ChangeFormat(ID, ENVELOPE, (), "debezium")
    batch = envelopes({"op": "t"}, {"op": "c", "after": ADA}, keys=[{"id": 7}, {"id": 1}])
    assert shown(by_id.changes(batch)) == [(None, None, 10, True), (1, "Ada", 11, False)]


def test_texts_are_in_the_order_of_their_fields() -> None:
    """Whole numbers before other texts, by their values, and nulls first."""
    values = [None, -(10**12), -12, -2, 0, 7, 10, 99, 100, 2**63 - 1]
    rows = [(one, other) for one in values for other in (None, "", "0009", "10", "9a", "b")]
    random.Random(1).shuffle(rows)
    columns = [pa.array([row[0] for row in rows], pa.int64()), pa.array([row[1] for row in rows])]
    found = order_texts(columns).to_pylist()
    wanted = {None: -1, "0009": 1, "10": 2, "": 3, "9a": 4, "b": 5}
    keys = [(-math.inf if one is None else one, wanted[other]) for one, other in rows]
    assert [text is None for text in found] == [row == (None, None) for row in rows]
    by_text = sorted(range(len(rows)), key=lambda number: found[number] or "")
    assert [keys[number] for number in by_text] == sorted(keys)
    texts = order_texts([pa.array([None if one is None else str(one) for one in values])]).to_pylist()
    assert texts == order_texts([pa.array(values, pa.decimal128(20, 0))]).to_pylist()
    assert texts[-3:] == ["02:99", "03:100", "19:9223372036854775807"]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("source.lsn",), None),
        (("ts_ms", "after.name"), None),
        (("name",), None),
        (("source",), "'source': it is struct"),
        (("source.pos",), "'source.pos': there is no such field, only id, name, source..."),
        (("lsn",), "'lsn': there is no such field"),
    ],
)
def test_fields_of_an_order(order: tuple[str, ...], message: str | None) -> None:
    kind = debezium_type(ROW, {"source.lsn": pa.int64(), "ts_ms": pa.int64()})
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            ChangeFormat(ID, kind, (), "debezium", order)
        return
    by_order = ChangeFormat(ID, kind, (), "debezium", order)
    values = [
        {"op": "c", "after": BOB, "source": {"lsn": 8}, "ts_ms": 3},
        {"payload": {"op": "d", "before": BOB, "source": {"lsn": 9}, "ts_ms": 4}},
        None,
        {"op": "t", "source": {"lsn": 10}, "ts_ms": 5},
    ]
    batch = envelopes(*[None] * 4, keys=[{"id": 2}, {"id": 2}, {"id": 2}, None])
    found = by_order.changes(batch.set_column(1, "value", pa.array(values, kind)))
    expected = {
        "source.lsn": ["01:8", "01:9", None, "02:10"],
        "ts_ms": ["01:3\x1f~Bob", "01:4\x1f~Bob", None, "01:5\x1f"],
        "name": ["~Bob", "~Bob", None, None],
    }
    assert found["_klog_order"].to_pylist() == expected[order[0]]


def test_a_row_without_an_order_is_bad() -> None:
    kind = debezium_type(ROW, {"source.lsn": pa.int64()})
    batch = envelopes(None).set_column(1, "value", pa.array([{"op": "c", "after": ADA}], kind))
    with pytest.raises(LoadError, match=r"offset 10, has no source.lsn, by which its change is ordered"):
        ChangeFormat(pa.binary(), kind, ("id",), "debezium", ("source.lsn",)).changes(batch)


_BYTES = list(UNAVAILABLE.encode())


@pytest.mark.parametrize(
    ("kind", "mark", "good"),
    [
        (pa.string(), "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==", "X19k"),
        (pa.string(), f'{{"{UNAVAILABLE}":"{UNAVAILABLE}"}}', "{}"),
        (pa.binary(), UNAVAILABLE.encode(), b""),
        (pa.list_(pa.string()), [UNAVAILABLE], ["a", UNAVAILABLE]),
        (pa.list_(pa.string()), ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"], [None]),
        (pa.list_(pa.binary()), [UNAVAILABLE.encode()], []),
        (pa.list_(pa.int32()), _BYTES, [*_BYTES[:-1], None]),
        (pa.large_list(pa.int64()), _BYTES, _BYTES[::-1]),
        (pa.list_(pa.float64()), _BYTES, _BYTES[1:]),
        (pa.list_(pa.decimal128(10, 2)), _BYTES, [1] * len(_BYTES)),
        (pa.map_(pa.string(), pa.string()), [(UNAVAILABLE, UNAVAILABLE)], [("a", UNAVAILABLE)]),
        (pa.list_(pa.struct([pa.field("a", pa.int64())])), None, [{"a": 1}]),
    ],
)
def test_a_value_that_the_connector_does_not_have(kind: pa.DataType, mark: Any, good: Any) -> None:
    """As Debezium's UnchangedToastedPlaceholder has it for columns of these types."""
    row = pa.struct([*ROW, pa.field("more", kind)])
    values = [{"op": "u", "after": {"id": at, "more": more}} for at, more in enumerate((good, mark, None, good))]
    values.append({"op": "d", "before": {"id": 4, "more": mark}})
    batch = envelopes(*[None] * 5).set_column(1, "value", pa.array(values, debezium_type(row)))
    arguments: tuple[Any, ...] = pa.binary(), debezium_type(row), ("id",), "debezium", ()
    kept = ChangeFormat(*arguments).changes(batch)["_klog_lacking"].to_pylist()
    assert [each and each["columns"] for each in kept] == [None, ["more"] if mark else None, None, None, None]
    bad: dict[int, str] = {}
    found = ChangeFormat(*arguments, "dead-letter").changes(batch, bad=bad)
    assert list(bad) == ([] if mark is None else [1])
    assert found["id"].to_pylist() == [at for at in range(5) if at not in bad]


def test_plain_rows_by_the_records_key_or_a_field() -> None:
    batch = records([Change(1, "a", 0, 5), Change(2, None, 0, 6)])
    assert shown(FORMAT.changes(batch)) == [(1, "a", 5, False), (2, None, 6, True)]
    by_name = ChangeFormat(batch["key"].type, batch["value"].type, ("name",))
    with pytest.raises(LoadError, match="rows-0, offset 6, has no name"):
        by_name.changes(batch)
    assert by_name.changes(batch.slice(0, 1))["name"].to_pylist() == ["a"]


def test_bytes_are_rows_of_two_columns() -> None:
    plain = ChangeFormat(pa.binary(), pa.binary())
    assert (plain.key, plain.row.names[:2]) == (("key",), ["key", "value"])
    batch = records([Change(1, "a", 0, 5)] * 2)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns |= {"key": pa.array([b"k", b"l"]), "value": pa.array([b"v", None], pa.binary())}
    found = plain.changes(pa.RecordBatch.from_pydict(columns))
    assert found.select(["key", "value", "_klog_deleted"]).to_pylist() == [
        {"key": b"k", "value": b"v", "_klog_deleted": False},
        {"key": b"l", "value": None, "_klog_deleted": True},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((pa.binary(), ROW, ("ids",)), "no such field, only id, name"),
        ((pa.binary(), ROW, ("id", "name", "id")), "upsert key 'id' is named twice"),
        ((pa.binary(), pa.struct([pa.field("id", ROW)]), ("id",)), "name fields with plain values"),
        ((pa.binary(), pa.struct([pa.field("_Klog_Offset", pa.int64())]), ("_Klog_Offset",)), "rename it"),
        ((pa.binary(), pa.struct([pa.field("key", pa.int64())])), "has a field 'key'"),
        ((pa.binary(), ENVELOPE, (), "debezium"), "keys are bytes"),
        ((ID, ROW, (), "debezium"), "no field before"),
        ((ID, debezium_type(pa.string()), (), "debezium"), "MongoDB"),
        ((ID, ROW, (), "maxwell"), "must be one of none, debezium"),
    ],
)
def test_formats_that_can_not_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChangeFormat(*arguments)
