"""Groups whose members, or whose broker, are killed again and again; __consumer_offsets shows what happened."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment
from kafka.record import MemoryRecords

from spark_klog.broker.groups.records import (
    Committed,
    OffsetKey,
    decode_group,
    decode_key,
    decode_offset,
)
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import OFFSET_COMMIT
from spark_klog.protocol.codec import Message
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.in_process import ConfluentProcess, KafkaPythonProcess
from tests.support.clients.java import Java39
from tests.support.clients.process import ClientFailed, ProcessClient
from tests.support.servers.broker import KlogBroker

#: `make soak` sets this.
_IS_SOAK = "SPARK_KLOG_KILLS" in os.environ
_KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "3"))
_STORM_SECONDS = 60 if _IS_SOAK else 15
PARTITIONS = 8
#: Short: the group waits this long for a member that was killed.
_SESSION_MS = 2_000


@pytest.fixture
def broker(server_dir: Path) -> Iterator[KlogBroker]:
    settings = ("group.initial.rebalance.delay.ms=100", "group.min.session.timeout.ms=1000")
    with KlogBroker(server_dir, *(word for setting in settings for word in ("--set", setting))) as running:
        yield running


class Feed:
    """A producer that goes on until it is stopped, whatever happens to the broker."""

    def __init__(self, servers: str) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0, "linger.ms": 5})
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for partition in range(PARTITIONS):
                self._producer.produce("t", b"value", partition=partition)
            self._producer.poll(0.02)

    def stop(self) -> None:
        """Stop and flush; may be called again."""
        self._is_over.set()
        self._thread.join(30)
        assert self._producer.flush(60) == 0


def _create(servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([NewTopic("t", PARTITIONS, 1)])["t"].result(30)


def _ends(broker: KlogBroker) -> dict[int, int]:
    reader = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "reader", "log_level": 0})
    ends = {number: reader.get_watermark_offsets(TopicPartition("t", number), 30)[1] for number in range(PARTITIONS)}
    reader.close()
    return ends


def _committed(broker: KlogBroker) -> dict[int, int]:
    reader = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "g", "log_level": 0})
    places = reader.committed([TopicPartition("t", number) for number in range(PARTITIONS)], 30)
    reader.close()
    return {place.partition: max(place.offset, 0) for place in places}


class History:
    """All commits of the group and its generations, in the order of the log."""

    def __init__(self, data_dir: Path) -> None:
        self.commits: list[tuple[int, int]] = []
        self.groups: list[Message] = []
        for path in sorted((data_dir / "__consumer_offsets-0").glob("*.log")):
            for batch in MemoryRecords(path.read_bytes()):
                for record in batch:
                    key = decode_key(record.key)
                    if isinstance(key, OffsetKey):
                        committed: Committed = decode_offset(record.value)
                        self.commits.append((key.partition, committed.offset))
                    elif key is not None and record.value is not None:
                        self.groups.append(decode_group(record.value))

    def check(self) -> None:
        """Offsets never go back, generations grow, and within one every partition has one owner."""
        last: dict[int, int] = defaultdict(int)
        for partition, offset in self.commits:
            assert offset >= last[partition], (partition, offset, last[partition])
            last[partition] = offset
        generations = [group["generation"] for group in self.groups]
        assert generations == sorted(set(generations))
        for group in self.groups:
            owned = []
            for member in group["members"]:
                assigned = ConsumerProtocolAssignment.decode(bytes(member["assignment"]))
                owned += [place.partition for place in assigned.partitions()]
            assert sorted(owned) == (list(range(PARTITIONS)) if group["members"] else []), group


class Worker:
    """A member in a process of its own that reads and commits until it leaves or is killed."""

    def __init__(self, kind: type[ProcessClient], servers: str) -> None:
        self._client = kind(servers)
        self._leaves = threading.Event()
        self.was_killed = False
        #: Acknowledged commits: the next offset by partition.
        self.acknowledged: dict[int, int] = {}
        self.read: set[tuple[int, int]] = set()
        self.trouble: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._client.ask("join", "t", "g", str(_SESSION_MS))
            while not self._leaves.is_set():
                has, _, came = " ".join(self._client.ask("poll", "200")).partition("|")
                lines = [(int(line.split(",")[0]), int(line.split(",")[1])) for line in came.split()]
                self.read |= set(lines)
                if lines and not self._client.ask("commit"):
                    mine = set(map(int, has.split()))
                    self.acknowledged |= {partition: offset + 1 for partition, offset in lines if partition in mine}
            self._client.ask("leave")
        except (ClientFailed, BrokenPipeError, ValueError) as error:
            if not self.was_killed:
                self.trouble = error

    def leave(self) -> None:
        self._leaves.set()

    def kill(self) -> None:
        self.was_killed = True
        self._client.kill()

    def end(self) -> None:
        self._leaves.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()


@pytest.mark.test_all("long")
@pytest.mark.peer
def test_storm_of_members_that_come_leave_and_are_killed(broker: KlogBroker) -> None:
    """Each partition has one owner a generation, stale generations are refused, no committed offset goes back."""
    servers, rng = broker.bootstrap_servers, random.Random(1)
    _create(servers)
    kinds = [ConfluentProcess, ConfluentProcess, ConfluentProcess, KafkaPythonProcess, KafkaPythonProcess]
    kinds += [KafkaPythonProcess, Java39, Java39]
    feed = Feed(servers)
    workers = [Worker(kind, servers) for kind in kinds]
    everyone = list(workers)
    refusals: set[int] = set()
    try:
        _wait_for_a_generation(broker)
        deadline = time.monotonic() + _STORM_SECONDS
        while time.monotonic() < deadline:
            time.sleep(rng.uniform(0.5, 2))
            number = rng.randrange(len(workers))
            old = workers[number]
            rng.choice([old.kill, old.leave])()
            workers[number] = Worker(kinds[number], servers)
            everyone.append(workers[number])
            refusals.add(_stale_commit(broker))
        feed.stop()
        ends = _ends(broker)
        last = time.monotonic() + 30
        while _committed(broker) != ends:
            assert time.monotonic() < last, (_committed(broker), ends)
            time.sleep(0.2)
    finally:
        feed.stop()
        for worker in everyone:
            worker.end()
    assert _committed(broker) == ends
    assert [worker.trouble for worker in everyone if worker.trouble] == []
    assert refusals >= {ErrorCode.ILLEGAL_GENERATION}
    assert refusals <= {ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID}
    assert set.union(*(worker.read for worker in everyone)) == {
        (partition, offset) for partition, end in ends.items() for offset in range(end)
    }
    history = History(broker.data_dir)
    history.check()
    assert len(history.groups) > 5
    commits = set(history.commits)
    assert all(line in commits for worker in everyone for line in worker.acknowledged.items())


def _wait_for_a_generation(broker: KlogBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    deadline = time.monotonic() + 60
    while admin.describe_consumer_groups(["g"])["g"].result(30).state != ConsumerGroupState.STABLE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _stale_commit(broker: KlogBroker) -> int:
    """Commit as a current member with the generation before the first; return the error code."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    members = admin.describe_consumer_groups(["g"])["g"].result(30).members
    member_id = members[0].member_id if members else "nobody"
    entry = {"partition_index": 0, "committed_offset": 0, "committed_metadata": ""}
    message = {
        "group_id": "g",
        "generation_id_or_member_epoch": 0,
        "member_id": member_id,
        "topics": [{"name": "t", "partitions": [entry]}],
    }
    with RawClient(broker.port) as client:
        code: int = client.request(OFFSET_COMMIT, 7, message)["topics"][0]["partitions"][0]["error_code"]
    return code


@pytest.mark.parametrize(
    "rebalances", [False, pytest.param(True, marks=pytest.mark.test_all("kill"))], ids=["steady", "rebalancing"]
)
def test_members_go_on_when_the_broker_is_killed(broker: KlogBroker, rebalances: bool) -> None:
    """A stable group keeps its generation; committed offsets survive, and nothing below them is read again."""
    servers, rng = broker.bootstrap_servers, random.Random(2)
    _create(servers)
    feed = Feed(servers)
    lock, is_over = threading.Lock(), threading.Event()
    acknowledged: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
    read: set[tuple[int, int]] = set()
    assignments: list[int] = []
    trouble: list[object] = []

    def consume(until: threading.Event) -> None:
        # a member whose generation was not written joins with a new id, and the group waits for its old one
        session = 3_000 if rebalances else 20_000
        settings = {"session.timeout.ms": session, "heartbeat.interval.ms": 100, "enable.auto.commit": False}
        quick = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 20, "log_level": 0}
        consumer = Consumer(
            {"bootstrap.servers": servers, "group.id": "g", "auto.offset.reset": "earliest", **settings, **quick}
        )
        consumer.subscribe(["t"], on_assign=lambda _, places: assignments.append(len(places)))
        while not until.is_set():
            floor = dict(acknowledged)
            places: dict[int, int] = {}
            for message in consumer.consume(1000, 0.1):
                if message.error() is None:
                    partition, offset = message.partition() or 0, message.offset() or 0
                    if offset < floor[partition]:
                        trouble.append((partition, offset, floor[partition]))
                    read.add((partition, offset))
                    places[partition] = offset + 1
            try:
                if places:
                    mine = {place.partition for place in consumer.assignment()}
                    wanted = [TopicPartition("t", *place) for place in places.items() if place[0] in mine]
                    for done in consumer.commit(offsets=wanted, asynchronous=False) or ():
                        if done.error is None:
                            with lock:
                                acknowledged[done.partition] = max(acknowledged[done.partition], done.offset)
            except KafkaException:
                pass  # the broker is down, or a rebalance is under way
        consumer.close()

    threads = [threading.Thread(target=consume, args=(is_over,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(assignments) < 2 or not all(acknowledged.values()):
        assert time.monotonic() < deadline, (assignments, acknowledged)
        time.sleep(0.05)
    settled = len(assignments)
    try:
        for _ in range(_KILLS):
            if rebalances:
                guest_leaves = threading.Event()
                guest = threading.Thread(target=consume, args=(guest_leaves,), daemon=True)
                guest.start()
            time.sleep(rng.uniform(0.1, 0.6))
            before = dict(acknowledged)
            broker.kill()
            broker.start()
            now = _committed(broker)
            assert all(now[partition] >= offset for partition, offset in before.items())
            if rebalances:
                guest_leaves.set()
                guest.join(60)
        feed.stop()
        ends = _ends(broker)
        deadline = time.monotonic() + 60
        while _committed(broker) != ends and time.monotonic() < deadline:
            time.sleep(0.1)
        assigned = len(assignments)  # when a member leaves, the other one takes its partitions
    finally:
        feed.stop()
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert _committed(broker) == ends
    assert trouble == []
    assert read == {(partition, offset) for partition, end in ends.items() for offset in range(end)}
    if not rebalances:
        assert assigned == settled
    History(broker.data_dir).check()
