"""`--group` of the load job: a call that stands still between its commit and the group does not set the group back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition as ConfluentPartition

from spark_klog.base.names import TopicPartition
from spark_klog.cli.jobs import batch_load
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.load import run as run_module
from spark_klog.load.journal import lease
from spark_klog.load.run import Loaded, LoadOptions, load
from tests.load.buckets import bucket
from tests.load.job_program import Runner
from tests.load.support import InProcess
from tests.load.unreliable_s3 import UnreliableS3, serving
from tests.spark.support import Sent, create_topic, produce

_SECONDS = 30


def test_the_next_call_waits_for_the_group(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"v")] * 10)
    monkeypatch.setattr(batch_load, "SparkRunner", Runner)
    given = ["--bootstrap-servers", servers, "--topics", topic, "--output", str(tmp_path), "--group", f"g-{topic}"]
    seen: list[int] = []

    def call() -> Any:
        return batch_load.main.main(given, standalone_mode=False)

    def group() -> int:
        settings = {"bootstrap.servers": servers, "group.id": f"g-{topic}"}
        consumer = Consumer(settings)
        try:
            [place] = consumer.committed([ConfluentPartition(topic, 0)], timeout=_SECONDS)
            return int(place.offset)
        finally:
            consumer.close()

    real = batch_load.open_store

    def stand_still(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(batch_load, "open_store", real)
        produce(servers, topic, [Sent(b"v")] * 5)
        with pytest.raises(SystemExit):
            call()
        seen.append(group())
        return real(*arguments, **options)

    monkeypatch.setattr(batch_load, "open_store", stand_still)
    for _ in range(2):
        with pytest.raises(SystemExit):
            call()
        seen.append(group())
    assert seen == sorted(seen)
    assert seen[1:] == [10, 15]


@pytest.fixture
def s3() -> Iterator[str]:
    with serving(UnreliableS3()) as address:
        yield address


@pytest.mark.test_all("long")
def test_a_call_whose_lease_is_lost_leaves_the_group(
    cluster: EmbeddedCluster, topic: str, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, published = cluster.bootstrap_servers, list[Mapping[TopicPartition, int]]()
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"v")] * 10)
    options = LoadOptions({"bootstrap.servers": servers}, [topic], bucket(s3, "group"))
    real = run_module._Run.all

    def stand_still(*arguments: Any) -> Loaded:
        loaded = real(*arguments)
        monkeypatch.setattr(run_module._Run, "all", real)
        produce(servers, topic, [Sent(b"v")] * 5)
        load(options, InProcess(), publish=published.append)
        return loaded

    monkeypatch.setattr(lease, "RENEW_SECONDS", 1000.0)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 6.0)
    monkeypatch.setattr(run_module._Run, "all", stand_still)
    with pytest.raises(LoadError, match="another run"):
        load(options, InProcess(), publish=published.append)
    assert published == [{(topic, 0): 15}]
