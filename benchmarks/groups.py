"""Groups: offset commits, loading offsets at start, and the rebalance time of a large group."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.broker_process import KlogBroker
from benchmarks.client import Client, frame
from benchmarks.figures import Result, Side
from benchmarks.record_batches import take_turns
from benchmarks.work import Bench, Work
from spark_klog.broker.groups.offset_manager import OffsetManager
from spark_klog.broker.groups.records import Committed, OffsetKey, encode_offset, encode_offset_key
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import CREATE_TOPICS, FIND_COORDINATOR, JOIN_GROUP, OFFSET_COMMIT, SYNC_GROUP
from spark_klog.records.formats.batch_v2 import build_batch
from spark_klog.records.kernels.reference import append_record

_COMMIT_VERSION = 7
_PIPELINE = 100
_OFFSETS = 1_000_000
_MEMBERS, _PARTITIONS = 50, 500
_DELAY_MS = 500
_SETTINGS = {"group.initial.rebalance.delay.ms": str(_DELAY_MS)}


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
        offsets = OffsetManager(lambda group, stored: None)
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


def _run(bench: Bench) -> Iterator[Result]:
    work_dir: Path = bench.folder("groups")
    broker = KlogBroker(work_dir, _SETTINGS)
    broker.start()
    try:
        yield from _commits(bench, broker)
        yield from _settling(bench, broker)
    finally:
        broker.stop()
    yield from _loading(bench)


GROUPS = Work(
    "groups",
    _run,
    (
        "Groups: commits are requests of one offset each, answered when it is in the log; wanted: 5,000 a second. "
        f"{_MEMBERS} members join from connections of their own, the leader deals {_PARTITIONS} partitions out; "
        "wanted: 2 s after the rebalance delay, which is taken off. Loaded are the offsets of a thousand groups; "
        "wanted: 5 s for a million.",
    ),
)
