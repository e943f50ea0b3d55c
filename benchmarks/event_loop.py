"""The longest time for which a broker answers no request, while it does long work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.broker_process import KlogBroker
from benchmarks.client import Client, frame
from benchmarks.figures import Result, Side
from benchmarks.groups import offset_batches
from benchmarks.record_batches import record_batches
from benchmarks.work import Bench, Work
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import (
    ALTER_CONFIGS,
    API_VERSIONS,
    CREATE_TOPICS,
    DELETE_RECORDS,
    DELETE_TOPICS,
    FIND_COORDINATOR,
    OFFSET_FETCH,
    PRODUCE,
)

log = logging.getLogger(__name__)

_TOPICS = 1000
_PARTITIONS = 500
_SEGMENTS = 2000
_OFFSETS = 1_000_000
_TIMEOUT_MS = 300_000
_TOPIC = 2
_SETTINGS = {"log.retention.check.interval.ms": "1000", "log.retention.ms": "-1"}
#: The first check of offsets comes after they are loaded and measured.
_OFFSETS_CHECK_SECONDS = 15
_LOADING = {"offsets.retention.check.interval.ms": str(_OFFSETS_CHECK_SECONDS * 1000)}


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
        log.info("longest pause %.1f ms, own %.1f ms, in %.2f s", self._longest, self._longest_own, elapsed)
        return self._longest, self._longest_own


def _create(client: Client, names: list[str], partitions: int = 1, **settings: str) -> None:
    configs = [{"name": name.replace("_", "."), "value": value} for name, value in settings.items()]
    made = {"num_partitions": partitions, "replication_factor": 1, "assignments": [], "configs": configs}
    message = {"topics": [made | {"name": name} for name in names], "timeout_ms": _TIMEOUT_MS, "validate_only": False}
    _check(client.ask(CREATE_TOPICS, 4, message)["topics"])


def _delete(client: Client, names: list[str]) -> None:
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
    yield f"CreateTopics: {len(names):,} topics in a request", lambda client: _create(client, names)
    partitions = _PARTITIONS // scale
    yield f"CreateTopics: a topic of {partitions} partitions", lambda client: _create(client, ["wide"], partitions)
    yield f"AlterConfigs of {partitions} partitions", lambda client: _alter(client, "wide", retention_ms="1000000")
    yield (
        f"Produce, the first batch of each of {len(names):,} topics",
        lambda client: [_produce(client, name, small, 1) for name in names],
    )
    yield f"DeleteTopics: {len(names):,} topics in a request", lambda client: _delete(client, names)
    yield f"DeleteTopics: a topic of {partitions} partitions", lambda client: _delete(client, ["wide"])

    def roll(client: Client) -> None:
        _create(client, ["rolls"], segment_bytes=str(32 * len(large)))
        _produce(client, "rolls", large, 1000 // scale)

    yield "Produce of 1 GB, rolled at 30 MB", roll

    def expire(client: Client) -> None:
        _alter(client, "rolls", retention_bytes="0", segment_bytes=str(32 * len(large)), file_delete_delay_ms="1000")
        _wait_for(lambda: sum(path.stat().st_size for path in active.glob("*.log*")) < 32 * len(large))

    yield "retention of 1 GB", expire

    def cut(client: Client) -> None:
        _create(client, ["cut"], segment_bytes=str(len(small)))
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
        log.info("%s", name)
        longest[name], longest[f"{name}; less waits for a processor"] = _Pings(broker).longest_ms(
            lambda work=work: work(client)
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


def _run(bench: Bench) -> Iterator[Result]:
    scale = 1 if bench.records >= 1_000_000 else 10
    sides: dict[str, Side] = {}
    for turn in range(bench.repeat):
        for name, pause in _once(bench.folder(f"event-loop-{turn}"), scale).items():
            sides.setdefault(name, Side("klog")).samples.append(pause)
    for name, side in sides.items():
        yield Result(f"longest pause: {name}", "ms", side, None, bench.command, False)


EVENT_LOOP = Work(
    "event_loop",
    _run,
    (
        "Pauses: the longest time that ApiVersions takes, asked for by a connection of its own a hundred times a "
        "second, while another connection has the broker do the work; wanted: 50 ms at the most. The time holds what "
        "the client and the machine add; the second figure is the longest time less what the client and all threads of "
        "the broker waited for a processor meanwhile, which is nothing on a quiet machine.",
    ),
)
