"""Topics of a standalone broker against a simple model: events in any order on a disk that loses what is not synced.

Whatever was answered holds: a created topic is there with its id, partitions and settings, a deleted one is not, and
acknowledged records are served, after a power failure those that were flushed. A change that a kill interrupted, or
that was refused because the disk has failed, is there or not, whole. No topic has offsets that were committed for an
earlier one of its name. At times the broker belongs to a cluster, which has topics of its own. The disk is that of
faulty_files.py.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from spark_klog.broker import broker as broker_module
from spark_klog.broker.broker import Broker
from spark_klog.broker.groups.offset_manager import DEFAULT_RETENTION, encoded_commits
from spark_klog.broker.metadata.internal_topics import OFFSETS_TOPIC
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_files import partition_of_folder
from spark_klog.log.topic_journal import JOURNAL
from spark_klog.trees.paths import Endpoint
from tests.log.faulty_files import FaultyFiles, Killed
from tests.support.brokers.batches import make_batch, read_records
from tests.support.runs.soak import SOAK

_SEQUENCES = 3000 if SOAK else 400
_NAMES = "abc"
_GROUP = "group"
_EVENTS = 25
_Key = tuple[str, int]


@dataclass
class _Topic:
    topic_id: UUID
    partitions: int
    settings: dict[str, str]
    #: By partition: the values of its records, and how many of them are flushed.
    records: dict[int, list[bytes]] = field(default_factory=dict)
    flushed: Counter[int] = field(default_factory=Counter)
    #: By partition: the offset that the group has committed.
    committed: dict[int, int] = field(default_factory=dict)


class _Run:
    """One sequence; `seed` decides it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.files = FaultyFiles()
        self.broker: Broker
        self.topics: dict[str, _Topic] = {}
        #: Names of topics that an interrupted change was about.
        self.unclear: set[str] = set()
        self.number = 0
        #: Calls of the disk until the process is killed there.
        self.left: int | None = None
        #: Whether changes in the folders of topics may fail.
        self.is_bad = False
        #: Whether the disk has only some bytes left.
        self.is_full = False
        self.story: list[str] = []

    async def run(self) -> None:
        await self.start()
        for _ in range(_EVENTS):
            event = self.rng.choice(
                [self.create] * 4
                + [self.delete] * 3
                + [self.grow, self.alter]
                + [self.produce] * 4
                + [self.commit] * 3
                + [self.flush, self.flush, self.checkpoint, self.stop, self.kill, self.power, self.join_cluster]
                + [self.retry, self.retry]
            )
            self.is_full = event.__func__ is _Run.create and self.rng.random() < 0.1
            self.is_bad = event.__func__ in _FAILING and self.rng.random() < 0.3
            self.left = self.rng.randrange(1, 25) if event.__func__ in _KILLED and self.rng.random() < 0.15 else None
            self.story.append(event.__name__)
            try:
                await event()
            except Killed:
                await self.die(power=self.rng.random() < 0.5)
            self.left = None
            if self.is_bad and self.rng.random() < 0.3:
                self.is_bad = False
                await self.stop()
        await self.die(power=False)

    # the broker

    def fails(self, operation: str, path: Path) -> bool:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise Killed
        key = partition_of_folder(path.name) or partition_of_folder(path.parent.name.partition(".")[0])
        is_topic = key is not None and key[0] in _NAMES
        if not (self.is_bad and is_topic and operation != "read" and self.rng.random() < 0.3):
            return False
        if path.parent == self.folder and path not in self.files._folders:
            self.files._gone.add(path)  # it is not made: no file can be made in it either
        return True

    async def start(self, directories: str | None = None) -> None:
        self.files.faults.fails = self.fails
        config = BrokerConfig("127.0.0.1", 1000, self.folder, 0, directories)
        with patch.object(broker_module, "LogDirectory", partial(LogDirectory, files=self.files)):
            self.broker = Broker(config)
        take = self.broker.flushes.take

        async def take_later(steps: Iterable[Any]) -> None:
            for _ in range(self.rng.randrange(60)):  # there may be many offsets to remove
                await asyncio.sleep(0)
            await take(steps)

        self.broker.flushes.take = take_later  # type: ignore[method-assign, assignment]
        self.broker.start([Endpoint("PLAINTEXT", "PLAINTEXT", "127.0.0.1", 1000)])
        await self.broker.coordinator.load()

    async def die(self, *, power: bool, directories: str | None = None) -> None:
        """Kill the broker and start it again; compare unless it starts in a cluster."""
        self.is_bad = False
        if self.broker.logs.journal.is_behind:  # a topic that could not be created on a full disk
            self.unclear |= {*_NAMES}
        self.story.append(f"died, power={power}")
        self.left = 0  # the dead process does nothing more
        await asyncio.sleep(0)
        self.files = self.files.after_crash(self.rng, power=power)
        if self.rng.random() < 0.3:
            self.tear()
        self.left = None
        _unlock(self.broker)
        await self.start(directories)
        if directories is None:
            self.check(power=power)

    def tear(self) -> None:
        """A write to the journal that was under way has left a part of itself."""
        content = self.files._entries.get(self.folder / JOURNAL)
        if content is not None:
            rest = b'{"topic": "z", "id": "%032d", "partitions": [0], "settings": {}}\n' % 5
            content.data += self.rng.choice([rest[: self.rng.randrange(len(rest))], bytes(self.rng.randrange(60))])
            content.sync()

    def check(self, *, power: bool) -> None:
        there = {name: topic for name, topic in self.broker.registry.topics.items() if name != OFFSETS_TOPIC}
        for name in self.unclear:
            topic = there.get(name)
            known = self.topics.get(name)
            if topic is None:
                self.topics.pop(name, None)
            elif known is None or topic.topic_id != known.topic_id:
                self.topics[name] = _Topic(topic.topic_id, len(topic.assignment), dict(topic.settings))
            else:
                assert len(topic.assignment) in (known.partitions, known.partitions + 2)
                known.partitions, known.settings = len(topic.assignment), dict(topic.settings)
        self.unclear.clear()
        assert {name: topic.topic_id for name, topic in there.items()} == {
            name: topic.topic_id for name, topic in self.topics.items()
        }
        assert not self.broker.logs.offline
        assert {key for key in self.broker.logs.logs if key[0] != OFFSETS_TOPIC} == {
            (name, partition) for name, topic in self.topics.items() for partition in range(topic.partitions)
        }
        for name, topic in self.topics.items():
            assert [*there[name].assignment] == [*range(topic.partitions)]
            assert dict(there[name].settings) == topic.settings
            for partition in range(topic.partitions):
                self.check_log(name, topic, partition, power=power)
        self.check_offsets(power=power)

    def check_offsets(self, *, power: bool) -> None:
        """A power failure may take those that nobody has flushed, and the removal of others."""
        there = {key: committed.offset for key, committed in self.broker.offsets.all(_GROUP).items()}
        assert {name for name, _ in there} <= self.topics.keys()
        for name, topic in self.topics.items():
            now = {partition: offset for (other, partition), offset in there.items() if other == name}
            assert power or now == topic.committed, (name, now, topic.committed)
            topic.committed = now

    def check_log(self, name: str, topic: _Topic, partition: int, *, power: bool) -> None:
        log = self.broker.logs.logs[name, partition]
        assert log.topic_id == topic.topic_id
        assert {key.replace("_", "."): str(value) for key, value in log.overrides.items()} == topic.settings
        values, written = _values(log), topic.records.get(partition, [])
        assert values == written[: len(values)], (name, partition, values, written)
        assert len(values) >= (topic.flushed[partition] if power else len(written)), (name, partition, values, written)
        topic.records[partition] = values
        topic.flushed[partition] = min(topic.flushed[partition], len(values))

    # events

    async def create(self) -> None:
        names = self.rng.sample(_NAMES, self.rng.randrange(1, 3))
        new = [(name, self.rng.randrange(1, 4), self.some_settings()) for name in names]
        self.unclear |= {*names} - self.topics.keys()
        if self.is_full:
            self.files.faults.capacity = self.files.used() + self.rng.randrange(500)
        made = await self.broker.changes.create_topics([self.broker.changes.new_topic(*topic) for topic in new])
        self.files.faults.capacity = None
        for (name, partitions, settings), outcome in zip(new, made, strict=True):
            assert isinstance(outcome, UUID) == (name not in self.topics) or self.is_bad or self.is_full, outcome
            if isinstance(outcome, UUID):
                self.topics[name] = _Topic(outcome, partitions, settings)
        self.unclear.clear()

    def some_settings(self) -> dict[str, str]:
        return self.rng.choice([{}, {"retention.ms": str(self.rng.randrange(10**9, 10**10))}])

    async def delete(self) -> None:
        names = self.rng.sample(_NAMES, self.rng.randrange(1, 3))
        self.unclear |= {*names} & self.topics.keys()
        gone = await self.broker.changes.delete_topics(dict.fromkeys(names))
        assert gone.keys() == {*names} & self.topics.keys()
        assert not any(isinstance(outcome, Exception) for outcome in gone.values())
        for name in gone:
            del self.topics[name]
        self.unclear.clear()

    async def grow(self) -> None:
        if (name := self.some_topic()) is not None:
            topic = self.topics[name]
            self.unclear.add(name)
            await self.broker.changes.create_partitions(name, topic.partitions + 2)
            topic.partitions += 2
            self.unclear.clear()

    async def alter(self) -> None:
        if (name := self.some_topic()) is not None:
            settings = self.some_settings()
            self.unclear.add(name)
            await self.broker.changes.alter_topic_settings(name, lambda _: settings)
            self.topics[name].settings = settings
            self.unclear.clear()

    async def produce(self) -> None:
        if (name := self.some_topic()) is not None:
            topic, partition = self.topics[name], self.rng.randrange(self.topics[name].partitions)
            for _ in range(self.rng.randrange(1, 4)):
                self.number += 1
                value = b"%s-%d-%d" % (name.encode(), partition, self.number)
                values = topic.records.setdefault(partition, [])
                values.append(value)
                self.log_of(name, partition).append(memoryview(bytearray(make_batch([(None, value)], [1]))))

    async def flush(self) -> None:
        if (name := self.some_topic()) is not None:
            topic, partition = self.topics[name], self.rng.randrange(self.topics[name].partitions)
            self.log_of(name, partition).flush()
            topic.flushed[partition] = len(topic.records.get(partition, []))

    async def commit(self) -> None:
        if (name := self.some_topic()) is not None:
            if OFFSETS_TOPIC not in self.broker.registry.topics:
                await self.broker.changes.create_topic(OFFSETS_TOPIC, 1)
            topic, partition = self.topics[name], self.rng.randrange(self.topics[name].partitions)
            self.number += 1
            log = self.broker.coordinator.local_log(_GROUP)
            assert log is not None
            commits = encoded_commits(_GROUP, {(name, partition): (self.number, -1, "")}, DEFAULT_RETENTION, None)
            self.broker.offsets.append(log, commits)
            topic.committed[partition] = self.number

    async def join_cluster(self) -> None:
        """In a cluster, a topic takes the place of one of that name, and is deleted; then the broker is alone again."""
        self.number += 1
        await self.retry()  # then it is known what there is
        await self.die(power=False, directories=str(self.folder.with_name(f"{self.folder.name}-tree-{self.number}")))
        assert not self.broker.registry.topics
        # the offsets of groups are not in the cluster, so none are removed there
        has_offsets = {name for name, topic in self.topics.items() if topic.committed}
        name = self.rng.choice([name for name in _NAMES if name not in has_offsets] or ["e"])
        known = self.topics.pop(name, None)
        await self.broker.changes.create_topic(name, known.partitions if known else 1)
        await self.broker.changes.delete_topics({name: None})
        self.topics["d"] = _Topic(await self.broker.changes.create_topic("d", 2), 2, {})
        if self.rng.random() < 0.5:
            await self.broker.changes.ended()
            self.broker.close()
        else:
            self.broker.registry.close()
        await self.die(power=False)
        await self.broker.changes.delete_topics({"d": None})
        del self.topics["d"]

    async def retry(self) -> None:
        """What housekeeping does."""
        await self.broker.follower.retry()
        await self.broker.follower.retry_logs()

    async def checkpoint(self) -> None:
        self.broker.logs.write_checkpoints()

    async def stop(self) -> None:
        await self.broker.changes.ended()
        self.broker.close()
        assert not self.broker.logs.journal.is_behind
        self.story.append(f"stopped, {sorted(self.files.names(self.folder))}")
        for topic in self.topics.values():
            topic.flushed = Counter({partition: len(values) for partition, values in topic.records.items()})
        await self.die(power=self.rng.random() < 0.5)

    async def kill(self) -> None:
        await self.die(power=False)

    async def power(self) -> None:
        await self.die(power=True)

    def some_topic(self) -> str | None:
        return self.rng.choice(sorted(self.topics)) if self.topics else None

    def log_of(self, name: str, partition: int) -> Any:
        return self.broker.logs.logs[name, partition]


_FAILING = [_Run.create, _Run.delete]
_KILLED = [_Run.create, _Run.delete, _Run.grow, _Run.alter, _Run.flush, _Run.stop]


def _values(log: Any) -> list[bytes]:
    values, offset = [], log.start_offset
    while (part := log.read(offset, 1 << 20)) is not None:
        for record in read_records(part.read()):
            values.append(bytes(record.value))
            offset = record.offset + 1
    return values


def _unlock(broker: Broker) -> None:
    """Release the lock of the data directory, as the death of the process does."""
    with suppress(OSError):
        os.close(broker.logs._lock)


async def _inline(function: Callable[..., Any], /, *arguments: Any) -> Any:
    await asyncio.sleep(0)
    return function(*arguments)


def run_seeds(folder: Path, seeds: range) -> None:
    """Run the sequences of some seeds."""
    with patch.object(asyncio, "to_thread", _inline):
        for seed in seeds:
            run = _Run(folder / str(seed), seed)
            run.folder.mkdir()
            try:
                asyncio.run(run.run())
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}; {run.story}") from error


@pytest.mark.parametrize("count", [40, pytest.param(_SEQUENCES, marks=pytest.mark.test_all("long"))])
def test_topics_are_what_the_model_says(tmp_path: Path, count: int) -> None:
    run_seeds(tmp_path, range(count))
