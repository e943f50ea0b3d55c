"""Sampled record sizes and timestamp types, of a fake that limits bytes as Apache Kafka does, and of our broker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.sampling import record_sizes, timestamp_types
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DecodeError, ErrorCode
from spark_klog.protocol.apis import FETCH
from spark_klog.records.contract import Record
from spark_klog.records.formats.batch import next_offset_after
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.wire.codecs import codec_by_name
from tests.support.brokers.batches import make_batch
from tests.support.clients.topics import create_topic

TIME = 1_700_000_000_000
A, B, C = ("t", 0), ("t", 1), ("u", 0)


def batch(offset: int, count: int, size: int) -> bytes:
    """A batch of `count` records with values of `size` bytes."""
    data = make_batch([(None, b"v" * size)] * count, [TIME] * count)
    data[:8] = offset.to_bytes(8, "big")
    return bytes(data)


class FakeCluster:
    """Brokers by node id, with the batches that a fetch of each of their partitions returns."""

    def __init__(self, **logs: Mapping[TopicPartition, list[bytes]]) -> None:
        self.config = client_config({"bootstrap.servers": "h:1"})
        self._logs = {int(node[1:]): log for node, log in logs.items()}
        self.log = {key: batches for log in logs.values() for key, batches in log.items()}
        self.errors: dict[TopicPartition, int] = {}
        self.requests: list[tuple[int, list[TopicPartition], int]] = []

    def attempt(self, action: Callable[[], Any]) -> Any:
        return action()

    def by_leader(self, partitions: Iterable[TopicPartition]) -> tuple[dict[int, list[TopicPartition]], dict[Any, Any]]:
        result: dict[int, list[TopicPartition]] = {}
        for topic, partition in partitions:
            for node, log in self._logs.items():
                if (topic, partition) in log:
                    result.setdefault(node, []).append((topic, partition))
        return result, {}

    def deadline(self) -> float:
        return math.inf

    def connection(self, node: int) -> _FakeBroker:
        return _FakeBroker(self, node, self._logs[node])


class _FakeBroker:
    def __init__(self, cluster: FakeCluster, node: int, log: Mapping[TopicPartition, list[bytes]]) -> None:
        self._cluster, self._node, self._log = cluster, node, log

    address = "h:1"

    def receive(self, answer: dict[str, Any], deadline: float) -> dict[str, Any]:
        return answer

    def send(self, api: object, message: dict[str, Any], *, version: int | None, deadline: float) -> dict[str, Any]:
        """Return the batches that fit into partition_max_bytes; only the first partition gets one that is larger."""
        assert api is FETCH
        assert message["max_wait_ms"] == 0
        responses, asked, sizes = [], [], set()
        is_first = True
        for topic in message["topics"]:
            entries = []
            for wanted in topic["partitions"]:
                key = topic["topic"], wanted["partition"]
                asked.append(key)
                sizes.add(wanted["partition_max_bytes"])
                data, size = b"", wanted["partition_max_bytes"]
                batches = self._log[key] if key not in self._cluster.errors else []
                for item in batches:
                    if len(data) + len(item) > size and not (is_first and not data):
                        break
                    data += item
                is_first = is_first and not data
                entries.append(
                    {
                        "partition_index": wanted["partition"],
                        "error_code": self._cluster.errors.get(key, 0),
                        "high_watermark": _end(batches, wanted["fetch_offset"]),
                        "records": memoryview(data) if data else None,
                        "aborted_transactions": None,
                    }
                )
            responses.append({"topic": topic["topic"], "partitions": entries})
        (size,) = sizes
        self._cluster.requests.append((self._node, asked, size))
        return {"error_code": 0, "responses": responses}


def _end(batches: list[bytes], offset: int) -> int:
    try:
        return next_offset_after(b"".join(batches), offset)
    except DecodeError:
        return offset + 1


def _as_cluster(fake: Any) -> Any:
    return fake


def ask(cluster: FakeCluster, offsets: dict[TopicPartition, int]) -> dict[TopicPartition, float]:
    return record_sizes(_as_cluster(cluster), offsets)


def test_bytes_for_each_offset() -> None:
    a, b, c = [batch(0, 10, 200), batch(10, 10, 100)], [batch(5, 20, 50)], [batch(0, 4, 99)]
    cluster = FakeCluster(n1={A: a, B: b}, n2={C: c})
    expected = {A: (len(a[0]) + len(a[1])) / 20, B: len(b[0]) / 20, C: len(c[0]) / 4}
    assert ask(cluster, {A: 0, B: 5, C: 0}) == expected
    assert 100 < expected[A] < 175
    assert [(node, asked) for node, asked, _ in cluster.requests] == [(1, [A, B]), (2, [C])], "one request a broker"
    assert {size for _, _, size in cluster.requests} == {65536}


def test_a_fetch_in_the_midst_of_a_batch() -> None:
    """The batch's bytes are divided by all its records, also if it begins at offset 0."""
    first, later = batch(0, 100, 80), batch(50, 100, 80)
    assert ask(FakeCluster(n1={A: [first]}), {A: 99}) == {A: len(first) / 100}
    assert ask(FakeCluster(n1={A: [later]}), {A: 149}) == {A: len(later) / 100}


def test_nothing_asked() -> None:
    cluster = FakeCluster()
    assert ask(cluster, {}) == {}
    assert cluster.requests == []


def test_partitions_without_records_have_no_size() -> None:
    cluster = FakeCluster(n1={A: [], B: [batch(0, 10, 100)]})
    assert list(ask(cluster, {A: 0, B: 0})) == [B]
    assert len(cluster.requests) == 1, "it is not asked again"


@pytest.mark.parametrize("size", [70_000, 300_000, 1_000_000, 5_000_000])
def test_batches_larger_than_a_sample(size: int) -> None:
    large = batch(0, 100, size // 100)
    cluster = FakeCluster(n1={key: [large, batch(100, 100, size // 100)] for key in (A, B, C)})
    assert ask(cluster, {A: 0, B: 0, C: 0}) == {key: len(large) / 100 for key in (A, B, C)}
    assert timestamp_types(_as_cluster(cluster), {A: 0, B: 0, C: 0}) == {A: 0, B: 0, C: 0}
    assert cluster.requests[0] == (1, [A, B, C], 65536)
    assert cluster.requests[1][1] == [B, C], "only those again"


def test_batches_larger_than_a_fetch() -> None:
    """Each response has only the batch of its first partition; no request asks for more than 1 MiB of several."""
    huge = batch(0, 2, 5_000_000)
    keys = [("t", partition) for partition in range(12)]
    cluster = FakeCluster(n1={key: [huge] for key in keys})
    found = ask(cluster, dict.fromkeys(keys, 0))
    assert set(found.values()) == {len(huge) / 2}
    assert len(found) == len(keys) == len(cluster.requests)
    assert {(size, len(asked)) for _, asked, size in cluster.requests[:-1]} == {
        (65_536, 12),
        (262_144, 4),
        (262_144, 3),
        (1_048_576, 1),
    }


def test_the_time_of_many_partitions() -> None:
    """request.timeout.ms is for some tens of requests, so that samples of any number of partitions come to an end."""
    keys = [("t", partition) for partition in range(2500)]
    cluster = FakeCluster(n1={key: [batch(0, 2, 10)] for key in keys})
    attempts: list[int] = []

    def attempt(action: Callable[[], Any]) -> Any:
        before = len(cluster.requests)
        made = action()
        attempts.append(len(cluster.requests) - before)
        return made

    cluster.attempt = attempt  # type: ignore[method-assign]
    assert len(ask(cluster, dict.fromkeys(keys, 0))) == len(keys)
    assert attempts == [64, 64, 29]


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_message_sets(magic: int, codec: str) -> None:
    records = [Record(50 + index, TIME, 0, None, b"v" * 100, ()) for index in range(10)]
    cluster = FakeCluster(n1={A: [build_message_set(records, magic, codec_by_name(codec))]})
    (data,) = cluster.log[A]
    assert ask(cluster, {A: 50}) == {A: len(data) / 10}
    assert timestamp_types(_as_cluster(cluster), {A: 50}) == {A: 0 if magic else -1}


def test_log_append_time() -> None:
    append_time = build_batch(b"", 1, base_timestamp=TIME, max_timestamp=TIME, attributes=0x08)
    cluster = FakeCluster(n1={A: [append_time, batch(1, 1, 1)], B: [batch(0, 1, 1), append_time], C: []})
    assert timestamp_types(_as_cluster(cluster), {A: 0, B: 0, C: 0}) == {A: 1, B: 0}


@pytest.mark.parametrize("noise", [b"\x00" * 100, b"\xff" * 100, batch(0, 1, 100)[:-1]])
def test_what_is_no_batch_has_no_size(noise: bytes) -> None:
    """The read that follows will raise the error."""
    assert list(ask(FakeCluster(n1={A: [noise], B: [batch(0, 1, 100)]}), {A: 0, B: 0})) == [B]


def test_an_error_of_one_partition() -> None:
    cluster = FakeCluster(n1={A: [batch(0, 1, 100)], B: [batch(0, 1, 100)]})
    cluster.errors[A] = ErrorCode.OFFSET_OUT_OF_RANGE
    assert list(ask(cluster, {A: 0, B: 0})) == [B]
    assert len(cluster.requests) == 1


def test_our_broker(cluster: EmbeddedCluster, topic: str) -> None:
    with Cluster.connect({"bootstrap.servers": cluster.bootstrap_servers}) as connected:
        create_topic(connected, topic, partitions=3)
        producer = Producer.of_cluster(connected)
        for partition, size in [(0, 100), (1, 1000)]:
            for _ in range(300):
                producer.send(topic, b"v" * size, partition=partition)
            producer.flush()
        found = record_sizes(connected, {(topic, partition): 150 for partition in range(3)})
        assert found == pytest.approx({(topic, 0): 108, (topic, 1): 1009}, rel=0.05)
        assert timestamp_types(connected, {(topic, partition): 0 for partition in range(3)}) == dict.fromkeys(found, 0)
