"""A task fetches many short ranges together; ranges that such responses do not hold are read one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer as ConfluentProducer

from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DataLossError, ErrorCode, ProtocolError
from spark_klog.spark.options import source_options
from spark_klog.spark.read import tasks
from spark_klog.spark.read.ranges import OffsetRange
from tests.spark.support import create_topic
from tests.support.brokers.faults import error
from tests.support.brokers.scripted_broker import ScriptedCluster

PARTITIONS, RECORDS = 40, 10


def _fill(servers: str, topic: str, sizes: Callable[[int], int] = lambda partition: 10) -> list[bytes]:
    """Produce RECORDS records with `sizes(partition)` more bytes to each partition; return all values."""
    producer = ConfluentProducer({"bootstrap.servers": servers, "linger.ms": 50})
    values = []
    for number in range(RECORDS):
        for partition in range(PARTITIONS):
            values.append(b"%d-%d-" % (partition, number) + bytes(sizes(partition)))
            producer.produce(topic, values[-1], partition=partition)
    assert producer.flush(30) == 0
    return values


def _read(servers: str, ranges: list[OffsetRange], **more: str) -> list[bytes]:
    options = {"kafka.bootstrap.servers": servers, "subscribe": ranges[0].topic, **more}
    found: list[bytes] = []
    for batch in tasks.read_ranges(source_options(options, streaming=False), ranges, WITHOUT_HEADERS):
        found += batch.column("value").to_pylist()
    return found


def _ranges(topic: str, end: int = RECORDS) -> list[OffsetRange]:
    return [OffsetRange(topic, partition, 0, end) for partition in range(PARTITIONS)]


def test_one_request_reads_them_all() -> None:
    with ScriptedCluster({"t": PARTITIONS}) as brokers:
        values = _fill(brokers.bootstrap_servers, "t")
        assert sorted(_read(brokers.bootstrap_servers, _ranges("t"))) == sorted(values)
        assert brokers.count("Fetch") == 1


@pytest.mark.parametrize("size", [100_000 // RECORDS, 900_000 // RECORDS])
@pytest.mark.parametrize(
    "per_batch",
    [lambda _: 1, lambda _: 5, lambda partition: 10 if partition % 2 else 5, lambda partition: 10 if partition else 1],
    ids=["1", "5", "5 or 10", "10 but for one"],
)
def test_requests_grow_until_they_hold_whole_ranges(size: int, per_batch: Callable[[int], int]) -> None:
    """A first response that ends within ranges shows how many bytes to request; no range is fetched alone."""
    with ScriptedCluster({"t": PARTITIONS}) as brokers:
        values = []
        for partition in range(PARTITIONS):
            found = [b"%d-%d-" % (partition, number) + bytes(size) for number in range(RECORDS)]
            brokers.append("t", partition, found, per_batch(partition))
            values += found
        assert sorted(_read(brokers.bootstrap_servers, _ranges("t"))) == sorted(values)
        assert brokers.count("Fetch") <= 5


def test_they_share_an_arrow_batch() -> None:
    """An Arrow batch for each of thousands of partitions would cost more than their records."""
    with ScriptedCluster({"t": PARTITIONS}) as brokers:
        values = _fill(brokers.bootstrap_servers, "t")
        options = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "subscribe": "t"}
        source = source_options(options, streaming=False)
        (batch,) = tasks.read_ranges(source, _ranges("t"), WITHOUT_HEADERS)
        found = [(row["partition"], row["offset"], row["value"]) for row in batch.to_pylist()]
        of = [value.split(b"-") for value in values]
        assert sorted(found) == sorted((int(v[0]), int(v[1]), value) for v, value in zip(of, values, strict=True))


def test_part_of_a_batch_and_ranges_that_are_long_or_alone(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, PARTITIONS)
    values = _fill(servers, topic, lambda partition: 200_000 if partition == 7 else 10)
    assert sorted(_read(servers, _ranges(topic))) == sorted(values)
    first = {b"%d-%d" % (partition, number) for partition in range(PARTITIONS) for number in range(3)}
    found = _read(servers, _ranges(topic, 3))
    assert {b"-".join(value.split(b"-")[:2]) for value in found} == first
    assert len(found) == len(first)
    assert len(_read(servers, _ranges(topic)[:1])) == RECORDS
    soon = {"fetchOffset.retryIntervalMs": "10", "fetchOffset.numRetries": "0"}
    with pytest.raises(DataLossError, match=f"{topic}-3"):
        _read(servers, [*_ranges(topic)[:3], OffsetRange(topic, 3, 5, RECORDS + 5)], **soon)


@pytest.mark.parametrize("code", ["NOT_LEADER_OR_FOLLOWER", "UNKNOWN_SERVER_ERROR", "TOPIC_AUTHORIZATION_FAILED"])
def test_an_error_is_met_by_a_fetch_of_its_own(code: str) -> None:
    with ScriptedCluster({"t": PARTITIONS}) as brokers:
        values = _fill(brokers.bootstrap_servers, "t")
        brokers.on("Fetch", error(ErrorCode[code], partition=3))
        assert sorted(_read(brokers.bootstrap_servers, _ranges("t"))) == sorted(values)
        assert brokers.count("Fetch") > 1


def test_an_error_that_lasts_is_raised() -> None:
    with ScriptedCluster({"t": PARTITIONS}) as brokers:
        _fill(brokers.bootstrap_servers, "t")
        brokers.always("Fetch", error(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
        with pytest.raises(ProtocolError, match="TOPIC_AUTHORIZATION_FAILED"):
            _read(brokers.bootstrap_servers, _ranges("t"))
