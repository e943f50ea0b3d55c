"""A consumer's reads after random calls of assign, seek, pause and resume, compared with lists of the sent values.

SPARK_KLOG_SEED (default 0) is the first seed, SPARK_KLOG_RUNS (default 4) the number of runs.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client import Consumer
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.clients.consumers import SECONDS, Server, next_offsets, short
from tests.support.servers.broker import KlogBroker

pytestmark = pytest.mark.usefixtures("driver")

_FIRST_SEED = int(os.environ.get("SPARK_KLOG_SEED", "0"))
_RUNS = int(os.environ.get("SPARK_KLOG_RUNS", "2"))
_PARTITIONS, _NODES, _ROUNDS, _CALLS = 4, 3, 20, 8


@pytest.fixture(scope="module")
def server(module_server_dir: Path) -> Iterator[Server]:
    with KlogBroker(module_server_dir / "klog") as broker:
        yield Server(broker.bootstrap_servers, None)


@pytest.mark.parametrize("how", ["seek", "pause", "assign"])
def test_a_partition_goes_on_after_a_call_that_changes_nothing(server: Server, how: str) -> None:
    topic = server.topic()
    server.send(topic, short(10))
    with server.consumer(auto_offset_reset="earliest", max_poll_records=2) as consumer:
        consumer.assign([(topic, 0)])
        found = next_offsets(consumer, 2)
        if how == "seek":
            consumer.seek(topic, 0, 2)
        elif how == "pause":
            consumer.pause([(topic, 0)])
            consumer.resume([(topic, 0)])
        else:
            consumer.assign([])
            consumer.assign([(topic, 0, 2)])
        server.send(topic, short(10))
        found += next_offsets(consumer, 18)
        server.send(topic, short(5))
        assert found + next_offsets(consumer, 5) == list(range(25))


class _Model:
    """Each partition's values and the offset to read next; the methods call the consumer and update this model."""

    def __init__(self, seed: int, brokers: ScriptedCluster) -> None:
        self.choose = random.Random(seed)
        self.brokers = brokers
        self.sent: dict[int, list[bytes]] = {number: [] for number in range(_PARTITIONS)}
        self.positions: dict[int, int] = {}
        self.paused: set[int] = set()
        self.reads_arrow = False
        self.calls: list[str] = []
        settings = {
            "bootstrap.servers": brokers.bootstrap_servers,
            "auto.offset.reset": "earliest",
            "fetch.max.wait.ms": self.choose.choice([1, 5]),
            "retry.backoff.ms": 2,
            "retry.backoff.max.ms": 10,
            "metadata.max.age.ms": self.choose.choice([1, 30]),
            "max.poll.records": self.choose.choice([1, 3, 20]),
            "max.partition.fetch.bytes": self.choose.choice([100, 500, 1 << 20]),
        }
        self.consumer = Consumer(settings)

    def send(self, number: int | None = None) -> None:
        number = self.choose.randrange(_PARTITIONS) if number is None else number
        values = [b"%d-%d" % (number, len(self.sent[number]) + i) for i in range(self.choose.randrange(1, 20))]
        self.brokers.append("t", number, values, size=self.choose.choice([1, 5, 20]))
        self.sent[number] += values

    def move(self) -> None:
        self.brokers.leaders["t", self.choose.randrange(_PARTITIONS)] = self.choose.randrange(_NODES)

    def assign(self) -> None:
        wanted: list[tuple[str, int] | tuple[str, int, int]] = []
        positions = {}
        numbers = self.choose.sample(range(_PARTITIONS), self.choose.randrange(_PARTITIONS + 1))
        for number in numbers:
            if self.choose.random() < 0.5:
                wanted.append(("t", number))
                positions[number] = self.positions.get(number, 0)
            else:
                positions[number] = self.choose.randrange(len(self.sent[number]) + 1)
                wanted.append(("t", number, positions[number]))
        self.consumer.assign(wanted)
        self.positions, self.paused = positions, self.paused & set(numbers)

    def assign_again(self) -> None:
        self.consumer.assign([])
        self.consumer.assign([("t", number, offset) for number, offset in self.positions.items()])
        self.paused.clear()

    def seek(self) -> None:
        for number in self.positions:
            if self.choose.random() < 0.5:
                if self.choose.random() < 0.5:
                    self.positions[number] = self.choose.randrange(len(self.sent[number]) + 1)
                self.consumer.seek("t", number, self.positions[number])

    def pause(self) -> None:
        numbers = [number for number in self.positions if self.choose.random() < 0.5]
        self.consumer.pause([("t", number) for number in numbers])
        self.paused.update(numbers)

    def resume(self) -> None:
        numbers = [number for number in self.positions if self.choose.random() < 0.7]
        self.consumer.resume([("t", number) for number in numbers])
        self.paused.difference_update(numbers)

    def pause_and_resume(self) -> None:
        self.pause()
        self.resume_all()

    def resume_all(self) -> None:
        self.consumer.resume([("t", number) for number in self.positions])
        self.paused.clear()

    def switch(self) -> None:
        """Switch between records and Arrow; the consumer then drops what it fetched, which can hide errors there."""
        self.reads_arrow = not self.reads_arrow

    def poll(self) -> None:
        timeout = self.choose.choice([0, 0, 0.005, 0.02])
        if self.reads_arrow:
            batch = self.consumer.poll_arrow(timeout)
            rows = [] if batch is None else batch.to_pylist()
            found = [(row["partition"], row["offset"], row["value"]) for row in rows]
        else:
            found = [(record.partition, record.offset, record.value) for record in self.consumer.poll(timeout)]
        for number, offset, value in found:
            assert number in self.positions.keys() - self.paused, (number, offset)
            assert offset == self.positions[number], (number, offset, self.positions)
            assert value == self.sent[number][offset]
            self.positions[number] += 1

    def read_all(self) -> None:
        """Send more to each partition and read all assigned ones to the end."""
        self.resume_all()
        for number in range(_PARTITIONS):
            self.send(number)
        deadline = time.monotonic() + SECONDS
        while any(offset < len(self.sent[number]) for number, offset in self.positions.items()):
            assert time.monotonic() < deadline, (self.positions, {n: len(v) for n, v in self.sent.items()})
            self.poll()
        for number, offset in self.positions.items():
            assert self.consumer.position("t", number) == offset

    def run(self) -> None:
        names = [
            "send",
            "move",
            "move",
            "assign",
            "assign_again",
            "seek",
            "pause",
            "resume",
            "pause_and_resume",
            "switch",
        ]
        for _ in range(_ROUNDS):
            for number in range(_PARTITIONS):
                self.send(number)
            for _ in range(_CALLS):
                self.calls.append(self.choose.choice([*names, *["poll"] * 6]))
                getattr(self, self.calls[-1])()
            self.calls.append("read_all")
            self.read_all()


@pytest.mark.parametrize("seed", range(_FIRST_SEED, _FIRST_SEED + _RUNS))
def test_random_calls_read_what_a_list_gives(seed: int) -> None:
    with ScriptedCluster({"t": _PARTITIONS}, nodes=_NODES) as brokers:
        model = _Model(seed, brokers)
        with model.consumer:
            try:
                model.run()
            except BaseException:
                print(f"SPARK_KLOG_SEED={seed}: {model.calls}")  # noqa: T201
                raise
