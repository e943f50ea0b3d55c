"""Spark's own from_avro and to_avro (spark-avro on pyspark 4.1.1) on the same schemas and rows.

Differences that are meant, and in docs/explanation/avro.md: rows that only we refuse (text that is not UTF-8, bytes
left over), times whose units differ.
"""

from __future__ import annotations

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
from tests.support.runs.soak import SOAK
from tests.support.spark.jvm_connector import spark_artifact
from tests.support.spark.pyspark_versions import child_environment, with_connector

from .model import evolutions, records, values
from .spark_types import case_of, every_type, plain, spark_type
from .support import written

_SECONDS = 600
_EXAMPLES = 50 if SOAK else 10


def _by_spark(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jar = spark_artifact("spark-avro")
    python = with_connector()
    script = Path(__file__).parents[2] / "support" / "spark" / "spark_avro.py"
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


def _check(case: dict[str, Any], answer: dict[str, Any]) -> None:
    assert "error" not in answer, (case, answer)
    reader = parse_schema(case["reader"])
    decoder = AvroDecoder(reader)
    rows = [bytes.fromhex(row) for row in case["rows"]]
    decoded = decoder.decode(pa.array(rows, pa.binary()), [decoder.program(parse_schema(case["writer"]))])
    assert spark_type(decoder.type) == answer["type"], case
    bad = dict(decoded.bad)
    for index, row in enumerate(answer["rows"]):
        if index not in bad:
            ours = plain(decoded.values[index].as_py(), decoder.type)
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
    cases = [every_type()]

    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def addcase(data: st.DataObject) -> None:
        writer = data.draw(records())
        reader = data.draw(evolutions(writer))
        rows = written(writer, *data.draw(st.lists(values(writer), min_size=1, max_size=3)))
        # Spark has an empty struct for a union of null alone
        if writer["fields"] and reader["fields"] and '["null"]' not in json.dumps(reader):
            cases.append(case_of(writer, reader, rows))

    addcase()
    answers = _by_spark(cases)
    assert len(answers) == len(cases)
    failed = []
    for case, answer in zip(cases, answers, strict=True):
        try:
            _check(case, answer)
        except AssertionError as error:
            failed.append(error)
    assert not failed, failed[:3]
