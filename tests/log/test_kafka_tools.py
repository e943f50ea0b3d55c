"""Our files read by Kafka's own tools, and Kafka's files read and indexed by us."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from spark_klog.embedded import EmbeddedCluster
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.tools.verify import verify
from tests.support.brokers.batches import make_batch, read_records
from tests.support.brokers.logs import searched
from tests.support.clients.dump import DumpComplaint, dump_files, dump_log, dumped_batches, dumped_records
from tests.support.servers.kafka import NEWEST, Version
from tests.support.servers.shared_kafka import SharedKafkas

pytestmark = pytest.mark.peer

NOW = 1_700_000_000_000
GOLDEN = Path(__file__).parent.parent / "data"


def _produce(servers: str, topic: str, count: int, codec: str) -> list[tuple[int, int, str, str]]:
    """Produce numbered ASCII records in many batches; return the expected (offset, timestamp, key, value)."""
    rng = random.Random(codec)
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 0,
            "batch.num.messages": 5,
            "compression.type": codec,
            "acks": "all",
        }
    )
    expected = []
    for number in range(count):
        value = f"{number}-" + "".join(rng.choices("abcdefgh", k=rng.randrange(0, 200)))
        timestamp = NOW + 10 * number + rng.randrange(-500, 500)
        expected.append((number, timestamp, f"k{number}", value))
        producer.produce(topic, value, f"k{number}", partition=0, timestamp=timestamp)
        if number % 5 == 4:
            producer.poll(0.001)
    assert producer.flush(30) == 0
    return expected


@pytest.mark.parametrize("codec", [pytest.param("none", marks=pytest.mark.test_all("codec")), "lz4"])
def test_dump_log_segments_finds_nothing_wrong(make_cluster: Callable[..., EmbeddedCluster], codec: str) -> None:
    cluster = make_cluster(settings={"internal.segment.bytes": "12000", "log.index.interval.bytes": "500"})
    expected = _produce(cluster.bootstrap_servers, "dumped", 500, codec)
    cluster.stop()
    folder = cluster.data_dir / "broker-0" / "dumped-0"
    logs, indexes, time_indexes = (sorted(folder.glob(f"*.{kind}")) for kind in ("log", "index", "timeindex"))
    assert len(logs) == len(indexes) == len(time_indexes) > 3
    records = dumped_records(dump_log(NEWEST, *logs))
    assert [(record.offset, record.timestamp, record.key, record.value) for record in records] == expected
    sane = dump_files(NEWEST, indexes, "--index-sanity-check")
    # the index of a small last segment has no entry yet
    assert sane.count("passed sanity check") + sane.count(".index is empty") == len(indexes)
    output = dump_files(NEWEST, [*indexes, *time_indexes])
    assert len(re.findall(r"^offset: \d+ position: \d+", output, re.MULTILINE)) > 10
    assert len(re.findall(r"^timestamp: \d+ offset: \d+", output, re.MULTILINE)) > 10


def test_a_wrong_index_is_noticed(tmp_path: Path) -> None:
    """Proves that the check above can fail: Kafka reports an entry that points into the middle of a batch."""
    log = PartitionLog(tmp_path / "t-0", LogConfig(index_interval_bytes=100))
    for number in range(9):
        log.append(memoryview(make_batch([(b"k", b"v" * 100)], [NOW + number])))
    log.close()
    index = next((tmp_path / "t-0").glob("*.index"))
    data = bytearray(index.read_bytes())
    data[3] += 1
    index.write_bytes(data)
    with pytest.raises(DumpComplaint, match="Mismatches"):
        dump_files(NEWEST, [index])


@pytest.mark.parametrize(
    "version", [*(pytest.param(v, marks=pytest.mark.test_all("version")) for v in ("0.10.2.2", "3.9.1")), NEWEST]
)
def test_a_wrong_checksum_is_noticed(version: Version, tmp_path: Path) -> None:
    """The damaged checksum is that of a wrapper, which holds compressed messages."""
    golden = GOLDEN / "kafka-0.10.2.2" / "logs" / "v1-gzip-0" / "00000000000000000000.log"
    second = next(batch for batch in dumped_batches(dump_log(version, golden, deep=False)) if batch.position > 0)
    assert (second.last_offset, second.magic, second.codec) == (17, 1, "gzip")
    data = bytearray(golden.read_bytes())
    data[second.position + 12] ^= 1
    broken = tmp_path / golden.name
    broken.write_bytes(data)
    with pytest.raises(DumpComplaint, match="isvalid: false"):
        dump_log(version, broken)


def test_indexes_of_kafka_are_those_that_we_build(shared_kafkas: SharedKafkas, server_dir: Path) -> None:
    """From the .log files of Kafka alone we build the same index bytes, and find the same offsets by time."""
    kafka = shared_kafkas.get(NEWEST)
    kafka.create_topic("indexed", configs={"internal.segment.bytes": "12000", "index.interval.bytes": "500"})
    expected = _produce(kafka.bootstrap_servers, "indexed", 500, "none")
    theirs = kafka.log_dir / "indexed-0"
    active = max(theirs.glob("*.index"))
    assert active.stat().st_size == 10 * 1024 * 1024  # zeros follow the entries
    assert list(verify(theirs)) == []
    ours = server_dir / "indexed-0"
    ours.mkdir()
    for path in theirs.glob("*.log"):
        (ours / path.name).write_bytes(path.read_bytes())
    log = PartitionLog(ours, LogConfig(segment_bytes=12000, index_interval_bytes=500), clean=True)
    log.close()
    entries = 0
    for path in [*theirs.glob("*.index"), *theirs.glob("*.timeindex")]:
        if path.stem != active.stem:  # those are preallocated, and lack the entry that a clean stop appends
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
            entries += path.stat().st_size
    assert entries > 300
    # and with Kafka's own indexes
    for path in [*theirs.glob("*.index"), *theirs.glob("*.timeindex")]:
        (ours / path.name).write_bytes(path.read_bytes())
    log = PartitionLog(ours, LogConfig(index_interval_bytes=500), clean=True)
    found = []
    while (part := log.read(len(found), 1)) is not None:
        found += [
            (record.offset, record.timestamp, (record.key or b"").decode(), (record.value or b"").decode())
            for record in read_records(part.read())
        ]
    assert found == expected
    for _, timestamp, *_ in expected:
        first = next(line for line in expected if line[1] >= timestamp)
        assert searched(log, timestamp) == (first[1], first[0])
    log.close()
