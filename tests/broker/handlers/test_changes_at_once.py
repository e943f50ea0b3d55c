"""Producers, rolls, DeleteRecords, topics deleted and created again, housekeeping and compaction, all at once.

Acknowledged records are served, also after a restart. A soak takes SPARK_KLOG_FUZZ_SECONDS.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from uuid import UUID

from spark_klog.broker.broker import Broker
from spark_klog.broker.housekeeping import clean_logs, keep_house
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.records.formats.batch import iter_batches
from spark_klog.records.reading.reader import records_of
from tests.support.brokers.batches import make_batch
from tests.support.brokers.loop_broker import running, send

_SECONDS = float(os.environ.get("SPARK_KLOG_FUZZ_SECONDS", "3"))
TOPICS = [f"t{number}" for number in range(6)]
#: Errors that a producer may get while its topic is deleted and created.
PASSING = {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.LEADER_NOT_AVAILABLE}
CONFIG = LogConfig(
    segment_bytes=3000, retention_ms=-1, file_delete_delay_ms=20, flush_ms=30, min_cleanable_dirty_ratio=0.1
)
Record = tuple["bytes | None", "bytes | None"]


class History:
    """By topic id: the acknowledged records, and the offset up to which records were deleted."""

    def __init__(self) -> None:
        self.acknowledged: dict[UUID, dict[int, Record]] = {}
        self.starts: dict[UUID, int] = {}

    def check(self, broker: Broker) -> None:
        for name, log in broker.logs.logs.items():
            assert log.topic_id is not None
            assert log.start_offset <= self.starts.get(log.topic_id, 0) or log.config.compacts, name
            found = served(log)
            last = {key: offset for offset, (key, _) in sorted(found.items())}
            for offset, record in self.acknowledged.get(log.topic_id, {}).items():
                if offset >= log.start_offset and not (
                    log.config.compacts and offset not in found and last[record[0]] > offset
                ):
                    assert found.get(offset) == record, (name, offset)


def served(log: PartitionLog) -> dict[int, Record]:
    found: dict[int, Record] = {}
    offset = log.start_offset
    while (part := log.read(offset, 1 << 20)) is not None:
        for header, batch in iter_batches(part.read()):
            found |= {record.offset: (record.key, record.value) for record in records_of(header, batch)}
            offset = header.next_offset
    return found


async def produce(broker: Broker, history: History, number: int, end: float) -> None:
    rng = random.Random(number)
    count = 0
    while time.monotonic() < end:
        name = rng.choice(TOPICS)
        before = broker.registry.topics.get(name)
        count += 1
        value = b"%d-%d-" % (number, count) + bytes(rng.randrange(300))
        pairs = [(b"%d" % rng.randrange(6), value) for _ in range(rng.randrange(1, 4))]
        answer = await send(broker, name, bytes(make_batch(pairs, [count] * len(pairs))))
        now = broker.registry.topics.get(name)
        if answer["error_code"] != ErrorCode.NONE:
            assert answer["error_code"] in PASSING, answer
        elif before is not None and now is not None and before.topic_id == now.topic_id:
            known = history.acknowledged.setdefault(now.topic_id, {})
            for offset, record in enumerate(pairs, answer["base_offset"]):
                assert offset not in known
                known[offset] = record
        await asyncio.sleep(0)


async def change(broker: Broker, history: History, end: float) -> None:
    rng = random.Random(0)
    while time.monotonic() < end:
        name = rng.choice(TOPICS)
        log = broker.logs.get(name, 0)
        if log is None:
            await broker.changes.create_topic(name, 1, {"cleanup.policy": rng.choice(["delete", "compact"])})
        elif rng.random() < 0.6:
            await broker.changes.delete_topics({name: None})
        elif log.config.deletes:
            assert log.topic_id is not None
            start = log.delete_records(rng.randint(log.start_offset, log.end_offset))
            history.starts[log.topic_id] = start
        await asyncio.sleep(rng.random() * 0.2)


def test_what_was_acknowledged_is_served(tmp_path: Path) -> None:
    history = History()

    async def run() -> None:
        async with running(tmp_path, log=CONFIG, housekeeping_ms=50, checkpoint_ms=50, cleaner_backoff_ms=20) as broker:
            care = [
                asyncio.create_task(keep_house(broker)),
                asyncio.create_task(clean_logs(broker.logs, broker.config)),
            ]
            end = time.monotonic() + _SECONDS
            await asyncio.gather(
                change(broker, history, end), *(produce(broker, history, number, end) for number in range(4))
            )
            for task in care:
                task.cancel()
            await asyncio.wait(care)
            history.check(broker)

    async def next_life() -> None:
        async with running(tmp_path, log=CONFIG) as broker:
            history.check(broker)

    asyncio.run(run())
    assert history.acknowledged
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()
    asyncio.run(next_life())
