"""compression.type of a topic: the broker compresses batches of another codec anew, and changes nothing else in them.

What is in the log is read by kafka-python, and by librdkafka's consumer.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from crc32c import crc32c
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder

from spark_klog.broker.event_loop import Decompression
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from spark_klog.wire.codecs import DecompressedTooLarge, codec_by_id
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.servers.broker import KlogBroker

NOW = 1_700_000_000_000
#: The ids of the values of compression.type.
IDS = {"uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
PAIRS = [(b"key-%d" % number, b"a value " * 20) for number in range(50)]
TIMES = [NOW + number for number in range(50)]


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(module_server_dir, "--set", "compression.type=gzip", "--set", "compression.gzip.level=1") as broker:
        with RawClient(broker.port) as client:
            for name in IDS:
                assert _create(client, name, **{"compression.type": name}) == {0}
            assert _create(client, "of-the-broker") == {0}
            assert _create(client, "of-the-producer", **{"compression.type": "producer"}) == {0}
        yield broker


def _create(client: RawClient, topic: str, **settings: str) -> set[int]:
    configs = [{"name": name, "value": value} for name, value in settings.items()]
    entry = {"name": topic, "num_partitions": 1, "replication_factor": 1, "configs": configs}
    return set(error_codes(client.request(apis.CREATE_TOPICS, 4, {"topics": [entry], "timeout_ms": 5000})))


def _batches(broker: KlogBroker, topic: str) -> list[Any]:
    return list(MemoryRecords((broker.data_dir / f"{topic}-0" / f"{0:020}.log").read_bytes()))


def _kept(batch: Any) -> tuple[Any, ...]:
    """All that must not change: the fields of the header, and the records."""
    return (
        *(batch.attributes & ~7, batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.max_timestamp),
        [(record.offset, record.timestamp, record.key, record.value) for record in batch],
    )


@pytest.mark.parametrize("topic", [*IDS, "of-the-broker", "of-the-producer"])
def test_batches_get_the_codec_and_keep_the_rest(broker: KlogBroker, topic: str) -> None:
    sent = []
    with RawClient(broker.port) as client:
        request = {"transactional_id": None, "transaction_timeout_ms": 60_000}
        producer = client.request(apis.INIT_PRODUCER_ID, 4, request)["producer_id"]
        for number, codec in enumerate(["none", "gzip", "snappy", "lz4", "zstd"]):
            whole = make_batch(PAIRS, TIMES, codec, producer_id=producer, producer_epoch=0, base_sequence=50 * number)
            assert client.produce(topic, bytes(whole), 8) == (0, 50 * number)
            assert client.produce(topic, bytes(whole), 8) == (0, 50 * number)  # a duplicate is known
            struct.pack_into(">q", whole, 0, 50 * number)
            sent += MemoryRecords(bytes(whole))
    stored = _batches(broker, topic)
    assert [batch.validate_crc() for batch in stored] == [True] * 5
    assert [_kept(batch) for batch in stored] == [_kept(batch) for batch in sent]
    codec = {"of-the-broker": IDS["gzip"]}.get(topic, IDS.get(topic))
    assert [batch.compression_type for batch in stored] == ([0, 1, 2, 3, 4] if codec is None else [codec] * 5)


def test_levels(broker: KlogBroker) -> None:
    """Of a topic, and of the broker for topics without one."""
    plain = bytes(make_batch([(None, bytes(range(256)) * 100 + b"text and more text" * 500)] * 3, [NOW] * 3))
    sizes = {}
    with RawClient(broker.port) as client:
        for name, settings in (
            ("broker's", {}),
            ("9", {"compression.gzip.level": "9"}),
            ("1", {"compression.gzip.level": "1"}),
        ):
            topic = f"level-{name[:1]}"
            assert _create(client, topic, **settings) == {0}
            assert client.produce(topic, plain, 8) == (0, 0)
            sizes[name] = (broker.data_dir / f"{topic}-0" / f"{0:020}.log").stat().st_size
        for name, value in (("gzip.level", "10"), ("zstd.level", "23"), ("lz4.level", "0"), ("type", "brotli")):
            assert _create(client, "bad", **{f"compression.{name}": value}) == {ErrorCode.INVALID_CONFIG}
    assert sizes["broker's"] == sizes["1"] > sizes["9"]


@pytest.mark.parametrize("magic", [0, 1])
def test_message_sets_of_old_producers(broker: KlogBroker, magic: int) -> None:
    builder = MemoryRecordsBuilder(magic=magic, compression_type=1, batch_size=1 << 20)
    for (key, value), time in zip(PAIRS, TIMES, strict=True):
        builder.append(timestamp=time, key=key, value=value)
    builder.close()
    topic = f"old-{magic}"
    with RawClient(broker.port) as client:
        assert _create(client, topic, **{"compression.type": "lz4"}) == {0}
        assert client.produce(topic, builder.buffer(), magic + 1)[0] == 0
        (stored,) = _batches(broker, topic)
        assert stored.compression_type == IDS["lz4"]
        records = list(stored)
        assert [(record.key, record.value) for record in records] == PAIRS
        if magic:
            assert [record.timestamp for record in records] == TIMES
        assert client.fetch(topic, 0, 3)[0] == 0


def test_large_batches_are_refused(broker: KlogBroker) -> None:
    """By the size that they arrive with, as in Kafka, and by what they decompress to: 16 times max.message.bytes."""
    words = random.Random(1).choices((b"abcdefgh", b"ijklmnop", b"qrstuvwx"), k=1 << 19)
    arrives_large = bytes(make_batch([(b"k", b"".join(words))], [NOW]))
    grows, fits = (bytes(make_batch([(b"k", bytes(size << 20))], [NOW], "gzip")) for size in (17, 15))
    wrapper = MemoryRecordsBuilder(magic=1, compression_type=1, batch_size=1 << 25)
    for _ in range(17):
        wrapper.append(timestamp=NOW, key=b"k", value=bytes(1 << 20))
    wrapper.close()
    assert len(wrapper.buffer()) < 1 << 20
    plain = MemoryRecordsBuilder(magic=1, compression_type=0, batch_size=1 << 25)
    for _ in range(33):
        plain.append(timestamp=NOW, key=b"k", value=bytes(1 << 16))
    plain.close()
    with RawClient(broker.port) as client:
        assert _create(client, "large", **{"compression.type": "zstd"}) == {0}
        assert _create(client, "compacted", **{"compression.type": "producer", "cleanup.policy": "compact"}) == {0}
        assert client.produce("large", arrives_large, 8)[0] == ErrorCode.MESSAGE_TOO_LARGE
        for topic in ("large", "compacted"):
            assert client.produce(topic, grows, 8)[0] == ErrorCode.MESSAGE_TOO_LARGE
            assert client.produce(topic, fits, 8) == (0, 0)
            assert client.produce(topic, wrapper.buffer(), 2)[0] == ErrorCode.MESSAGE_TOO_LARGE
        for old in (wrapper, plain):
            assert client.produce("of-the-producer", old.buffer(), 2)[0] == ErrorCode.MESSAGE_TOO_LARGE


def test_large_batches_are_not_compressed_by_the_slowest_levels(broker: KlogBroker) -> None:
    """Those of zstd from 10 on need a second for half a megabyte, and are for smaller batches."""
    words = random.Random(1).choices([random.Random(2).randbytes(8) for _ in range(300)], k=120_000)
    codec, sizes = codec_by_id(IDS["zstd"]), {}
    with RawClient(broker.port) as client:
        for level in ("9", "12"):
            settings = {"compression.type": "zstd", "compression.zstd.level": level}
            assert _create(client, f"zstd-{level}", **settings) == {0}
            for offset, count in enumerate((1 << 14, 120_000)):
                batch = bytes(make_batch([(b"k", b"".join(words[:count]))], [NOW]))
                assert client.produce(f"zstd-{level}", batch, 8) == (0, offset)
                expected = len(codec.compress(batch[61:], 9 if count == 120_000 else int(level)))
                sizes[level, count] = expected
            file = broker.data_dir / f"zstd-{level}-0" / f"{0:020}.log"
            assert file.stat().st_size == 2 * 61 + sizes[level, 1 << 14] + sizes[level, 120_000]
    assert len({*sizes.values()}) == 3, "the levels differ"


def test_small_batches_do_not_wait_for_large_ones() -> None:
    """Nor for those of a log; a batch whose client has gone keeps its thread."""
    goes_on = threading.Event()
    begun: list[int] = []

    def work(records: memoryview, limit: int) -> int:
        begun.append(len(records))
        assert goes_on.wait(300)
        return -1

    def decompress(records: memoryview, limit: int) -> int:
        return len(codec_by_id(IDS["gzip"]).decompress(records, limit))

    async def run() -> None:
        lanes = Decompression()
        large, grows, small = memoryview(bytes(1 << 20)), gzip.compress(bytes(1 << 19)), gzip.compress(b"small")
        try:
            of_log = asyncio.ensure_future(lanes.of_log(lambda: goes_on.wait(300)))
            gone = asyncio.ensure_future(lanes.produced(work, large, 1 << 24))
            while not begun:
                await asyncio.sleep(0.01)
            gone.cancel()
            following = asyncio.ensure_future(lanes.produced(work, large, 1 << 24))
            grown = asyncio.ensure_future(lanes.produced(decompress, memoryview(grows), 1 << 24))
            assert await asyncio.wait_for(lanes.produced(decompress, memoryview(small), 1 << 24), 120) == 5
            with pytest.raises(DecompressedTooLarge):
                await lanes.produced(decompress, memoryview(gzip.compress(bytes(1000))), 100)
            assert [waiting.done() for waiting in (of_log, following, grown)] == [False] * 3
            assert begun == [1 << 20]
            goes_on.set()
            assert await asyncio.wait_for(asyncio.gather(of_log, following, grown), 120) == [True, -1, 1 << 19]
        finally:
            goes_on.set()
            lanes.close()

    asyncio.run(run())


def test_old_fetches_of_zstd_are_refused(broker: KlogBroker) -> None:
    with RawClient(broker.port) as client:
        codes = [client.fetch("zstd", 0, version)[0] for version in (2, 4, 9, 10, 12)]
    refused = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert codes == [refused, refused, refused, 0, 0]


def test_batches_whose_records_are_damaged_are_refused(broker: KlogBroker) -> None:
    """Found, as they are decompressed: a count that is not true, and bytes that are not the codec's."""
    lie = make_batch(PAIRS, TIMES, "gzip")
    for position, value in ((23, 50), (57, 51)):  # one record more
        struct.pack_into(">i", lie, position, value)
    cut = make_batch(PAIRS, TIMES, "gzip")
    cut[80:100] = bytes(20)
    with RawClient(broker.port) as client:
        assert _create(client, "damaged", **{"compression.type": "lz4"}) == {0}
        for batch in (lie, cut):
            assert client.produce("damaged", bytes(batch), 8)[0] == ErrorCode.CORRUPT_MESSAGE  # the CRC
            struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
            assert client.produce("damaged", bytes(batch), 8)[0] == ErrorCode.INVALID_RECORD
        assert client.produce("damaged", bytes(make_batch(PAIRS, TIMES)), 8) == (0, 0)


def test_transactions_with_headers_are_read_by_a_client(broker: KlogBroker) -> None:
    servers = {"bootstrap.servers": broker.bootstrap_servers}
    producer = Producer(servers | {"transactional.id": "compressed", "compression.type": "gzip", "linger.ms": 500})
    producer.init_transactions(20)
    with RawClient(broker.port) as client:
        assert _create(client, "transactions", **{"compression.type": "zstd"}) == {0}
    for commits in (False, True):
        producer.begin_transaction()
        for number in range(10):
            headers = [("number", b"%d" % number)]
            producer.produce("transactions", b"%d" % commits, b"k", 0, headers=headers, timestamp=NOW + number)
        producer.flush(20)
        producer.commit_transaction(20) if commits else producer.abort_transaction(20)
    assert {batch.compression_type for batch in _batches(broker, "transactions") if not batch.is_control_batch} == {4}
    consumer = Consumer(servers | {"group.id": "g", "isolation.level": "read_committed", "check.crcs": True})
    consumer.assign([TopicPartition("transactions", 0, 0)])
    messages = consumer.consume(10, 20)
    consumer.close()
    assert [(message.value(), message.headers(), message.timestamp()[1]) for message in messages] == [
        (b"1", [("number", b"%d" % number)], NOW + number) for number in range(10)
    ]
