"""Two changes of a broker's logs that cross: each is right alone, and here one happens within the other."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from spark_klog.broker import event_loop, handlers
from spark_klog.broker.groups.group import Join
from spark_klog.broker.handlers import fetch, list_offsets, produce
from spark_klog.broker.housekeeping import clean_logs, keep_house
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from spark_klog.broker.transactions.markers import MarkerEntry, write_marker
from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.segments import segment
from spark_klog.log.segments.segment import FileRange
from spark_klog.records.contract import CREATE_TIME, Record
from spark_klog.records.formats.message_set import build_message_set
from spark_klog.records.reading.produced import check_keys
from spark_klog.wire.codecs import codec_by_id
from tests.support.brokers.batches import make_batch, read_records
from tests.support.brokers.loop_broker import (
    append,
    client_request,
    commit_in_transaction,
    new_producer,
    running,
    send,
    synced_in_threads,
)
from tests.support.brokers.producer_batches import batch, marker
from tests.support.brokers.raw_client import error_codes
from tests.support.checker.log_model import ABORT
from tests.support.clients.commits import commit_offsets
from tests.support.waiting import until

#: ms; never too old for retention.
_FAR = 4_000_000_000_000


class Disk:
    """A slow disk: a sync waits until the test lets it go on."""

    def __init__(self) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.fails = False


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The first sync in another thread waits until the test lets it go on."""
    disk, sync, loop_thread = Disk(), os.fsync, threading.get_ident()
    is_first = True

    def waiting(descriptor: int) -> None:
        nonlocal is_first
        if is_first and threading.get_ident() != loop_thread:
            is_first = False
            disk.waits.set()
            assert disk.goes_on.wait(60)
            if disk.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", waiting)
        yield disk
        disk.goes_on.set()


def test_a_batch_that_waits_for_a_roll_is_of_no_transaction_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer has given up and aborted; appended after the marker, the batch would open a transaction for ever."""

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(segment_bytes=200)) as broker:
            await broker.coordinator.load()
            care = asyncio.create_task(broker.transactions.run(asyncio.sleep(0)))
            await until(lambda: not broker.transactions.is_loading, "the transactions")
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            producer = await new_producer(broker, "x")
            assert not await broker.transactions.add("x", producer, frozenset({("t", 0)}))
            append(log, 2)
            # EndTxn would wait for the same flush, behind the batch
            monkeypatch.setattr(broker.flushes, "make_early_room", lambda *_: asyncio.sleep(0))
            with slow_disk(monkeypatch) as disk:
                late = asyncio.create_task(
                    send(broker, "t", bytes(batch(producer.producer_id, producer.epoch, 0, 3)), "x")
                )
                await until(disk.waits.is_set, "the flush before the roll")
                assert not await broker.transactions.end("x", producer, commits=False)
            assert (await late)["error_code"] != ErrorCode.NONE
            assert log.last_stable_offset == log.end_offset
            care.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("is_own", [False, True])
def test_transactions_that_end_while_a_batch_is_verified_do_not_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_own: bool
) -> None:
    """On a busy partition those of others end all the time; if its own has ended, the client has to retry."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            await broker.transactions.load()
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            own, other = [await new_producer(broker, name) for name in ("x", "other")]
            assert not await broker.transactions.add("x", own, frozenset({("t", 0)}))
            verify, asked = broker.transactions.verify, 0

            async def verify_while_one_ends(*arguments: Any) -> ErrorCode:
                nonlocal asked
                asked += 1
                assert asked == 1
                ends = own if is_own else other
                log.append(memoryview(marker(ends.producer_id, ends.epoch, ABORT)))
                return await verify(*arguments)

            monkeypatch.setattr(broker.transactions, "verify", verify_while_one_ends)
            answer = await send(broker, "t", bytes(batch(own.producer_id, own.epoch, 0, 1)), "x")
            assert answer["error_code"] == (ErrorCode.NOT_ENOUGH_REPLICAS if is_own else ErrorCode.NONE), answer

    asyncio.run(run())


@pytest.mark.parametrize("what", ["records", "offsets", "producer id"])
def test_a_log_that_others_fill_meanwhile_rolls_without_a_flush_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Others take the room in the segment while a batch is verified or a producer id is claimed."""

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(segment_bytes=2000), offsets_partitions=1) as broker:
            await broker.coordinator.load()
            await broker.transactions.load()
            await broker.changes.create_topic("t", 1)
            producer = await new_producer(broker, "x")
            await broker.coordinator.find("g")
            for name in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
                await broker.changes.alter_topic_settings(name, lambda before: {**before, "segment.bytes": "2000"})
            assert not await broker.transactions.add("x", producer, frozenset({("t", 0), (OFFSETS_TOPIC, 0)}))
            log = {
                "records": broker.logs.logs["t", 0],
                "offsets": broker.logs.logs[OFFSETS_TOPIC, 0],
                "producer id": broker.transactions.local_log("new"),
            }[what]
            assert log is not None
            append(log, 1)

            def filled(call: Any) -> Any:
                async def fill(*arguments: Any) -> Any:
                    size = 1980 - log.segments[-1].size
                    log.append(memoryview(bytearray(make_batch([(None, bytes(size - 70))], [1]))))
                    return await call(*arguments)

                return fill

            monkeypatch.setattr(broker.transactions, "verify", filled(broker.transactions.verify))
            monkeypatch.setattr(broker.transactions, "new_producer_id", filled(broker.transactions.new_producer_id))
            with synced_in_threads(monkeypatch):
                if what == "records":
                    answer = await send(broker, "t", bytes(batch(producer.producer_id, producer.epoch, 0, 3)), "x")
                    assert not answer["error_code"], answer
                elif what == "offsets":
                    assert await commit_in_transaction(broker, "x", producer, "t", offset=1) == {"t": ErrorCode.NONE}
                else:
                    await new_producer(broker, "new")
            assert len(log.segments) > 1

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_partitions_that_are_added_again_wait_for_the_same_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """A repeated AddPartitionsToTxn waits for the flush of the first one.

    Clients write to a partition once AddPartitionsToTxn is answered; if a crash lost the record, no marker would end
    the transaction there.
    """

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(flush_messages=1)) as broker:
            await broker.coordinator.load()
            care = asyncio.create_task(broker.transactions.run(asyncio.sleep(0)))
            await until(lambda: not broker.transactions.is_loading, "the transactions")
            await broker.changes.create_topic("t", 1)
            producer = await new_producer(broker, "x")

            def add() -> asyncio.Task[ErrorCode]:
                return asyncio.create_task(broker.transactions.add("x", producer, frozenset({("t", 0)})))

            with slow_disk(monkeypatch) as disk:
                disk.fails = fails
                first = add()
                await until(disk.waits.is_set, "the flush")
                again = add()
                await asyncio.wait({again}, timeout=0.1)
                assert not again.done()
                disk.goes_on.set()
                expected = ErrorCode.COORDINATOR_NOT_AVAILABLE if fails else ErrorCode.NONE
                assert [await first, await again, await add()] == [expected] * 3
            care.cancel()

    asyncio.run(run())


def test_a_flush_that_fails_while_the_broker_stops_is_no_clean_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running(tmp_path, log=LogConfig(flush_ms=1)) as broker:
            await broker.changes.create_topic("t", 1)
            append(broker.logs.get("t", 0), 1)
            with slow_disk(monkeypatch) as disk:
                disk.fails = True
                house = asyncio.create_task(keep_house(broker))
                await until(disk.waits.is_set, "a flush by time")
                house.cancel()
                await asyncio.wait([house])
                disk.goes_on.set()
                await broker.changes.ended()
            await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(run())
    assert not (tmp_path / "data" / ".kafka_cleanshutdown").exists()


def test_the_care_of_a_deleted_log_leaves_the_new_topic_of_its_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of housekeeping goes through the logs that existed when it began."""

    async def run() -> None:
        config = LogConfig(segment_bytes=1, retention_bytes=150, retention_ms=-1, file_delete_delay_ms=0)
        async with running(tmp_path, log=config, housekeeping_ms=50) as broker:
            for topic in ("a", "b"):
                await broker.changes.create_topic(topic, 1)
            first, old = broker.logs.logs["a", 0], broker.logs.logs["b", 0]
            append(old, 5)
            append(first, 5)
            waits, goes_on = threading.Event(), threading.Event()

            def slow() -> None:
                waits.set()
                assert goes_on.wait(60)

            monkeypatch.setattr(first.deleted_files, "remove_due", slow)  # as for a large segment
            house = asyncio.create_task(keep_house(broker))
            await until(waits.is_set, "retention of the first log")
            house_is_at_first = old.start_offset == 0
            assert house_is_at_first
            await broker.changes.delete_topics({"b": None})
            await broker.changes.create_topic("b", 1, {"retention.bytes": "-1"})
            append(broker.logs.get("b", 0), 3)
            files = sorted(path.name for path in (tmp_path / "data" / "b-0").iterdir())
            goes_on.set()
            monkeypatch.undo()
            await until(lambda: first.start_offset and not first.deleted_files.are_due, "the rest of its round")
            await asyncio.sleep(0.1)
            assert sorted(path.name for path in (tmp_path / "data" / "b-0").iterdir()) == files
            house.cancel()

    asyncio.run(run())

    async def next_life() -> None:
        async with running(tmp_path) as broker:
            assert broker.logs.logs["b", 0].end_offset == 3

    asyncio.run(next_life())


def test_groups_are_read_while_their_log_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = LogConfig(segment_bytes=20_000, min_cleanable_dirty_ratio=0)

    async def first_life() -> None:
        async with running(tmp_path, log=config, offsets_partitions=1) as broker:
            await broker.coordinator.load()
            await broker.changes.create_topic("t", 1)
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            settings = {"segment.bytes": "20000", "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.0"}
            await broker.changes.alter_topic_settings(OFFSETS_TOPIC, lambda _: settings)
            log = broker.coordinator.local_log("g")
            assert log is not None
            for number in range(20_000):
                commit_offsets(broker.offsets, log, "g", {("t", number % 50): (number, -1, "")})

    async def second_life() -> None:
        async with running(tmp_path, log=config, cleaner_backoff_ms=1) as broker:
            cleaner = asyncio.create_task(clean_logs(broker.logs, broker.config, lambda: broker.coordinator.is_loading))
            await broker.coordinator.load()
            found = broker.offsets.fetch("g", "t", 49)
            assert await broker.coordinator.code("g") is ErrorCode.NONE, caplog.text[-2000:]
            assert found is not None
            assert found.offset == 19_999
            cleaner.cancel()
            await asyncio.wait([cleaner])

    asyncio.run(first_life())
    caplog.set_level(logging.ERROR)
    asyncio.run(second_life())


def test_settings_that_two_clients_alter_at_once_are_both_kept(tmp_path: Path) -> None:
    def message(name: str, value: str) -> dict[str, Any]:
        config = {"name": name, "config_operation": 0, "value": value}
        resource = {"resource_type": 2, "resource_name": "t", "configs": [config]}
        return {"resources": [resource], "validate_only": False}

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            wanted = {"retention.ms": "60000", "segment.bytes": "1077777", "max.message.bytes": "5555"}
            answers = await asyncio.gather(
                *(
                    handlers.configs.incremental_alter_configs(broker, client_request(), message(*item))
                    for item in wanted.items()
                )
            )
            assert [answer["responses"][0]["error_code"] for answer in answers] == [0, 0, 0]
            assert broker.registry.settings("t") == wanted

    asyncio.run(run())


def test_a_commit_of_a_member_that_has_left_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large commit yields to the event loop, so the broker checks the member when it writes the offsets."""

    async def run() -> None:
        async with running(tmp_path, group_initial_delay_ms=0) as broker:
            await broker.coordinator.load()
            await broker.changes.create_topic("t", 2)
            assert await broker.coordinator.code("g") is ErrorCode.NONE
            join = Join("", None, "client", "host", 10_000, 60_000, "consumer", (("range", b""),), False)
            joined = await broker.groups.join("g", join)
            member, generation = joined["member_id"], joined["generation_id"]
            synced = await broker.groups.sync("g", member, None, generation, ("consumer", "range"), {member: b"x"})
            assert synced["error_code"] == 0
            entries = [
                {"partition_index": index, "committed_offset": 5, "committed_leader_epoch": -1} for index in (0, 1)
            ]
            message = {
                "group_id": "g",
                "member_id": member,
                "group_instance_id": None,
                "generation_id_or_member_epoch": generation,
                "retention_time_ms": -1,
                "topics": [{"name": "t", "partitions": [entry | {"committed_metadata": ""} for entry in entries]}],
            }
            checked = broker.authorizer.refusal

            def others_have_their_turn(*arguments: Any) -> Any:
                broker.groups.leave("g", member, None)
                return checked(*arguments)

            monkeypatch.setattr(broker.authorizer, "refusal", others_have_their_turn)
            answer = await handlers.offsets.offset_commit(broker, client_request(), message)
            codes = [entry["error_code"] for entry in answer["topics"][0]["partitions"]]
            assert codes == [ErrorCode.UNKNOWN_MEMBER_ID] * 2
            assert broker.offsets.fetch("g", "t", 0) is None

    asyncio.run(run())


def test_who_finds_a_flush_that_has_just_ended_begins_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has grown during that flush; waiting for the one that has ended would never yield to the event loop."""

    async def run() -> None:
        async with running(tmp_path, log=LogConfig(segment_bytes=200)) as broker:
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            append(log, 2)
            ends, waits = log.end_flush, log.waits_to_roll
            later: list[asyncio.Task[None]] = []
            looks = 0

            def grown(*arguments: Any) -> None:
                ends(*arguments)
                if not later:
                    append(log, 1)
                    later.append(asyncio.create_task(broker.flushes.make_room(log, 200, -1)))

            def looked(size: int, timestamp: int) -> bool:
                nonlocal looks
                looks += 1
                assert looks < 1000, "it goes round and round"
                return waits(size, timestamp)

            monkeypatch.setattr(log, "end_flush", grown)
            monkeypatch.setattr(log, "waits_to_roll", looked)
            await broker.flushes.make_room(log, 200, -1)
            await asyncio.gather(*later)
            assert later
            assert not waits(200, -1)

    asyncio.run(run())


def fetch_message(partitions: list[int], max_wait_ms: int) -> dict[str, Any]:
    entries = [
        {"partition": index, "fetch_offset": 0, "partition_max_bytes": 1 << 20, "current_leader_epoch": -1}
        for index in partitions
    ]
    return {
        "max_wait_ms": max_wait_ms,
        "min_bytes": 1,
        "max_bytes": 1 << 20,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": "t", "topic_id": None, "partitions": entries}],
        "forgotten_topics_data": [],
    }


def test_a_record_that_comes_while_a_fetch_looks_at_other_partitions_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch has read the record's partition already, and does not wait on it yet."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 2)
            leader_log, is_appended = broker.partitions.leader_log, False

            async def others_have_their_turn(topic: str, partition: int, epoch: int = -1, **more: bool) -> Any:
                nonlocal is_appended
                if partition == 1 and not is_appended:
                    is_appended = True
                    assert (await send(broker, "t", bytes(make_batch([(None, b"v")], [1]))))["error_code"] == 0
                return await leader_log(topic, partition, epoch, **more)

            with monkeypatch.context() as patch:
                patch.setattr(broker.partitions, "leader_log", others_have_their_turn)
                request = client_request(11)
                message = fetch_message([0, 1], 600_000)
                answer = await asyncio.wait_for(fetch.fetch(broker, request, message), 20)
            (topic,) = answer["responses"]
            assert len(topic["partitions"][0]["records"]) > 0

    asyncio.run(run())


def test_a_disk_that_fails_as_offsets_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)

            def fail(_: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(broker.logs.logs["t", 0], "search", fail)
            entry = {"partition_index": 0, "timestamp": 5, "current_leader_epoch": -1}
            message = {"isolation_level": 0, "topics": [{"name": "t", "partitions": [entry]}]}
            answer = await list_offsets.list_offsets(broker, client_request(), message)
            assert answer["topics"][0]["partitions"][0]["error_code"] == ErrorCode.KAFKA_STORAGE_ERROR

    asyncio.run(run())


@pytest.mark.parametrize("timestamp", [_FAR + 5, -3])
def test_others_are_served_while_a_time_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timestamp: int
) -> None:
    """A deleted record's larger timestamp hides later ones from the index: the look-up walks the whole segment."""
    batches = 500

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            for time_ms in (_FAR + 9, *[_FAR] * batches):
                log.append(memoryview(make_batch([(b"k", b"v")], [time_ms])))
            log.delete_records(1)
            rounds = 0

            async def others() -> None:
                nonlocal rounds
                while True:
                    rounds += 1
                    log.append(memoryview(make_batch([(b"k", b"v")], [_FAR])))
                    await asyncio.sleep(0)

            monkeypatch.setattr(event_loop, "_TURN_SECONDS", 0)
            monkeypatch.setattr(event_loop, "_REST_SECONDS", inf)
            task = asyncio.create_task(others())
            entry = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
            message = {"isolation_level": 0, "topics": [{"name": "t", "partitions": [entry]}]}
            answer = await list_offsets.list_offsets(broker, client_request(), message)
            task.cancel()
            assert rounds >= batches
            (found,) = answer["topics"][0]["partitions"]
            expected = (_FAR, 1) if timestamp < 0 else (-1, -1)
            assert (found["error_code"], found["timestamp"], found["offset"]) == (ErrorCode.NONE, *expected)

    asyncio.run(run())


@pytest.mark.parametrize("when", [3, 8, 14])
def test_records_are_deleted_during_a_look_up_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: int
) -> None:
    """The look-up still has the old segments, whose files are deleted; what it found may be deleted, too."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1, {"segment.bytes": "900"})
            log = broker.logs.logs["t", 0]
            for number in range(60):
                time_ms = _FAR + (9 if number in (0, 20, 50) else 0)
                log.append(memoryview(make_batch([(None, b"v")], [time_ms])))
            log.delete_records(1)
            take, count = broker.turns.take, 0

            async def delete_once() -> None:
                nonlocal count
                count += 1
                if count == when:
                    log.delete_records(35)
                await take()

            monkeypatch.setattr(broker.turns, "take", delete_once)
            entry = {"partition_index": 0, "timestamp": _FAR + 5, "current_leader_epoch": -1}
            message = {"isolation_level": 0, "topics": [{"name": "t", "partitions": [entry]}]}
            (found,) = (await list_offsets.list_offsets(broker, client_request(), message))["topics"][0]["partitions"]
            assert count >= when
            assert (found["error_code"], found["timestamp"], found["offset"]) == (ErrorCode.NONE, _FAR + 9, 50)

    asyncio.run(run())
    assert "can't be searched" not in caplog.text


@pytest.mark.parametrize(("timestamp", "look"), [(_FAR + 5, "_first_since"), (-3, "_largest_from")])
@pytest.mark.parametrize("kind", ["compressed", "large"])
def test_others_are_served_while_a_batch_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, timestamp: int, look: str
) -> None:
    """A compressed batch of a few KB may hold a million records."""
    codec, size = ("gzip", 1) if kind == "compressed" else ("none", 5000)

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs["t", 0]
            times = [_FAR + 9, _FAR, _FAR + 5]
            log.append(memoryview(make_batch([(b"k", bytes(size))] * 3, times, codec)))
            log.delete_records(1)
            served, called = threading.Event(), getattr(segment, look)

            def late(*arguments: object) -> object:
                assert served.wait(20)
                return called(*arguments)

            monkeypatch.setattr(segment, look, late)
            asyncio.get_running_loop().call_later(0.05, served.set)
            entry = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
            message = {"isolation_level": 0, "topics": [{"name": "t", "partitions": [entry]}]}
            (found,) = (await list_offsets.list_offsets(broker, client_request(), message))["topics"][0]["partitions"]
            assert (found["error_code"], found["timestamp"], found["offset"]) == (ErrorCode.NONE, _FAR + 5, 2)

    asyncio.run(run())


def test_others_are_served_while_keys_are_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a compacted topic the broker checks each key, and a small compressed request may hold millions of records."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1, {"cleanup.policy": "compact"})
            served = threading.Event()

            def check(records: memoryview, limit: int) -> None:
                assert served.wait(20)
                check_keys(records, limit)

            monkeypatch.setattr(produce, "check_keys", check)
            answers = []
            for key, code in ((b"k", ErrorCode.NONE), (None, ErrorCode.INVALID_RECORD)):
                served.clear()
                data = {"index": 0, "records": memoryview(make_batch([(b"k", b"v"), (key, b"v")], [_FAR] * 2, "gzip"))}
                topics = [{"name": "t", "topic_id": UUID(int=0), "partition_data": [data]}]
                message = {"acks": -1, "transactional_id": None, "topic_data": topics}
                request = client_request(9)
                answer = asyncio.create_task(produce.produce(broker, request, message))
                await asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(served.set)
                answers.append((await asyncio.wait_for(answer, 30), code))
            for found, code in answers:
                assert found is not None
                assert found["responses"][0]["partition_responses"][0]["error_code"] == code

    asyncio.run(run())


def test_others_are_served_while_old_formats_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed message set may hold millions of messages."""

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            loop, served = asyncio.get_running_loop(), threading.Event()

            def waiting(convert: Callable[..., Any]) -> Callable[..., Any]:
                def converted(*args: Any, **options: Any) -> Any:
                    loop.call_soon_threadsafe(served.set)
                    assert served.wait(20)
                    served.clear()
                    return convert(*args, **options)

                return converted

            monkeypatch.setattr(produce, "up_convert", waiting(produce.up_convert))
            monkeypatch.setattr(fetch, "down_convert", waiting(fetch.down_convert))
            monkeypatch.setattr(FileRange, "read", waiting(FileRange.read))
            messages = [Record(number, _FAR, CREATE_TIME, b"k", b"v", ()) for number in range(3)]
            data = {"index": 0, "records": memoryview(bytearray(build_message_set(messages, 1, codec_by_id(1))))}
            topics = [{"name": "t", "topic_id": UUID(int=0), "partition_data": [data]}]
            message = {"acks": -1, "transactional_id": None, "topic_data": topics}
            request = client_request(2)
            answer = await asyncio.wait_for(produce.produce(broker, request, message), 30)
            assert answer is not None
            assert answer["responses"][0]["partition_responses"][0]["error_code"] == ErrorCode.NONE
            answer = await asyncio.wait_for(fetch.fetch(broker, request, fetch_message([0], 0)), 30)
            found = answer["responses"][0]["partitions"][0]["records"]
            assert [record.value for record in read_records(bytes(found))] == [b"v"] * 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("partition", "is_offline", "code", "reason"),
    [
        (0, False, ErrorCode.LEADER_NOT_AVAILABLE, "t-0 is new: broker 0 has not made its log yet"),
        (0, True, ErrorCode.KAFKA_STORAGE_ERROR, "t-0 can't be written: its log on broker 0 is offline, see what"),
        (1, False, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "t-1 does not exist"),
    ],
)
def test_why_there_is_no_log_to_append_to(
    tmp_path: Path, partition: int, is_offline: bool, code: ErrorCode, reason: str
) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            log = broker.logs.logs.pop(("t", 0))
            if is_offline:
                broker.logs.offline["t", 0] = log
            data = {"index": partition, "records": memoryview(bytearray())}
            topics = [{"name": "t", "topic_id": UUID(int=0), "partition_data": [data]}]
            message = {"acks": -1, "transactional_id": None, "topic_data": topics}
            answer = await asyncio.wait_for(produce.produce(broker, client_request(7), message), 30)
            assert answer is not None
            (found,) = answer["responses"][0]["partition_responses"]
            assert found["error_code"] == code
            assert found["error_message"].startswith(reason)
            broker.logs.offline.clear()
            broker.logs.logs["t", 0] = log  # so that it is closed

    asyncio.run(run())


def test_a_disk_that_fails_as_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:

            def fail(_: Path) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(shutil, "disk_usage", fail)
            (result,) = handlers.cluster.describe_log_dirs(broker, client_request(), {"topics": None})["results"]
            assert result["error_code"] == ErrorCode.KAFKA_STORAGE_ERROR

    asyncio.run(run())


@pytest.mark.parametrize("handler", [handlers.groups.delete_groups, handlers.offsets.offset_delete])
def test_offsets_that_their_topic_no_longer_takes_are_not_deleted(tmp_path: Path, handler: Any) -> None:
    """With a lower max.message.bytes the deletion does not fit: the client gets an error, and the offsets stay."""
    group = "g" * 1000

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            log = await broker.coordinator.log_of(group)
            assert not isinstance(log, ErrorCode)
            commit_offsets(broker.offsets, log, group, {("t", 0): (7, -1, "")})
            await broker.changes.alter_topic_settings(
                OFFSETS_TOPIC, lambda before: {**before, "max.message.bytes": "500"}
            )
            topics = [{"name": "t", "partitions": [{"partition_index": 0}]}]
            answer = await handler(
                broker, client_request(), {"groups_names": [group], "group_id": group, "topics": topics}
            )
            assert ErrorCode.UNKNOWN_SERVER_ERROR in error_codes(answer)
            assert broker.offsets.fetch(group, "t", 0) is not None

    asyncio.run(run())


def test_ids_of_transactions_that_are_still_loading_are_not_given(tmp_path: Path) -> None:
    """A directory from Kafka has no file of producer ids; the transaction log has them, even if their data is gone."""
    message = {"transactional_id": None, "transaction_timeout_ms": 1000, "producer_id": -1, "producer_epoch": -1}

    async def first_life() -> int:
        async with running(tmp_path) as broker:
            await broker.transactions.load()
            for name in ("x", "y"):
                await broker.transactions.log_of(name)
                found = await broker.transactions.init(name, 1000, None)
                assert isinstance(found, ProducerIdAndEpoch)
            return found.producer_id

    async def second_life(known: int) -> None:
        async with running(tmp_path) as broker:
            answer = await handlers.transactions.init_producer_id(broker, client_request(), message)
            assert answer["error_code"] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, answer
            await broker.transactions.load()
            answer = await handlers.transactions.init_producer_id(broker, client_request(), message)
            assert (answer["error_code"], answer["producer_id"]) == (ErrorCode.NONE, known + 1)

    known = asyncio.run(first_life())
    (tmp_path / "data" / "latest_producer_id_block").unlink()
    asyncio.run(second_life(known))


def test_a_damaged_transaction_index_refuses_the_marker_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.coordinator.load()
            await broker.transactions.load()
            producer = await new_producer(broker, "x")
            keys = {("t", 0), ("t", 1)}
            await broker.changes.create_topic("t", 2)
            log = broker.logs.logs["t", 0]
            for number in range(2):
                assert await broker.transactions.add("x", producer, frozenset(keys)) is ErrorCode.NONE
                for partition in range(2):
                    records = batch(producer.producer_id, producer.epoch, number, 1)
                    broker.logs.logs["t", partition].append(memoryview(records))
                if number:
                    break
                assert await broker.transactions.end("x", producer, commits=False) is ErrorCode.NONE
            log.flush()
            assert log.aborted_transactions(0, log.end_offset)
            index = log.segments[-1].transaction_index
            index.release()  # as if other logs needed the memory
            index.path.write_bytes(b"damaged" + index.path.read_bytes())
            end = log.end_offset
            marker = MarkerEntry(producer, False, 0, 0)
            assert (
                await write_marker(broker.partitions, broker.coordinator, ("t", 0), marker)
                is ErrorCode.KAFKA_STORAGE_ERROR
            )
            assert await broker.transactions.end("x", producer, commits=False) is ErrorCode.NONE
            assert str(index.path) in caplog.text
            assert log.end_offset == end
            assert broker.logs.logs["t", 1].last_stable_offset == broker.logs.logs["t", 1].end_offset
            # once the index can be read again, the marker is written
            index.path.write_bytes(index.path.read_bytes()[len(b"damaged") :])
            assert await write_marker(broker.partitions, broker.coordinator, ("t", 0), marker) is ErrorCode.NONE
            assert len(log.aborted_transactions(0, log.end_offset)) == 2

    asyncio.run(run())
