"""Run a broker in the test's event loop, and send requests to its handlers."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_klog.base.names import PLAINTEXT
from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.broker.handlers import offsets, produce
from spark_klog.broker.security.config import Listener
from spark_klog.broker.security.session import Session
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.log.partition_log import PartitionLog
from spark_klog.trees.paths import Endpoint
from tests.support.brokers.batches import make_batch


@asynccontextmanager
async def running(tmp_path: Path, **settings: Any) -> AsyncIterator[Broker]:
    config = replace(BrokerConfig("127.0.0.1", 1000, tmp_path / "data"), **settings)
    broker = Broker(config)
    try:
        broker.start([Endpoint("PLAINTEXT", "PLAINTEXT", config.host, config.port)])
        broker.follower.watch()
        yield broker
        await broker.changes.ended()
    finally:
        broker.close()


@asynccontextmanager
async def running_as(
    tmp_path: Path, broker_id: int = 0, shared: bool = False, *, watches: bool = True
) -> AsyncIterator[Broker]:
    """Run one of several brokers; `shared` gives them one tree, without `watches` only `refresh` shows it changes."""
    directories = str(tmp_path / "directories") if shared else None
    config = BrokerConfig("127.0.0.1", 1000 + broker_id, tmp_path / str(broker_id), broker_id, directories)
    broker = Broker(config)
    try:
        broker.start([Endpoint("PLAINTEXT", "PLAINTEXT", config.host, config.port)])
        if watches:
            broker.follower.watch()
        yield broker
    finally:
        broker.close()


@contextmanager
def synced_in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Assert that fsync is called, but never in the event loop's thread; yields the ids of the calling threads."""
    threads: list[int] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        threads.append(threading.get_ident())
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        yield threads
    assert threads
    assert threading.get_ident() not in threads


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "data").iterdir() if path.is_dir())


def append(log: PartitionLog | None, count: int) -> None:
    assert log is not None
    for _ in range(count):
        log.append(memoryview(bytearray(make_batch([(None, b"value")], [1]))))


def append_value(log: PartitionLog | None, size: int) -> None:
    assert log is not None
    log.append(memoryview(bytearray(make_batch([(None, b"v" * size)], [1]))))


def client_request(version: int = 7) -> Request:
    listener = Listener(PLAINTEXT, PLAINTEXT, "127.0.0.1", 1000)
    return Request(version, "client", Session(listener, "peer", [], lambda mechanism, name: None))


async def send(broker: Broker, topic: str, records: bytes, transactional_id: str | None = None) -> dict[str, Any]:
    """Produce to partition 0 and return its part of the response."""
    data = [{"index": 0, "records": memoryview(bytearray(records))}]
    topics = [{"name": topic, "topic_id": None, "partition_data": data}]
    message = {"acks": 1, "transactional_id": transactional_id, "topic_data": topics}
    answer = await produce.produce(broker, client_request(), message)
    assert answer is not None
    (partition,) = answer["responses"][0]["partition_responses"]
    return dict(partition)


async def new_producer(broker: Broker, transactional_id: str) -> ProducerIdAndEpoch:
    """Initialize a transactional producer."""
    producer = await broker.transactions.init(transactional_id, 60_000, None)
    assert isinstance(producer, ProducerIdAndEpoch)
    return producer


async def commit(broker: Broker, *topics: str, offset: int, group: str = "g") -> dict[str, int]:
    """Commit an offset of partition 0 of each topic; return the error codes by topic."""
    message = {"generation_id_or_member_epoch": -1, "retention_time_ms": -1, **_to_commit(topics, offset, group)}
    return _codes(await offsets.offset_commit(broker, client_request(), message))


async def commit_in_transaction(
    broker: Broker, transactional_id: str, producer: ProducerIdAndEpoch, *topics: str, offset: int
) -> dict[str, int]:
    """Commit like `commit`, but in the producer's transaction."""
    message = {
        "transactional_id": transactional_id,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "generation_id": -1,
        **_to_commit(topics, offset, "g"),
    }
    return _codes(await offsets.txn_offset_commit(broker, client_request(4), message))


def offsets_of(offsets: OffsetManager) -> dict[str, int]:
    """The committed offsets of group g by topic."""
    return {topic: committed.offset for (topic, _), committed in offsets.all("g").items()}


def _to_commit(topics: tuple[str, ...], offset: int, group: str) -> dict[str, Any]:
    entry = {"partition_index": 0, "committed_offset": offset, "committed_leader_epoch": -1, "committed_metadata": ""}
    entries = [{"name": topic, "partitions": [entry]} for topic in topics]
    return {"group_id": group, "member_id": "", "group_instance_id": None, "topics": entries}


def _codes(answer: dict[str, Any]) -> dict[str, int]:
    return {topic["name"]: topic["partitions"][0]["error_code"] for topic in answer["topics"]}
