"""The parts of `klog consume` and `klog produce` that need no cluster: formats, JSON, filters, lines."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings, strategies as st

from spark_klog.cli.records.arrow_form import Form, json_lines
from spark_klog.cli.records.consume import Where, apply
from spark_klog.cli.records.form import RecordForm, parse_record, record_lines, safe, unescape
from spark_klog.cli.records.produce import _split
from spark_klog.cli.records.serdes import PackFormat
from spark_klog.client.consumer.decoding import ConsumerRecord
from spark_klog.columns.decode import MAX_MILLISECONDS
from spark_klog.columns.schema import FULL, in_milliseconds
from spark_klog.errors import ConfigError

Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]

_bytes = st.one_of(st.none(), st.binary(max_size=9), st.text(max_size=9).map(str.encode), st.sampled_from([b'a"\\\n']))
_rows = st.lists(
    st.tuples(_bytes, _bytes, st.one_of(st.none(), st.lists(st.tuples(st.text(max_size=3), _bytes), max_size=2))),
    min_size=1,
    max_size=5,
)


def batch(
    rows: list[Row], first: int = 0, timestamp: int | None = 1_700_000_000_123, *, has_ms: bool = False
) -> pa.RecordBatch:
    schema = in_milliseconds(FULL) if has_ms else FULL
    headers = [pairs and [{"key": name, "value": value} for name, value in pairs] for _, _, pairs in rows]
    return pa.record_batch(
        [
            pa.array([key for key, _, _ in rows], pa.binary()),
            pa.array([value for _, value, _ in rows], pa.binary()),
            pa.array(["clicks"] * len(rows)),
            pa.array([3] * len(rows), pa.int32()),
            pa.array(range(first, first + len(rows)), pa.int64()),
            pa.array([timestamp and timestamp * (1 if has_ms else 1000)] * len(rows), schema.field("timestamp").type),
            pa.array([0] * len(rows), pa.int32()),
            pa.array(headers, FULL.field("headers").type),
        ],
        schema=schema,
    )


def records(rows: list[Row], first: int = 0, timestamp: int | None = 1_700_000_000_123) -> list[ConsumerRecord]:
    """The same as `batch`, as they are without pyarrow."""
    time = -1 if timestamp is None else timestamp
    return [
        ConsumerRecord("clicks", 3, offset, time, 0, key, value, tuple(headers or ()))
        for offset, (key, value, headers) in enumerate(rows, first)
    ]


@settings(deadline=None)  # the first example imports pandas
@given(_rows, st.booleans(), st.sampled_from([None, 0, 1_700_000_000_123, 1_700_000_000_123_456_789]))
def test_records_are_printed_as_batches_are(rows: list[Row], is_terminal: bool, timestamp: int | None) -> None:
    has_ms = timestamp is not None and timestamp > MAX_MILLISECONDS  # of nanoseconds: they fit into no us
    its_batch = batch(rows, 7, timestamp, has_ms=has_ms)
    for text in (r"%t-%p@%o %k[%K]=%s[%S] %T %h%%\x00\n", "%s", "x", ""):
        forms = [made(text, null=b"NULL", is_terminal=is_terminal) for made in (Form, RecordForm)]
        of_batch, of_records = forms[0].render(its_batch), forms[1].render(records(rows, 7, timestamp))
        assert bytes(of_batch) == of_records
    lines = bytes(json_lines(its_batch, is_terminal))
    assert lines == record_lines(records(rows, 7, timestamp), is_terminal)


@settings(deadline=None)  # the first example imports pandas
@given(_rows, st.booleans())
def test_formats(rows: list[Row], is_terminal: bool) -> None:
    form = Form(r"%t-%p@%o %k[%K]=%s[%S] %T %h%%\x00\n", null=b"NULL", is_terminal=is_terminal)

    def shown(data: bytes) -> bytes:
        return safe(data) if is_terminal else data

    expected = b""
    for number, (key, value, headers) in enumerate(rows, 40):
        pairs = b",".join(name.encode() + b"=" + (content or b"") for name, content in headers or ())
        expected += b"clicks-3@%d " % number
        expected += shown(b"NULL" if key is None else key) + b"[%d]=" % (-1 if key is None else len(key))
        expected += shown(b"NULL" if value is None else value) + b"[%d] " % (-1 if value is None else len(value))
        expected += b"1700000000123 " + shown(pairs) + b"%\0\n"
    assert bytes(form.render(batch(rows, 40))) == expected


def test_a_slice_is_printed_alone() -> None:
    whole = batch([(None, b"v%d" % number, None) for number in range(9)])
    assert bytes(Form(r"%s,").render(whole.slice(3, 2))) == b"v3,v4,"
    assert [json.loads(line)["value"] for line in bytes(json_lines(whole.slice(3, 2))).splitlines()] == ["v3", "v4"]


def test_a_format_without_fields() -> None:
    assert bytes(Form("x").render(batch([(None, None, None)] * 3))) == b"xxx"
    assert bytes(Form("").render(batch([(None, None, None)] * 3))) == b""


@pytest.mark.parametrize("text", ["%z", "%", "\\", "\\q", "%s \\xg1"])
def test_wrong_formats(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--format: .* is not known"):
        Form(text)


def test_escapes() -> None:
    assert unescape("-D", r"%\t\x1f\\\0") == b"%\t\x1f\\\0"
    assert safe(b"\x1b[31mred\xff\n\t\xe2\x80\xae") == b"\\x1b[31mred\\xff\n\t\\u202e"


@settings(deadline=None)  # the first example imports pandas
@given(_rows, st.booleans())
def test_json_there_and_back(rows: list[Row], ascii: bool) -> None:
    lines = bytes(json_lines(batch(rows, 7), ascii)).split(b"\n")
    assert lines.pop() == b""
    for number, (line, (key, value, headers)) in enumerate(zip(lines, rows, strict=True), 7):
        record = json.loads(line)
        assert {name: record[name] for name in ("topic", "partition", "offset", "timestamp")} == {
            "topic": "clicks",
            "partition": 3,
            "offset": number,
            "timestamp": 1_700_000_000_123,
        }
        assert record["value"] == (_text(value)) or "base64" in record["value"]
        parsed = parse_record(line)
        assert (parsed.key, parsed.value, parsed.partition, parsed.timestamp) == (key, value, 3, 1_700_000_000_123)
        assert parsed.headers == tuple(headers or ())
        if ascii:
            assert line.isascii()


def _text(value: bytes | None) -> Any:
    try:
        return value and value.decode() if value != b"" else ""
    except UnicodeDecodeError:
        return None


def test_a_record_without_timestamp() -> None:
    assert json.loads(bytes(json_lines(batch([(None, None, None)], timestamp=None))))["timestamp"] == -1


def test_numbers_within_values_keep_their_digits() -> None:
    value = b'{"id":1234567890123456.7891,"n":[0.10,-1.50,12345678901234567890,1e5]}'
    record = parse_record(b'{"value": %s, "key": 1234567890123456.7891}' % value)
    assert record.value == value.replace(b"1e5", b"1E+5")
    assert parse_record(b'{"partition": -0, "timestamp": -0}')[2:4] == (0, 0)
    assert parse_record(b'{"value": [%s]}' % (b"1" * 5000)).value == b"[%s]" % (b"1" * 5000)
    assert record.key == b"1234567890123456.7891"


def test_json_of_other_programs() -> None:
    record = parse_record(b'{"value": {"a": [1, null]}, "headers": {"h": "x", "n": null}, "key": 7}')
    assert record == (b'{"a":[1,null]}', b"7", None, None, (("h", b"x"), ("n", None)))


def test_fields_of_a_later_version_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    line = b'{"value": "v", "key": "k", "leader_epoch": 3, "value_schema_id": 7}'
    assert parse_record(line) == parse_record(line) == (b"v", b"k", None, None, ())
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == ["the field leader_epoch is passed over"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "not a JSON object"),
        (b'{"a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"vlaue": 1}', "vlaue: no such field"),  # would be null, which deletes
        (b'{"partition": -1}', "partition: -1"),
        (b'{"partition": true}', "partition: True"),
        (b'{"timestamp": 1.5}', "timestamp: 1.5"),
        (b'{"headers": ["a"]}', "headers must be"),
        (b'{"headers": 7}', "headers must be"),
        (b'{"value": {"base64": "?"}}', "is not base64"),
        (b'{"value": {"base64": 3}}', "is not base64"),
        (b'{"value": "\\ud800"}', "no form in UTF-8"),
        (b'{"value": 1, "value": 2}', "it has 'value' twice in one object: remove one of them"),
        (b'{"value": {"a": [{"b": 1, "b": 1}]}}', "it has 'b' twice in one object"),
    ],
)
def test_wrong_json(line: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_record(line)


_FILTERED: list[Row] = [
    (b"a", b'{"user": {"id": 7, "tags": ["x", true]}, "n": "10"}', [("h", b"1"), ("h", b"2")]),
    (b"b", b'{"user": {"id": 9.5}, "n": null}', [("h", None)]),
    (None, b"plain \xff", None),
    (b"9", b"10", []),
    (b"", None, [("g", b"2")]),
]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("key=a", [0]),
        ("key != a", [1, 3, 4]),
        ("key=", [4]),
        ("key>8", [3]),
        ("key>=b", [1]),
        ("key~^[ab]$", [0, 1]),
        ("key =~ ^[ab]$", [0, 1]),
        ("key!~^[ab]$", [3, 4]),
        ("value~user", [0, 1]),
        (r"value~\\xff", [2]),
        ("value>9", [3]),
        ("header.h=2", [0]),
        ("header.h!=2", []),
        ("header.g = 2", [4]),
        (".user.id=7", [0]),
        (".user.id > 7", [1]),
        (".user.id<1e3", [0, 1]),
        (".user.tags.0=x", [0]),
        (".user.tags.1=true", [0]),
        (".user.tags.1=1", []),
        (".user.tags.2=x", []),
        (".n=10", [0]),
        (".n=null", [1]),
        (".n~1", [0]),
        ("offset>=103", [3, 4]),
        ("partition!=3", []),
        ("topic=clicks", [0, 1, 2, 3, 4]),
        ("topic!~c", []),
        ("timestamp<2023-11-15", [0, 1, 2, 3, 4]),
        ("timestamp>1700000000123", []),
    ],
)
def test_filters(text: str, rows: list[int]) -> None:
    found = apply([Where(text)], batch(_FILTERED, 100))
    assert [offset - 100 for offset in found.column("offset").to_pylist()] == rows
    assert [record.offset - 100 for record in apply([Where(text)], records(_FILTERED, 100))] == rows


_DIGITS = [
    b'{"n": 0.12345678901234567890}',
    b'{"n": 0.12345678901234567891}',
    b'{"n": NaN}',
    b'{"n": 1e9999999999999999999}',
]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (".n=0.12345678901234567891", [1]),
        (".n != 0.1234567890123456789", [1, 2]),
        (".n > 0.12345678901234567890", [1]),
        (".n <= 0.12345678901234567890", [0]),
        (".n ~ 90$", [0]),
        (".n < 10000000000000000000001", [0, 1]),
    ],
)
def test_filters_compare_all_digits(text: str, rows: list[int]) -> None:
    given: list[Row] = [(None, value, []) for value in _DIGITS]
    found = apply([Where(text)], batch(given, 100))
    assert [offset - 100 for offset in found.column("offset").to_pylist()] == rows
    assert [record.offset - 100 for record in apply([Where(text)], records(given, 100))] == rows


@pytest.mark.parametrize("text", ["", "key", "size=3", "offset=x", "offset~3", "key~(", "timestamp=soon"])
def test_wrong_filters(text: str) -> None:
    with pytest.raises(ConfigError, match="--where"):
        Where(text)


@given(
    st.lists(st.binary(max_size=6), max_size=6),
    st.sampled_from([b"\n", b"ab", b"\0\0\0"]),
    st.lists(st.integers(0, 40), max_size=9),
)
@example([b"a", b"b"], b"\0\0\0", [0, 1, 2, 3, 4])
def test_lines_are_split_wherever_reads_end(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    data = end.join(lines)
    pieces = [data[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True)]
    read = iter([piece for piece in pieces if piece])
    found = [line for chunk in _split(lambda: next(read, b""), "stdin", end) for line in chunk]
    expected = data.split(end)
    assert found == (expected if expected[-1] else expected[:-1])


def test_packed_numbers() -> None:
    data = bytes.fromhex("00000001 fffe 8002") + b"hello"
    for form, text in (("i", b"1"), (">ihhs", b"1-2-32766hello"), ("iHBbcs", b"1655341282hello")):
        assert PackFormat(form).unpack(data) == (text, ""), form
    assert PackFormat("<h h").unpack(b"\1\0\0\1") == (b"1 256", "")
    assert PackFormat("i$").unpack(data) == (None, "9 bytes are left at the end ($)")
    assert PackFormat("qq").unpack(data) == (None, "5 bytes are left for a number of 8 (q)")
    assert [PackFormat(form).is_number for form in ("i", ">Q$", "ii", "s", "i ")] == [True, True, False, False, False]
