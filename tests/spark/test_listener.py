"""The progress listener: figures of progress records, and of a running query."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from spark_klog.spark.listener import ProgressListener, QueryMetrics, SourceProgress, source_progress

from .support import Job, Sent, create_topic, produce, wait_for

START, END = '{"t":{"0":10,"1":0},"u":{"0":5}}', '{"t":{"0":40,"1":0},"u":{"0":5}}'
LATEST = (
    '{"t":{"0":100,"1":6},"u":{"0":5},'
    '"record bytes":[{"topic":"t","partition":0,"bytes":12.5},{"topic":"gone","partition":0,"bytes":1}]}'
)


def progress(start: str | None = START, end: str | None = END, latest: str | None = LATEST) -> SourceProgress | None:
    source: Any = SimpleNamespace(
        numInputRows=30, processedRowsPerSecond=15.0, startOffset=start, endOffset=end, latestOffset=latest
    )
    return source_progress("q", 3, source)


def test_figures() -> None:
    found = progress()
    assert found is not None
    assert (found.query, found.batch_id, found.rows, found.rows_per_second) == ("q", 3, 30, 15.0)
    assert found.records == {"t-0": 30, "t-1": 0, "u-0": 0}
    assert found.bytes == {"t-0": 375}
    behind = (found.min_offsets_behind_latest, found.max_offsets_behind_latest, found.avg_offsets_behind_latest)
    assert behind == (0, 60, 22.0)
    assert found.lost == []
    assert json.loads(found.to_json())["max_offsets_behind_latest"] == 60
    assert str(found) == "q micro-batch 3, source 0 (t, u): 30 rows, 15 rows/s, 60 behind at most"


def test_a_first_batch_starts_where_its_end_says() -> None:
    end = json.dumps(json.loads(END) | {'start of query {"t":{"0":38}}': {}})
    found = progress(None, end, '{"t":{"0":40,"1":0},"u":{"0":5}}')
    assert found is not None
    assert found.records == {"t-0": 2, "t-1": 0, "u-0": 5}
    assert str(found).endswith("up to date")


def test_all_partitions_may_be_gone() -> None:
    lost = [{"topic": "t", "partition": 0, "start": 5, "end": 5, "cause": "deleted"}]
    found = progress('{"t":{"0":5}}', '{"start of ":{}}', json.dumps({"lost ranges": lost}))
    assert found is not None
    assert (found.lost, found.records, found.avg_offsets_behind_latest) == (lost, {}, 0)


def test_lost_ranges_are_told() -> None:
    lost = [{"topic": "t", "partition": 0, "start": 1, "end": 2, "cause": "retention"}]
    found = progress(latest=json.dumps({"t": {"0": 40}, "lost ranges": lost}))
    assert found is not None
    assert found.lost == lost
    assert str(found).endswith("up to date, 1 ranges lost")


def test_partitions_that_open_transactions_hold_up() -> None:
    held_up = [{"topic": "t-x", "partition": 1, "records": 70, "sinceMs": 1_700_000_000_000}]
    found = progress(latest=json.dumps({"t": {"0": 40}, "held up by open transactions": held_up}))
    assert found is not None
    assert found.held_up == held_up
    assert str(found).endswith("up to date, 70 wait behind open transactions")
    metrics = QueryMetrics(lambda: 1_700_000_012.5)
    metrics.add(found)
    families = text_string_to_metric_families("".join(f"{line}\n" for line in "".join(metrics.page()).splitlines()))
    samples = {one.name: one for family in families for one in family.samples if "held_up" in one.name}
    assert {name: one.value for name, one in samples.items()} == {
        "klog_query_held_up_records": 70,
        "klog_query_held_up_seconds": 12.5,
    }
    labels = {"query": "q", "source": "0", "topic": "t-x", "partition": "1"}
    assert [one.labels for one in samples.values()] == [labels, labels]


@pytest.mark.parametrize("latest", [None, "None", "null", ""])
def test_a_batch_that_a_restart_runs_again_has_no_latest_offset(latest: str | None) -> None:
    found = progress(latest=latest)
    assert found is not None
    assert (found.records["t-0"], found.max_offsets_behind_latest) == (30, 0)


@pytest.mark.parametrize("end", [None, "", "3", "[]", "{}", "null", "no json", '{"t": 3}', '{"t": {"x": 3}}'])
def test_sources_of_others_are_left_out(end: str | None) -> None:
    assert progress(end=end) is None


@pytest.fixture
def listener(spark: SparkSession) -> Iterator[ProgressListener]:
    made = ProgressListener(show=io.StringIO(), metrics="0")
    spark.streams.addListener(made)
    yield made
    spark.streams.removeListener(made)
    made.close()


def _samples(listener: ProgressListener, query: str) -> dict[tuple[str, str | None], float]:
    with urllib.request.urlopen(f"http://{listener.metrics_address}/metrics", timeout=20) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return {
        (sample.name, sample.labels.get("partition")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["query"] == query
    }


def test_a_query(
    spark: SparkSession, cluster: EmbeddedCluster, topic: str, tmp_path: Path, listener: ProgressListener
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    produce(servers, topic, [Sent(b"x" * 1000, partition=number % 2) for number in range(400)])
    produce(servers, topic, [Sent(b"x" * 1000, partition=1) for _ in range(100)])
    found: list[SourceProgress] = []
    scraped: list[dict[tuple[str, str | None], float]] = []

    def note(progress: SourceProgress) -> None:
        """Runs while the query does: the listener removes a query's samples when it ends."""
        scraped.append(_samples(listener, progress.query))
        found.append(progress)

    listener._on_progress = note
    job = Job(spark, servers, tmp_path, subscribe=topic, maxOffsetsPerTrigger="250", estimateRecordBytes="true")
    rows = job.run()
    wait_for(lambda: sum(item.rows for item in found) == 500, "progress of all rows")
    batches = [item for item in found if item.rows]
    assert [item.rows for item in batches] == rows
    for key, count in ((f"{topic}-0", 200), (f"{topic}-1", 300)):
        assert sum(item.records[key] for item in batches) == count
        # a value of 1,000 bytes makes a slightly larger record, with its share of the batch header
        assert count * 1000 < sum(item.bytes[key] for item in batches) < count * 1100
    first = batches[0]
    # AvailableNow's lag is relative to the offsets seen at its start
    left = [200 - first.records[f"{topic}-0"], 300 - first.records[f"{topic}-1"]]
    assert first.max_offsets_behind_latest == max(left)
    assert first.min_offsets_behind_latest == min(left)
    assert first.avg_offsets_behind_latest == sum(left) / 2
    assert batches[-1].max_offsets_behind_latest == 0
    assert listener.last[first.query, 0] == found[-1]
    show = listener._show
    assert isinstance(show, io.StringIO)
    assert show.getvalue() == "".join(f"{item}\n" for item in found)
    assert "\x1b" not in show.getvalue()
    assert scraped[-1]["klog_query_rows_total", None] == 500
    assert scraped[-1]["klog_query_lag_records", "0"] == scraped[-1]["klog_query_lag_records", "1"] == 0
