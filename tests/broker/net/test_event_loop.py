"""Slow work stays out of the event loop's thread, and concurrent work keeps its order."""

from __future__ import annotations

import asyncio
import base64
import mmap
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest

from spark_klog.base.clock import system_ms
from spark_klog.broker import event_loop, fetches, handlers
from spark_klog.broker.broker import Broker
from spark_klog.broker.fetches import Purgatory
from spark_klog.broker.groups import coordinator
from spark_klog.broker.groups.group import Join
from spark_klog.broker.handlers import list_offsets
from spark_klog.broker.handlers.offsets import offset_fetch
from spark_klog.broker.housekeeping import _dirtiest, clean_logs, keep_house
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from spark_klog.broker.net.server import Server
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import DirectoryError, ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.segments.segment import Segment
from spark_klog.protocol import apis
from spark_klog.protocol.codec import decode_request, decode_request_header
from spark_klog.protocol.schema import Api
from spark_klog.wire.primitives import Reader
from tests.support.brokers.batches import make_batch
from tests.support.brokers.costly_requests import costly_frame
from tests.support.brokers.loop_broker import (
    append,
    client_request,
    commit,
    folders,
    new_producer,
    running,
    send,
    synced_in_threads,
)
from tests.support.clients.commits import commit_offsets
from tests.support.waiting import until


def noted_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> list[Any]:
    """Wrap the method; return a list that gets `note(*args)` for each call."""
    notes: list[Any] = []
    called = getattr(owner, name)

    def noted(*args: Any, **more: Any) -> Any:
        notes.append(note(*args))
        return called(*args, **more)

    monkeypatch.setattr(owner, name, noted)
    return notes


def partitions(broker: Broker, topic: str) -> list[int]:
    return sorted(partition for name, partition in broker.logs.logs if name == topic)


def test_topics_are_changed_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            with synced_in_threads(monkeypatch):
                await broker.changes.create_topic("t", 3, {"retention.ms": "1000"})
                await broker.changes.create_partitions("t", 5)
                await broker.changes.alter_topic_settings("t", lambda _: {"retention.ms": "2000"})
                await broker.changes.delete_topics({"t": None})

    asyncio.run(run())


def test_a_topic_deleted_and_created_again_while_it_is_created(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            created = asyncio.create_task(broker.changes.create_topic("t", 400))
            await until(lambda: partitions(broker, "t"), "the first logs")
            deleted = asyncio.create_task(broker.changes.delete_topics({"t": None}))
            await deleted
            topic_id = await broker.changes.create_topic("t", 2)
            await asyncio.gather(created, return_exceptions=True)
            await broker.changes.ended()
            assert partitions(broker, "t") == [0, 1]
            assert {log.topic_id for log in broker.logs.logs.values()} == {topic_id}
            assert folders(tmp_path) == ["t-0", "t-1"]

    asyncio.run(run())


def test_the_first_groups_wait_for_the_log_of_their_offsets(tmp_path: Path) -> None:
    """Many clients come to a new broker at once: all wait for the log, none gets an error."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            first = asyncio.create_task(broker.changes.create_topic(OFFSETS_TOPIC, 50))
            await until(lambda: OFFSETS_TOPIC in broker.registry.topics, "the topic is registered")
            assert broker.coordinator.local_log("g") is None
            codes = await asyncio.gather(*(broker.coordinator.code(f"group {number}") for number in range(20)))
            assert set(codes) == {ErrorCode.NONE}
            await first

    asyncio.run(run())


def test_a_topic_whose_client_hangs_up_is_created_whole(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            created = asyncio.create_task(broker.changes.create_topic("t", 300))
            await until(lambda: partitions(broker, "t"), "the first logs")
            created.cancel()
            with pytest.raises(asyncio.CancelledError):
                await created
        assert len(folders(tmp_path)) == 300

    asyncio.run(run())


def test_a_topic_whose_folder_cannot_be_made_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            (tmp_path / "data" / "t-1").write_text("in the way")
            with pytest.raises(DirectoryError, match=r"t-1 can't be created"):
                await broker.changes.create_topic("t", 3)
            assert "t" not in broker.registry.topics
            await broker.changes.create_topic("u", 1)
            assert sorted(broker.logs.logs) == [("u", 0)]
            (tmp_path / "data" / "t-1").unlink()
            await broker.changes.create_topic("t", 3)
            await broker.changes.ended()
            assert folders(tmp_path) == ["t-0", "t-1", "t-2", "u-0"]

    asyncio.run(run())


def test_a_log_with_trouble_does_not_end_the_care_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any exception counts; at the stop the other logs are closed, and the next start finds all their records."""

    def fail(*_: object) -> int:
        raise struct.error("'i' format requires -2147483648 <= number <= 2147483647")

    async def run() -> None:
        config = LogConfig(segment_bytes=1, retention_bytes=0)
        async with running(tmp_path, log=config, housekeeping_ms=50, checkpoint_ms=50) as broker:
            for topic in ("a", "bad", "c"):
                await broker.changes.create_topic(topic, 1)
                append(broker.logs.get(topic, 0), 5)
            bad = broker.logs.logs["bad", 0]
            monkeypatch.setattr(bad, "delete_expired", fail)
            monkeypatch.setattr(bad, "close", fail)
            house = asyncio.create_task(keep_house(broker))
            others = [broker.logs.logs["a", 0], broker.logs.logs["c", 0]]
            await until(lambda: all(log.start_offset == 5 for log in others), "retention")
            for log in others:
                append(log, 5)
            await until(lambda: all(log.start_offset == 10 for log in others), "retention goes on")
            assert not house.done()
            house.cancel()

    asyncio.run(run())
    assert "bad-0: housekeeping failed" in caplog.text
    assert "bad-0 can't be closed" in caplog.text
    assert not (tmp_path / "data" / ".kafka_cleanshutdown").exists()

    async def next_life() -> None:
        async with running(tmp_path) as broker:
            assert [broker.logs.logs[topic, 0].end_offset for topic in ("a", "bad", "c")] == [10, 5, 10]

    asyncio.run(next_life())


def test_groups_go_with_the_topic_of_offsets(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            log = broker.coordinator.local_log("g")
            assert log is not None
            commit_offsets(broker.offsets, log, "g", {("t", 0): (7, -1, "")})
            join = Join("", None, "client", "host", 1000, 60_000, "consumer", (("range", b""),), False)
            joining = asyncio.create_task(broker.groups.join("joins", join))
            await until(lambda: broker.groups.get("joins"), "a member that waits")
            await broker.changes.delete_topics({OFFSETS_TOPIC: None})
            assert (await joining)["error_code"] == ErrorCode.NOT_COORDINATOR
            assert broker.offsets.groups == []
            assert list(broker.groups) == []
            assert await broker.coordinator.code("g") is ErrorCode.NONE  # creates the topic again
            assert broker.offsets.fetch("g", "t", 0) is None

    asyncio.run(run())


def test_a_segment_is_rolled_without_a_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent Produce requests: each record is appended once, and threads do the flushes."""

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(segment_bytes=1000)) as broker:
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            batch = bytes(make_batch([(None, b"v" * 200)], [1]))

            async def send_many() -> list[int]:
                answers = [await send(broker, "t", batch) for _ in range(20)]
                assert {answer["error_code"] for answer in answers} == {ErrorCode.NONE}
                return [answer["base_offset"] for answer in answers]

            with synced_in_threads(monkeypatch):
                offsets = await asyncio.gather(*(send_many() for _ in range(5)))
            assert sorted(offset for found in offsets for offset in found) == list(range(100))
            assert len(log.segments) > 20

    asyncio.run(run())


def test_rolls_by_age_and_flushes_by_count_wait_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1, {"segment.ms": "1000", "flush.messages": "3"})
            log = broker.logs.logs["t", 0]
            with synced_in_threads(monkeypatch):
                for number in range(20):
                    batch = bytes(make_batch([(None, b"value")], [1000 * number]))
                    assert (await send(broker, "t", batch))["error_code"] == ErrorCode.NONE
                    assert log.end_offset - log.recovery_point < 3
            assert len(log.segments) > 5

    asyncio.run(run())


def test_what_empties_a_log_waits_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention, and DeleteRecords up to the end, begin a new segment."""

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(retention_bytes=0), housekeeping_ms=50) as broker:
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            append(log, 3)
            with synced_in_threads(monkeypatch):
                topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": -1}]}]
                answer = await handlers.topics.delete_records(broker, client_request(1), {"topics": topics})
                assert answer["topics"][0]["partitions"][0]["low_watermark"] == 3
                append(log, 3)
                house = asyncio.create_task(keep_house(broker))
                await until(lambda: log.start_offset == 6, "retention")
                house.cancel()
                await asyncio.gather(house, return_exceptions=True)

    asyncio.run(run())


def test_logs_of_internal_topics_roll_without_a_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent offset commits, and transactions, whose markers go to another log."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            await broker.transactions.load()
            await broker.changes.create_topic("t", 1)
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            offsets = broker.coordinator.local_log("g")
            producer = await broker.transactions.init("id", 60_000, None)
            states = broker.transactions.local_log("id")
            assert offsets is not None
            assert states is not None
            assert not isinstance(producer, ErrorCode)
            logs = [offsets, states, broker.logs.logs["t", 0]]
            for log in logs:
                log.config = replace(log.config, segment_bytes=4000)

            async def commit(group: str) -> None:
                for offset in range(40):
                    log = await broker.coordinator.log_of("g")
                    assert not isinstance(log, ErrorCode)
                    commit_offsets(broker.offsets, log, group, {("t", 0): (offset, -1, "")})

            with synced_in_threads(monkeypatch):
                await asyncio.gather(*(commit(f"g-{number}") for number in range(4)))
                for _ in range(60):
                    added = await broker.transactions.add("id", producer, frozenset({("t", 0)}))
                    assert added is ErrorCode.NONE
                    assert await broker.transactions.end("id", producer, commits=True) is ErrorCode.NONE
            assert min(len(log.segments) for log in logs) > 1
            assert {broker.offsets.fetch(f"g-{number}", "t", 0).offset for number in range(4)} == {39}  # type: ignore[union-attr]

    asyncio.run(run())


def test_a_damaged_topic_id_takes_its_partition_offline_and_a_padded_one_is_read(tmp_path: Path) -> None:
    async def run(*, damages: bool) -> None:
        async with running(tmp_path) as broker:
            if damages:
                topic_id = await broker.changes.create_topic("padded", 1)
                await broker.changes.create_topic("damaged", 1)
                encoded = base64.urlsafe_b64encode(topic_id.bytes).decode()
                metadata = "partition.metadata"
                (tmp_path / "data" / "padded-0" / metadata).write_text(f"version: 0\ntopic_id: {encoded}\n")
                (tmp_path / "data" / "damaged-0" / metadata).write_text("version: 0\ntopic_id: ?\n")
            else:
                assert list(broker.logs.logs) == [("padded", 0)]
                assert list(broker.logs.offline) == [("damaged", 0)]

    asyncio.run(run(damages=True))
    (tmp_path / "data" / "cleaner-offset-checkpoint").write_text("")
    asyncio.run(run(damages=False))


def test_offsets_expire_in_threads_and_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group's offsets: no step removes many, and rolls and flushes by count do not wait in the event loop."""

    async def run() -> None:
        async with running(tmp_path, offsets_retention_minutes=0) as broker:
            await broker.coordinator.load()
            log = await broker.coordinator.log_of("g")
            assert not isinstance(log, ErrorCode)
            for topic in range(20):
                commit_offsets(
                    broker.offsets, log, "g", {(f"topic {topic}", number): (1, -1, "") for number in range(100)}
                )
            log.config = replace(log.config, segment_bytes=20_000, flush_messages=50)
            before = log.end_offset
            removed = noted_calls(monkeypatch, broker.offsets, "remove", lambda log, group, keys: len(list(keys)))
            monkeypatch.setattr(coordinator, "system_ms", lambda: system_ms() + 1000)
            with synced_in_threads(monkeypatch):
                await broker.coordinator.expire()
            assert broker.offsets.groups == []
            assert log.end_offset == before + 2000
            assert log.end_offset - log.recovery_point < 50
            assert len(log.segments) > 2
            assert max(removed) <= 100

    asyncio.run(run())


@pytest.mark.parametrize("is_deleted", [True, False])
def test_many_offsets_are_removed_in_threads_and_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    """Offsets are removed with their group or their topic."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            log = await broker.coordinator.log_of("g")
            assert not isinstance(log, ErrorCode)
            await broker.changes.create_topic("t", 1)
            for start in range(0, 2000, 100):
                commit_offsets(broker.offsets, log, "g", {("t", start + number): (1, -1, "") for number in range(100)})
            log.config = replace(log.config, segment_bytes=20_000, flush_messages=50)
            removed = noted_calls(monkeypatch, broker.offsets, "remove", lambda log, group, keys: len(list(keys)))
            with synced_in_threads(monkeypatch):
                if is_deleted:
                    answer = await handlers.groups.delete_groups(broker, client_request(2), {"groups_names": ["g"]})
                    assert answer["results"] == [{"group_id": "g", "error_code": ErrorCode.NONE}]
                else:
                    await broker.changes.delete_topics({"t": None})
                    await until(lambda: not broker.offsets.has("g"), "the topic's offsets go")
            assert not broker.offsets.has("g")
            assert max(removed) <= 100
            assert len(log.segments) > 2

    asyncio.run(run())


def test_what_the_broker_itself_appends_is_flushed_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes by count end before the answers: commits, members, transactions and markers; also for timed-out ones."""

    async def run() -> None:
        settings = {"log": LogConfig(flush_messages=1), "transaction_check_ms": 50, "group_initial_delay_ms": 0}
        async with running(tmp_path, **settings) as broker:
            await broker.coordinator.load()
            care = asyncio.create_task(broker.transactions.run(asyncio.sleep(0)))
            await until(lambda: not broker.transactions.is_loading, "the transactions")
            await broker.changes.create_topic("t", 2)
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            producer = await new_producer(broker, "id")
            logs = broker.logs.logs.values()

            def check_flushed() -> None:
                assert {log.directory.name for log in logs if log.recovery_point < log.end_offset} == set()

            with synced_in_threads(monkeypatch) as threads:
                assert await commit(broker, "t", offset=1) == {"t": ErrorCode.NONE}
                check_flushed()
                joined = await handlers.groups.join_group(broker, client_request(2), join_message("members"))
                assert joined["error_code"] == ErrorCode.NONE
                synced = await handlers.groups.sync_group(broker, client_request(2), sync_message("members", joined))
                assert synced["error_code"] == ErrorCode.NONE
                check_flushed()
                both = frozenset({("t", 0), ("t", 1)})
                assert await broker.transactions.add("id", producer, both) is ErrorCode.NONE
                state = broker.logs.logs[TRANSACTIONS_TOPIC, 0]
                prepared = state.end_offset + 1
                assert await broker.transactions.end("id", producer, commits=True) is ErrorCode.NONE
                assert state.recovery_point >= prepared
                await until(lambda: state.recovery_point > prepared, "the end of the transaction, after its answer")
                marker: dict[str, Any] = {
                    "producer_id": 9,
                    "producer_epoch": 0,
                    "transaction_result": True,
                    "coordinator_epoch": 0,
                    "transaction_version": 0,
                }
                marker["topics"] = [{"name": "t", "partition_indexes": [0, 1]}]
                answer = await handlers.transactions.write_txn_markers(broker, client_request(1), {"markers": [marker]})
                codes = [entry["error_code"] for entry in answer["markers"][0]["topics"][0]["partitions"]]
                assert codes == [ErrorCode.NONE, ErrorCode.NONE]
                check_flushed()
                producer = await broker.transactions.init("id", 1, None)
                assert isinstance(producer, ProducerIdAndEpoch)
                assert await broker.transactions.add("id", producer, both) is ErrorCode.NONE
                await until(lambda: broker.logs.logs["t", 1].end_offset == 3, "the transaction is aborted")
                await until(lambda: all(log.recovery_point == log.end_offset for log in logs), "it is on the disk")
            assert len(threads) > 10
            care.cancel()

    asyncio.run(run())


def join_message(group: str) -> dict[str, Any]:
    return {
        "group_id": group,
        "member_id": "",
        "group_instance_id": None,
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 10_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
    }


def sync_message(group: str, joined: dict[str, Any]) -> dict[str, Any]:
    return {
        "group_id": group,
        "member_id": joined["member_id"],
        "group_instance_id": None,
        "generation_id": joined["generation_id"],
        "protocol_type": None,
        "protocol_name": None,
        "assignments": [{"member_id": joined["member_id"], "assignment": b""}],
    }


def test_a_marker_waits_until_the_decision_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a crash could abort in one partition what is committed in another; also if the client is gone."""

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(flush_messages=1)) as broker:
            await broker.coordinator.load()
            care = asyncio.create_task(broker.transactions.run(asyncio.sleep(0)))
            await until(lambda: not broker.transactions.is_loading, "the transactions")
            await broker.changes.create_topic("t", 1)
            producer = await new_producer(broker, "id")
            assert await broker.transactions.add("id", producer, frozenset({("t", 0)})) is ErrorCode.NONE
            log = broker.logs.logs["t", 0]
            waits, goes_on, sync = threading.Event(), threading.Event(), os.fsync

            def slow(descriptor: int) -> None:
                waits.set()
                assert goes_on.wait(60)
                sync(descriptor)

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", slow)
                ending = asyncio.create_task(broker.transactions.end("id", producer, commits=True))
                await until(waits.is_set, "the flush of the decision")
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)
                assert log.end_offset == 0
                goes_on.set()
                await until(lambda: log.end_offset == 1, "the marker")
                await until(lambda: not has_missing(broker), "the transaction ends")
            assert await broker.transactions.init("id", 60_000, None) == ProducerIdAndEpoch(
                producer.producer_id, producer.epoch + 1
            )
            assert log.end_offset == 1
            care.cancel()

    asyncio.run(run())


def has_missing(broker: Broker) -> bool:
    return any(transaction.is_prepared for transaction in broker.transactions)


def test_the_log_cleaners_table_is_given_back_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unmapping 128 MB of touched memory takes the kernel 40 to 150 ms."""
    made: list[int] = []
    unmapped_by: list[int] = []

    class Table(mmap.mmap):
        def __init__(self, _: int, size: int, **_how: int) -> None:
            made.append(size)

        def close(self) -> None:
            unmapped_by.append(threading.get_ident())
            super().close()

        def __del__(self) -> None:
            if not self.closed:
                unmapped_by.append(threading.get_ident())

    monkeypatch.setattr(mmap, "mmap", Table)

    async def run() -> None:
        async with running(tmp_path, cleaner_backoff_ms=1) as broker:
            settings = {"cleanup.policy": "compact", "segment.bytes": "200", "min.cleanable.dirty.ratio": "0.0"}
            await broker.changes.create_topic("t", 1, settings)
            log = broker.logs.logs["t", 0]
            cleaner = asyncio.create_task(clean_logs(broker.logs, broker.config))
            for _ in range(2):
                before = len(made)
                for number in range(20):
                    log.append(memoryview(bytearray(make_batch([(b"key", b"%d" % number)], [system_ms()]))))
                await until(lambda before=before: len(made) > before, "a round of the cleaner")
                await until(lambda: len(made) == len(unmapped_by), "the table is given back")
            cleaner.cancel()
            await asyncio.wait([cleaner])
        assert threading.get_ident() not in unmapped_by

    asyncio.run(run())


def test_a_thread_gives_way_to_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a slice of work the thread waits until the loop has had a turn, unless the loop is closed."""
    monkeypatch.setattr(event_loop, "_LONGEST_REST_SECONDS", 60.0)
    has_rested = threading.Event()

    async def run() -> event_loop.ThreadPace:
        pace = event_loop.ThreadPace(asyncio.get_running_loop())

        def work() -> None:
            time.sleep(2 * event_loop._SLICE_SECONDS)
            pace.rest()
            has_rested.set()

        working = asyncio.get_running_loop().run_in_executor(None, work)
        assert not has_rested.wait(0.2)  # this is the loop's thread
        await working
        return pace

    pace = asyncio.run(run())
    assert has_rested.is_set()
    time.sleep(2 * event_loop._SLICE_SECONDS)
    pace.rest()


def test_the_log_cleaner_gives_way_to_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []
    monkeypatch.setattr(event_loop.ThreadPace, "rest", lambda _: rests.append(threading.get_ident()))

    async def run() -> None:
        async with running(tmp_path, cleaner_backoff_ms=20) as broker:
            settings = {"cleanup.policy": "compact", "segment.bytes": "2000000", "min.cleanable.dirty.ratio": "0.0"}
            await broker.changes.create_topic("t", 1, settings)
            for number in range(60):  # as much as the kernel does at once
                records = make_batch([(b"key", b"%06d" % number * 50_000)], [system_ms()])
                broker.logs.logs["t", 0].append(memoryview(bytearray(records)))
            cleaner = asyncio.create_task(clean_logs(broker.logs, broker.config))
            await until(lambda: len(rests) > 60, "a rest after each run of batches, in both passes")
            cleaner.cancel()
            await asyncio.wait([cleaner])
        assert threading.get_ident() not in rests

    asyncio.run(run())


def test_indexes_of_many_segments_are_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, the first look-up by time and the first plan of the log cleaner need all segments' indexes."""
    settings = {"segment.bytes": "200", "cleanup.policy": "compact"}

    async def fill() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 2, settings)
            for partition in range(2):
                for number in range(30):
                    records = make_batch([(b"key", bytes(100))], [1000 + number])
                    broker.logs.logs["t", partition].append(memoryview(records))

    async def look() -> None:
        load_end, turn, loaded = Segment.load_end, 0, []

        def noted(segment: Segment) -> int | None:
            loaded.append(turn)
            return load_end(segment)

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        async with running(tmp_path) as broker:
            monkeypatch.setattr(Segment, "load_end", noted)
            monkeypatch.setattr(event_loop, "_TURN_SECONDS", 0.0)
            monkeypatch.setattr(event_loop, "_REST_SECONDS", inf)
            monkeypatch.setattr(event_loop, "_SLICE_SECONDS", 0.0)
            counting = asyncio.create_task(count_turns())
            partition = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": 1029}
            message = {"isolation_level": 0, "topics": [{"name": "t", "partitions": [partition]}]}
            answer = await list_offsets.list_offsets(broker, client_request(), message)
            assert answer["topics"][0]["partitions"][0]["offset"] == 29
            assert len(loaded) == len(set(loaded)) == len(broker.logs.logs["t", 0].segments) - 1
            loaded.clear()
            found = await _dirtiest(broker.logs, system_ms())
            assert found is not None
            assert len(loaded) == len(set(loaded)) == len(broker.logs.logs["t", 1].segments) - 1
            counting.cancel()

    asyncio.run(fill())
    asyncio.run(look())


def test_a_round_answers_few_bytes_of_long_requests() -> None:
    """However many connections have one ready; the next round answers as many."""

    async def run() -> None:
        turns, size = event_loop.Turns(), 20_000
        for _ in range(3):
            answered = [turns.has_room(size) for _ in range(100)]
            assert answered == sorted(answered, reverse=True)
            assert 0 < sum(answered) * size <= event_loop._LONG_BYTES < (sum(answered) + 1) * size
            assert not turns.has_room(2 * event_loop._LONG_BYTES)
            await asyncio.sleep(0)

    asyncio.run(run())


#: Lists whose elements are looked up one by one.
_LOOKED_UP = {
    apis.LIST_OFFSETS: ("topics",),
    apis.OFFSET_FOR_LEADER_EPOCH: ("topics",),
    apis.OFFSET_COMMIT: ("topics",),
    apis.OFFSET_FETCH: ("groups",),
    apis.DESCRIBE_GROUPS: ("groups",),
    apis.CONSUMER_GROUP_DESCRIBE: ("group_ids",),
    apis.DELETE_RECORDS: ("topics",),
    apis.ADD_PARTITIONS_TO_TXN: ("transactions", "topics"),
    apis.WRITE_TXN_MARKERS: ("markers", "topics"),
    apis.ALTER_REPLICA_LOG_DIRS: ("dirs", "topics"),
    apis.ALTER_PARTITION_REASSIGNMENTS: ("topics",),
    apis.ELECT_LEADERS: ("topic_partitions",),
    apis.DESCRIBE_PRODUCERS: ("topics",),
    apis.DESCRIBE_TRANSACTIONS: ("transactional_ids",),
    apis.DESCRIBE_TOPIC_PARTITIONS: ("topics",),
}


def test_each_element_of_a_request_is_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if what is in an element is nothing: a topic without partitions."""
    taken = noted_calls(monkeypatch, event_loop.Turns, "take", lambda *_: 1)

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            loading = asyncio.ensure_future(broker.transactions.run(asyncio.sleep(0)))
            server, session, topic_id = Server(broker), client_request().session, uuid.UUID(int=0)
            for api, path in _LOOKED_UP.items():
                frame = costly_frame(api, api.versions.last, path, 4000, "name", topic_id, is_distinct=True)
                _, request = decode_request(api, api.versions.last, _behind_header(frame))
                for step in path[:-1]:
                    request = request[step][0]
                del taken[:]
                await server.answer(bytearray(frame), session)
                assert len(taken) >= len(request[path[-1]]) > 100, api.name
            loading.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("api", "version", "steps"),
    [(apis.OFFSET_COMMIT, 9, 2), (apis.TXN_OFFSET_COMMIT, 5, 2), (apis.OFFSET_FETCH, 10, 1)],
)
@pytest.mark.parametrize("is_many_topics", [True, False])
def test_answers_about_offsets_are_made_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: Api, version: int, steps: int, *, is_many_topics: bool
) -> None:
    """One step for each element when it is checked, if it is, and one for its part of the answer."""
    taken = noted_calls(monkeypatch, event_loop.Turns, "take", lambda *_: 1)
    last = "partition_indexes" if api is apis.OFFSET_FETCH else "partitions"
    path = ("groups",) * (api is apis.OFFSET_FETCH) + ("topics",) + (last,) * (not is_many_topics)

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            loading = asyncio.ensure_future(broker.transactions.run(asyncio.sleep(0)))
            frame = costly_frame(api, version, path, 4000, "name", uuid.UUID(int=5), is_distinct=True)
            _, request = decode_request(api, version, _behind_header(frame))
            for step in path[:-1]:
                request = request[step][0]
            del taken[:]
            await Server(broker).answer(bytearray(frame), client_request().session)
            assert len(taken) >= steps * len(request[path[-1]]) > 100
            loading.cancel()

    asyncio.run(run())


def test_fetched_offsets_are_those_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits, and the removal of all, come while the answer is made in steps."""
    monkeypatch.setattr(event_loop, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(event_loop, "_REST_SECONDS", inf)
    count, answers = 50, 0

    async def run() -> None:
        nonlocal answers
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            log = broker.coordinator.local_log("g")
            assert log is not None
            for topics in (None, [{"name": "t", "partition_indexes": [*range(count)]}]):
                for change in range(1, 30):
                    commit_offsets(broker.offsets, log, "g", {("t", n): (change, -1, "") for n in range(count)})
                    message = {"group_id": "g", "topics": topics, "require_stable": False}
                    fetching = asyncio.ensure_future(offset_fetch(broker, client_request(7), message))
                    for _ in range(change):
                        await asyncio.sleep(0)
                    if change % 2:
                        commit_offsets(broker.offsets, log, "g", {("t", n): (100, -1, "") for n in range(count)})
                    else:
                        broker.offsets.remove(log, "g", [("t", n) for n in range(count)])
                    answer = await fetching
                    entries = [each for topic in answer["topics"] for each in topic["partitions"]]
                    offsets = {each["committed_offset"] for each in entries}
                    assert (len(entries), offsets in ({change}, {100}, {-1})) == (count, True) or not entries
                    answers += offsets == {change}

    asyncio.run(run())
    assert answers > 10


def _behind_header(frame: bytes) -> Reader:
    reader = Reader(frame)
    decode_request_header(reader)
    return reader


def test_one_of_those_with_much_to_do_goes_on_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others wait for one turn, not for those of all; who is cancelled holds nobody up."""
    monkeypatch.setattr(event_loop, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(event_loop, "_REST_SECONDS", inf)

    async def run() -> None:
        turns, turn, steps = event_loop.Turns(), 0, []

        async def work(number: int) -> None:
            for _ in range(50):
                await turns.take()
                steps.append((turn, number))

        tasks = [asyncio.create_task(work(number)) for number in range(20)]
        while not all(task.done() for task in tasks):
            turn += 1
            assert turn < 10_000
            if turn % 100 == 0:
                tasks[turn // 100 % 20].cancel()
            await asyncio.sleep(0)
        assert len({turn for turn, _ in steps}) == len(steps)
        done = [task for task in tasks if not task.cancelled()]
        assert done
        assert len(steps) >= 50 * len(done)
        assert max(number for _, number in steps[:20]) == 19  # each gets its turn

    asyncio.run(run())


@pytest.mark.parametrize("step_seconds", [0.005, 0.03])
def test_a_task_that_has_worked_for_long_has_not_rested(step_seconds: float) -> None:
    """However long its steps are: others run after each of them, or after the second one."""

    async def run() -> None:
        turns, steps_since, worst = event_loop.Turns(), 0, 0

        async def work() -> None:
            nonlocal steps_since, worst
            for _ in range(10):
                await turns.take()
                time.sleep(step_seconds)  # work
                steps_since += 1
                worst = max(worst, steps_since)

        worker = asyncio.create_task(work())
        while not worker.done():
            steps_since = 0
            await asyncio.sleep(0)
        assert worst == 1

    asyncio.run(run())


def test_a_task_that_has_rested_begins_a_turn_at_once() -> None:
    async def run() -> None:
        turns = event_loop.Turns()
        await turns.take()
        await asyncio.sleep(event_loop._TURN_SECONDS + event_loop._REST_SECONDS + 0.005)
        taking = turns.take()
        with pytest.raises(StopIteration):
            taking.send(None)

    asyncio.run(run())


def test_waiting_fetches_are_woken_some_at_a_time() -> None:
    """Other requests are answered between, also if all wait for one partition, or each for another one."""

    async def run(keys: list[list[tuple[str, int]]]) -> None:
        purgatory, count = Purgatory(), len(keys)
        waits = [asyncio.ensure_future(purgatory.wait(some, 3600)) for some in keys]
        late = asyncio.ensure_future(purgatory.wait([("t", count)], 0.001))
        await asyncio.sleep(0)
        assert purgatory.waiting == count + 1
        waits[0].cancel()
        for number in range(count):
            purgatory.wake(("t", number))
        left = [count]
        while not all(wait.done() for wait in waits):
            await asyncio.sleep(0)
            left.append(sum(not wait.done() for wait in waits))
        assert max(before - after for before, after in pairwise(left)) <= fetches._WOKEN_AT_ONCE + 1
        assert all([await wait for wait in waits[1:]])
        assert not await late
        rest = asyncio.ensure_future(purgatory.wait([("t", 0)], 3600))
        await asyncio.sleep(0)
        purgatory.close()
        assert await rest
        assert not await purgatory.wait([("t", 0)], 3600)
        assert purgatory.waiting == 0

    asyncio.run(run([[("t", 0)]] * 100))
    asyncio.run(run([[("t", number), ("t", 0)] for number in range(100)]))
