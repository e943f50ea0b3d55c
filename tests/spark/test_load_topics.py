"""Loads by topic share a job of Spark, and one whose task fails or kills its worker fails alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.by_topic import Loads, example_of
from spark_klog.load.run import LoadOptions
from spark_klog.load.tasks.task import SparkRunner, Work

from .support import create_topic, produce, values

_COUNT = 6


class _Dies:
    """Ends the process that reads it from a pickle."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (1,)


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize("why", ["error", "death"])
def test_one_that_fails(
    spark: SparkSession,
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = cluster.bootstrap_servers
    topics = [f"{topic}.{number}" for number in range(_COUNT)]
    for name in topics:
        create_topic(servers, name)
        produce(servers, name, values(20))
    bad = tmp_path / topics[2]
    if why == "error":  # its files can't be written
        (bad / "_klog/runs/00000001").mkdir(parents=True)
        (bad / "_klog/runs/00000001/staging").write_text("")
    jobs: list[int] = []
    real = SparkRunner._answers

    def answers(self: SparkRunner, works: Sequence[Work]) -> list[Any]:
        jobs.append(len(works))
        if why == "death":
            works = [replace(work, job=_Dies()) if work.job.output == str(bad) else work for work in works]
        return real(self, works)

    monkeypatch.setattr(SparkRunner, "_answers", answers)
    asked = LoadOptions({"bootstrap.servers": servers}, topics[:1], example_of(str(tmp_path / "{topic}")))
    follow = lambda _total, _done: nullcontext()  # noqa: E731
    loads = Loads(asked, topics, None, str(tmp_path / "{topic}"), SparkRunner(lambda: spark), follow)
    outcomes = loads.round()
    assert {outcome.topic: outcome.has_failed for outcome in outcomes} == {name: name == topics[2] for name in topics}
    # all together, and then who may be at fault, each alone
    assert jobs == [_COUNT, *[1] * (_COUNT if why == "death" else 1)]
    assert ("staging" if why == "error" else "worker") in str(outcomes[2].error)
    if why == "error":
        (bad / "_klog/runs/00000001/staging").unlink()
    monkeypatch.setattr(SparkRunner, "_answers", real)
    records = [sum(part.records for part in outcome.loaded.partitions) for outcome in loads.round() if outcome.loaded]
    assert records == [20 if name == topics[2] else 0 for name in topics]
