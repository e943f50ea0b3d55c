"""The broker's parts: the log, groups, the longest pauses of its event loop."""

from __future__ import annotations

import logging
import os
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.brokers import KlogBroker
from benchmarks.figures import Bench, Result, Side, Work
from benchmarks.record_batches import TIME, record_batches, take_turns, value
from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.broker.groups.records import Committed, OffsetKey, encode_offset, encode_offset_key
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.errors import ErrorCode
from spark_klog.log.compaction.cleaner import compact, plan
from spark_klog.log.compaction.passes import OffsetMap
from spark_klog.log.config import COMPACT, LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import (
    ALTER_CONFIGS,
    API_VERSIONS,
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_TOPICS,
    DELETE_RECORDS,
    DELETE_TOPICS,
    FIND_COORDINATOR,
    JOIN_GROUP,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    SYNC_GROUP,
)
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import JOIN_EPOCH, LEAVE_EPOCH
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record
from spark_klog.wire.codecs import Codec, codec_by_name

_log = logging.getLogger(__name__)
#: Some measured work takes minutes.
_TIMEOUT_SECONDS = 300
_MB = 1024 * 1024
#: Records of a batch of about 16 KB, the default batch.size of Java's producer.
_RECORDS = 150
#: Records of a batch of nearly 1 MB.
_LARGE = 9_000
_SEGMENT = 1024 * _MB
_READS = 2000
_KEYED_BATCHES = 2000
_OPENED_SEGMENTS = 10_000
_COMMIT_VERSION = 7
_PIPELINE = 100
_OFFSETS = 1_000_000
_MEMBERS = 50
_PARTITIONS = 500
_EPOCH_MEMBERS, _EPOCH_PARTITIONS = 200, 1000
_DELAY_MS = 500
_GROUP_SETTINGS = {"group.initial.rebalance.delay.ms": str(_DELAY_MS)}
_TOPICS = 1000
_SEGMENTS = 2000
_TIMEOUT_MS = 300_000
_TOPIC = 2
_SETTINGS = {"log.retention.check.interval.ms": "1000", "log.retention.ms": "-1"}
#: The first check of offsets comes after they are loaded and measured.
_OFFSETS_CHECK_SECONDS = 15
_LOADING = {"offsets.retention.check.interval.ms": str(_OFFSETS_CHECK_SECONDS * 1000)}


class Client:
    """A socket, and the frames sent over it."""

    def __init__(self, servers: str) -> None:
        host, _, port = servers.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), _TIMEOUT_SECONDS)
        self._file = self._socket.makefile("rb")

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def receive(self) -> bytes:
        (size,) = struct.unpack(">i", self._file.read(4))
        return self._file.read(size)

    def ask(self, api: Api, version: int, message: dict[str, Any]) -> dict[str, Any]:
        self.send(frame(api, version, message))
        return decode_response(api, version, self.receive())[1]

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def frame(api: Api, version: int, message: dict[str, Any]) -> bytes:
    body = encode_request(api, version, 1, "bench", message).to_bytes()
    return struct.pack(">i", len(body)) + body


def _batches(size: int, records: int = _RECORDS) -> bytearray:
    one = record_batches("none", 1, records)
    return bytearray(one * max(1, size // len(one)))


def _appends(bench: Bench, records: int) -> Iterator[Result]:
    """GB/s of appends to one segment of 256 MB, 1 MB per call; the peer writes the same bytes with os.write."""
    data = _batches(_MB, records)
    calls = max(1, 256 * _MB // len(data))

    def ours() -> float:
        folder = bench.work_dir / "append-0"
        log = PartitionLog(folder, LogConfig(max_message_bytes=2 * _MB))
        log.append(memoryview(data))  # the first append writes and syncs the leader epochs
        started = time.perf_counter()
        for _ in range(calls):
            log.append(memoryview(data))
        elapsed = time.perf_counter() - started
        log.close()
        shutil.rmtree(folder)
        return calls * len(data) / elapsed / 1e9

    def bare() -> float:
        path = bench.work_dir / "bare"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data)
        started = time.perf_counter()
        for _ in range(calls):
            os.write(descriptor, data)
        elapsed = time.perf_counter() - started
        os.close(descriptor)
        path.unlink()
        return calls * len(data) / elapsed / 1e9

    sides = Side("klog"), Side("os.write of the same bytes")
    take_turns([(sides[0], ours), (sides[1], bare)], bench.repeat)
    name = f"append of 1 MB of batches of {records} records of 100 B"
    yield Result(name, "GB/s", *sides, bench.command)


def _random_reads(bench: Bench) -> Iterator[Result]:
    """Microseconds to find the range for a random offset of a log of 10 GB, as the broker passes it to sendfile."""
    folder = bench.work_dir / "large-0"
    size = 10 * 1024 * _MB if bench.records >= 1_000_000 else 100 * _MB
    data = _batches(8 * _MB)
    log = PartitionLog(folder, LogConfig(segment_bytes=min(_SEGMENT, size // 10), max_message_bytes=2 * _MB))
    while log.size < size:
        log.append(memoryview(data))
    rng = random.Random(1)

    def run() -> float:
        offsets = [rng.randrange(log.end_offset) for _ in range(_READS)]
        started = time.perf_counter()
        for offset in offsets:
            log.read(offset, 64 * 1024)
        return (time.perf_counter() - started) / _READS * 1e6

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"range at a random offset of a log of {size >> 30} GB", "µs", side, None, bench.command, False)
    log.close()
    shutil.rmtree(folder)


def _recovery(bench: Bench, records: int) -> Iterator[Result]:
    """GB/s of log that is checked and indexed after an unclean shutdown."""
    folder = bench.work_dir / "recovery-0"
    log = PartitionLog(folder, LogConfig(max_message_bytes=2 * _MB))
    data = _batches(_MB, records)
    while log.size < 512 * _MB:
        log.append(memoryview(data))
    size = log.size
    log.close()

    def run() -> float:
        started = time.perf_counter()
        PartitionLog(folder, LogConfig(), clean=False)
        return size / (time.perf_counter() - started) / 1e9

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"recovery, batches of {records} records of 100 B", "GB/s", side, None, bench.command)
    shutil.rmtree(folder)


def _many_segments(bench: Bench) -> Iterator[Result]:
    """Seconds to open a log of ten thousand segments."""
    folder = bench.work_dir / "segments-0"
    log = PartitionLog(folder, LogConfig(segment_bytes=1))
    for _ in range(_OPENED_SEGMENTS):
        log.append(memoryview(bytearray(record_batches("none", 1, 1))))
    log.close()

    def run() -> float:
        started = time.perf_counter()
        PartitionLog(folder, LogConfig(segment_bytes=1), clean=True)
        return time.perf_counter() - started

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"opening {_OPENED_SEGMENTS:,} segments", "s", side, None, bench.command, False)
    shutil.rmtree(folder)


def _keyed_batches(codec: Codec, keys: int) -> list[bytearray]:
    """Batches of 150 records of 100 B, their keys chosen at random."""
    rng, batches = random.Random(1), []
    for batch in range(_KEYED_BATCHES):
        body = bytearray()
        for index in range(_RECORDS):
            append_record(body, index, index, b"key-%012d" % rng.randrange(keys), value(batch, index))
        batches.append(
            bytearray(build_batch(body, _RECORDS, base_timestamp=TIME, max_timestamp=TIME + _RECORDS - 1, codec=codec))
        )
    return batches


def _compactions(bench: Bench, codec: str) -> Iterator[Result]:
    """MB of records, as they are without a codec, that a processor second compacts."""
    rng, batches = random.Random(2), _keyed_batches(codec_by_name(codec), 100_000)
    plain = sum(len(batch) for batch in _keyed_batches(codec_by_name("none"), 100_000)) / len(batches)
    size = (256 if bench.records >= 1_000_000 else 16) * _MB
    config = LogConfig(segment_bytes=64 * _MB, cleanup_policy=COMPACT, min_cleanable_dirty_ratio=0)

    def run() -> float:
        folder, written = bench.work_dir / "compaction-0", 0
        log = PartitionLog(folder, config)
        while written * plain < size:
            log.append(memoryview(rng.choice(batches)))
            written += 1
        offsets = OffsetMap()
        started, before = time.process_time(), log.size
        compact(log, plan(log, None, TIME), offsets, TIME)
        elapsed = time.process_time() - started
        assert log.size < before
        offsets.close()
        log.close()
        shutil.rmtree(folder)
        return written * plain / elapsed / 1e6

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"compaction, records of 100 B with 100,000 keys, {codec}", "MB a CPU s", side, None, bench.command)


def _run_log(bench: Bench) -> Iterator[Result]:
    for records in (_LARGE, _RECORDS, 10):
        yield from _appends(bench, records)
    yield from _random_reads(bench)
    for records in (_RECORDS, 10):
        yield from _recovery(bench, records)
    for codec in ("none", "lz4", "zstd"):
        yield from _compactions(bench, codec)
    yield from _many_segments(bench)


LOG = Work(
    "log",
    _run_log,
    notes=(
        "Appends: a log of one segment, 1 MB a call, 256 MB in all, not flushed; os.write writes the same bytes into a "
        "file of the same file system. Random reads find the range that the broker hands to sendfile.",
        "Recovery reads 512 MB from the page cache, checks every batch and builds both indexes.",
        "Compaction: 256 MB of records in batches of 150, which the cleaner reads twice. MB are those of the records "
        "without a codec; with one the same batches are decompressed twice, and what is left of each is compressed.",
    ),
)


def _make_topic(client: Client, name: str, partitions: int) -> None:
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": [], "configs": []}
    answer = client.ask(CREATE_TOPICS, 4, {"topics": [topic], "timeout_ms": 10_000, "validate_only": False})
    assert [entry["error_code"] for entry in answer["topics"]] == [0], answer
    client.ask(FIND_COORDINATOR, 1, {"key": "g", "key_type": 0})


def _commits(bench: Bench, broker: KlogBroker) -> Iterator[Result]:
    """Requests with one offset each, a hundred in flight."""
    count = 50_000 if bench.records >= 1_000_000 else 5_000
    client = Client(broker.bootstrap_servers)
    _make_topic(client, "commits", 10)

    def request(offset: int) -> bytes:
        entry = {"partition_index": offset % 10, "committed_offset": offset, "committed_metadata": ""}
        message = {
            "group_id": "g",
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "topics": [{"name": "commits", "partitions": [entry]}],
        }
        return frame(OFFSET_COMMIT, _COMMIT_VERSION, message)

    def run() -> float:
        frames = [request(offset) for offset in range(count)]
        started = time.perf_counter()
        client.send(b"".join(frames[:_PIPELINE]))
        for number in range(count):
            answer = client.receive()
            assert answer[-2:] == b"\0\0", answer  # the error code of the only partition
            if number + _PIPELINE < count:
                client.send(frames[number + _PIPELINE])
        return count / (time.perf_counter() - started)

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    client.close()
    yield Result(f"offset commits by one connection, {_PIPELINE} under way", "commits/s", side, None, bench.command)


def _loading(bench: Bench) -> Iterator[Result]:
    count = _OFFSETS if bench.records >= 1_000_000 else _OFFSETS // 10
    folder = bench.work_dir / "__consumer_offsets-0"
    log = PartitionLog(folder, LogConfig())
    for batch in offset_batches(count):
        log.append(memoryview(bytearray(batch)))

    def run() -> float:
        offsets = OffsetManager(lambda group, stored: None, lambda *record: None)
        started = time.perf_counter()
        offsets.load(log)
        elapsed = time.perf_counter() - started
        assert sum(1 for group in offsets.groups for _ in offsets.all(group)) == count
        return elapsed

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    yield Result(f"loading {count:,} committed offsets", "s", side, None, bench.command, False)
    log.close()


def offset_batches(count: int) -> Iterator[bytes]:
    """Commits of `count` offsets, as in __consumer_offsets."""
    return map(_commit_batch, range(0, count, 10))


def _commit_batch(start: int) -> bytes:
    """Commits of ten partitions; each group has a thousand."""
    body = bytearray()
    for delta in range(10):
        number = start + delta
        key = encode_offset_key(OffsetKey(f"group-{number // 1000}", f"topic-{number % 1000 // 10}", delta))
        append_record(body, 0, delta, key, encode_offset(Committed(number, -1, "", 1_700_000_000_000)))
    return bytes(build_batch(body, 10, base_timestamp=1_700_000_000_000, max_timestamp=1_700_000_000_000))


def _settling(bench: Bench, broker: KlogBroker) -> Iterator[Result]:
    """Seconds from the first JoinGroup to the last SyncGroup response, without the delay of the first rebalance."""
    clients = [Client(broker.bootstrap_servers) for _ in range(_MEMBERS)]
    _make_topic(clients[0], "shared", _PARTITIONS)
    runs = iter(range(1000))

    def run() -> float:
        group = f"settling-{next(runs)}"
        with ThreadPoolExecutor(_MEMBERS) as threads:
            started = time.perf_counter()
            sizes = list(threads.map(lambda client: _join(client, group), clients))
            elapsed = time.perf_counter() - started
        assert sum(sizes) == _PARTITIONS, sizes
        return elapsed - _DELAY_MS / 1000

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    for client in clients:
        client.close()
    work = f"a group of {_MEMBERS} members over {_PARTITIONS} partitions settles"
    yield Result(work, "s", side, None, bench.command, False)


def _join(client: Client, group: str) -> int:
    """Join, and return the member's number of partitions. The leader deals them out in turn, four bytes each."""
    message = {
        "group_id": group,
        "session_timeout_ms": 30_000,
        "rebalance_timeout_ms": 60_000,
        "member_id": "",
        "protocol_type": "bench",
        "protocols": [{"name": "in turn", "metadata": b"shared"}],
    }
    answer = client.ask(JOIN_GROUP, 5, message)
    answer = client.ask(JOIN_GROUP, 5, message | {"member_id": answer["member_id"]})
    assert answer["error_code"] == 0, answer
    ids = [member["member_id"] for member in answer["members"]]
    given = [
        {
            "member_id": member_id,
            "assignment": b"".join(struct.pack(">i", number) for number in range(rank, _PARTITIONS, len(ids))),
        }
        for rank, member_id in enumerate(ids)
    ]
    request = {
        "group_id": group,
        "generation_id": answer["generation_id"],
        "member_id": answer["member_id"],
        "assignments": given,
    }
    answer = client.ask(SYNC_GROUP, 3, request)
    assert answer["error_code"] == 0, answer
    return len(answer["assignment"]) // 4


def _settling_by_epochs(bench: Bench, broker: KlogBroker) -> Iterator[Result]:
    """Seconds from the first heartbeat until each of the members has its share, as they come one after the other."""
    clients = [Client(broker.bootstrap_servers) for _ in range(_EPOCH_MEMBERS)]
    _make_topic(clients[0], "epochs", _EPOCH_PARTITIONS)
    runs = iter(range(1000))

    def run() -> float:
        group, counts, is_settled = f"epochs-{next(runs)}", dict[str, int](), threading.Event()

        def take_part(client: Client) -> None:
            member_id = str(uuid4())
            beat: Message = {"group_id": group, "member_id": member_id, "rebalance_timeout_ms": 60_000}
            beat |= {"member_epoch": JOIN_EPOCH, "subscribed_topic_names": ["epochs"], "topic_partitions": []}
            while True:
                answer = client.ask(CONSUMER_GROUP_HEARTBEAT, 1, beat)
                assert answer["error_code"] == 0, answer
                beat = {"group_id": group, "member_id": member_id, "member_epoch": answer["member_epoch"]}
                if answer["assignment"] is not None:
                    beat["topic_partitions"] = answer["assignment"]["topic_partitions"]
                    counts[member_id] = sum(len(row["partitions"]) for row in beat["topic_partitions"])
                    if list(counts.values()) == [_EPOCH_PARTITIONS // _EPOCH_MEMBERS] * _EPOCH_MEMBERS:
                        is_settled.set()
                elif is_settled.wait(answer["heartbeat_interval_ms"] / 1000):
                    break
            client.ask(CONSUMER_GROUP_HEARTBEAT, 1, beat | {"member_epoch": LEAVE_EPOCH})

        with ThreadPoolExecutor(_EPOCH_MEMBERS) as threads:
            started = time.perf_counter()
            done = [threads.submit(take_part, client) for client in clients]
            assert is_settled.wait(60), sorted(counts.values())
            elapsed = time.perf_counter() - started
        for one in done:
            one.result()
        return elapsed

    side = Side("klog")
    take_turns([(side, run)], bench.repeat)
    for client in clients:
        client.close()
    work = f"a group of {_EPOCH_MEMBERS} members by KIP-848 over {_EPOCH_PARTITIONS} partitions settles"
    yield Result(work, "s", side, None, bench.command, False)


def _run_groups(bench: Bench) -> Iterator[Result]:
    work_dir: Path = bench.folder("groups")
    broker = KlogBroker(work_dir, _GROUP_SETTINGS)
    broker.start()
    try:
        yield from _commits(bench, broker)
        yield from _settling(bench, broker)
        yield from _settling_by_epochs(bench, broker)
    finally:
        broker.stop()
    yield from _loading(bench)


GROUPS = Work(
    "groups",
    _run_groups,
    (
        "Groups: commits are requests of one offset each, answered when it is in the log; wanted: 5,000 a second. "
        f"{_MEMBERS} members join from connections of their own, the leader deals {_PARTITIONS} partitions out; "
        f"wanted: 2 s after the rebalance delay, which is taken off. {_EPOCH_MEMBERS} members by KIP-848 send "
        "heartbeats when the broker says, at once after a new assignment; wanted: 2 s. Loaded are the offsets of a "
        "thousand groups; wanted: 5 s for a million.",
    ),
)


def _waited_ms(pid: int | None) -> float:
    """How long this thread and a process's threads have waited for a processor; 0 if Linux does not count it."""
    paths = [Path("/proc/thread-self/schedstat"), *Path(f"/proc/{pid}/task").glob("*/schedstat")]
    waited = 0
    for path in paths:
        with suppress(OSError):  # the thread has ended
            waited += int(path.read_text().split()[1])
    return waited / 1e6


class _Pings:
    """Sends ApiVersions on its own connection, a hundred times a second, and keeps the longest response times."""

    def __init__(self, broker: KlogBroker) -> None:
        self._client = Client(broker.bootstrap_servers)
        self._pid = broker.pid
        self._is_done = threading.Event()
        self._longest = self._longest_own = 0.0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        request = frame(API_VERSIONS, 0, {})
        while not self._is_done.wait(0.01):
            waited = _waited_ms(self._pid)
            asked = time.perf_counter()
            self._client.send(request)
            self._client.receive()
            elapsed = 1000 * (time.perf_counter() - asked)
            self._longest = max(self._longest, elapsed)
            self._longest_own = max(self._longest_own, elapsed - (_waited_ms(self._pid) - waited))

    def longest_ms(self, work: Callable[[], object]) -> tuple[float, float]:
        """The longest response time while `work` runs, and the longest one less the waits for a processor."""
        self._thread.start()
        started = time.perf_counter()
        try:
            work()
            elapsed = time.perf_counter() - started
            self._is_done.wait(0.2)  # for what the work leaves to be done after its response
        finally:
            self._is_done.set()
            self._thread.join()
            self._client.close()
        _log.info("longest pause %.1f ms, own %.1f ms, in %.2f s", self._longest, self._longest_own, elapsed)
        return self._longest, self._longest_own


def longest_pause(broker: KlogBroker, work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the longest ApiVersions while `work` runs, and of the longest one less waits for a processor."""
    return _Pings(broker).longest_ms(work)


def create_topics(client: Client, names: list[str], partitions: int = 1, **settings: str) -> None:
    configs = [{"name": name.replace("_", "."), "value": value} for name, value in settings.items()]
    made = {"num_partitions": partitions, "replication_factor": 1, "assignments": [], "configs": configs}
    message = {"topics": [made | {"name": name} for name in names], "timeout_ms": _TIMEOUT_MS, "validate_only": False}
    _check(client.ask(CREATE_TOPICS, 4, message)["topics"])


def delete_topics(client: Client, names: list[str]) -> None:
    message = {"topic_names": names, "timeout_ms": _TIMEOUT_MS}
    _check(client.ask(DELETE_TOPICS, 3, message)["responses"])


def _check(entries: list[dict[str, Any]]) -> None:
    failed = [entry for entry in entries if entry["error_code"]]
    assert not failed, failed[:3]


def _produce(client: Client, topic: str, batch: bytes, count: int) -> None:
    data = [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}]
    request = frame(PRODUCE, 7, {"acks": 1, "timeout_ms": _TIMEOUT_MS, "topic_data": data})
    for _ in range(count):
        client.send(request)
        client.receive()


def _alter(client: Client, topic: str, **settings: str) -> None:
    configs = [{"name": name.replace("_", "."), "value": value} for name, value in settings.items()]
    resource = {"resource_type": _TOPIC, "resource_name": topic, "configs": configs}
    _check(client.ask(ALTER_CONFIGS, 0, {"resources": [resource], "validate_only": False})["responses"])


def _delete_records(client: Client, topic: str) -> None:
    topics = [{"name": topic, "partitions": [{"partition_index": 0, "offset": -1}]}]
    answer = client.ask(DELETE_RECORDS, 0, {"topics": topics, "timeout_ms": _TIMEOUT_MS})
    _check(answer["topics"][0]["partitions"])


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _of_topics(broker: KlogBroker, folder: Path, scale: int) -> Iterator[tuple[str, Callable[[Client], object]]]:
    """The pieces of work with topics, in this order."""
    names = [f"topic-{number}" for number in range(_TOPICS // scale)]
    small, large = record_batches("none", 1, 10), record_batches("none", 1, 8000)
    active = folder / "data" / "rolls-0"
    yield f"CreateTopics: {len(names):,} topics in a request", lambda client: create_topics(client, names)
    partitions = _PARTITIONS // scale
    yield (
        f"CreateTopics: a topic of {partitions} partitions",
        lambda client: create_topics(client, ["wide"], partitions),
    )
    yield f"AlterConfigs of {partitions} partitions", lambda client: _alter(client, "wide", retention_ms="1000000")
    yield (
        f"Produce, the first batch of each of {len(names):,} topics",
        lambda client: [_produce(client, name, small, 1) for name in names],
    )
    yield f"DeleteTopics: {len(names):,} topics in a request", lambda client: delete_topics(client, names)
    yield f"DeleteTopics: a topic of {partitions} partitions", lambda client: delete_topics(client, ["wide"])

    def roll(client: Client) -> None:
        create_topics(client, ["rolls"], internal_segment_bytes=str(32 * len(large)))
        _produce(client, "rolls", large, 1000 // scale)

    yield "Produce of 1 GB, rolled at 30 MB", roll

    def expire(client: Client) -> None:
        _alter(
            client,
            "rolls",
            retention_bytes="0",
            internal_segment_bytes=str(32 * len(large)),
            file_delete_delay_ms="1000",
        )
        _wait_for(lambda: sum(path.stat().st_size for path in active.glob("*.log*")) < 32 * len(large))

    yield "retention of 1 GB", expire

    def cut(client: Client) -> None:
        create_topics(client, ["cut"], internal_segment_bytes=str(len(small)))
        _produce(client, "cut", small, _SEGMENTS // scale)

    yield f"Produce, {_SEGMENTS // scale} rolls", cut
    yield f"DeleteRecords of {_SEGMENTS // scale} segments", lambda client: _delete_records(client, "cut")


def _offset_code(client: Client, number: int) -> tuple[int, int]:
    """(error code, offset) of a committed offset of `offset_batches`."""
    topics = [{"name": f"topic-{number % 1000 // 10}", "partition_indexes": [number % 10]}]
    answer = client.ask(OFFSET_FETCH, 4, {"group_id": f"group-{number // 1000}", "topics": topics})
    partition = answer["topics"][0]["partitions"][0] if answer["topics"] else {"error_code": 0, "committed_offset": -1}
    return answer["error_code"] or partition["error_code"], partition["committed_offset"]


def _of_offsets(count: int) -> Iterator[tuple[str, Callable[[Client], object]]]:
    loading = (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    yield (
        f"loading {count:,} committed offsets",
        lambda client: _wait_for(lambda: _offset_code(client, count - 1)[0] not in loading),
    )
    yield (
        f"expiry of {count:,} committed offsets",
        lambda client: _wait_for(lambda: {_offset_code(client, number)[1] for number in (0, count - 1)} == {-1}),
    )


def _fill_offsets(broker: KlogBroker, folder: Path, count: int) -> None:
    broker.start()
    client = Client(broker.bootstrap_servers)
    client.ask(FIND_COORDINATOR, 1, {"key": "g", "key_type": 0})
    client.close()
    broker.stop()
    offsets = PartitionLog(folder / "data" / f"{OFFSETS_TOPIC}-0", LogConfig(), clean=True)
    for batch in offset_batches(count):
        offsets.append(memoryview(bytearray(batch)))
    offsets.close()


def _measured(broker: KlogBroker, pieces: Iterator[tuple[str, Callable[[Client], object]]]) -> dict[str, float]:
    longest = {}
    client = Client(broker.bootstrap_servers)
    for name, work in pieces:
        _log.info("%s", name)
        longest[name], longest[f"{name}; less waits for a processor"] = longest_pause(
            broker, lambda work=work: work(client)
        )
    client.close()
    return longest


def _once(folder: Path, scale: int) -> dict[str, float]:
    longest: dict[str, float] = {}
    topics = KlogBroker(folder / "topics", _SETTINGS)
    topics.start()
    try:
        longest |= _measured(topics, _of_topics(topics, folder / "topics", scale))
    finally:
        topics.stop()
    offsets = KlogBroker(folder / "offsets", _LOADING)
    _fill_offsets(offsets, folder / "offsets", _OFFSETS // scale)
    offsets.start()
    try:
        longest |= _measured(offsets, _of_offsets(_OFFSETS // scale))
    finally:
        offsets.stop()
    return longest


def _run_event_loop(bench: Bench) -> Iterator[Result]:
    scale = 1 if bench.records >= 1_000_000 else 10
    sides: dict[str, Side] = {}
    for turn in range(bench.repeat):
        for name, pause in _once(bench.folder(f"event-loop-{turn}"), scale).items():
            sides.setdefault(name, Side("klog")).samples.append(pause)
    for name, side in sides.items():
        yield Result(f"longest pause: {name}", "ms", side, None, bench.command, False)


EVENT_LOOP = Work(
    "event_loop",
    _run_event_loop,
    (
        "Pauses: the longest time that ApiVersions takes, asked for by a connection of its own a hundred times a "
        "second, while another connection has the broker do the work; wanted: 50 ms at the most. The time holds what "
        "the client and the machine add; the second figure is the longest time less what the client and all threads of "
        "the broker waited for a processor meanwhile, which is nothing on a quiet machine.",
    ),
)
