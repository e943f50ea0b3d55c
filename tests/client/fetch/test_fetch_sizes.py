"""Messages larger than the fetch size, by each reader of the client.

Before Fetch 3 brokers return the first part of such a message, and the client asks again.
"""

from __future__ import annotations

import logging
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kafka.record.memory_records import MemoryRecordsBuilder

from spark_klog.classic import SimpleConsumer
from spark_klog.client import Admin, Consumer, Producer, settings as settings_module
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import DecodeError, RecordTooLarge
from tests.support.brokers.batches import read_records
from tests.support.brokers.fake_broker import MAX_FRAME, TOPIC, FakeBroker
from tests.support.clients.consumers import SECONDS
from tests.support.servers.kafka import HOST

TIME = 1_700_000_000_000


@pytest.fixture(params=[0, 1, 2, 3], ids=lambda version: f"fetch-{version}")
def broker(request: pytest.FixtureRequest) -> Iterator[FakeBroker]:
    with FakeBroker(request.param) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def _messages(magic: int, sizes: list[int], first: int = 0) -> list[tuple[int, bytes]]:
    """Messages by kafka-python with values of these sizes."""
    log = []
    for offset, size in enumerate(sizes, first):
        builder = MemoryRecordsBuilder(magic=magic, compression_type=0, batch_size=1 << 30, offset=offset)
        builder.append(TIME, None, bytes([offset % 256]) * size)
        builder.close()
        log.append((offset, bytes(builder.buffer())))
    return log


Found = list[tuple[int, bytes | None]]


def _settings(broker: FakeBroker, max_bytes: int, more: dict[str, str]) -> dict[str, str]:
    settings = {"bootstrap.servers": f"{HOST}:{broker.server_address[1]}", "max.partition.fetch.bytes": str(max_bytes)}
    settings |= {name.replace("_", "."): value for name, value in more.items()}
    return {"request.timeout.ms": "3000", **settings}


def _by_fetcher(broker: FakeBroker, start: int, end: int, max_bytes: int = 1000, **more: str) -> Found:
    with Cluster.connect(_settings(broker, max_bytes, more)) as cluster:
        return [
            (record.offset, record.value)
            for fetched in fetch_range(cluster, TOPIC, 0, start, end)
            for record in read_records(bytes(fetched.data))
            if start <= record.offset < end
        ]


def _by_consumer(broker: FakeBroker, start: int, end: int, max_bytes: int = 1000, **more: str) -> Found:
    found: Found = []
    with Consumer(_settings(broker, max_bytes, more)) as consumer:
        consumer.assign([(TOPIC, 0, start)])
        deadline = time.monotonic() + SECONDS
        while len(found) < end - start and time.monotonic() < deadline:
            found += [(record.offset, record.value) for record in consumer.poll(1.0)]
    return found


def _by_simple_consumer(broker: FakeBroker, start: int, end: int, max_bytes: int = 1000, **more: str) -> Found:
    given = {name.replace("_", "."): value for name, value in more.items()}
    found: Found = []
    with SimpleConsumer(HOST, broker.server_address[1], settings=given) as consumer:
        while start < end:
            some = consumer.fetch(TOPIC, 0, start, max_bytes, version=broker.version)
            assert some
            found += [(one.offset, one.value) for one in some]
            start = some[-1].offset + 1
    return found


_READERS = {"fetcher": _by_fetcher, "consumer": _by_consumer, "simple consumer": _by_simple_consumer}
Read = Callable[..., Found]


#: For what SimpleConsumer does otherwise: it takes no less than a message and no more than `buffer_size`.
without_simple_consumer = pytest.mark.parametrize("read", ["fetcher", "consumer"], indirect=True)


@pytest.fixture(params=_READERS)
def read(request: pytest.FixtureRequest) -> Read:
    return _READERS[request.param]


def _expected(sizes: list[int], first: int = 0) -> list[tuple[int, bytes]]:
    return [(offset, bytes([offset % 256]) * size) for offset, size in enumerate(sizes, first)]


def _magic(broker: FakeBroker) -> int:
    return 0 if broker.version < 2 else 1


def test_a_message_larger_than_asked_for_is_asked_for_again(
    broker: FakeBroker, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    broker.log = _messages(_magic(broker), [5000])
    size = len(broker.log[0][1])
    with caplog.at_level(logging.INFO, "spark_klog.client"):
        assert read(broker, 0, 1) == _expected([5000])
    assert [asked[:2] for asked in broker.asked][:2] == [(0, 1000), (0, size)]
    assert read is not _by_fetcher or f"{TOPIC}-0 at offset 0: a message of {size} bytes, fetching again" in caplog.text


_SIZES = [[10] * 50, [900, 5, 3000, 5, 5, 60_000, 5], [2000] * 5, [10, 100, 1000, 10_000, 100_000]]


@pytest.mark.parametrize("max_bytes", [100, 1000])
def test_messages_of_any_size(broker: FakeBroker, read: Read, max_bytes: int) -> None:
    """Each offset is fetched twice at most; the fetcher keeps the largest size that it needed."""
    for sizes in _SIZES:
        broker.log = _messages(_magic(broker), sizes)
        broker.asked.clear()
        assert read(broker, 0, len(sizes), max_bytes) == _expected(sizes)
        asked = [one for one in broker.asked if one.offset < len(sizes)]
        offsets = [one.offset for one in asked]
        assert offsets == sorted(offsets)
        assert max(offsets.count(offset) for offset in offsets) <= 2
        asked_for = [one.max_bytes for one in asked]
        assert read is not _by_fetcher or asked_for == sorted(asked_for)
        assert max(asked_for) <= max(max_bytes, *(len(message) for _, message in broker.log))


def test_the_whole_answer_may_be_as_large_as_its_partition(broker: FakeBroker, read: Read) -> None:
    broker.log = _messages(_magic(broker), [5000])
    assert read(broker, 0, 1, fetch_max_bytes="2000") == _expected([5000])
    for asked in broker.asked:
        assert asked.total_max_bytes is None or asked.total_max_bytes >= max(2000, asked.max_bytes)


def test_a_range_that_begins_within_a_large_set(broker: FakeBroker, read: Read) -> None:
    builder = MemoryRecordsBuilder(magic=_magic(broker), compression_type=1, batch_size=1 << 30)
    for number in range(100):
        builder.append(TIME, None, b"%d" % (7919**number % 10**40))
    builder.close()
    wrapper = bytearray(builder.buffer())
    struct.pack_into(">q", wrapper, 0, 99)  # as brokers do: the offset of the last message in the set
    broker.log = [(99, bytes(wrapper)), *_messages(_magic(broker), [10], 100)]
    assert len(wrapper) > 1000
    found = read(broker, 40, 101)
    assert found == [(n, b"%d" % (7919**n % 10**40)) for n in range(40, 100)] + _expected([10], 100)
    assert [asked[:2] for asked in broker.asked][:2] == [(40, 1000), (40, len(wrapper))]


@pytest.mark.parametrize(
    ("claimed", "fetch_max_bytes"),
    [(MAX_FRAME + 1, 50 * 1024 * 1024), (2**31 - 1, 1000), (120_000_001, 60_000_000)],
)
def test_a_message_larger_than_any_answer_is_refused(
    broker: FakeBroker, read: Read, claimed: int, fetch_max_bytes: int
) -> None:
    """The limit is 100 MiB, or twice fetch.max.bytes if that is more; the client does not request such a size."""
    message = bytearray(_messages(_magic(broker), [5000], 7)[0][1])
    struct.pack_into(">i", message, 8, claimed - 12)
    broker.log = [*_messages(_magic(broker), [10] * 7), (7, bytes(message))]
    with pytest.raises(RecordTooLarge) as failed:
        read(broker, 0, 8, fetch_max_bytes=str(fetch_max_bytes))
    error = failed.value
    assert (error.topic, error.partition, error.offset, error.size, error.fetched) == (TOPIC, 0, 7, claimed, 1000)
    assert str(error) == (
        f"[KLOG_RECORD_TOO_LARGE] {TOPIC}-0 at offset 7: the record batch has {claimed} bytes, 1000 were fetched; "
        f"raise {'buffer_size' if read is _by_simple_consumer else 'fetch.max.bytes and max.partition.fetch.bytes'}"
    )
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.size, copy.fetched) == (str(error), claimed, 1000)
    assert {asked.max_bytes for asked in broker.asked} == {1000}


@without_simple_consumer
def test_a_message_as_large_as_an_answer_may_be_is_asked_for(broker: FakeBroker, read: Read) -> None:
    message = bytearray(_messages(_magic(broker), [5000])[0][1])
    struct.pack_into(">i", message, 8, MAX_FRAME - 12)
    broker.log = [(0, bytes(message))]
    with pytest.raises(RecordTooLarge):
        read(broker, 0, 1)
    assert [asked.max_bytes for asked in broker.asked] == [1000, MAX_FRAME]


def test_a_broker_that_gives_no_more_is_not_asked_for_ever(broker: FakeBroker, read: Read) -> None:
    broker.log = _messages(_magic(broker), [10, 5000])
    broker.most = 2000
    size = len(broker.log[1][1])
    with pytest.raises(RecordTooLarge, match=f"offset 1: the record batch has {size} bytes, 2000 were fetched"):
        read(broker, 0, 2)
    assert len(broker.asked) == 3


@pytest.mark.parametrize("given", [1, 11])
def test_too_little_to_tell_the_size(broker: FakeBroker, read: Read, given: int) -> None:
    broker.log = _messages(_magic(broker), [5000])
    broker.most = given
    with pytest.raises(RecordTooLarge, match=f"an unknown number of bytes, {given} were fetched") as failed:
        read(broker, 0, 1)
    assert (failed.value.size, failed.value.fetched) == (0, given)


@without_simple_consumer
@pytest.mark.parametrize("given", [0, 1, 11, 12, 16, 17])
def test_the_size_is_told_by_12_bytes(broker: FakeBroker, read: Read, given: int) -> None:
    broker.log = _messages(_magic(broker), [5000])
    assert read(broker, 0, 1, given) == _expected([5000])


def test_a_broker_that_answers_with_earlier_records_only(broker: FakeBroker, read: Read) -> None:
    broker.log = _messages(_magic(broker), [10, 10, 10])
    broker.most, broker.start = 2 * len(broker.log[0][1]), 0
    with pytest.raises(
        DecodeError, match=rf"{TOPIC}-0 at offset 2: {broker.most} bytes fetched hold only records before"
    ):
        read(broker, 2, 3)


@pytest.mark.parametrize("position", [8, 16])
def test_what_is_no_message_is_named(broker: FakeBroker, read: Read, position: int) -> None:
    """A negative length, and an unknown magic."""
    message = bytearray(_messages(_magic(broker), [5000])[0][1])
    message[position] = 0xFF
    broker.log = [(0, bytes(message))]
    with pytest.raises(DecodeError, match=f"{TOPIC}-0 at offset 0: no batch at position 0: "):
        read(broker, 0, 1)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_batch_that_is_larger_than_a_response_may_be(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """Brokers send a first batch of any size; the limit of 100 MiB is lowered here. The error says what to raise."""
    servers, topic = cluster.bootstrap_servers, f"large-{partitions}"
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(topic, partitions)
    with Producer({"bootstrap.servers": servers}) as producer:
        producer.send(topic, b"x" * 500_000, partition=partitions - 1)
    monkeypatch.setattr(settings_module, "MAX_FRAME", 100_000)
    client = {"bootstrap.servers": servers, "fetch.max.bytes": "20000"}
    words = rf"{topic}-{partitions - 1}.*500\d\d\d bytes.*raise fetch.max.bytes"
    with Cluster.connect(client) as connected, pytest.raises(RecordTooLarge, match=words):
        list(fetch_range(connected, topic, partitions - 1, 0, 1))
    with Consumer({**client, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([(topic, partition) for partition in range(partitions)])
        with pytest.raises(RecordTooLarge if partitions == 1 else DecodeError, match=words) as found:
            consumer.poll(20)
        assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)  # noqa: S301
    with Cluster.connect({**client, "fetch.max.bytes": "260000"}) as connected:
        [fetched] = fetch_range(connected, topic, partitions - 1, 0, 1)
        assert len(fetched.data) > 500_000
