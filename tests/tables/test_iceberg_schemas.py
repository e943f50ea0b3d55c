"""Schemas and files of Iceberg tables: what is added, widened, renamed and refused; bounds, partitions, field ids."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, StructType, TimestamptzType

from spark_klog.columns.schema import FULL, with_types
from spark_klog.errors import LoadError
from spark_klog.tables.iceberg_schema import changes, to_arrow, to_iceberg
from spark_klog.tables.table import with_aliases
from tests.tables.iceberg_tables import LOAD, Warehouse, before_commit, rows, run_of, write

_AT = datetime(2024, 1, 1, 5, 30, tzinfo=timezone.utc)


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


def _of(**values: pa.DataType) -> pa.Schema:
    return with_types(FULL, {"value": pa.struct(list(values.items()))})


def _values(warehouse: Warehouse) -> dict[int, Any]:
    """The values of the rows as pyiceberg reads them, by offset."""
    return {row["offset"]: row["value"] for row in warehouse.stranger().scan().to_arrow().to_pylist()}


def test_columns_are_added_widened_and_renamed(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared(
        "none",
        _of(a=pa.int32(), old=pa.float32(), deep=pa.list_(pa.struct([("x", pa.int32())])), n=pa.decimal128(9, 2)),
    )
    first = {"a": 1, "old": 0.5, "deep": [{"x": 1}], "n": Decimal("1.23")}
    table.append([write(table, schema, "1", rows([1], value=first))], run_of(1, 1))
    renamed = with_aliases(pa.field("new", pa.float64()), ["older", "old"])
    item = pa.struct([("x", pa.int64()), ("y", pa.string())])
    others = [("a", pa.int64()), ("deep", pa.list_(item)), ("n", pa.decimal128(12, 2)), ("z", pa.date32())]
    kind = pa.struct([renamed, *others])
    schema = table.prepare(with_types(FULL, {"value": kind}), "none", "timestamp", LOAD)
    assert schema.field("value").type.names == ["new", "a", "deep", "n", "z"]
    assert schema.field("value").type == pa.struct(
        [("new", pa.float64()), ("a", pa.int64()), ("deep", pa.list_(pa.field("element", item))), *list(kind)[3:]]
    )
    second = {
        "a": 1 << 40,
        "new": 0.25,
        "deep": [{"x": 1 << 40, "y": "y"}],
        "n": Decimal("12345678.90"),
        "z": date(2024, 1, 1),
    }
    table.append([write(table, schema, "2", rows([2], value=second))], run_of(2, 2))
    # a run that still has the old columns writes what it has, by the table's types
    old = _of(a=pa.int32(), deep=pa.list_(pa.struct([("x", pa.int32())])))
    schema = table.prepare(old, "none", "timestamp", LOAD)
    assert schema.field("value").type.field("a").type == pa.int64()
    table.append([write(table, schema, "3", rows([3], value={"a": 3, "deep": [{"x": 3}]}))], run_of(3, 3))
    found = _values(warehouse)
    assert found[1] == {"a": 1, "new": 0.5, "deep": [{"x": 1, "y": None}], "n": Decimal("1.23"), "z": None}
    assert found[2] == second
    assert found[3] == {"a": 3, "new": None, "deep": [{"x": 3, "y": None}], "n": None, "z": None}
    assert warehouse.offsets(row_filter="value.a > 100") == [2]
    assert table.compact(1 << 20) == 3  # also files of before the list's items changed
    assert _values(warehouse) == found
    (path,) = warehouse.stranger().inspect.files()["file_path"].to_pylist()
    value = pq.read_schema(path.removeprefix("file://")).field("value").type
    assert value.field("deep").type.value_type.names == ["x", "y"]


def test_a_column_that_is_not_the_loads_is_not_renamed(warehouse: Warehouse) -> None:
    """Neither one that the table had before its first load, nor one that the user adds; also by a later process."""
    text, at = pa.string(), pa.field("timestamp", pa.timestamp("us", tz="UTC"))
    warehouse.catalog.create_namespace("ns")
    warehouse.catalog.create_table("ns.t", pa.schema([pa.field("before", text), at]))

    def prepared(*columns: pa.Field) -> list[str]:
        warehouse.open().prepare(pa.schema([*columns, at]), "none", "", LOAD)
        return warehouse.stranger().schema().as_arrow().names

    assert prepared(with_aliases(pa.field("a", text), ["before"])) == ["before", "timestamp", "a"]
    with warehouse.stranger().update_schema() as update:
        update.add_column("note", StringType())
    again = with_aliases(pa.field("b", text), ["note", "a"])
    assert prepared(again) == ["before", "timestamp", "b", "note"]
    assert prepared(again, with_aliases(pa.field("c", text), ["note"])) == ["before", "timestamp", "b", "note", "c"]


def test_the_column_of_the_partitions_is_renamed(warehouse: Warehouse) -> None:
    kind, table = pa.timestamp("us", tz="UTC"), warehouse.open()
    schema = table.prepare(_of(of=pa.struct([("at", kind)])), "hour", "value.of.at", LOAD)
    table.append([write(table, schema, "1", rows([1], value={"of": {"at": _AT}}))], run_of(1, 1))
    renamed = with_aliases(pa.field("time", pa.struct([with_aliases(pa.field("event", kind), ["at"])])), ["of"])
    columns = with_types(FULL, {"value": pa.struct([renamed])})
    with pytest.raises(LoadError, match=r"by the hour of value\.of\.at; the load's .* hour of timestamp"):
        table.prepare(columns, "hour", "timestamp", LOAD)
    schema = table.prepare(columns, "hour", "value.time.event", LOAD)
    table.append([write(table, schema, "2", rows([2], value={"time": {"event": _AT}}))], run_of(2, 2))
    assert warehouse.offsets(row_filter="value.time.event = '2024-01-01T05:30:00+00:00'") == [1, 2]


def test_what_does_not_fit_is_named(warehouse: Warehouse) -> None:
    fields = [
        NestedField(1, "topic", IntegerType(), required=False),
        NestedField(2, "value", StructType(NestedField(3, "a", StringType(), required=True)), required=False),
        NestedField(4, "who", StringType(), required=True),
        NestedField(5, "offset", LongType(), required=True),
        NestedField(6, "timestamp", TimestamptzType(), required=False),
        NestedField(7, "PARTITION", IntegerType(), required=False),
    ]
    spec = PartitionSpec(PartitionField(5, 1000, BucketTransform(4), "b"))
    warehouse.catalog.create_namespace("ns")
    warehouse.catalog.create_table("ns.t", Schema(*fields), partition_spec=spec)
    table = warehouse.open()
    with pytest.raises(
        LoadError, match=r"is partitioned by the bucket\[4\] of offset; the load's would be partitioned by the hour"
    ):
        table.prepare(FULL, "hour", "timestamp", LOAD)
    with warehouse.stranger().update_spec() as update:
        update.remove_field("b")
    with pytest.raises(LoadError) as caught:
        table.prepare(_of(a=pa.string()), "none", "timestamp", LOAD)
    for difference in (
        "topic is int in the table, string in the load",
        "value.a is required in the table, and may be null in the load",
        "who is required in the table, and the load has none",
        "offset is required in the table, and may be null in the load",
        "partition and PARTITION differ by case only",
    ):
        assert difference in str(caught.value)
    assert warehouse.open().load_id() is None  # nothing has changed
    with pytest.raises(LoadError, match=r"column value\.t: Iceberg \(format version 2\) has no timestamp\[ns\]"):
        Warehouse(Path(warehouse.catalog.properties["warehouse"].removeprefix("file://")), "ns.u").prepared(
            "none", _of(t=pa.timestamp("ns"))
        )


def test_layouts_and_owners(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared("day")
    table.append([write(table, schema, "1", rows([1]))], run_of(1, 1))
    for layout, message in (
        ("hour", "by the day of timestamp; the load's .* hour of timestamp"),
        ("none", "not partitioned"),
    ):
        kind = layout
        with pytest.raises(LoadError, match=message):
            table.prepare(FULL, kind, "timestamp", LOAD)
    with pytest.raises(LoadError, match="belongs to load load-1, this is load-2"):
        table.prepare(FULL, "day", "timestamp", "load-2")
    with pytest.raises(LoadError, match=r"no column value\.at to be partitioned by"):
        table.prepare(FULL, "day", "value.at", LOAD)
    other = Warehouse(Path(table.location.removeprefix("file://")), "ns.u")
    with pytest.raises(LoadError, match=r"by the hour of value\.at, which is date: Iceberg does so by timestamps$"):
        other.open().prepare(_of(at=pa.date32()), "hour", "value.at", LOAD)
    assert other.open().schema() is None


def test_a_table_without_rows_keeps_the_layout_that_its_user_gave_it(warehouse: Warehouse) -> None:
    columns = pa.schema([pa.field("timestamp", pa.timestamp("us", tz="UTC"))])
    spec = PartitionSpec(PartitionField(1, 1000, DayTransform(), "of_day"))
    warehouse.catalog.create_namespace("ns")
    warehouse.catalog.create_table("ns.t", to_iceberg(columns), partition_spec=spec)
    table = warehouse.open()
    table.prepare(columns, "day", "timestamp", LOAD)
    with pytest.raises(LoadError, match=r"by the day of timestamp; the load's .* hour of timestamp"):
        table.prepare(columns, "hour", "timestamp", LOAD)


@pytest.mark.parametrize("first", ["hour", "day"])
@pytest.mark.parametrize(
    ("values", "layout", "time_column"),
    [
        ({"a": pa.int64()}, "none", ""),
        ({"at": pa.string()}, "none", ""),
        ({"at": pa.date32()}, "day", "value.at"),
        ({"at": pa.string(), "by": pa.timestamp("us")}, "hour", "value.by"),
        ({"a": pa.int64()}, "hour", "timestamp"),
    ],
)
def test_a_time_column_that_no_commit_has_binds_no_later_run(
    warehouse: Warehouse, first: str, values: dict[str, pa.DataType], layout: str, time_column: str
) -> None:
    """It goes, or gets another type, although the table was partitioned by it."""
    refused = warehouse.open()
    schema = refused.prepare(_of(at=pa.timestamp("us")), first, "value.at", LOAD)
    table = warehouse.open()
    schema = table.prepare(_of(**values), layout, time_column, LOAD)
    assert [one.name for one in warehouse.stranger().schema().find_type("value").fields] == list(values)
    examples = {"a": 1, "at": "2024-01-01" if values.get("at") == pa.string() else date(2024, 1, 1), "by": _AT}
    value = {name: examples[name] for name in values}
    table.append([write(table, schema, "1", rows([1], value=value))], run_of(1, 1))
    by = {name: one.replace(tzinfo=None) if isinstance(one, datetime) else one for name, one in value.items()}
    assert _values(warehouse) == {1: by}
    found = warehouse.stranger()
    source = [found.schema().find_column_name(field.source_id) for field in found.spec().fields]
    assert source == [time_column] * (layout != "none")
    with pytest.raises(LoadError, match=r"iceberg:c\.ns\.t "):
        refused.prepare(_of(at=pa.timestamp("us")), first, "value.at", LOAD)


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("us"),
        *(pytest.param(one, marks=pytest.mark.test_all("long")) for one in (pa.timestamp("us", tz="UTC"), pa.date32())),
    ],
    ids=str,
)
def test_partitions_by_a_field_of_the_values(warehouse: Warehouse, kind: pa.DataType) -> None:
    layout: str = "day" if pa.types.is_date(kind) else "hour"
    table = warehouse.open()
    schema = table.prepare(_of(at=kind), layout, "value.at", LOAD)

    def at(hour: int) -> Any:
        when = datetime(1969, 12, 31, hour, 1, tzinfo=timezone.utc)
        return date(1969, 12, 31) if layout == "day" else when if kind.tz else when.replace(tzinfo=None)

    files = [write(table, schema, str(hour), rows([hour], value={"at": at(hour)})) for hour in (3, 4)]
    table.append([*files, write(table, schema, "null", rows([9], value={"at": None}))], run_of(1, 5))
    table.append([write(table, schema, "none", rows([10], value=None))], run_of(2, 5))
    text = {"day": "1969-12-31", "hour": "1969-12-31T04:00:00"}[layout] + ("+00:00" if "UTC" in str(kind) else "")
    assert warehouse.offsets(row_filter=f"value.at >= '{text}'") == ([3, 4] if layout == "day" else [4])
    assert warehouse.offsets(row_filter="value.at IS NULL") == [9, 10]
    values = {one.file.partition[0] for one in warehouse.stranger().scan().plan_files()}
    assert values == ({-1, None} if layout == "day" else {-21, -20, None})
    mixed = write(table, schema, "mixed", rows([11], value={"at": at(3)}) + rows([12], value=None))
    with pytest.raises(LoadError, match=r"mixed\.parquet has null and other values of value\.at"):
        table.append([mixed], run_of(3, 5))
    if layout == "hour":
        two = write(table, schema, "two", rows([11], value={"at": at(3)}) + rows([12], value={"at": at(4)}))
        with pytest.raises(LoadError, match=r"value\.at of several partitions: hours -21 to -20"):
            table.append([two], run_of(3, 5))
    assert table.last_run(LOAD) == run_of(2, 5)
    assert table.compact(1 << 20) == (4 if layout == "day" else 2)
    assert warehouse.offsets(row_filter="value.at IS NULL") == [9, 10]


_TYPES = [
    (pa.bool_(), [False, True]),
    (pa.int8(), [-5, 7]),
    (pa.uint32(), [0, 1 << 31]),
    (pa.uint64(), [0, (1 << 64) - 1]),
    (pa.float32(), [-1.5, 2.5]),
    (pa.float64(), [-1e300, 2.5]),
    (pa.decimal128(5, 2), [Decimal("-1.28"), Decimal("327.67")]),
    (pa.decimal128(38, 0), [Decimal(-(10**37)), Decimal(10**37)]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.time32("ms"), None),
    (pa.time64("us"), None),
    (pa.timestamp("ms", tz="Europe/Berlin"), [_AT, _AT]),
    (pa.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 12, 31)]),
    (pa.binary(3), [b"abc", b"\xff\xff\xff"]),
    (pa.large_string(), ["", "\U0010ffff" * 20]),
    (pa.string(), ["a" * 17, "ä" * 17]),
    (pa.large_binary(), [b"", b"\xff" * 20]),
    (pa.map_(pa.string(), pa.list_(pa.int16())), [[("a", [1, None])], []]),
]


def test_types_and_bounds(warehouse: Warehouse) -> None:
    columns = pa.schema([*FULL, *(pa.field(f"c{number}", kind) for number, (kind, _) in enumerate(_TYPES))])
    table, schema = warehouse.prepared("none", columns)
    assert not [one for one in schema.types if "large" in str(one)]
    times = {9: [1000, 2000], 10: [1, 86_399_999_999]}
    records = rows([1, 2])
    for index, record in enumerate(records):
        for number, (_, values) in enumerate(_TYPES):
            record[f"c{number}"] = values[index] if values else pa.scalar(times[number][index], pa.time64("us")).as_py()
    for number, codec in enumerate(("zstd", "none"), start=1):
        options = {"compression": codec, "store_decimal_as_integer": number == 2}
        table.append([write(table, schema, str(number), records, **options)], run_of(number, 2))
    found = warehouse.stranger().scan().to_arrow().sort_by("offset").to_pylist()
    for row, wanted in zip(found, sorted([*records, *records], key=lambda one: one["offset"]), strict=True):
        for name, value in wanted.items():
            mine = row[name].astimezone(timezone.utc) if isinstance(value, datetime) and value.tzinfo else row[name]
            assert mine == value, name
    iceberg = warehouse.stranger().schema()
    for task in warehouse.stranger().scan().plan_files():
        for number, (_, values) in enumerate(_TYPES[:-1]):
            field = iceberg.find_field(f"c{number}")
            low = from_bytes(field.field_type, task.file.lower_bounds[field.field_id])
            raw = task.file.upper_bounds.get(field.field_id)
            if number in (14, 16):
                assert raw is None  # no text or bytes of 16 are larger
                continue
            assert raw is not None
            high = from_bytes(field.field_type, raw)
            if number == 15:
                assert low == "a" * 16
                assert "ä" * 17 <= high <= "å" * 16
            elif values and not isinstance(values[0], date | datetime):
                assert [low, high] == values, number
            assert low <= high
        assert task.file.record_count == 2


def test_a_row_group_without_statistics_has_no_bounds(warehouse: Warehouse) -> None:
    """Parquet's writer leaves out values of more than 4 KB; bounds of the other row group would hide rows."""
    table, schema = warehouse.prepared()
    records = rows([1], value=b"a") + rows([2], value=b"z" * 5000)
    table.append([write(table, schema, "1", records, row_group_size=1)], run_of(1, 2))
    [task] = warehouse.stranger().scan().plan_files()
    value = warehouse.stranger().schema().find_field("value").field_id
    assert value not in task.file.upper_bounds
    assert task.file.value_counts[value] == 2
    plain = pa.schema([pa.field("offset", pa.int64())])
    with pytest.raises(LoadError, match=r"plain\.parquet has a column without a field id"):
        table.append([write(table, plain, "plain", [{"offset": 1}])], run_of(2, 2))


def test_a_column_that_others_rename_or_widen_before_the_commit(warehouse: Warehouse) -> None:
    table, schema = warehouse.prepared("none")
    file = write(table, schema, "1", rows([1]))
    with warehouse.stranger().update_schema() as update:
        update.rename_column("value", "content")
        update.update_column("partition", LongType())
    table.append([file], run_of(1, 1))
    [row] = warehouse.stranger().scan().to_arrow().to_pylist()
    assert (row["content"], row["partition"]) == (b"000001", 0)


@pytest.mark.parametrize("how", ["dropped", "replaced by the corrected schema", "during the commit"])
def test_no_value_is_lost_by_a_column_that_goes_before_the_commit(warehouse: Warehouse, how: str) -> None:
    table, schema = warehouse.prepared("none")
    table.append([write(table, schema, "1", rows([1]))], run_of(1, 1))
    more = [pa.schema([*FULL, pa.field("more", kind)]) for kind in (pa.int32(), pa.float64())]
    schema = table.prepare(more[0], "none", "timestamp", LOAD, "tasks")
    file = write(table, schema, "2", rows([2], more=7))

    def change() -> None:
        if how == "dropped":
            with warehouse.stranger().update_schema() as update:
                update.delete_column("more")
        else:
            warehouse.open().prepare(more[1], "none", "timestamp", LOAD, "plan")

    if how == "during the commit":
        before_commit(table, change)
    else:
        change()
    with pytest.raises(LoadError, match=r"2\.parquet has a column more \(field id \d+\) .*: run again"):
        table.append([file], run_of(2, 2))
    assert warehouse.offsets() == [1]
    schema = table.prepare(more[1], "none", "timestamp", LOAD, "tasks")
    table.append([write(table, schema, "3", rows([2], more=7.0))], run_of(2, 2))
    assert warehouse.stranger().scan().to_arrow().sort_by("offset")["more"].to_pylist() == [None, 7.0]


def test_a_commit_names_the_columns_that_its_files_are_written_by(warehouse: Warehouse) -> None:
    """A catalog that compares what a commit requires, and nothing else, is a REST catalog."""
    table, schema = warehouse.prepared("none")
    file = write(table, schema, "1", rows([1]))
    catalog, asked = table._catalog, list[Any]()
    real = catalog.commit_table

    def commit(at: Any, requirements: Any, updates: Any) -> Any:
        asked.extend(one.current_schema_id for one in requirements if one.type == "assert-current-schema-id")
        return real(at, requirements, updates)

    catalog.commit_table = commit  # type: ignore[method-assign]
    table.append([file], run_of(1, 1))
    assert asked == [warehouse.stranger().schema().schema_id]


def test_arrow_and_back() -> None:
    kinds = [kind for kind, _ in _TYPES]
    columns = pa.schema([pa.field(f"c{number}", kind) for number, kind in enumerate(kinds)])
    schema = to_iceberg(columns)
    assert not changes(schema, columns, ())
    assert not changes(schema, columns, ()).differences
    assert not changes(schema, to_arrow(schema), ())
    ids = [one.field_id for one in schema.fields]
    assert len(set(ids)) == len(kinds)
