"""Loads into tables that they partition themselves: by columns, and in Iceberg by transforms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings, strategies as st
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import parse_transform

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files.folder import LocalFolder
from spark_klog.load.audit import status
from spark_klog.load.run import LoadOptions
from spark_klog.load.settings import VALUES, WriteSettings
from spark_klog.load.table_columns import dated_columns
from spark_klog.load.tasks import writers
from spark_klog.tables.iceberg_partitions import by_partition
from spark_klog.tables.iceberg_schema import to_iceberg
from spark_klog.tables.partitions import Term, as_numbers, layout_text, parse_terms
from tests.load.support import Killed, die, failing, run
from tests.load.tables import Lake, make_lake
from tests.spark.support import Sent, create_topic, produce
from tests.support.spark.spark_tables import SparkTables

_SCHEMA = "id bigint, city string, price decimal(9,2), day date, at timestamp, flag boolean, inner struct<code int>"
_CITIES = ["Zürich/a=b%2F 1", "x", "", None, "'; --", "__HIVE_DEFAULT_PARTITION_", "a\nb", "x"]
_TIMES = ["2026-01-05T23:59:59.999999Z", "1969-12-31T23:00:00Z", None, "2026-03-01T00:00:00.5Z"]
_TRANSFORMS = "bucket(3, id), truncate(2, city), month(at), year(day), inner.code, price, flag"


def _row(number: int) -> dict[str, Any]:
    time = _TIMES[number % len(_TIMES)]
    return {
        "id": number,
        "city": _CITIES[number % len(_CITIES)],
        "price": [12.5, None, -0.01][number % 3],
        "day": [None, "2026-01-05", "1969-12-31"][number % 3],
        "at": time,
        "flag": [True, False, None][number % 3],
        "inner": [None, {"code": None}, {"code": 7}][number % 3],
    }


def _expected(number: int) -> tuple[Any, ...]:
    row = _row(number)
    at = row["at"] and datetime.fromisoformat(row["at"].replace("Z", "+00:00").replace("00.5+", "00.500000+"))
    code = row["inner"] and row["inner"]["code"]
    price = None if row["price"] is None else Decimal(str(row["price"])).quantize(Decimal("0.01"))
    day = row["day"] and date.fromisoformat(row["day"])
    return number, row["city"], price, day, at, row["flag"], code


def _found(table: pa.Table) -> list[tuple[Any, ...]]:
    rows = []
    for row in table.select(["id", "city", "price", "day", "at", "flag", "inner"]).to_pylist():
        at = row["at"] and row["at"].astimezone(timezone.utc)
        inner = row["inner"] and row["inner"]["code"]
        rows.append((*(row[name] for name in ("id", "city", "price", "day")), at, row["flag"], inner))
    return sorted(rows, key=lambda row: row[0])


def _send(servers: str, topic: str, numbers: range, **values: Any) -> None:
    rows = [json.dumps(_row(number) | values).encode() for number in numbers]
    produce(servers, topic, [Sent(row, b"%d" % number) for number, row in zip(numbers, rows, strict=True)])


def _partitions(lake: Lake) -> set[tuple[Any, ...]]:
    """The partitions of the table's files."""
    if lake.kind == "iceberg":
        files = lake.catalog.load_table(lake.name).scan().plan_files()
        return {tuple(item.file.partition[place] for place in range(len(item.file.partition))) for item in files}
    table = DeltaTable(lake.uri)
    names = [f"partition.{name}" for name in table.metadata().partition_columns]
    return {tuple(row[name] for name in names) for row in pa.table(table.get_add_actions(flatten=True)).to_pylist()}


def _check(lake: Lake, count: int) -> None:
    expected = [_expected(number) for number in range(count)]
    if lake.kind == "delta":  # an empty text is null in a partition's values: PROTOCOL.md
        expected = [(row[0], row[1] or None, *row[2:]) for row in expected]
    for name, read in lake.readers().items():
        if name != "duckdb" or lake.kind == "iceberg":  # Delta's files do not have the columns
            found = [(row[0], row[1] or None, *row[2:]) if lake.kind == "delta" else row for row in _found(read())]
            assert found == expected, name  # Polars has an empty text by the folder of deltalake's merge


_LONG = ["ü" * 5000, "ü" * 5000 + "x", "x" * 5000, "__HIVE_DEFAULT_PARTITION__", None]


def test_texts_that_are_no_names_of_folders(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Delta: appends have them, read by Polars they are others; deltalake's merge has no folder for them."""
    servers, lake = cluster.bootstrap_servers, make_lake("delta", tmp_path, monkeypatch)
    create_topic(servers, topic)
    for number, city in enumerate(_LONG):
        _send(servers, topic, range(number, number + 1), city=city)
    how = WriteSettings(schema=_SCHEMA, table_columns=VALUES, layout="city")
    run(servers, lake.address, topic, settings=how)
    for name in ("deltalake", "polars"):
        table = lake.readers()[name]().sort_by("id")
        found = table["city"].to_pylist()
        assert len(set(found)) == len(_LONG)
        if name == "deltalake":
            assert found == _LONG
        else:
            assert [city and city.partition("+")[0] for city in found] == [city and city[:12] for city in _LONG]
    other = make_lake("delta", tmp_path / "other", monkeypatch)
    message = r"the partition column city of a row begins with '(ü|x)+' and has 500. letters: deltalake can't name"
    with pytest.raises(LoadError, match=message):
        run(servers, other.address, topic, settings=replace(how, table_columns="records", upsert_key="id"))


@pytest.mark.parametrize(
    ("kind", "layout", "columns"),
    [
        ("delta", "city, day, at, flag", "values"),
        ("iceberg", _TRANSFORMS, "values"),
        ("iceberg", "city, bucket(2, city), hour(at), bucket(2, price)", "values"),
        ("iceberg", "truncate(3, value.city), bucket(2, key), hour(timestamp), partition", "records"),
    ],
)
def test_appends(
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    layout: str,
    columns: str,
) -> None:
    """All rows are there once, by all readers, after a run that was killed, too, and no file has two partitions."""
    monkeypatch.setattr(writers, "MOST_PARTITIONS", 5)
    servers, lake = cluster.bootstrap_servers, make_lake(kind, tmp_path, monkeypatch)
    how = WriteSettings(schema=_SCHEMA, table_columns=columns, layout=layout)
    create_topic(servers, topic)
    _send(servers, topic, range(24))
    # nothing binds a load whose first run was killed
    with pytest.raises(Killed), failing(LocalFolder, -3, die):
        run(servers, lake.address, topic, settings=replace(how, layout="none"))
    run(servers, lake.address, topic, settings=how)
    _send(servers, topic, range(24, 48))
    with pytest.raises(Killed), failing(LocalFolder, -8, die):
        run(servers, lake.address, topic, settings=how)
    run(servers, lake.address, topic, settings=how)
    if columns == "values":
        _check(lake, 48)
    else:
        values = [row["value"]["id"] for row in lake.readers()["pyiceberg"]().to_pylist()]
        assert sorted(values) == list(range(48))
    assert len(_partitions(lake)) > 4
    assert status(lake.address).findings == []
    other = "belongs to a load with --partition-by .*, not with --partition-by id"
    with pytest.raises(LoadError, match=other):
        run(servers, lake.address, topic, settings=replace(how, layout="id"))


@pytest.mark.peer
@pytest.mark.test_all("client")
@pytest.mark.parametrize(("kind", "layout"), [("delta", "city, day, at, flag"), ("iceberg", _TRANSFORMS)])
def test_spark_reads_them(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, layout: str
) -> None:
    servers, lake = cluster.bootstrap_servers, make_lake(kind, tmp_path, monkeypatch)
    create_topic(servers, topic)
    _send(servers, topic, range(24))
    run(servers, lake.address, topic, settings=WriteSettings(schema=_SCHEMA, table_columns=VALUES, layout=layout))
    name = f"delta.`{lake.uri}`" if kind == "delta" else f"tests.{lake.name}"
    columns = "id, city, price, day, unix_micros(at) AS at, flag"
    with SparkTables(lake.kind, tmp_path / "spark", "tests", lake.warehouse) as spark:
        for where in ("true", "city = 'x'", "at >= '2026-01-01T00:00:00Z'", "price = 12.5", "at IS NULL"):
            found = spark.sql(f"SELECT {columns} FROM {name} WHERE {where} ORDER BY id").to_pydict()
            assert found["id"] == [number for number in range(24) if _is_in(_expected(number), where)], where
            for number, city, price, at in zip(*(found[key] for key in ("id", "city", "price", "at")), strict=True):
                row = _expected(number)
                assert (city, price) == (row[1] if kind == "iceberg" else row[1] or None, row[2])
                assert at == (None if row[4] is None else round(row[4].timestamp() * 1_000_000))


def _is_in(row: tuple[Any, ...], where: str) -> bool:
    by_text: Mapping[str, bool] = {
        "true": True,
        "city = 'x'": row[1] == "x",
        "at >= '2026-01-01T00:00:00Z'": row[4] is not None and row[4].year >= 2026,
        "price = 12.5": row[2] == Decimal("12.50"),
        "at IS NULL": row[4] is None,
    }
    return by_text[where]


@pytest.mark.parametrize(
    ("kind", "layout"), [("delta", "city, day"), ("iceberg", "bucket(4, id), truncate(1, city), month(at), price")]
)
def test_upserts(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, layout: str
) -> None:
    """A row that changes its partition leaves the old one; others may partition the table otherwise afterwards."""
    servers, lake = cluster.bootstrap_servers, make_lake(kind, tmp_path, monkeypatch)
    how = WriteSettings(schema=_SCHEMA, upsert_key="id", layout=layout)
    create_topic(servers, topic)
    _send(servers, topic, range(24))
    run(servers, lake.address, topic, settings=how)
    _check(lake, 24)
    assert len(_partitions(lake)) > 4
    _send(servers, topic, range(24), city="moved", day="2030-01-01", at=None, price=1)
    run(servers, lake.address, topic, settings=how)
    place = {"delta": {("moved", date(2030, 1, 1))}, "iceberg": {(n, "m", None, Decimal("1.00")) for n in range(4)}}
    assert _partitions(lake) == place[kind]
    if kind == "iceberg":
        with lake.catalog.load_table(lake.name).update_spec() as update:
            update.remove_field("price")
    _send(servers, topic, range(24))
    with pytest.raises(Killed), failing(LocalFolder, -5, die):
        run(servers, lake.address, topic, settings=how)
    run(servers, lake.address, topic, settings=how)
    _check(lake, 24)
    assert status(lake.address).findings == []


def test_what_does_not_fit_is_refused(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written: transforms of Delta, types, columns that are not there, the tables of others."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    _send(servers, topic, range(4))
    delta, iceberg = (make_lake(kind, tmp_path, monkeypatch) for kind in ("delta", "iceberg"))
    wrong = [
        (delta, "day(at)", r"can't be partitioned by day\(at\), as Delta's tables are by columns alone: name a column"),
        (delta, "weekly", "has no column weekly to be partitioned by"),
        (delta, "_klog_partition", "can't be partitioned by _klog_partition, which tells where a row is from"),
        (delta, "price", "can't be partitioned by price, which is decimal"),
        (delta, "inner", "can't be partitioned by inner, which is struct"),
        (iceberg, "weekly", "has no column weekly to be partitioned by"),
        (iceberg, "day(id)", "can't be partitioned by the day of id, which is long: Iceberg does so by timestamps"),
        (iceberg, "inner", "can't be partitioned by inner, which is struct"),
    ]
    for lake, layout, message in wrong:
        for key in ("", "id"):
            columns = "records" if key else VALUES
            how = WriteSettings(schema=_SCHEMA, table_columns=columns, layout=layout, upsert_key=key)
            with pytest.raises(LoadError, match=message):
                run(servers, lake.address, topic, settings=how)
            assert not lake.exists()
    for lake in (delta, iceberg):
        with pytest.raises(LoadError, match=r"no column city .*: fields of the values are columns"):
            run(servers, lake.address, topic, settings=WriteSettings(schema=_SCHEMA, layout="city"))
    mine = WriteSettings(schema=_SCHEMA, upsert_key="id", layout="city")
    DeltaTable.create(delta.uri, pa.schema([("id", pa.int64()), ("city", pa.string())]), partition_by=["id"])
    with pytest.raises(LoadError, match="is partitioned by id; the load's would be partitioned by city"):
        run(servers, delta.address, topic, settings=mine)
    run(servers, delta.address, topic, settings=replace(mine, layout="none"))
    assert {row[0] for row in _partitions(delta)} == set(range(4))


_LONGS = st.integers(-(1 << 62), 1 << 62)
_MICROSECONDS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
_COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), _LONGS),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.date32(), st.integers(-719_162, 2_932_896)),
    (pa.timestamp("us"), _MICROSECONDS),
    (pa.timestamp("us", tz="UTC"), _MICROSECONDS),
    (pa.string(), st.text()),
    (pa.binary(), st.binary()),
    (pa.decimal128(9, 2), st.decimals(-9_999_999, 9_999_999, places=2)),
]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_partitions_are_those_of_pyiceberg(data: st.DataObject) -> None:
    """Of values of all types by all transforms: rows of one partition are together, whatever their values."""
    kind, values = data.draw(st.sampled_from(_COLUMNS))
    column = pa.array(data.draw(st.lists(st.none() | values, max_size=20)), kind)
    texts = ["identity", "bucket[1]", "bucket[16]", "bucket[1000003]", "truncate[1]", "truncate[7]"]
    transform = parse_transform(data.draw(st.sampled_from([*texts, "year", "month", "day", "hour"])))
    schema = to_iceberg([pa.field("c", kind)])
    if not transform.can_transform(schema.find_type("c")):
        return
    spec = PartitionSpec(PartitionField(1, 1000, transform, "p"))
    made = transform.transform(schema.find_type("c"))
    raw = as_numbers(column).to_pylist()
    expected: dict[Any, list[Any]] = {}
    for value in raw:
        expected.setdefault(None if value is None else made(value), []).append(value)
    parts = [(one[0], part) for one, part in by_partition(pa.table({"c": column}), spec, schema)]
    assert len(parts) == len(expected)
    assert {key: as_numbers(part["c"].combine_chunks()).to_pylist() for key, part in parts} == expected


def test_layouts() -> None:
    terms = parse_terms("days(ts),bucket(16, id) , `odd, name`, truncate( 4,a.b), identity(day), CITY")
    assert terms == (
        *(Term("ts", "day"), Term("id", "bucket", 16), Term("odd, name"), Term("a.b", "truncate", 4)),
        *(Term("day"), Term("CITY")),
    )
    text = "day(ts), bucket(16, id), `odd, name`, truncate(4, a.b), identity(day), CITY"
    assert layout_text(terms) == text
    assert parse_terms(text) == terms
    for wrong, message in {
        "day(": "must be none, day, hour, or names",
        "a,,b": "must be none",
        "a,": "must be none",
        "bucket(id)": r"write bucket\(16, id\)",
        "bucket(0, id)": r"write bucket\(16, id\)",
        "truncate(99999999999, id)": r"write truncate\(16, id\)",
        "day(4, ts)": r"write day\(ts\)",
        "week(ts)": "no transform week, but identity, year",
        "a, identity(a)": "twice",
    }.items():
        with pytest.raises(ConfigError, match=message):
            WriteSettings(layout=wrong)
    with pytest.raises(ConfigError, match=r"name a column of the rows, as 'day\(FIELD\)'"):
        WriteSettings(schema="id bigint", upsert_key="id", layout="day")
    dated = WriteSettings(schema="at timestamp, city string", table_columns=VALUES, layout="at, city")
    assert dated_columns(dated, has_ids=False) == {"at", "city"}  # the text needs none, having no date
    assert dated_columns(dated, has_ids=True) == set()
    assert dated_columns(replace(dated, layout="day(at), city"), has_ids=True) == {"at"}
    with pytest.raises(ConfigError, match="columns are for --table"):
        LoadOptions({}, ["t"], "/tmp/out", WriteSettings(layout="city"))
