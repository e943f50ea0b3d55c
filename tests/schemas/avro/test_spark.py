"""Spark's own from_avro and to_avro (spark-avro on pyspark 4.1.1) on the same schemas and rows.

Differences that are meant, and in docs/explanation/avro.md: rows that only we refuse (text that is not UTF-8, bytes
left over), times whose units differ.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.schema import parse_schema
from tests.support.maven import resolve
from tests.support.pyspark_versions import WITH_CONNECTOR, child_environment, with_connector

from .model import evolutions, records, values
from .support import record, written

_SECONDS = 600
_EXAMPLES = 50


def _by_spark(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    artifact = f"org.apache.spark:spark-avro_2.13:{WITH_CONNECTOR}"
    (jar,) = resolve(f"spark-avro-alone-{WITH_CONNECTOR}", (artifact,), dependencies=False).glob("*.jar")
    python = with_connector()
    script = Path(__file__).parents[2] / "support" / "spark_avro.py"
    done = subprocess.run(
        [str(python), str(script), str(jar)],
        input=json.dumps(cases),
        env={**child_environment(python), "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _case(writer: Any, reader: Any, rows: list[bytes]) -> dict[str, Any]:
    return {"writer": json.dumps(writer), "reader": json.dumps(reader), "rows": [row.hex() for row in rows]}


def _logical(kind: str, logical: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


def _types() -> dict[str, Any]:
    """A record with every type, and its values."""
    fields = {
        "boolean": ("boolean", True),
        "int": ("int", -(2**31)),
        "long": ("long", 2**63 - 1),
        "float": ("float", 1.5),
        "double": ("double", -1e300),
        "string": ("string", "\u20ac\U0001f600"),
        "bytes": ("bytes", b"\x00\xff"),
        "fixed": ({"type": "fixed", "name": "F", "size": 3}, b"abc"),
        "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B"),
        "date": (_logical("int", "date"), dt.date(1970, 1, 2)),
        "time_millis": (_logical("int", "time-millis"), dt.time(1)),
        "time_micros": (_logical("long", "time-micros"), dt.time(1)),
        "millis": (_logical("long", "timestamp-millis"), dt.datetime(2024, 5, 6, 7, tzinfo=dt.timezone.utc)),
        "micros": (_logical("long", "timestamp-micros"), dt.datetime(2024, 5, 6, 7, tzinfo=dt.timezone.utc)),
        "local_millis": (_logical("long", "local-timestamp-millis"), dt.datetime(2024, 5, 6, 7)),
        "local_micros": (_logical("long", "local-timestamp-micros"), dt.datetime(2024, 5, 6, 7)),
        "nanos": (_logical("long", "timestamp-nanos"), 5),
        "uuid": (_logical("string", "uuid"), "00000000-0000-0000-0000-000000000007"),
        "duration": ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, bytes(12)),
        "decimal": (_logical("bytes", "decimal", precision=10, scale=2), decimal.Decimal("-12.34")),
        "wide": (
            {"type": "fixed", "name": "W", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 9},
            decimal.Decimal("-1.000000001"),
        ),
        "array": ({"type": "array", "items": ["null", "int"]}, [1, None]),
        "map": ({"type": "map", "values": {"type": "array", "items": "string"}}, {"k": ["v"]}),
        "record": (record(("x", ["null", "int"]), name="I"), {"x": 1}),
        "nullable": (["string", "null"], None),
        "longs": (["int", "long"], 5),
        "doubles": (["float", "null", "double"], 5.0),
        "member": (["null", "string", "int", record(("y", "int"), name="J")], {"y": 1}),
    }
    schema = record(*((name, kind) for name, (kind, _) in fields.items()))
    row = {name: value for name, (_, value) in fields.items()}
    return _case(schema, schema, written(schema, row))


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Our value as spark_avro.py has it."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            kind.field(index).name: _plain(value[kind.field(index).name], kind.field(index).type)
            for index in range(kind.num_fields)
        }
    if pa.types.is_map(kind):
        # Java keeps the last value of a key
        return sorted([key, _plain(item, kind.item_type)] for key, item in dict(value).items())
    if pa.types.is_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dt.datetime):
        return str(value.replace(tzinfo=None))
    if isinstance(value, dt.date | decimal.Decimal):
        return str(value)
    return repr(value) if isinstance(value, float) else value


def _spark_type(kind: pa.DataType) -> str:
    """The name that Spark has for an Arrow type."""
    if pa.types.is_struct(kind):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return f"struct<{','.join(f'{field.name}:{_spark_type(field.type)}' for field in fields)}>"
    if pa.types.is_map(kind):
        return f"map<string,{_spark_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{_spark_type(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    names = {"int32": "int", "int64": "bigint", "bool": "boolean", "date32[day]": "date", "null": "void"}
    return names.get(str(kind), str(kind))


def _check(case: dict[str, Any], answer: dict[str, Any]) -> None:
    assert "error" not in answer, (case, answer)
    reader = parse_schema(case["reader"])
    decoder = AvroDecoder(reader)
    rows = [bytes.fromhex(row) for row in case["rows"]]
    decoded = decoder.decode(pa.array(rows, pa.binary()), [decoder.program(parse_schema(case["writer"]))])
    assert _spark_type(decoder.type) == answer["type"], case
    bad = dict(decoded.bad)
    for index, row in enumerate(answer["rows"]):
        if index not in bad:
            ours = _plain(decoded.values[index].as_py(), decoder.type)
            assert ours == row, (case, ours, row)
        elif "not UTF-8" not in bad[index]:
            assert row is None or all(value is None for value in row.values()), (case, bad[index], row)
    if not bad and isinstance(answer["written"], list):
        encoded = AvroEncoder(reader, decoder.type).encode(decoded.values).to_pylist()
        if '"map"' not in case["reader"]:  # Java's maps have another order
            assert [value.hex() for value in encoded] == answer["written"], case


@pytest.mark.peer
@pytest.mark.test_all("client")
def test_as_spark_reads_and_writes() -> None:
    cases = [_types()]

    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def add_case(data: st.DataObject) -> None:
        writer = data.draw(records())
        reader = data.draw(evolutions(writer))
        rows = written(writer, *data.draw(st.lists(values(writer), min_size=1, max_size=3)))
        # Spark has an empty struct for a union of null alone
        if writer["fields"] and reader["fields"] and '["null"]' not in json.dumps(reader):
            cases.append(_case(writer, reader, rows))

    add_case()
    answers = _by_spark(cases)
    assert len(answers) == len(cases)
    failed = []
    for case, answer in zip(cases, answers, strict=True):
        try:
            _check(case, answer)
        except AssertionError as error:
            failed.append(error)
    assert not failed, failed[:3]
