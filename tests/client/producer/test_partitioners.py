"""Each partitioner's partitions for keys, row by row and in columns, compared with confluent-kafka's."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pyarrow as pa
import pytest
from confluent_kafka import Producer as ConfluentProducer

from spark_klog.client import Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.settings import client_config
from spark_klog.columns.encode import Placement
from spark_klog.embedded import EmbeddedCluster
from spark_klog.records.partitioning import PARTITIONERS
from tests.support.brokers.model_cluster import ModelCluster
from tests.support.clients.topics import create_topic

COUNT = 7
JAVAS = "org.apache.kafka.clients.producer"
_draw = random.Random(5)
KEYS = [None, b"", b"a", b"\xff", *(_draw.randbytes(_draw.randrange(1, 40)) for _ in range(300))]
HASHING = sorted(PARTITIONERS["partitioner"].keys() - {"random"})


def librdkafkas(servers: str, topic: str, partitioner: str) -> list[int]:
    """The partition that librdkafka chooses for each key."""
    chosen: dict[int, int] = {}
    producer = ConfluentProducer({"bootstrap.servers": servers, "partitioner": partitioner, "log_level": 0})
    for number, key in enumerate(KEYS):
        told = lambda error, message, number=number: chosen.__setitem__(number, message.partition())  # noqa: E731
        producer.produce(topic, b"v", key, on_delivery=told)
    assert producer.flush(60) == 0
    return [chosen[number] for number in range(len(KEYS))]


@pytest.mark.parametrize("partitioner", HASHING)
def test_keys_go_where_librdkafka_sends_them(cluster: EmbeddedCluster, topic: str, partitioner: str) -> None:
    with Cluster(client_config({"bootstrap.servers": cluster.bootstrap_servers})) as client:
        create_topic(client, topic, COUNT)
    theirs = librdkafkas(cluster.bootstrap_servers, topic, partitioner)
    way = PARTITIONERS["partitioner"][partitioner]
    ours = [way.of(key, COUNT) for key in KEYS]
    free = [key for key, partition in zip(KEYS, ours, strict=True) if partition is None]
    assert free == {"consistent_random": [None, b""]}.get(partitioner, [None] if "random" in partitioner else [])
    for mine, other in zip(ours, theirs, strict=True):
        assert mine in (None, other)
    numbers = [b"%d" % number for number in range(len(KEYS))]
    rows = pa.record_batch({"key": pa.array(KEYS, pa.binary()), "value": pa.array(numbers)})
    for part in (rows, rows.slice(3), rows.slice(0, 1)):
        found = {}
        placement = Placement(part, COUNT, 1 << 20, way)
        for partition, columns in placement.records([COUNT] * placement.turns):
            assert columns.value is not None
            ends = memoryview(columns.value.offsets).cast("B").cast("i").tolist()[: columns.count + 1]
            values = [bytes(columns.value.data)[begin:end] for begin, end in pairwise(ends)]
            found.update(dict.fromkeys(map(int, values), partition))
        sent = [int(value) for value in part["value"].to_pylist()]
        wanted = {number: COUNT if ours[number] is None else ours[number] for number in sent}
        assert found == wanted


@pytest.mark.parametrize(
    ("settings", "is_spread"),
    [
        ({}, False),
        ({"partitioner.class": f"{JAVAS}.internals.DefaultPartitioner"}, False),
        ({"partitioner.class": f"{JAVAS}.UniformStickyPartitioner"}, True),
        ({"partitioner.class": f"{JAVAS}.RoundRobinPartitioner"}, True),
        ({"partitioner.ignore.keys": "true"}, True),
        ({"partitioner": "random"}, True),
    ],
)
@pytest.mark.parametrize("in_columns", [False, True])
def test_records_of_one_key(settings: dict[str, str], is_spread: bool, in_columns: bool) -> None:
    more = {"linger.ms": "600000", "batch.size": "1000", **settings}
    with ModelCluster(1, {"t": 4}) as brokers, Producer({"bootstrap.servers": brokers.servers, **more}) as producer:
        values = [b"%0100d" % number for number in range(80)]
        if in_columns:
            producer.send_arrow(pa.table({"key": [b"k"] * 80, "value": values}), "t")
        else:
            for value in values:
                producer.send("t", value, key=b"k")
        producer.flush()
        lengths = Counter({key: len(found) for key, found in brokers.log.items() if found})
        if "RoundRobin" in str(settings):
            assert set(lengths.values()) == {20}
            for found in brokers.log.values():
                numbers = [int(value) for value in found]
                assert {after - before for before, after in pairwise(numbers)} == {4}
        elif is_spread:
            assert max(lengths.values()) - min(lengths.values()) <= 11
            assert len(lengths) == 4
        else:
            assert list(lengths.values()) == [80]


def test_all_columns_without_a_key_column() -> None:
    for name, way in PARTITIONERS["partitioner"].items():
        placement = Placement(pa.record_batch({"value": [b"a", b"b"]}), COUNT, 1 << 20, way)
        found = {partition for partition, _ in placement.records([COUNT] * placement.turns)}
        wanted = way.of(None, COUNT)
        assert found == {COUNT if wanted is None else wanted}, name
