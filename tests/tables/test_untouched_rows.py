"""Rows that an upsert or a compaction only moves keep each value, whatever their types, and what became of these since.

The rows are compared with those that were written, which a model in plain Python has changed as the table's schema was.
DuckDB reads the files that the table has afterwards.
"""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import DataFileContent
from pyiceberg.types import DecimalType, DoubleType, LongType, StringType

from spark_klog.tables.table import DataFile, Table
from tests.tables.change_support import FORMAT, Change
from tests.tables.iceberg_tables import delete_by_file
from tests.tables.test_upserts import Source, catalog_options, run

_ITEM = pa.struct([("a", pa.int32()), ("gone", pa.string())])
_DEEP = pa.struct(
    [("inner", pa.struct([("n", pa.list_(pa.map_(pa.string(), pa.list_(pa.float32()))))])), ("a", pa.int32())]
)
_COLUMNS = pa.schema(
    [
        ("b", pa.bool_()),
        ("i", pa.int32()),
        ("l", pa.int64()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("dec", pa.decimal128(9, 2)),
        ("day", pa.date32()),
        ("ts", pa.timestamp("us")),
        ("tz", pa.timestamp("us", "UTC")),
        ("s", pa.string()),
        ("x", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("items", pa.list_(_ITEM)),
        ("words", pa.map_(pa.string(), pa.int32())),
        ("pairs", pa.map_(pa.string(), pa.struct([("a", pa.decimal128(5, 2))]))),
        ("deep", _DEEP),
        ("lists", pa.list_(pa.list_(pa.int32()))),
        ("place", pa.struct([("city", pa.string())])),
    ]
)
_FULL = {
    "b": True,
    "i": -(2**31),
    "l": 2**63 - 1,
    "f": -0.0,
    "d": 1e308,
    "dec": Decimal("-1234567.89"),
    "day": date(1, 1, 1),
    "ts": datetime(9999, 12, 31, 23, 59, 59, 999999),
    "tz": datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc),
    "s": "",
    "x": b"\x00",
    "tags": ["x", None, ""],
    "items": [{"a": 1, "gone": "g"}, None, {"a": None, "gone": None}],
    "words": [("k", 1), ("", None)],
    "pairs": [("k", {"a": Decimal("1.50")}), ("n", None), ("e", {"a": None})],
    "deep": {"inner": {"n": [[("k", [0.5, None]), ("n", None), ("e", [])], None, []]}, "a": 7},
    "lists": [[1, None], None, []],
    "place": {"city": "x"},
}
_ROWS: list[dict[str, Any]] = [
    dict.fromkeys(_FULL),
    _FULL,
    {name: [] if isinstance(value, list) else None for name, value in _FULL.items()},
    _FULL
    | {"items": [None], "tags": [None], "lists": [None], "deep": {"inner": None, "a": None}, "place": {"city": None}},
    _FULL
    | {
        "items": None,
        "tags": None,
        "words": None,
        "pairs": None,
        "lists": None,
        "deep": {"inner": {"n": None}, "a": 1},
    },
]


def _evolved(row: dict[str, Any]) -> dict[str, Any]:
    """A row after `_evolve`: what a reader of the table sees."""

    def of(value: Any, change: Any) -> Any:
        return None if value is None else change(value)

    items = of(row["items"], lambda each: [of(one, lambda item: {"aa": item["a"], "b": None}) for one in each])
    pairs = of(row["pairs"], lambda each: [(k, of(v, lambda pair: {"a": pair["a"], "z": None})) for k, v in each])
    deep = of(
        row["deep"],
        lambda value: {"inner": of(value["inner"], lambda one: {"n": one["n"], "m": None}), "a": value["a"]},
    )
    place = of(row["place"], lambda value: {"zip": None, "city": value["city"]})
    return row | {"items": items, "pairs": pairs, "deep": deep, "place": place}


def _evolve(folder: Path) -> None:
    table = load_catalog("local", **catalog_options(folder)).load_table("space.table")
    with table.update_schema() as update:
        update.update_column("i", LongType()).update_column("f", DoubleType())
        update.update_column("dec", DecimalType(18, 2)).update_column(("words", "value"), LongType())
        update.update_column(("lists", "element", "element"), LongType())
        update.update_column(("deep", "inner", "n", "element", "value", "element"), DoubleType())
        update.update_column(("pairs", "value", "a"), DecimalType(9, 2)).add_column(
            ("pairs", "value", "z"), StringType()
        )
        update.rename_column(("items", "element", "a"), "aa").delete_column(("items", "element", "gone"))
        update.add_column(("items", "element", "b"), StringType()).add_column(("deep", "inner", "m"), StringType())
        update.add_column(("place", "zip"), StringType()).move_first(("place", "zip"))
        update.move_first("lists")


def _write(folder: Path, name: str, schema: pa.Schema, rows: list[dict[str, Any]]) -> DataFile:
    footers: list[Any] = []
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, folder / name, metadata_collector=footers, row_group_size=3)
    return DataFile(name, (folder / name).stat().st_size, footers[0])


def _read(table: Table, folder: Path) -> dict[int, dict[str, Any]]:
    paths = [str(folder / one.path) for one in table.files()]
    found = duckdb.read_parquet(paths, union_by_name=True, hive_partitioning=False).arrow().read_all().to_pylist()
    names = ("id", *_COLUMNS.names)
    rows = [{name: row[name] for name in names} for row in found]
    for row in rows:
        if row["tz"] is not None:
            row["tz"] = row["tz"].astimezone(timezone.utc)
    return {row.pop("id"): row for row in rows}


def _text(rows: dict[int, dict[str, Any]]) -> list[str]:
    """With the signs of zeros."""
    return [f"{key}: {dict(sorted(row.items()))}" for key, row in sorted(rows.items())]


@pytest.mark.parametrize("call", ["upsert", "upsert of rows with delete files", "compaction"])
def test_iceberg(call: str, tmp_path: Path) -> None:
    source = Source("iceberg", tmp_path)
    schema = source.table.prepare(pa.schema([*FORMAT.row, *_COLUMNS]), "none", "", "load")
    folder = Path(source.table.location.removeprefix("file://"))
    folder.mkdir(parents=True, exist_ok=True)
    batches = [[{"id": 10 * number + place, **row} for place, row in enumerate(_ROWS)] for number in (1, 2)]
    data = [_write(folder, f"{number}.parquet", schema, rows) for number, rows in enumerate(batches)]
    source.table.append(data, run(1))
    _evolve(tmp_path)
    wanted = {row["id"]: _evolved({name: row[name] for name in _COLUMNS.names}) for rows in batches for row in rows}
    if call == "compaction":
        assert source.table.compact(1 << 20) == 2
    else:
        if call != "upsert":
            table = load_catalog("local", **catalog_options(tmp_path)).load_table("space.table")
            for task in table.scan().plan_files():
                delete_by_file(table, task.file, 2, DataFileContent.POSITION_DELETES)
            wanted = {key: row for key, row in wanted.items() if key % 10 != 2}
        source.merge([Change(number, "new", 0, number) for number in (11, 21)], 2)
        wanted = {key: row for key, row in wanted.items() if key % 10 != 1}
    found = _read(source.table, folder)
    assert _text({key: row for key, row in found.items() if key in wanted}) == _text(wanted)
    assert len(found) == len(wanted) + (0 if call == "compaction" else 2)


def _plain(one: pa.Field) -> pa.Field:
    """A field as other writers have it, without ids and with large offsets."""
    kind = one.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_plain(child) for child in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(_plain(kind.key_field), _plain(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.large_list(_plain(kind.value_field))
    elif pa.types.is_string(kind):
        kind = pa.large_string()
    return pa.field(one.name, kind, one.nullable)


@pytest.mark.parametrize("call", ["upsert", "compaction"])
def test_delta(call: str, tmp_path: Path) -> None:
    """Fields are added in lists and structs, which deltalake can: not in maps, and numbers get no wider."""
    source = Source("delta", tmp_path)
    folder = tmp_path / "table"
    batches = [[{"id": 10 * number + place, **row} for place, row in enumerate(_ROWS)] for number in (1, 2)]
    schema = source.table.prepare(pa.schema([*FORMAT.row, *_COLUMNS]), "none", "", "load")
    source.table.append(
        [_write(folder, f"{number}.parquet", schema, rows) for number, rows in enumerate(batches)], run(1)
    )
    before = {row["id"]: {name: row[name] for name in _COLUMNS.names} for rows in batches for row in rows}
    assert _text(_read(source.table, folder)) == _text(before)
    more = {
        "items": pa.list_(pa.struct([*_ITEM, pa.field("b", pa.string())])),
        "place": pa.struct([("city", pa.string()), ("zip", pa.string())]),
    }
    columns = [pa.field(one.name, more.get(one.name, one.type)) for one in _COLUMNS]
    source.table.prepare(pa.schema([*FORMAT.row, *columns]), "none", "", "load")

    def evolved(row: dict[str, Any]) -> dict[str, Any]:
        items = row["items"] and [one and one | {"b": None} for one in row["items"]]
        return row | {"items": items, "place": row["place"] and row["place"] | {"zip": None}}

    wanted = {key: evolved(row) for key, row in before.items()}
    if call == "compaction":
        assert source.table.compact(1 << 20) == 2
    else:
        source.merge([Change(number, "new", 0, number) for number in (11, 21)], 2)
        wanted = {key: row for key, row in wanted.items() if key % 10 != 1}
    found = _read(source.table, folder)
    assert _text({key: row for key, row in found.items() if key in wanted}) == _text(wanted)
    assert len(found) == len(wanted) + (0 if call == "compaction" else 2)
