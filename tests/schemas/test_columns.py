"""Keys and values of a partition's records as rows, and columns of rows as records, without a registry or Spark."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from types import FrameType
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from spark_klog.base.names import Format
from spark_klog.columns.decode import MAX_MILLISECONDS, PartitionDecoder, Unreadable
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    EncodeError,
    RecordDeserializationError,
    SchemaError,
)
from spark_klog.schemas.avro.from_arrow import schema_of
from spark_klog.schemas.column_format import ColumnFormat, ReaderSchema, RegistrySettings
from spark_klog.schemas.column_writing import WriteFormat
from spark_klog.security.config import Settings
from tests.support.brokers.batches import make_batch

_SCHEMA = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
_TIME = 1_700_000_000_000
#: No one listens there: a record's own schema is the reader's.
_NOWHERE = RegistrySettings(Settings({"url": "http://127.0.0.1:1", "retries.deadline.ms": "1"}))


def _value(number: int, schema_id: int = 7) -> bytes:
    buffer = io.BytesIO(b"\0" + schema_id.to_bytes(4, "big"))
    buffer.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(_SCHEMA), {"id": number})
    return buffer.getvalue()


def _decoder(*columns: Any, is_permissive: bool = False, yields_bad: bool = True) -> PartitionDecoder:
    decoders, schema = {}, WITHOUT_HEADERS
    for column in columns:
        source = ColumnFormat(column, "avro", _NOWHERE, is_permissive=is_permissive)
        decoders[column] = ReaderSchema(source, json.dumps(_SCHEMA), {}, 7).decoder()
        schema = schema.set(schema.get_field_index(column), pa.field(column, decoders[column].type))
    return PartitionDecoder("t", 0, schema, decoders=decoders, yields_bad=yields_bad)


def _batch(first: int, records: list[tuple[bytes | None, bytes | None]], times: list[int]) -> bytes:
    data = make_batch(records, times)
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


def _parts(decoder: PartitionDecoder) -> Iterator[pa.RecordBatch | Unreadable]:
    first = [(b"k", _value(0)), (b"k", b"\0\0\0\0\7"), (b"k", _value(2)), (_value(3), None)]
    late = MAX_MILLISECONDS + 1
    yield from decoder.decode(_batch(10, first, [_TIME, _TIME, late, _TIME]), 10, 14)
    decoder.move_to("u", 5)
    second = [(b"k", _value(4)), (b"k", b"x"), (_value(6), b"\0\0\0\0\7"), (_value(7), _value(7))]
    yield from decoder.decode(_batch(0, second, [_TIME, _TIME, late, _TIME]), 0, 4)
    yield from decoder.finish()


def _of(parts: list[Any]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    rows = [
        (row["topic"], row["partition"], row["offset"], row["value"] and row["value"]["id"])
        for part in parts
        if isinstance(part, pa.RecordBatch)
        for row in part.to_pylist()
    ]
    bad = [
        (one.topic, one.partition, one.bad.offset, bytes(one.bad.data)) for one in parts if isinstance(one, Unreadable)
    ]
    return rows, bad


def test_records_before_the_first_bad_one_come_first() -> None:
    with pytest.raises(RecordDeserializationError) as caught:
        next(_parts(_decoder("key", "value", yields_bad=False)))
    error = caught.value
    assert (error.topic, error.partition, error.offset, error.column) == ("t", 0, 10, "key")
    parts = _parts(_decoder("value", yields_bad=False))
    assert _of([next(parts)]) == ([("t", 0, 10, 0)], [])
    with pytest.raises(RecordDeserializationError) as caught:
        next(parts)
    error = caught.value
    assert (error.topic, error.offset, error.column) == ("t", 11, "value")
    assert (error.key, error.value) == (b"k", b"\0\0\0\0\7")


def test_bad_records_are_left_out_with_their_places() -> None:
    rows, bad = _of(list(_parts(_decoder("value"))))
    assert rows == [("t", 0, 10, 0), ("t", 0, 13, None), ("u", 5, 0, 4), ("u", 5, 3, 7)]
    assert bad == [
        ("t", 0, 11, b"\0\0\0\0\7"),
        ("t", 0, 12, _value(2)),  # its timestamp
        ("u", 5, 1, b"x"),
        ("u", 5, 2, b"\0\0\0\0\7"),  # and its timestamp
    ]


def test_keys_and_values() -> None:
    parts = list(_parts(_decoder("key", "value")))
    rows, bad = _of(parts)
    assert [row[:3] for row in rows] == [("t", 0, 13), ("u", 5, 3)]
    reasons = [str(one.bad.error) for one in parts if isinstance(one, Unreadable)]
    assert "the record at offset 10 has a key that does not decode: the key begins with the byte 0x6b" in reasons[0]
    assert ", and has a value that does not decode: schema id 7: " in reasons[1]
    assert ", and has the timestamp " in reasons[-1]
    kept = {(one.topic, one.bad.offset): one.bad.record for one in parts if isinstance(one, Unreadable)}
    assert kept["t", 10][:3] == (b"k", _value(0), ())
    assert kept["u", 2][:3] == (_value(6), b"\0\0\0\0\7", ())
    assert len(bad) == 6
    assert len({(topic, offset) for topic, _, offset, _ in bad}) == 6


def test_permissive_rows_are_null() -> None:
    rows, bad = _of(list(_parts(_decoder("value", is_permissive=True))))
    assert rows == [
        ("t", 0, 10, 0),
        ("t", 0, 11, None),
        ("t", 0, 13, None),
        ("u", 5, 0, 4),
        ("u", 5, 1, None),
        ("u", 5, 3, 7),
    ]
    assert [place[:3] for place in bad] == [("t", 0, 12), ("u", 5, 2)]  # by their timestamps


def test_the_first_bad_record_is_an_error() -> None:
    decoder = _decoder("value", yields_bad=False)
    with pytest.raises(
        DecodeError, match=r"^t-0: the record at offset 11 has a value that does not decode: schema id 7: "
    ):
        list(_parts(decoder))


def test_a_registry_that_is_down_makes_no_row_bad() -> None:
    decoder = _decoder("value", is_permissive=True)
    data = _batch(0, [(b"k", _value(0, schema_id=8))], [_TIME])
    with pytest.raises(ConnectionError, match="gave up on schema id 8"):
        list(chain(decoder.decode(data, 0, 1), decoder.finish()))


_KIND = pa.struct(
    [
        pa.field("n", pa.null()),
        pa.field("b", pa.bool_(), nullable=False),
        pa.field("i", pa.int16()),
        pa.field("l", pa.int64()),
        pa.field("f", pa.float32()),
        pa.field("d", pa.float64()),
        pa.field("s", pa.string()),
        pa.field("x", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("list", pa.list_(pa.struct([pa.field("z", pa.int32())]))),
        pa.field("map", pa.map_(pa.string(), pa.list_(pa.float64()))),
        pa.field("inner", pa.struct([pa.field("inner", pa.struct([pa.field("y", pa.string())]))])),
    ]
)


def test_the_schema_of_a_type() -> None:
    text = schema_of(_KIND)
    parsed = fastavro.parse_schema(json.loads(text))
    assert parsed["name"] == "topLevelRecord"
    writer = WriteFormat(ColumnFormat("value", "avro")).writer(_KIND)
    assert writer.text == text
    row: dict[str, Any] = dict.fromkeys(_KIND.names)
    full = {**row, "b": True, "i": 1, "s": "\u20ac", "list": [{"z": 1}, None], "inner": {"inner": {"y": "y"}}}
    rows = [{**row, "b": False}, full, None]
    values = writer.encoder().encode(pa.array(rows, _KIND))
    read = [data and fastavro.schemaless_reader(io.BytesIO(data), parsed, None) for data in values.to_pylist()]
    assert read == rows
    data = _batch(0, [(b"k", value) for value in values.to_pylist()], [_TIME] * 3)
    source = ReaderSchema(ColumnFormat("value", "avro"), text)
    schema = WITHOUT_HEADERS.set(1, pa.field("value", source.decoder().type))
    decoder = PartitionDecoder("t", 0, schema, decoders={"value": source.decoder()})
    (batch,) = chain(decoder.decode(data, 0, 3), decoder.finish())
    assert batch.column("value").to_pylist() == rows


def test_what_avro_has_not() -> None:
    for kind, text in (
        (
            pa.struct([pa.field("a", pa.struct([pa.field("b c", pa.int32())]))]),
            r"^column value: field a\.b c: Avro's names",
        ),
        (
            pa.struct([pa.field("a", pa.list_(pa.duration("us")))]),
            r"^column value: field a\[\]: Avro has no type for dur",
        ),
        (pa.duration("us"), "^column value: Avro has no type for duration"),
    ):
        with pytest.raises(SchemaError, match=text):
            WriteFormat(ColumnFormat("value", "avro")).writer(kind)


def test_a_row_that_does_not_fit() -> None:
    source = ColumnFormat("value", "avro", text=json.dumps(_SCHEMA))
    encoder = WriteFormat(source).writer(pa.struct([("id", pa.int64())])).encoder()
    rows = pa.array([{"id": 1}, {"id": None}])
    with pytest.raises(EncodeError, match=r"^column value, row 1: .*id.*, counted after 100 rows$"):
        encoder.encode(rows, 100)
    assert encoder.encode(rows[:1]).to_pylist() == [b"\2"]


def test_a_registry_that_is_away_is_told_with_the_partition() -> None:
    decoder = _decoder("value")
    with pytest.raises(ConnectionFailed, match=r"^t-0: the schema registry http://127\.0\.0\.1:1 "):
        list(chain(decoder.decode(_batch(0, [(None, _value(1, 8))], [_TIME]), 0, 1), decoder.finish()))


@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("avro", json.dumps(_SCHEMA), '"string"'),
        (
            "protobuf",
            'syntax = "proto3"; message R {int64 id = 1;}',
            'syntax = "proto3"; message R {int64 no = 1;}',
        ),
        ("json-schema", '{"type": "object", "properties": {"id": {"type": "integer"}}}', '{"type": "string"}'),
    ],
)
def test_a_schema_is_planned_once_a_process(name: Format, text: str, other: str) -> None:
    """Decoders have rows of their own, but share what was made of the schema."""
    called: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called[frame.f_code.co_name] += 1

    source = ReaderSchema(ColumnFormat("value", name), text)
    values = pa.array([{"avro": b"\2", "protobuf": b"\x08\1", "json-schema": b'{"id": 1}'}[name], None, b"\xff"])
    first, second = source.decoder(), source.decoder()
    expected = first.decode(values, None)
    assert expected.values.to_pylist() == [{"id": 1}, None, None]
    assert [row for row, _ in expected.bad] == [2]
    sys.setprofile(profile)
    try:
        third = source.decoder()
        assert third.decode(values, None) == second.decode(values, None) == expected
    finally:
        sys.setprofile(None)
    assert not {"parse_schema", "columns_of", "resolve", "compile_plan"} & called.keys()
    assert ReaderSchema(ColumnFormat("value", name), other).type != source.type
