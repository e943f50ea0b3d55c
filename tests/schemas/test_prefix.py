"""Schema ids in headers and before records: as confluent-kafka writes them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry.common.serde import SchemaId

from spark_klog.columns.schema import FULL
from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.program import Program
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.decoder import RecordDecoder
from spark_klog.schemas.prefix import SchemaKey, id_prefix, schema_keys, without_ids
from spark_klog.schemas.protobuf.message_indexes import read_indexes, write_indexes

_GUID = UUID("89791762-2336-4186-9674-299b90a802e2")
_BY_ID = SchemaId("AVRO", 7).id_to_bytes()
_BY_GUID = SchemaId("AVRO", guid=str(_GUID)).guid_to_bytes()
_HEADERS = FULL.field("headers").type


def _headers(*rows: list[tuple[str, bytes | None]] | None) -> pa.Array:
    return pa.array([row and [{"key": key, "value": value} for key, value in row] for row in rows], _HEADERS)


def _columns(values: pa.Array) -> BinaryColumn:
    validity, offsets, data = values.buffers()
    return BinaryColumn(offsets, data or b"", validity, values.null_count)


def _found(values: Any, headers: Any = None, *, has_indexes: bool = False) -> list[tuple[object, int]]:
    keys, which, starts, bad = schema_keys(values, headers, "value", has_indexes=has_indexes)
    reasons = dict(bad)
    found = []
    for row, (number, start) in enumerate(zip(which.tolist(), starts.tolist(), strict=True)):
        found.append((keys[number] if number >= 0 else reasons.get(row), start))
    return found


def test_prefixes() -> None:
    assert id_prefix(7) == _BY_ID
    values = pa.array([_BY_ID + b"x", None, _BY_GUID, id_prefix(2**31 - 1), _BY_ID], pa.binary())
    expected = [
        (SchemaKey(7), 5),
        (None, 0),
        (SchemaKey(_GUID), 17),
        (SchemaKey(2**31 - 1), 5),
        (SchemaKey(7), 5),
    ]
    assert _found(values) == expected
    assert _found(values.slice(2)) == expected[2:]
    assert _found(values.cast(pa.large_binary())) == expected
    assert _found(_columns(values)) == expected
    assert _found(values[:0]) == []
    assert _found(pa.array([None, None], pa.binary())) == [(None, 0)] * 2


@pytest.mark.parametrize("number", [-1, 2**31])
def test_ids_that_are_none(number: int) -> None:
    with pytest.raises(SchemaError, match="not the id of a schema"):
        id_prefix(number)


def test_values_without_a_prefix() -> None:
    values = pa.array([b"", b"\x00\x00\x00\x01", b"\x01" * 16, b'{"json": 1}'])
    assert schema_keys(values, None, "key").bad[0].reason == "the key has 0 bytes: too few for a schema id"
    assert [reason for reason, _ in _found(values)] == [
        "the value has 0 bytes: too few for a schema id",
        "the value has 4 bytes: too few for a schema id",
        "the value has 16 bytes: too few for a schema id",
        "the value begins with the byte 0x7b, not with a schema id",
    ]


def test_headers_come_first() -> None:
    name = "__value_schema_id"
    values = pa.array([b"p", _BY_ID + b"p", None, b"p", b"p", b"p", b"p", _BY_ID], pa.binary())
    headers = _headers(
        [("other", b"1"), (name, _BY_GUID)],
        None,
        [(name, _BY_ID)],
        [("__key_schema_id", _BY_ID), ("__value_schema_xx", _BY_ID), (name, _BY_GUID), (name, _BY_ID)],
        [(name, _BY_GUID + b"\x02\x04")],
        [(name, _BY_GUID), (name, b"")],
        [(name, b"\x09abcd")],
        [(name, _BY_GUID), ("other", _BY_GUID), (name, None)],
    )
    expected = [
        (SchemaKey(_GUID), 0),
        (SchemaKey(7), 5),
        (None, 0),
        (SchemaKey(7), 0),
        (SchemaKey(_GUID), 0),
        ("the header with the schema id has 0 bytes: too few for a schema id", 0),
        ("the header with the schema id begins with the byte 0x09, not with a schema id", 0),
        (SchemaKey(7), 5),
    ]
    assert _found(values, headers) == expected
    assert _found(values.slice(3), headers.slice(3)) == expected[3:]
    entries = headers.values
    column = HeadersColumn(
        headers.buffers()[1],
        headers.buffers()[0],
        1,
        _columns(entries.field(0)),
        _columns(entries.field(1)),
        len(entries),
    )
    assert _found(_columns(values), column) == expected
    assert _found(values[:2], _headers(None, None))[1] == expected[1]
    assert _found(values[:0], headers[:0]) == []
    payloads = pa.array([b"p"], pa.binary())
    assert _found(payloads, headers[4:5], has_indexes=True) == [(SchemaKey(_GUID, b"\x02\x04"), 0)]


def test_headers_of_what_is_encoded_anew() -> None:
    name = "__value_schema_id"
    rows = [
        [("a", b"1"), (name, _BY_ID), ("b", None), (name, None)],
        None,
        [(name, _BY_ID)],
        [],
        [("__key_schema_id", _BY_ID), ("c", b"")],
    ]
    kept = [row and [header for header in row if header[0] != name] for row in rows]
    headers, expected = _headers(*rows), _headers(*kept)
    for start, stop in ((0, 5), (1, 5), (2, 3), (1, 2), (3, 5), (2, 2)):
        found = without_ids(headers[start:stop], "value")
        found.validate(full=True)
        assert found.to_pylist() == expected[start:stop].to_pylist()
    chunked = without_ids(pa.chunked_array([headers[2:], headers]), "value")
    assert chunked.to_pylist() == expected[2:].to_pylist() + expected.to_pylist()
    assert without_ids(pa.array([1]), "value") == pa.array([1])
    assert without_ids(pa.nulls(2, _HEADERS), "key").to_pylist() == [None, None]


def test_many_schemas_in_a_batch() -> None:
    ids = [number % 700 for number in range(5000)]
    guids = [UUID(int=number % 90) for number in range(900)]
    values = [id_prefix(number) for number in ids] + [b"\x01" + guid.bytes for guid in guids] + [id_prefix(1), b"?"]
    expected = [SchemaKey(number) for number in (*ids, *guids, 1)]
    found = _found(pa.array(values))
    assert [key for key, _ in found[:-1]] == expected
    assert [start for _, start in found] == [5] * 5000 + [17] * 900 + [5, 0]


_SCHEMAS = {7: '"int"', 8: '"long"', 9: '"string"', _GUID: '{"type": "int", "doc": "by GUID"}'}


_LONGS = AvroDecoder(parse_schema('"long"'))


class _Registry:
    def __init__(self) -> None:
        self.asked: list[object] = []
        self.is_down = False

    def program(self, key: SchemaKey) -> Program:
        self.asked.append(key.id)
        if self.is_down:
            raise ConnectionError("the registry is down")
        if key.id not in _SCHEMAS:
            raise SchemaError("the registry does not know it")
        return _LONGS.program(parse_schema(_SCHEMAS[key.id]), key.rest)


def test_each_record_by_its_schema() -> None:
    registry = _Registry()
    decoder = RecordDecoder(_LONGS, registry.program)
    values = [
        _BY_ID + b"\x02",
        id_prefix(8) + b"\x04",
        None,
        id_prefix(5) + b"\x02",
        b"?",
        id_prefix(9) + b"\x02a",
        b"\x06",
    ]
    values += [_BY_ID + b"", id_prefix(8) + b"\x08"]
    headers = _headers(*[None] * 6, [("__value_schema_id", _BY_GUID)], None, None)
    decoded = decoder.decode(pa.array(values, pa.binary()), headers)
    assert decoded.values.type == decoder.type == pa.int64()
    assert decoded.values.to_pylist() == [1, 2, None, None, None, None, 3, None, 4]
    assert [row for row, _ in decoded.bad] == [3, 4, 5, 7]
    reasons = [reason for _, reason in decoded.bad]
    assert reasons[0] == "schema id 5: the registry does not know it"
    assert "schema id 9: a value of the writer's schema can't be read" in reasons[2]
    assert reasons[3].startswith("schema id 7: the value is cut off")
    decoder.decode(pa.array(values, pa.binary()), headers)
    assert sorted(map(str, registry.asked)) == sorted(map(str, [7, 8, 5, 9, _GUID]))


@pytest.mark.parametrize("first_bad", [id_prefix(5) + b"\2", b"?"])
def test_after_a_bad_row_no_schema_is_asked_for(first_bad: bytes) -> None:
    registry = _Registry()
    decoder = RecordDecoder(_LONGS, registry.program, ends_at_bad=True)
    values = [
        id_prefix(8) + b"\x04",
        None,
        _BY_ID + b"\2",
        first_bad,
        *(id_prefix(number) + b"\2" for number in range(9)),
    ]
    # the schemas of headers are the first of all, but this one is of the last row
    headers = _headers(*[None] * 12, [("__value_schema_id", _BY_GUID)])
    decoded = decoder.decode(pa.array(values, pa.binary()), headers)
    assert decoded.values.to_pylist()[:4] == [2, None, 1, None]
    assert min(decoded.bad).row == 3
    assert set(range(4, 11)) <= {row for row, _ in decoded.bad}
    assert registry.asked == [8, 7] + [5] * (first_bad != b"?")
    assert decoder.decode(pa.array(values[:3], pa.binary())).values.to_pylist() == [2, None, 1]
    values = [id_prefix(8) + b"", *values]  # what is bad is its data
    decoded = decoder.decode(pa.array(values, pa.binary()), None)
    assert min(decoded.bad).row == 0


def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_klog.schemas.decoder._MOST_PROGRAMS", 2)
    registry = _Registry()
    decoder = RecordDecoder(_LONGS, registry.program)
    values = pa.array([id_prefix(number) + b"\x02" for number in (7, 8, 5)], pa.binary())
    for _ in range(2):
        assert decoder.decode(values).values.to_pylist() == [1, 1, None]
    assert registry.asked == [7, 8, 5] * 2


def test_a_registry_that_is_down_is_asked_again() -> None:
    registry = _Registry()
    registry.is_down = True
    decoder = RecordDecoder(_LONGS, registry.program)
    values = pa.array([_BY_ID + b"\x02"])
    with pytest.raises(ConnectionError):
        decoder.decode(values)
    registry.is_down = False
    assert decoder.decode(values).values.to_pylist() == [1]


def test_message_indexes_follow() -> None:
    first, second, deep = b"\0", b"\2\2", b"\6\0\x04\xac\x02"
    rows = [
        _BY_ID + first + b"x",
        _BY_GUID + first,
        _BY_ID + second,
        _BY_ID + deep + b"x",
        None,
        _BY_ID,
        _BY_ID + b"\4\0",
    ]
    expected: list[tuple[object, int]] = [
        (SchemaKey(7, first), 6),
        (SchemaKey(_GUID, first), 18),
        (SchemaKey(7, second), 7),
        (SchemaKey(7, deep), 10),
        (None, 0),
        (SchemaKey(7, b"\x80"), 0),  # without indexes, and not as after an id in a header
        (SchemaKey(7, b"\4\0"), 0),
    ]
    values = pa.array(rows, pa.binary())
    assert _found(values, has_indexes=True) == expected
    assert _found(values.slice(1), has_indexes=True) == expected[1:]
    assert _found(_columns(values), has_indexes=True) == expected
    assert _found(values[:1], has_indexes=True) == expected[:1]
    header = [("__value_schema_id", _BY_ID + second)]
    headers = _headers(header, [("__value_schema_id", _BY_GUID)], None, header, header, None, header)
    assert _found(values, headers, has_indexes=True)[:5] == [
        (SchemaKey(7, second), 0),
        (SchemaKey(_GUID), 0),
        (SchemaKey(7, second), 7),
        (SchemaKey(7, second), 0),
        (None, 0),
    ]


def test_bytes_that_are_no_message_indexes_are_refused_as_in_the_whole_value() -> None:
    values = [
        b"",
        b"\1",
        b"\3x",
        b"\x80",
        b"\x80" * 5,
        b"\4\0",
        b"\4\0\1",
        b"\x80\1" + b"\x80\x80\x80\x80\x7f" * 63 + b"\1",
    ]
    keys, which, _, bad = schema_keys(pa.array([_BY_ID + value for value in values]), None, "value", has_indexes=True)
    assert not bad
    for number, value in zip(which.tolist(), values, strict=True):
        with pytest.raises(SchemaError) as whole:
            read_indexes(value)
        with pytest.raises(SchemaError) as kept:
            read_indexes(keys[number].rest)
        assert str(kept.value) == str(whole.value)


def test_more_message_indexes_than_are_sought_at_once() -> None:
    rows = [_BY_ID + write_indexes((number % 50, 1)) + b"x" for number in range(200)]
    rows[60:60] = [_BY_ID + b"\3"]
    found = _found(pa.array(rows), has_indexes=True)
    assert found[60] == (SchemaKey(7, b"\3"), 0)
    del found[60]
    assert found == [(SchemaKey(7, write_indexes((number % 50, 1))), 8) for number in range(200)]
