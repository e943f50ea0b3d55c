"""Arrow columns as JSON, and JSON as rows: against Python's own JSON, and one against the other."""

from __future__ import annotations

import base64
import json
import math
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spark_klog.cli.records.form import parse_json
from spark_klog.cli.records.json_rows import RowReader
from spark_klog.columns.plain_json import plain_json
from spark_klog.errors import ConfigError
from spark_klog.schemas.avro.codec import AvroCodec
from spark_klog.schemas.json_schema.texts import json_texts
from tests.schemas.avro.model import records, values
from tests.schemas.avro.support import written

_DECIMAL = st.integers(-(10**9) + 1, 10**9 - 1).map(lambda units: Decimal(units).scaleb(-2))
#: About the most that 64 bits hold in microseconds.
_DAYS = timedelta(days=100_000_000)
_LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.decimal128(9, 2), _DECIMAL),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(timezone.utc))),
    (pa.time64("us"), st.times()),
    (pa.duration("us"), st.timedeltas(-_DAYS, _DAYS)),
]
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def _struct(fields: list[Typed]) -> Typed:
    names = [f'f"{number}' for number in range(len(fields))]
    kind = pa.struct([pa.field(name, one) for name, (one, _) in zip(names, fields, strict=True)])
    return kind, st.fixed_dictionaries({name: st.none() | some for name, (_, some) in zip(names, fields, strict=True)})


def _list(item: Typed) -> Typed:
    return pa.list_(item[0]), st.lists(st.none() | item[1], max_size=3)


def _map(item: Typed) -> Typed:
    return pa.map_(pa.string(), item[0]), st.dictionaries(st.text(max_size=3), st.none() | item[1], max_size=3).map(
        lambda entries: list(entries.items())
    )


_types: st.SearchStrategy[Typed] = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(_struct), inner.map(_list), inner.map(_map)),
    max_leaves=4,
)


@st.composite
def _columns(draw: st.DrawFn) -> pa.Array:
    kind, values = draw(_types)
    return pa.array(draw(st.lists(st.none() | values, max_size=4)), kind)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """What the JSON is to say, in Python's own terms."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_plain(one, kind.value_type) for one in value]
    if pa.types.is_map(kind):
        return {name: _plain(one, kind.item_type) for name, one in value}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text if value.tzinfo is None else f"{text}Z"
    if isinstance(value, timedelta):
        return f"{Decimal(value // timedelta(microseconds=1)).scaleb(-6)}s"
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "isoformat"):
        return value.isoformat(timespec="microseconds")
    return value


@settings(deadline=None)  # the first example imports pandas
@given(_columns(), st.booleans(), st.integers(0, 2))
def test_texts_and_back(column: pa.Array, ascii: bool, skipped: int) -> None:
    column = column.slice(skipped)
    texts = json_texts(column, ascii).to_pylist()
    parsed = [json.loads(text, parse_float=Decimal) for text in texts]
    for text, value in zip(texts, column.to_pylist(), strict=True):
        assert not ascii or text.isascii()
        floats = json.loads(text)
        wanted = json.loads(json.dumps(_plain(value, column.type), default=float))
        if not _has_float32(column.type):
            assert floats == wanted
    reader = RowReader(column.type)
    rows = [reader.read(value) for value in parsed]
    assert all(shape == column.type for _, shape in rows)
    assert repr(pa.array([row for row, _ in rows], column.type).to_pylist()).replace("-nan", "nan") == repr(
        column.to_pylist()
    )


def _has_float32(kind: pa.DataType) -> bool:
    """Whose shortest text is another number as a double."""
    return "float" in str(kind).replace("float64", "")


_ORDER = pa.struct(
    [
        pa.field("id", pa.int32(), nullable=False),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("lines", pa.list_(pa.struct([pa.field("price", pa.decimal128(5, 2)), pa.field("flag", pa.bool_())]))),
        pa.field("tags", pa.map_(pa.string(), pa.float32())),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
    ]
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", "^the value must be an object, not an array$"),
        ('{"id": 1, "x": 2}', "^the schema has no field x$"),
        ('{"id": null}', "^field id must not be null; if the schema has a default, leave it out"),
        ('{"id": 2147483648}', "^field id must be an integer of 32 bits, not a number: 2147483648$"),
        ('{"id": 1.5}', r"^field id must be an integer of 32 bits, not a number: 1\.5$"),
        ('{"id": true}', "^field id must be an integer of 32 bits, not a boolean: true$"),
        (
            '{"lines": [{"price": 1.25}, {"price": 1.255}]}',
            r"^field lines\[1\]\.price must be a decimal\(5, 2\), .*: 1\.255$",
        ),
        ('{"lines": [{"price": 1000}]}', r"^field lines\[0\]\.price must be a decimal\(5, 2\), not one with 4 digits"),
        ('{"lines": [{"price": "x"}]}', r'^field lines\[0\]\.price must be a decimal\(5, 2\), not a string: "x"$'),
        ('{"lines": [{"size": 1}]}', r"^field lines\[\]: the schema has no field size$"),
        ('{"lines": {}}', "^field lines must be an array, not an object$"),
        ('{"lines": [{"flag": 1}]}', r"^field lines\[0\]\.flag must be a boolean, not a number: 1$"),
        ('{"tags": {"a": "b"}}', r'^field tags\.a must be a number, "NaN", .*, not a string: "b"$'),
        ('{"tags": {"a": 1e400}}', r"^field tags\.a is a number that a float can't hold: 1E\+400$"),
        ('{"tags": {"a": -3.5e38}}', r"^field tags\.a is a number that a float can't hold: -3\.5E\+38$"),
        (f'{{"tags": {{"a": {10**400}}}}}', r"^field tags\.a is a number that a float can't hold: 10+\.\.\.$"),
        ('{"tags": {"a": "\\ud800"}}', r"^field tags\.a must be a number"),
        ('{"raw": 1}', '^field raw must be text, or {"base64": "..."}, not a number: 1$'),
        ('{"raw": "\\ud800"}', r'^field raw has half of a surrogate pair, which no text may have: "\\ud800"$'),
        ('{"raw": {"base64": "?"}}', r'^field raw is not base64: "\?"$'),
        ('{"day": "2026-02-30"}', '^field day is no date: day is out of range for month: "2026-02-30"$'),
        (
            '{"at": "yesterday"}',
            "^field at must be a time such as 2024-12-31T.*, not another string: .yesterday.$",
        ),
    ],
)
def test_what_does_not_fit_is_named(text: str, error: str) -> None:
    value = json.loads(text, parse_float=Decimal)
    with pytest.raises(ConfigError, match=error):
        RowReader(_ORDER).read(value)


def test_what_fits() -> None:
    def row(text: str) -> Any:
        value = json.loads(text, parse_float=Decimal)
        read, shape = RowReader(_ORDER).read(value)
        return pa.array([read], shape)[0].as_py()

    assert row('{"id": 1.0}') == {"id": 1}
    moment = datetime(2026, 11, 21, 10, 0, 0, 500_000, timezone.utc)
    for time in ("2026-11-21T10:00:00.5Z", "2026-11-21 10:00:00.500", "2026-11-21T12:30:00.5+02:30"):
        assert row(json.dumps({"at": time})) == {"at": moment}
    nanoseconds = json.dumps({"at": "2026-11-21T10:00:00.5000009Z"})
    assert row(nanoseconds) == row(json.dumps({"at": "2026-11-21T10:00:00.5Z"}))
    assert row('{"lines": [{"price": "1.5"}, {"price": 2, "flag": true}, null]}') == {
        "lines": [{"price": Decimal("1.5"), "flag": None}, {"price": Decimal(2), "flag": True}, None]
    }
    assert row("null") is None


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_avro_records_there_and_back(data: st.DataObject) -> None:
    schema = data.draw(records())
    codec = AvroCodec()
    parsed = codec.parse(json.dumps(schema))
    decoder = codec.decoder(parsed)

    def texts_of(column: pa.Array) -> list[bytes]:
        decoded = decoder.decode(column, [decoder.program(parsed)])
        assert decoded.bad == []
        texts: list[bytes] = json_texts(decoded.values).to_pylist()
        return texts

    rows = data.draw(st.lists(values(schema), min_size=1, max_size=3))
    texts = texts_of(pa.array(written(schema, *rows), pa.binary()))
    reader = RowReader(decoder.type)
    encoded: list[bytes] = []
    for text in texts:
        row, shape = reader.read(parse_json(text))
        encoded += codec.encoder(parsed, shape).encode(pa.array([row], shape)).to_pylist()
    assert texts_of(pa.array(encoded, pa.binary())) == texts


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.decimal128(20, 10), Decimal(0), "0.0000000000"),
        (pa.decimal128(20, 10), Decimal("-1E-10"), "-0.0000000001"),
        (pa.decimal128(38, 7), Decimal("1.5"), "1.5000000"),
        (pa.decimal128(10, -2), Decimal(1200), "1200"),
        (pa.duration("ns"), 1, '"0.000000001s"'),
        (pa.duration("ns"), 0, '"0.000000000s"'),
    ],
    ids=str,
)
def test_all_digits_are_shown_without_an_exponent(kind: pa.DataType, value: Any, text: str) -> None:
    column = pa.array([value, None], kind)
    assert json_texts(column).to_pylist() == [text.encode(), b"null"]
    if pa.types.is_decimal(kind):
        assert plain_json(value.quantize(Decimal(1).scaleb(-kind.scale)), kind) == text
    (read, _) = RowReader(kind).read(parse_json(text.encode()))
    assert pa.array([read, None], kind).equals(column)


def test_times_beyond_the_calendar() -> None:
    """Arrow has a sentence for them, which is no time."""
    largest = 2**63 - 1
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")):
        texts = json_texts(pa.array([largest, -largest, 253_402_300_800_000_000, None], pa.int64()).cast(kind))
        first, second, third, fourth = (json.loads(text) for text in texts.to_pylist())
        assert (first, second, fourth) == (largest, -largest, None)
        assert str(third).startswith("10000-01-01T00:00:00") or third == 253_402_300_800_000_000
