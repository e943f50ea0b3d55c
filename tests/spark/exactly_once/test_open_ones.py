"""What `klog transactions` and `klog checkpoint show` say of a query whose micro-batch is under way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession, functions as F

from spark_klog.cli.main import main
from tests.spark.support import Sent, create_topic, produce, wait_for

from .support import read

_SECONDS = 300


def _lines(*words: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]


@pytest.mark.test_all("again")
@pytest.mark.usefixtures("logging_kept")
def test_who_holds_an_open_transaction(spark: SparkSession, servers: str, topic: str, tmp_path: Path) -> None:
    """One task has written, and the other waits for a file."""
    for name in (f"{topic}-from", topic):
        create_topic(servers, name, 2)
    produce(servers, f"{topic}-from", [Sent(b"first"), Sent(b"wait", partition=1)])
    file, checkpoint = tmp_path / "go", tmp_path / "checkpoint"

    def held(value: bytes) -> str:
        while value == b"wait" and not Path(str(file)).exists():
            time.sleep(0.05)
        return value.decode()

    stream = spark.readStream.format("klog").option("kafka.bootstrap.servers", servers)
    stream = stream.option("subscribe", f"{topic}-from").option("startingOffsets", "earliest")
    writer = (
        stream.load()
        .select(F.udf(held, "string")("value").alias("value"))
        .writeStream.format("klog")
        .option("topic", topic)
    )
    writer = writer.options(**{"kafka.bootstrap.servers": servers, "deliveryGuarantee": "exactly-once"})
    writer = writer.option("decisionTopic", f"{topic}-decisions")
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    where = ("-b", servers, "--decision-topic", f"{topic}-decisions")
    try:
        found: list[dict[str, Any]] = []

        def is_open() -> bool:
            if query.exception() is None:
                listed = _lines("transactions", "list", "--state", "ongoing", *where)
                found[:] = [line for line in listed if line["query"] is not None]
            return bool(found)

        wait_for(is_open, "an open transaction of the sink", _SECONDS, query)
        (line,) = found
        assert (line["query"], line["batch"], line["task"], line["isDecided"]) == (str(query.id), None, None, False)
        (line,) = _lines("transactions", "list", "--state", "ongoing", *where, "--checkpoint", str(checkpoint))
        assert line["query"] == str(checkpoint)
        (shown,) = _lines("checkpoint", "show", str(checkpoint), *where)
        (one,) = shown["decisions"]["open"]
        assert (one["transactionalId"], one["isDecided"]) == (line["transactionalId"], False)
        assert shown["decisions"]["nextRun"][-1] == "runs and writes micro-batch 0 again"
    finally:
        file.touch()
    assert query.awaitTermination(_SECONDS)
    (shown,) = _lines("checkpoint", "show", str(checkpoint), *where)
    decisions = shown["decisions"]
    assert (decisions["decided"], decisions["transactions"], decisions["open"], decisions["isEnded"]) == (
        0,
        2,
        [],
        True,
    )
    assert decisions["nextRun"][-1] == "runs and writes micro-batch 1"
    assert decisions["place"].startswith(f"topic {topic}-decisions")
    assert sorted(read(servers, topic)) == ["first", "wait"]
