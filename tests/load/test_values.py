"""Values by a schema, and files by event time and time zone; Python's json and zoneinfo are the oracles."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from spark_klog.columns.room import decodable_parts
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, LoadError
from spark_klog.load.audit import status
from spark_klog.load.journal import paths
from spark_klog.load.run import LoadOptions, MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.load.values import field_times, read_schema
from spark_klog.restore import replay
from spark_klog.schemas.column_format import ColumnFormat
from spark_klog.schemas.json_schema import decoder as decoder_module
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.ddl import parse_schema, schema_text
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.schemas.rows import Decoded
from tests.load.support import by_duckdb, run
from tests.spark.support import Sent, create_topic, produce
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.klog import klog
from tests.support.clients.mirrors import read_topic

_TIME = 1_700_002_800_000  # 2023-11-14T23:00Z
_HOUR_MS = 3_600_000
_DDL = (
    "id bigint, name string, at timestamp, day date, price decimal(10,2), tags array<string>, place struct<lat: double>"
)
_GOOD = {
    "id": 7,
    "name": "näme",
    "at": "2023-11-14T23:30:00.5Z",
    "day": "2023-11-14",
    "price": "1.25",
    "tags": ["a", "b"],
    "place": {"lat": 1.5, "lon": 2},
    "more": [{}],
}
_PARSED = {
    "id": 7,
    "name": "näme",
    "at": datetime(2023, 11, 14, 23, 30, 0, 500_000, timezone.utc),
    "day": date(2023, 11, 14),
    "price": Decimal("1.25"),
    "tags": ["a", "b"],
    "place": {"lat": 1.5},
}
_BAD = [
    b"",
    b" ",
    b"1",
    b"[1]",
    b"{}{}",
    b'{"id":1',
    b'{"id":1} x',
    b'{"id":"1"}',
    b'{"id":1.5}',
    b'{"id":99999999999999999999}',
    b'{"name":"\xff"}',
    b'{"at":"noon"}',
    b'{"day":"2023-11-14T10:00:00"}',
    b'{"day":"0000-01-01"}',
    b'{"at":"9999-12-31T23:30:00-01:00"}',
    b'{"price":"x"}',
    b'{"tags":{}}',
    b'{"id":1,"id":2}',
    b'{}}null{"v":{}',
    b'{}}{"v":{}',
    b"\x00",
]


def parse(ddl: str, *rows: bytes | None) -> Decoded:
    decoded = JsonDecoder(column_of(parse_schema(ddl), DDL)).decode(pa.array(rows, pa.binary()), [None])
    decoded.values.validate(full=True)
    return decoded


def test_decimals_of_too_many_digits() -> None:
    parsed = parse("price decimal(9,2)", b'{"price":1234567}', b'{"price":12345678}')
    assert [row for row, _ in parsed.bad] == [1]


def test_lists_that_are_much_larger_in_columns() -> None:
    fields = ", ".join(f"f{number}: string" for number in range(100))
    crowded = b'{"many":[' + b"{}," * 100_000 + b"{}]}"
    ddl = f"id bigint, many array<struct<{fields}>>"
    parsed = parse(ddl, b'{"id":1}', crowded, None, b'{"many":[{},{}]}')
    ((row, why),) = parsed.bad
    assert (row, len(parsed.values)) == (1, 4)
    assert "more than 4 MiB, and 64 bytes for each byte of the record" in why


def test_lists_of_sparse_objects_are_read() -> None:
    fields = ", ".join(f"f{number}: string" for number in range(200))
    rows: list[Any] = [{"items": [{"id": number} for number in range(size)]} for size in (200, 2000)]
    texts = [json.dumps(row, separators=(",", ":")).encode() for row in rows]
    parsed = parse(f"items array<struct<id: bigint, {fields}>>", *texts)
    assert not parsed.bad
    assert [[one["id"] for one in items] for items in parsed.values.field("items").to_pylist()] == [
        list(range(size)) for size in (200, 2000)
    ]


def test_parts_of_a_batch_of_lists(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Each has at most 64 records that could take 4 MiB by their lists; all records are read."""
    create_topic(cluster.bootstrap_servers, topic)
    rows: list[Any] = [{"id": number, "many": [{"f1": str(number) * 1000}] * 2} for number in range(300)]
    values = [None if number % 7 == 3 else json.dumps(row).encode() for number, row in enumerate(rows)]
    produce(cluster.bootstrap_servers, topic, [Sent(value, b"key") for value in values])
    fields = ", ".join(f"f{number}: string" for number in range(400))
    settings = WriteSettings(schema=f"id bigint, many array<struct<{fields}>>")
    loaded = run(cluster.bootstrap_servers, tmp_path, topic, settings=settings)
    assert [(one.records, one.bytes) for one in loaded.partitions] == [(300, 900 + sum(map(len, filter(None, values))))]
    columns = ["offset", "value.id", "value.many.list.element.f1"]
    [path] = [str(path) for path in tmp_path.rglob("*.parquet")]
    read = [row["value"] for row in pq.ParquetFile(path).read(columns).sort_by("offset").to_pylist()]
    assert read == [row if values[number] else None for number, row in enumerate(rows)]

    sizes = np.array([0, 900_000, 10, 6000, *[6000] * 200, 0])
    ranges = decodable_parts(sizes, 2000)
    most = np.minimum(sizes * 2000, sizes * 64 + 4 * 2**20)
    assert [one for begin, end in ranges for one in range(begin, end)] == [*range(len(sizes))]
    assert len(ranges) == 4
    assert all(most[begin:end].sum() <= 256 * 2**20 for begin, end in ranges)
    assert decodable_parts(sizes, 0) == [(0, len(sizes))]
    assert decodable_parts(np.array([9_000_000, 9_000_000]), 2000) == [(0, 1), (1, 2)]
    assert decodable_parts(np.array([], np.int64), 2000) == []


def _nulls(value: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(_PARSED) | value


def test_dates_of_debezium() -> None:
    """With the Z of `time.precision.mode=isostring`, at each level and beside others; what has more there is bad."""
    ddl = "d date, l array<date>, s struct<d: date, t: string>, a array<struct<d: date>>"
    texts = ["2017-09-15Z", "2017-09-15", "0001-01-01Z", "2017-09-15ZZ", "2017-09-15z", "2017-02-29Z", "x\n2017-09-15Z"]
    rows: list[Any] = [{"d": t, "l": [None, t], "s": {"d": t, "t": t}, "a": [{"d": t}, None]} for t in texts]
    parsed = parse(ddl, *[json.dumps(row).encode() for row in [*rows, None]])
    assert [row for row, _ in parsed.bad] == [3, 4, 5, 6]

    def day(text: str) -> date:
        return date.fromisoformat(text.removesuffix("Z"))

    expected = [
        {"d": day(t), "l": [None, day(t)], "s": {"d": day(t), "t": t}, "a": [{"d": day(t)}, None]} for t in texts[:3]
    ]
    assert parsed.values.to_pylist() == [*expected, *[None] * 5]
    without_bad = parse(ddl, *[json.dumps(row).encode() for row in rows[:3]])
    assert without_bad.values.to_pylist() == expected


def test_parser() -> None:
    pretty = json.dumps(_GOOD, indent=2).encode()
    rows = [json.dumps(_GOOD).encode(), None, b"null", b"{}", pretty, b'{"id":null}']
    found = parse(_DDL, *rows)
    assert found.bad == []
    assert found.values.to_pylist() == [_PARSED, None, None, _nulls({}), _PARSED, _nulls({})]
    for bad in _BAD:
        found = parse(_DDL, b'{"id":1}', bad, b'{"id":2}')
        assert [row for row, _ in found.bad] == [1], bad
        assert found.values.to_pylist() == [_nulls({"id": 1}), None, _nulls({"id": 2})]
    found = parse(_DDL, *_BAD)
    assert (found.values.null_count, [row for row, _ in found.bad]) == (len(_BAD), [*range(len(_BAD))])


_ROWS = st.one_of(
    st.builds(lambda n, s: json.dumps({"id": n, "name": s}).encode(), st.integers(-(2**63), 2**63 - 1), st.text()),
    st.sampled_from([*_BAD, b"{}"]),
)


@given(st.lists(_ROWS, max_size=30))
@hypothesis_settings(deadline=None, max_examples=60, derandomize=True)
def test_each_value_is_parsed_or_named(rows: list[bytes]) -> None:
    parsed = parse("id bigint, name string", *rows)
    bad = {row for row, _ in parsed.bad}
    assert bad <= {index for index, row in enumerate(rows) if row in _BAD}
    for row, value in zip(rows, parsed.values.to_pylist(), strict=True):
        if row not in _BAD:
            expected = {name: item for name, item in json.loads(row).items() if name in ("id", "name")}
            assert value == {"id": None, "name": None} | expected


@pytest.mark.parametrize("bad", [b"{", b'{"id":"x"}', b'{"id":1.5}', b'{"at":"noon"}', b'{"tags":[1]}'])
def test_many_bad_values_cost_no_call_each(monkeypatch: pytest.MonkeyPatch, bad: bytes) -> None:
    calls, real = [0], decoder_module.read_json

    def read_json(*arguments: Any) -> Any:
        calls[0] += 1
        return real(*arguments)

    monkeypatch.setattr(decoder_module, "read_json", read_json)
    parsed = parse(_DDL, *[b"{}" if number % 3 == 0 else bad for number in range(9000)])
    assert [row for row, _ in parsed.bad] == [number for number in range(9000) if number % 3]
    assert parsed.values.null_count == 6000
    assert calls[0] < 100


@pytest.mark.parametrize("number", ["NaN", "-NaN", "Inf", "-Inf", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_bad_beside_any_other(number: str) -> None:
    row = f'{{"x":{number}}}'.encode()
    for rows in ([row], [row, b"bad"], [row, b'{"x":1}']):
        parsed = parse("x double", *rows)
        assert parsed.bad[0].row == 0
        assert parsed.values[0].as_py() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a name or a type is missing"),
        ("id", "a name or a type is missing at character 3"),
        ("id bigint name string", "unexpected text"),
        ("id number", "unknown type 'number'"),
        ("id bigint, id string", "field id is there twice"),
        ("tags array<string", "'>' is missing"),
        ("price decimal(50,2)", r"decimal\(50,2\) can't be"),
        ("a " + "array<" * 40, "more than 32 levels"),
        ("id int, at date, ID int", "id and ID differ by case only at character .*; leave one of them out"),
        ("place struct<lat: double, Lat: double>", "lat and Lat differ by case only"),
        ("id bigint NOT NULL, name string", "unexpected NOT at character .*; leave NOT NULL out"),
        ("place struct<lat: double not null>", "unexpected NOT .* leave NOT NULL out"),
        ("id bigint COMMENT 'the key'", "unexpected COMMENT .* leave the comment out"),
        ("tags array<string comment 'x'>", "unexpected COMMENT .* leave the comment out"),
        ("id bigint DEFAULT 7", "unexpected DEFAULT .* leave the default out"),
        ("struct<id: bigint>, name string", "unexpected text at character"),
    ],
)
def test_schemas_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_schema(text)


def test_schemas(tmp_path: Path) -> None:
    file = tmp_path / "schema.ddl"
    file.write_text(_DDL.replace(", ", ",\n  ").upper().replace("ID BIGINT", "id bigint"))
    kind = read_schema(_DDL + ", `odd ``name` int")
    assert parse_schema(schema_text(kind)) == kind
    assert read_schema(str(file))[0] == pa.field("id", pa.int64())
    assert parse_schema("STRUCT<id: bigint, price: dec(9,2), at timestamp_ltz>") == parse_schema(
        "id bigint, price decimal(9,2), at timestamp"
    )
    for missing in ("nofile.ddl", "no file.ddl", r"c:\no\file.ddl", "/no/file: here", ""):
        with pytest.raises(
            ConfigError, match=rf"--schema is neither a file nor DDL: schema {re.escape(repr(missing))}"
        ):
            read_schema(missing)
    file.write_text("id number")
    with pytest.raises(ConfigError, match=r"--schema file .*schema\.ddl: schema 'id number': unknown type"):
        read_schema(str(file))
    file.write_text("näme int", "latin-1")
    with pytest.raises(ConfigError, match=r"schema\.ddl can't be read: 'utf-8' codec"):
        read_schema(str(file))


@pytest.mark.parametrize("format_name", ["parquet", "json"])
def test_a_load_of_values(cluster: EmbeddedCluster, topic: str, tmp_path: Path, format_name: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    rows: list[bytes | None] = [json.dumps(_GOOD | {"id": n}).encode() for n in range(50)]
    for at, bad in enumerate(_BAD):
        rows.insert(at * 2, bad)
    rows.append(None)
    produce(servers, topic, [Sent(row, b"k", 0, _TIME, (("h", b"\x01"),)) for row in rows])
    asked = WriteSettings(format_name, "none", schema=schema_text(parse_schema(_DDL)))
    with pytest.raises(LoadError, match=f"has {len(_BAD)} bad record batches or values, more than --max-bad 3%"):
        run(servers, tmp_path, topic, settings=asked, max_bad=MaxBad(3, is_percent=True))
    loaded = run(servers, tmp_path, topic, settings=asked, max_bad=MaxBad(30, is_percent=True))
    [audit] = loaded.partitions
    assert (audit.records, audit.bad, loaded.bad, audit.unexplained) == (51, len(_BAD), len(_BAD), 0)
    assert audit.gaps == {"unparsed": len(_BAD)}
    good = [offset for offset, row in enumerate(rows) if row not in _BAD]
    [letters] = (tmp_path / paths.LETTERS).iterdir()
    lines = [json.loads(line) for line in letters.read_text().splitlines()]
    assert [(line["offset"], base64.b64decode(line["value"])) for line in lines] == [
        (offset, row) for offset, row in enumerate(rows) if row in _BAD
    ]
    assert (lines[0]["key"], lines[0]["headers"], lines[0]["timestamp"]) == ("aw==", [["h", "AQ=="]], _TIME)
    if format_name == "parquet":
        assert [place[2] for place in by_duckdb(tmp_path)] == good
        found = ds.dataset(tmp_path, format="parquet").to_table()["value"].to_pylist()
        assert found == [_PARSED | {"id": n} for n in range(50)] + [None]
        with duckdb.connect() as connection:
            [[total, name]] = connection.execute(
                f"SELECT sum(value.id), max(value.name) FROM read_parquet('{tmp_path}/*/*.parquet')"
            ).fetchall()
        assert (total, name) == (sum(range(50)), "näme")
    else:
        [path] = tmp_path.glob(f"{topic}/*.jsonl")
        first = json.loads(path.read_text().splitlines()[0])
        assert first["value"] == {
            name: value for name, value in _GOOD.items() if name not in ("more", "place", "at")
        } | {"id": 0, "place": {"lat": 1.5}, "at": "2023-11-14T23:30:00.500000+00:00"}
    found_status = status(str(tmp_path))
    assert (found_status.findings, found_status.partitions[0]["bad"]) == ([], len(_BAD))
    with pytest.raises(LoadError, match="belongs to a load with values of the schema"):
        run(servers, tmp_path, topic, settings=WriteSettings(format_name, "none"))
    assert str(len(_BAD)) in klog("load", "status", str(tmp_path)).stdout


def test_numbers_that_json_does_not_have(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """JSON lines stay valid for strict parsers: NaN and infinities are strings, which DuckDB reads back as numbers."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    inner = {"type": "record", "name": "In", "fields": [{"name": "y", "type": "float"}]}
    numbers = {"type": "array", "items": "double"}
    fields = [("x", "double"), ("more", ["null", numbers]), ("in", ["null", inner])]
    schema: Any = {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields]}
    rows: list[dict[str, Any]] = [
        {"x": math.nan, "more": [1, -math.inf], "in": None},
        {"x": math.inf, "more": None, "in": {"y": math.inf}},
        {"x": 1.5, "more": None, "in": None},
    ]
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, row)
        produce(servers, topic, [Sent(out.getvalue(), None, 0, _TIME)])
    form = ColumnFormat("value", "avro", None, text=json.dumps(schema))
    run(servers, tmp_path, topic, settings=WriteSettings("json", "none"), formats=(form,))
    [path] = tmp_path.glob(f"{topic}/*.jsonl")
    lines = [json.loads(line, parse_constant=pytest.fail)["value"] for line in path.read_text().splitlines()]
    assert lines == [
        {"x": "NaN", "more": [1, "-Infinity"], "in": None},
        {"x": "Infinity", "more": None, "in": {"y": "Infinity"}},
        {"x": 1.5, "more": None, "in": None},
    ]
    with duckdb.connect() as connection:
        found = connection.execute(
            "SELECT value.x, value.more[2] FROM read_json($1, columns = {value: 'STRUCT(x DOUBLE, more DOUBLE[])'})",
            [str(path)],
        ).fetchall()
    assert repr(found) == "[(nan, -inf), (inf, None), (1.5, None)]"


@pytest.mark.parametrize("schema", ["", "id bigint"])
def test_timestamps_without_microseconds(cluster: EmbeddedCluster, topic: str, tmp_path: Path, schema: str) -> None:
    """Nanoseconds sent as milliseconds: those records become dead letters, and all other records are loaded."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    times = dict(enumerate([_TIME * 10**6, _TIME, -(2**62), _TIME, 2**63 - 1, _TIME]))
    values = [b"no" if offset == 3 else b'{"id": 1}' for offset in times]
    batch = make_batch([(None, value) for value in values], list(times.values()))
    with RawClient(int(servers.rpartition(":")[2])) as client:
        assert client.produce(topic, bytes(batch), 7) == (0, 0)
    asked = WriteSettings(schema=schema)
    bad = [0, 2, 3, 4] if schema else [0, 2, 4]
    with pytest.raises(LoadError, match=f"has {len(bad)} bad record batches or values, more than --max-bad 1"):
        run(servers, tmp_path, topic, settings=asked, max_bad=MaxBad(1))
    loaded = run(servers, tmp_path, topic, settings=asked, max_bad=MaxBad(4))
    assert (loaded.bad, [item.error for item in loaded.partitions]) == (len(bad), [""])
    assert by_duckdb(tmp_path) == [(topic, 0, offset) for offset in times if offset not in bad]
    [letters] = (tmp_path / paths.LETTERS).iterdir()
    found = [json.loads(line) for line in letters.read_text().splitlines()]
    assert [(item["offset"], item["timestamp"]) for item in found] == [(offset, times[offset]) for offset in bad]
    assert [item["reason"] for item in found if item["offset"] != 3] == [
        f"timestamp {times[offset]} ms does not fit into microseconds" for offset in bad if offset != 3
    ]
    assert all(base64.b64decode(item["value"]) == values[item["offset"]] for item in found)
    create_topic(servers, f"{topic}-again")
    before = time.time_ns() // 1_000_000
    assert replay(str(tmp_path), {"bootstrap.servers": servers}, f"{topic}-again").records == len(bad)
    [again] = read_topic(servers, f"{topic}-again", 1)
    assert [item.value for item in again] == [values[offset] for offset in bad]
    assert all(before <= seen.timestamp[1] or offset == 3 for seen, offset in zip(again, bad, strict=True))


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata"])
def test_by_event_time_in_a_zone(cluster: EmbeddedCluster, topic: str, tmp_path: Path, zone: str) -> None:
    """Late records go to the hour of their event; records without an event time to the hour of their timestamp."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    autumn = 1_698_530_400_000  # 2023-10-28T22:00Z: clocks in Berlin are set back three hours later
    times = [autumn + number * 7 % 12 * _HOUR_MS for number in range(120)]
    sent = [Sent(b'{"at":%d}' % when, None, 0, _TIME) for when in times]
    produce(servers, topic, [*sent, Sent(b"{}", None, 0, _TIME), Sent(None, None, 0, _TIME)])
    asked = WriteSettings(layout="hour", schema="at bigint", event_time="at", time_zone=zone)
    run(servers, tmp_path, topic, settings=asked)
    expected = Counter(
        datetime.fromtimestamp(when / 1000, ZoneInfo(zone)).strftime("date=%Y-%m-%d/hour=%H")
        for when in [*times, _TIME, _TIME]
    )
    found: Counter[str] = Counter()
    for path in tmp_path.rglob("*.parquet"):
        found["/".join(path.parts[-3:-1])] += ds.dataset(path).count_rows()
    assert found == expected
    assert sum(status(str(tmp_path)).hours[topic].values()) == 122


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata", "UTC"])
def test_local_times_of_fields(zone: str) -> None:
    """By Python's own clock: only instants have another time in another zone."""
    instant, local = datetime(2024, 7, 1, 2, 30, tzinfo=timezone.utc), datetime(2024, 7, 1, 2, 30)
    shown = instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    for kind, value, expected in (
        (pa.timestamp("us", "UTC"), instant, shown),
        (pa.int64(), int(instant.timestamp() * 1000), shown),
        (pa.timestamp("us"), local, local),
        (pa.timestamp("ms"), local, local),
        (pa.date32(), local.date(), datetime(2024, 7, 1)),
    ):
        rows = pa.array([{"a": {"at": value}}, {"a": None}], pa.struct([("a", pa.struct([("at", kind)]))]))
        times = np.array([0, int(instant.timestamp()) * 1_000_000], np.int64)
        found = field_times(rows, "a.at", times, zone)
        assert pa.array(found).cast(pa.timestamp("us")).to_pylist() == [expected, shown], kind


@pytest.mark.parametrize("kind", ["files", "delta"])
@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata", "UTC"])
def test_a_date_as_event_time(cluster: EmbeddedCluster, topic: str, tmp_path: Path, zone: str, kind: str) -> None:
    """A date has no time zone: records lie in its folder, those without one in that of their timestamp's date there."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    sent = [Sent(b'{"day":"%s"}' % day, None, 0, _TIME) for day in (b"2023-11-14", b"2024-03-10", b"1969-12-31")]
    produce(servers, topic, [*sent, Sent(b"{}", None, 0, _TIME)])
    asked = WriteSettings(layout="day", schema="day date", event_time="day", time_zone=zone)
    run(servers, f"delta:{tmp_path}" if kind == "delta" else tmp_path, topic, settings=asked)
    found = {
        path.parent.name: [value and value["day"] for value in ds.dataset(path).to_table()["value"].to_pylist()]
        for path in tmp_path.rglob("*.parquet")
    }
    now = f"date={datetime.fromtimestamp(_TIME / 1000, ZoneInfo(zone)):%Y-%m-%d}"
    expected: dict[str, list[date | None]] = {now: []}
    for day in (date(2023, 11, 14), date(2024, 3, 10), date(1969, 12, 31)):
        expected.setdefault(f"date={day}", []).append(day)
    expected[now].append(None)
    assert found == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"time_zone": "Asia/Kolkata"}, "with --time-zone UTC, not with --time-zone Asia/Kolkata"),
        ({"event_time": ""}, "with --event-time at, not without --event-time"),
    ],
)
def test_other_times_for_an_output(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, change: dict[str, str], words: str
) -> None:
    """Records of one time would be in two folders."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b'{"at":0}')])
    asked: dict[str, Any] = {"layout": "hour", "schema": "at bigint, by bigint", "event_time": "at"}
    run(servers, tmp_path, topic, settings=WriteSettings(**asked))
    with pytest.raises(LoadError, match=words):
        run(servers, tmp_path, topic, settings=WriteSettings(**asked | change))
    run(servers, tmp_path / "flat", topic)
    run(servers, tmp_path / "flat", topic, settings=WriteSettings(time_zone="Asia/Kolkata"))  # without folders


def test_dead_letters_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    """Runs in its own process, since a process has one locale; the variables keep Python from replacing C by UTF-8."""
    row = {"topic": "t", "partition": 0, "offset": 0, "timestamp": 1, "value": b"no", "headers": [{"key": "é"}]}
    code = f"""
import pathlib, pyarrow
from spark_klog.load.journal.model import Range
from spark_klog.load.settings import WriteSettings
from spark_klog.load.tasks.task import READ, Values
folder = pathlib.Path({str(tmp_path)!r})
with Values(Range("t", 0, 0, 1), WriteSettings(schema="a bigint"), folder, "0123abc") as values:
    values.parse(pyarrow.RecordBatch.from_pylist([{row!a}], READ))
"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **locale}, check=True)
    [letters] = tmp_path.iterdir()
    assert json.loads(letters.read_bytes().decode())["headers"] == [["é", None]]


def test_settings_of_values() -> None:
    with pytest.raises(ConfigError, match="time zone 'Mars/Olympus' does not exist"):
        WriteSettings(time_zone="Mars/Olympus")
    with pytest.raises(ConfigError, match="needs a --value-format with a schema"):
        LoadOptions({}, ["a"], "out", WriteSettings(event_time="at", layout="day"))
    with pytest.raises(ConfigError, match="the schema has no field 'when'"):
        WriteSettings(event_time="place.when", layout="day", schema="place struct<at: timestamp>")
    with pytest.raises(ConfigError, match="must be a timestamp"):
        WriteSettings(event_time="at", layout="day", schema="at string")
    with pytest.raises(ConfigError, match="is for --partition-by"):
        WriteSettings(event_time="at", schema="at date")


def test_what_goes_on_after_a_value_makes_it_bad() -> None:
    for row in (b'{"x": 2}, "w": 5', b'null, "w": 5'):
        parsed = parse("x bigint", b'{"x": 1}', row)
        assert parsed.values.to_pylist() == [{"x": 1}, None]
        ((number, reason),) = parsed.bad
        assert (number, reason.partition(" at ")[0]) == (1, "no JSON: Extra data")
