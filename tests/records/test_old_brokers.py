"""Logs of magic 0 and 1 that Apache Kafka 0.10.2.2 wrote, against what was produced to it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Message, Producer

from tests.support.dump import DumpedRecord, dump_log, dumped_batches, dumped_records
from tests.support.kafka import Kafka, Version

pytestmark = pytest.mark.peer

CODECS = ("none", "gzip", "snappy", "lz4")
PER_CODEC = 50
NOW = 1_700_000_000_000


class Topic(NamedTuple):
    magic: int
    timestamp_type: str
    configs: dict[str, str]
    client: dict[str, str]


_MAGIC_0 = {"message.format.version": "0.9.0"}
_OLD_CLIENT = {"api.version.request": "false", "broker.version.fallback": "0.9.0"}
TOPICS = {
    "magic-0": Topic(0, "NoTimestampType", _MAGIC_0, {}),
    "magic-0-old-client": Topic(0, "NoTimestampType", _MAGIC_0, _OLD_CLIENT),
    "magic-1": Topic(1, "CreateTime", {}, {}),
    "magic-1-append-time": Topic(1, "LogAppendTime", {"message.timestamp.type": "LogAppendTime"}, {}),
}

OldLogs = dict[str, tuple[Path, list[DumpedRecord]]]


@pytest.fixture(scope="module")
def old_logs(module_server_dir: Path) -> OldLogs:
    """By topic: the only segment of its only partition, and the records produced to it. The broker has stopped."""
    logs: OldLogs = {}
    with Kafka("0.10.2.2", module_server_dir / "kafka") as kafka:
        for name, topic in TOPICS.items():
            kafka.create_topic(name, configs=topic.configs)
            records = [record for codec in CODECS for record in _produce(kafka.bootstrap_servers, name, codec)]
            logs[name] = (kafka.log_dir / f"{name}-0" / f"{0:020}.log", records)
    return logs


def _produce(servers: str, topic: str, codec: str) -> list[DumpedRecord]:
    """Records in several batches, some without key, value or both, as they should be stored."""
    magic, timestamp_type, _, client = TOPICS[topic]
    rng = random.Random(f"{topic} {codec}")
    settings = {"bootstrap.servers": servers, "compression.type": codec, "linger.ms": 50, "batch.num.messages": 10}
    producer = Producer({**settings, **client})
    stored: list[DumpedRecord] = []

    def on_delivery(error: object, message: Message) -> None:
        offset = message.offset()
        assert error is None
        assert offset is not None
        timestamp = message.timestamp()[1] if magic else -1
        key, value = (None if data is None else data.decode() for data in (message.key(), message.value()))
        stored.append(DumpedRecord(offset, magic, timestamp_type, timestamp, key, value))

    for number in range(PER_CODEC):
        key = None if number % 3 == 0 else f"k{number % 10}"
        value = None if number % 7 == 0 else "".join(rng.choices("ab cd", k=rng.choice((0, 1, 20, 200))))
        producer.produce(topic, value, key, timestamp=NOW + rng.randrange(10_000), on_delivery=on_delivery)
    assert producer.flush(30) == 0
    return stored


@pytest.mark.parametrize("version", ["0.10.2.2", "3.9.1", "4.1.0"])
def test_kafka_dumps_what_was_produced(old_logs: OldLogs, version: Version) -> None:
    paths = [path for path, _ in old_logs.values()]
    produced = [record for _, records in old_logs.values() for record in records]
    assert len(produced) == len(TOPICS) * len(CODECS) * PER_CODEC
    if version == "0.10.2.2":
        produced = [record if record.value is not None else record._replace(key=None) for record in produced]
    assert dumped_records(dump_log(version, *paths)) == produced
    batches = dumped_batches(dump_log(version, *paths, deep=False))
    assert {(batch.magic, batch.codec) for batch in batches} == {(magic, codec) for magic in (0, 1) for codec in CODECS}
