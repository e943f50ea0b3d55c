"""Random schemas, evolutions and rows: the native kernel, the rows by fastavro, and fastavro's own resolution agree."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.schema import AvroSchema, parse_schema
from spark_klog.schemas.rows import Decoded
from tests.schemas.oracles import KERNELS, of_kernel

from .model import evolutions, expected, records, values


def _examples(count: int, test: Callable[[st.DataObject], None]) -> Callable[[], None]:
    """A test of so many random examples."""
    rules = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    return rules(given(data=st.data())(test))


def _written(schema: Any, rows: list[Any]) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    result = []
    for row in rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, row)
        result.append(stream.getvalue())
    return result


def _by_fastavro(writer: Any, reader: Any, data: bytes) -> Any:
    """What fastavro reads; an exception if it does not."""
    parsed = fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    return fastavro.schemaless_reader(io.BytesIO(data), *parsed, return_record_name=True)


def _decoded(kernel: str, writer: Any, reader: Any, data: pa.Array) -> Decoded:
    with of_kernel(kernel):
        decoder = AvroDecoder(parse_schema(reader))
        program = decoder.program(parse_schema(writer))
    result = decoder.decode(data, [program])
    assert result.values.type == decoder.type
    result.values.validate(full=True)
    return result


def _same(one: Any, other: Any) -> bool:
    """Equal, also of types; floats as they are with 32 bits."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=1e-6) or (math.isinf(one) and abs(other) > 3e38)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _evolutions(data: st.DataObject) -> None:
    writer = data.draw(records())
    reader = data.draw(evolutions(writer))
    written = _written(writer, data.draw(st.lists(values(writer), max_size=4)))
    column = pa.array([*written, None], pa.binary())
    native, *others = [_decoded(kernel, writer, reader, column) for kernel in KERNELS]
    bad = {row for row, _ in native.bad}
    for other in others:
        assert native.values.equals(other.values)
        assert bad == {row for row, _ in other.bad}
    rows = native.values.to_pylist()
    for number, value in enumerate(written):
        try:
            read = _by_fastavro(writer, reader, value)
        except Exception:
            assert number in bad
        else:
            assert number not in bad
            wanted = expected(reader, read)
            assert _same(rows[number], wanted), (rows[number], wanted)


def _round_trip(data: st.DataObject) -> None:
    """What is decoded is encoded to the same bytes."""
    schema = data.draw(records())
    prefix = b"\x00\x00\x00\x00\x07"
    written = [prefix + value for value in _written(schema, data.draw(st.lists(values(schema), max_size=4)))]
    column = pa.array([b"cut", None, *written, None], pa.binary()).slice(1)
    parsed = parse_schema(schema)
    for kernel in KERNELS:
        with of_kernel(kernel):
            _check_round_trip(parsed, schema, column, written, prefix)


def _check_round_trip(parsed: AvroSchema, schema: Any, column: pa.Array, written: list[bytes], prefix: bytes) -> None:
    decoder = AvroDecoder(parsed)
    result = decoder.decode(column, [decoder.program(parsed)], starts=5)
    assert not result.bad
    rows = result.values.to_pylist()[1:-1]
    for row, value in zip(rows, written, strict=True):
        assert _same(row, expected(schema, _by_fastavro(schema, schema, value[5:])))
    encoder = AvroEncoder(parsed, decoder.type)
    assert encoder.encode(result.values, prefix).equals(column)
    assert encoder.encode(result.values.slice(1), prefix).equals(column.slice(1))


test_evolutions = _examples(30, _evolutions)
test_many_evolutions = pytest.mark.test_all("long")(_examples(400, _evolutions))
test_round_trip = _examples(30, _round_trip)
test_many_round_trips = pytest.mark.test_all("long")(_examples(400, _round_trip))
