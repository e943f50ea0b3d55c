"""Which short ranges of a Fetch response the client may use."""

from __future__ import annotations

import uuid
from struct import pack_into

import pytest

from spark_klog.client import Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import ShortRanges, fetch_short
from spark_klog.embedded import EmbeddedCluster
from spark_klog.records.building.assignment import own_batch
from tests.support.clients.topics import make_topic

_DELTA = 23


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_a_corrupt_batch_before_one_that_is_cut_off(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, is_corrupt: bool
) -> None:
    """Its header claims the offsets of the next batch: if the client used the response, it would lose those records."""
    first, second = own_batch([(b"k", b"v")] * 3, 0), own_batch([(b"k", b"v" * 300)] * 300, 0)
    pack_into(">q", second, 0, 3)
    if is_corrupt:
        pack_into(">i", first, _DELTA, 299)
    records = memoryview(bytes(first + second))[: len(first) + (len(second) // 2 if is_corrupt else len(second))]
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(cluster.bootstrap_servers, topic, 1)
    with Cluster.connect({"bootstrap.servers": cluster.bootstrap_servers}) as client:
        key, node = (topic, 0), client.leader(topic, 0)
        entry = {"error_code": 0, "records": records, "high_watermark": 303, "aborted_transactions": []}
        monkeypatch.setattr("spark_klog.client.fetch.entries.entries_of", lambda *_: {key: entry})
        answer = fetch_short(client, node, {key: (0, 300)}, {}, 1 << 20)
    assert answer is not None
    assert list(answer.fetched) == ([] if is_corrupt else [key])


def test_the_least_that_may_be_asked_of_a_partition(cluster: EmbeddedCluster) -> None:
    """Kafka allows max.partition.fetch.bytes=0 and returns the first batch whatever its size."""
    topic = f"t-{uuid.uuid4().hex[:8]}"
    make_topic(cluster.bootstrap_servers, topic, 2)
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with Producer(settings) as producer:
        for partition in (0, 1):
            producer.send(topic, b"v", partition=partition)
    with Cluster.connect({**settings, "max.partition.fetch.bytes": "0"}) as client:
        node = client.leader(topic, 0)
        found = list(ShortRanges(client, {}).fetch(node, {(topic, 0): (0, 1), (topic, 1): (0, 1)}))
    assert (topic, 0) in found[0]
