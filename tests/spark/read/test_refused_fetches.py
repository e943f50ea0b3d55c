"""Fetches that fail with OFFSET_OUT_OF_RANGE for a moment: only records that are really gone count as lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from spark_klog.broker.faults import ErrorAnswer, Fault
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DataLossError, ProtocolError
from spark_klog.spark.options import source_options
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import read_ranges
from tests.spark.support import create_topic, delete_records, produce, values

REFUSED = ErrorAnswer("OFFSET_OUT_OF_RANGE")


@pytest.fixture(scope="module")
def faulty() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(faults=[]) as running:
        yield running


def offsets(cluster: EmbeddedCluster, topic: str, end: int, **given: str) -> list[int]:
    options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": topic}
    options |= {"kafka.max.partition.fetch.bytes": "200", "fetchOffset.retryIntervalMs": "10"} | given
    wanted = [OffsetRange(topic, 0, 0, end)]
    found: list[int] = []
    for batch in read_ranges(source_options(options, streaming=False), wanted, WITHOUT_HEADERS):
        found += batch.column("offset").to_pylist()
    return found


@pytest.mark.parametrize("mode", ["true", "false", "report"])
@pytest.mark.parametrize("skip", [0, 3])
def test_a_refusal_that_passes(
    faulty: EmbeddedCluster, topic: str, mode: str, skip: int, caplog: pytest.LogCaptureFixture
) -> None:
    create_topic(faulty.bootstrap_servers, topic)
    produce(faulty.bootstrap_servers, topic, values(100), batch_num_messages=10)
    fault = Fault(REFUSED, api="Fetch", topic=topic, skip=skip, count=3)
    faulty.inject(fault)
    with caplog.at_level(logging.WARNING, "spark_klog"):
        assert offsets(faulty, topic, 100, failOnDataLoss=mode) == list(range(100))
    assert faulty.faults_fired()[fault] == 3
    assert caplog.messages == []
    faulty.clear_faults()


def test_only_what_is_gone_is_given_up(faulty: EmbeddedCluster, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    create_topic(faulty.bootstrap_servers, topic)
    produce(faulty.bootstrap_servers, topic, values(100), batch_num_messages=10)
    delete_records(faulty.bootstrap_servers, topic, {0: 35})
    faulty.inject(Fault(REFUSED, api="Fetch", topic=topic, skip=2, count=2))
    with caplog.at_level(logging.WARNING, "spark_klog"):
        # the log ends at 100, so [100, 120) counts as lost
        assert offsets(faulty, topic, 120, failOnDataLoss="false", **{"fetchOffset.numRetries": "2"}) == list(
            range(35, 100)
        )
    faulty.clear_faults()
    told = [message.partition("true): ")[2] for message in caplog.messages]
    assert told == [
        f"{topic}-0: wanted [0, 35), available [35, 100) (retention)",
        f"{topic}-0 was read up to offset 100, but its log was truncated since: available [35, 100)",
    ]
    with pytest.raises(DataLossError, match=r"wanted \[0, 35\)"):
        offsets(faulty, topic, 100)


def test_a_broker_that_refuses_what_it_has_is_no_loss(faulty: EmbeddedCluster, topic: str) -> None:
    create_topic(faulty.bootstrap_servers, topic)
    produce(faulty.bootstrap_servers, topic, values(10))
    faulty.inject(Fault(REFUSED, api="Fetch", topic=topic))
    options = {"kafkaConsumer.pollTimeoutMs": "1000", "failOnDataLoss": "false"}
    with pytest.raises(ProtocolError, match="OFFSET_OUT_OF_RANGE"):
        offsets(faulty, topic, 10, **options)
    faulty.clear_faults()
