"""A restarted query whose options name fewer partitions than before fails at once, with advice on how to continue."""

from __future__ import annotations

import logging

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DataLossError
from spark_klog.spark.read import stream
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.versions import ReadAllAvailable
from tests.spark.support import create_topic, produce, values

#: Each option with a value that names all, one that names fewer, and the partition that is then missing.
CHANGES = [
    ("subscribe", "{0}-a,{0}-b", "{0}-a", "{0}-b-1"),
    ("subscribePattern", "^{0}-[ab]$", "^{0}-a$", "{0}-b-1"),
    ("assign", '{{"{0}-a":[0],"{0}-b":[0,1]}}', '{{"{0}-a":[0],"{0}-b":[0]}}', "{0}-b-1"),
]


@pytest.fixture(autouse=True)
def never_wait_for_what_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the reader looked for an unnamed partition as if it were deleted, the test would time out."""
    monkeypatch.setattr(stream, "_GONE_SECONDS", 3600.0)


@pytest.fixture
def topics(cluster: EmbeddedCluster, topic: str) -> str:
    for name, partitions in ((f"{topic}-a", 1), (f"{topic}-b", 2)):
        create_topic(cluster.bootstrap_servers, name, partitions)
        produce(cluster.bootstrap_servers, name, values(4, partitions=partitions))
    return topic


def reader(cluster: EmbeddedCluster, option: str, value: str, mode: str = "true") -> stream.StreamReader:
    options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, option: value, "failOnDataLoss": mode}
    source = KlogDataSource(options | {"startingOffsets": "earliest"})
    made = source.streamReader(source.schema())
    assert isinstance(made, stream.StreamReader)
    return made


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("option", "every", "less", "missing"), CHANGES)
def test_less_than_before(
    cluster: EmbeddedCluster,
    topics: str,
    option: str,
    every: str,
    less: str,
    missing: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = reader(cluster, option, every.format(topics))
    end = first.latestOffset({}, ReadAllAvailable())
    words = f"{missing.format(topics)} is no longer named by the options subscribe, subscribePattern or assign"
    narrow = reader(cluster, option, less.format(topics))
    with pytest.raises(DataLossError, match="set failOnDataLoss=false or report to continue without") as raised:
        narrow.latestOffset(end, ReadAllAvailable())
    assert str(raised.value).startswith("[KLOG_DATA_LOSS.UNSUBSCRIBED] ")
    assert words in str(raised.value)
    assert "; name it again to continue with it, or set failOnDataLoss=false" in str(raised.value)
    # a micro-batch that the previous run planned and did not read fails, too
    with pytest.raises(DataLossError, match=r"KLOG_DATA_LOSS\.UNSUBSCRIBED"):
        reader(cluster, option, less.format(topics)).partitions({}, end)
    # with failOnDataLoss=false the query continues, and logs that once
    going_on = reader(cluster, option, less.format(topics), "false")
    with caplog.at_level(logging.WARNING, "spark_klog"):
        following = going_on.latestOffset(end, ReadAllAvailable())
        assert going_on.latestOffset(following, ReadAllAvailable()) == following
    assert f"{topics}-a" in following
    (told,) = [message for message in caplog.messages if words in message]
    assert told.endswith("if it is named again later, the query reads it from its first record on")
    again = reader(cluster, option, every.format(topics), "false")
    tasks = again.partitions(following, again.latestOffset(following, ReadAllAvailable()))
    begun = {f"{item.topic}-{item.partition}": item.start for task in tasks for item in task.ranges}
    assert begun[missing.format(topics)] == 0
    for each in (first, narrow, going_on, again):
        each.stop()
