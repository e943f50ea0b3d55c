"""Corrupt batches in a fetch: the reader does not trust their last offsets, and reads all other batches."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client import Consumer
from spark_klog.columns.schema import WITHOUT_HEADERS
from spark_klog.errors import CorruptBatchError
from spark_klog.spark.options import source_options
from spark_klog.spark.read.ranges import OffsetRange
from spark_klog.spark.read.tasks import read_ranges
from tests.support.brokers.batches import make_batch
from tests.support.brokers.fake_broker import TOPIC, FakeBroker
from tests.support.servers.kafka import HOST

TIME = 1_700_000_000_000
#: Records per batch.
EACH = 10
LAST_OFFSET_DELTA, VALUE_BYTE = slice(23, 27), -5
#: Wrong last offset deltas of a corrupt batch; 9 is right.
LIES = [2**31 - 1, 1_000, 12, 3, 0]


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker(3) as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def batches(count: int) -> list[tuple[int, bytes]]:
    made = []
    for base in range(0, count * EACH, EACH):
        data = make_batch([(None, b"value-%d" % (base + at)) for at in range(EACH)], [TIME] * EACH)
        data[:8] = base.to_bytes(8, "big")
        made.append((base + EACH - 1, bytes(data)))
    return made


def corrupted(batch: tuple[int, bytes], delta: int | None) -> tuple[int, bytes]:
    """The batch with a flipped bit in a value, and another last offset if `delta` is given.

    The broker uses that last offset, too: it leaves out batches that end before the fetch offset.
    """
    data = bytearray(batch[1])
    data[VALUE_BYTE] ^= 1
    if delta is None:
        return batch[0], bytes(data)
    data[LAST_OFFSET_DELTA] = delta.to_bytes(4, "big", signed=True)
    return int.from_bytes(data[:8], "big") + delta, bytes(data)


def read(broker: FakeBroker, count: int, mode: str, max_bytes: int = 1 << 20, **more: str) -> list[int]:
    options = {
        "kafka.bootstrap.servers": f"{HOST}:{broker.server_address[1]}",
        "kafka.max.partition.fetch.bytes": str(max_bytes),
        "subscribe": TOPIC,
        "badRecords": mode,
    } | more
    wanted = OffsetRange(TOPIC, 0, 0, count * EACH)
    found = read_ranges(source_options(options, streaming=False), [wanted], WITHOUT_HEADERS)
    return [offset for batch in found for offset in batch.column("offset").to_pylist()]


@pytest.mark.parametrize("lie", [None, *LIES])
@pytest.mark.parametrize("which", [[0], [3], [5], [0, 5], [2, 3], [4, 5], [0, 1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize("a_fetch", [1, 2, 3, 6])
def test_all_but_the_corrupt_ones_are_read(
    broker: FakeBroker, tmp_path: Path, lie: int | None, which: list[int], a_fetch: int
) -> None:
    good = batches(6)
    broker.log = [corrupted(batch, lie) if number in which else batch for number, batch in enumerate(good)]
    # the high watermark does not depend on the batches
    broker.end = 6 * EACH
    size = max(len(data) for _, data in good)
    found = read(broker, 6, "deadletter", a_fetch * size, badRecordsPath=str(tmp_path))
    assert found == [offset for offset in range(6 * EACH) if offset // EACH not in which]
    letters = [json.loads(path.read_text())["offset"] for path in tmp_path.iterdir()]
    assert sorted(letters) == [number * EACH for number in which]


@pytest.mark.parametrize("lie", [-1, -(2**31)])
@pytest.mark.parametrize("which", [[0], [3], [0, 2, 3]], ids=str)
@pytest.mark.parametrize("a_fetch", [1, 2, 3, 6])
def test_one_that_says_to_end_before_it_begins(broker: FakeBroker, lie: int, which: list[int], a_fetch: int) -> None:
    """A broker may leave out such a batch; as the log's last batch it would make the reader wait for more."""
    broker.log = [corrupted(batch, lie) if number in which else batch for number, batch in enumerate(batches(6))]
    found = read(broker, 6, "skip", a_fetch * 250)
    assert found == [offset for offset in range(6 * EACH) if offset // EACH not in which]


@pytest.mark.parametrize("lie", [None, *LIES])
@pytest.mark.parametrize("which", [0, 3, 5])
def test_fail_is_at_the_corrupt_one(broker: FakeBroker, lie: int | None, which: int) -> None:
    broker.log = batches(6)
    broker.log[which] = corrupted(broker.log[which], lie)
    broker.end = 6 * EACH
    with pytest.raises(CorruptBatchError, match=f"{TOPIC}-0: batch of offsets {which * EACH}-"):
        read(broker, 6, "fail")


@pytest.mark.parametrize("checks", [True, False])
def test_a_consumer_names_the_checksum_or_reads_on(broker: FakeBroker, checks: bool) -> None:
    broker.log = [corrupted(batch, None) for batch in batches(1)]
    servers = f"{HOST}:{broker.server_address[1]}"
    with Consumer({"bootstrap.servers": servers, "check.crcs": checks}) as consumer:
        consumer.assign([(TOPIC, 0, 0)])
        if not checks:
            assert [record.offset for record in consumer.poll(20)] == list(range(EACH))
            return
        for _ in range(2):
            with pytest.raises(CorruptBatchError, match=f"{TOPIC}-0 after offset -1: .*CRC"):
                consumer.poll(20)
