"""Topics of dead letters: read them, and replay them, each letter once.

A replay sends letters to the topics that their records came from, in transactions. Each has some letters of a partition
and the progress in it, an offset of the group `klog-dead-letters.TOPIC`: letters before it are sent, whatever they are
about. Replays of some letters note in its metadata what they have chosen, and up to which offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spark_klog.base.durable import check_version
from spark_klog.base.names import TopicPartition
from spark_klog.client.admin.admin import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.consumer import Consumer, read_ranges
from spark_klog.client.consumer.decoding import ConsumerRecord
from spark_klog.client.dead_letters import CORRUPT_BATCH, SIZES, DeadLetter, split
from spark_klog.client.offsets import Committed, GroupOffsets, first_and_end
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import of_bytes, without_ids
from spark_klog.errors import ConfigError, KlogError
from spark_klog.records.contract import Headers
from spark_klog.security.config import Settings

GROUP = "klog-dead-letters."
_NOTE_VERSION = 1
#: Brokers take 4,096 bytes of metadata.
_MOST_NOTES = 4000
#: A transaction ends at either; the offsets that are looked at, and bytes of keys and values.
_OFFSETS, _BYTES = 5000, 8 * 1024 * 1024


@dataclass(frozen=True)
class Choice:
    """Which letters: `reason` is a regular expression, found in "ERROR: REASON"; `source` the record's topic."""

    reason: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.reason)
        except re.error as error:
            raise ConfigError(f"{self.reason!r} is not a regular expression: {error}") from None

    def takes(self, letter: DeadLetter) -> bool:
        is_of_source = self.source in ("", letter.topic)
        return is_of_source and re.search(self.reason, f"{letter.error}: {letter.reason}") is not None


ALL = Choice()


class Progress:
    """What is replayed of a partition: all up to an offset, and of some choices more."""

    def __init__(self, committed: Committed | None, where: str) -> None:
        self._until: dict[Choice, int] = {}
        if committed is None:
            return
        self._until[ALL] = committed.offset
        if committed.metadata:
            try:
                note = json.loads(committed.metadata)
                version, chosen = note["version"], note["replayed"]
            except (TypeError, ValueError, KeyError):
                raise KlogError(f"{where} has an offset that no replay has committed: delete it") from None
            check_version(version, _NOTE_VERSION, where, "delete the group, or use that version", KlogError)
            self._until |= {Choice(reason, source): until for reason, source, until in chosen}

    def start(self, choice: Choice) -> int:
        return max(self._until.get(ALL, 0), self._until.get(choice, 0))

    def has(self, letter: DeadLetter, offset: int) -> bool:
        return any(offset < until and choice.takes(letter) for choice, until in self._until.items())

    def advance(self, choice: Choice, until: int) -> None:
        self._until[choice] = until
        everything = self._until.get(ALL, 0)
        self._until = {each: at for each, at in self._until.items() if each == ALL or at > everything}

    @property
    def committed(self) -> Committed:
        """What to commit; `ConfigError` for too many choices."""
        chosen = [[each.reason, each.source, until] for each, until in self._until.items() if each != ALL]
        text = json.dumps({"version": _NOTE_VERSION, "replayed": chosen}) if chosen else ""
        if len(text.encode()) > _MOST_NOTES:
            raise ConfigError("too many different choices were replayed to note one more: replay all of the topic")
        return Committed(self._until.get(ALL, 0), metadata=text)


class Letter(NamedTuple):
    """A record of a topic of dead letters. `said` is None, and `own` are all its headers, if it is no letter."""

    record: ConsumerRecord
    said: DeadLetter | None
    own: Headers
    is_replayed: bool

    @property
    def is_sendable(self) -> bool:
        return self.said is not None and self.said.error != CORRUPT_BATCH


class LetterTopic:
    """A topic of dead letters of a cluster. Errors are those of clients, `ConfigError` for a topic without a name."""

    def __init__(self, settings: Mapping[str, str], topic: str) -> None:
        self.topic, self.group = topic, f"{GROUP}{topic}"
        self._settings = without_ids(of_bytes(settings)) | {"isolation.level": "read_committed"}

    def letters(self, choice: Choice = ALL) -> Iterator[Letter]:
        """The letters that are there, partition by partition, and with `ALL` other records, too."""
        with Admin(self._settings) as admin:
            ranges = self._ranges(admin.cluster)
            progress = self._progress(admin.cluster, list(ranges))
        for key, (start, end) in ranges.items():
            for _, letters in self._read(key, start, end, progress[key]):
                yield from (each for each in letters if choice == ALL or (each.said and choice.takes(each.said)))

    def _ranges(self, cluster: Cluster) -> dict[TopicPartition, tuple[int, int]]:
        keys = [(self.topic, partition) for partition in cluster.partitions([self.topic])[self.topic]]
        first, end = first_and_end(cluster, keys)
        return {key: (first[key], end[key]) for key in keys}

    def _progress(self, cluster: Cluster, keys: list[TopicPartition]) -> dict[TopicPartition, Progress]:
        committed = GroupOffsets(cluster, self.group, is_stable=True).committed(keys)
        return {key: Progress(committed.get(key), f"group {self.group}") for key in keys}

    def _read(
        self, key: TopicPartition, start: int, end: int, progress: Progress
    ) -> Iterator[tuple[int, list[Letter]]]:
        """Lists of what is in a range, each with the offset after it."""
        with Consumer(self._settings | {"auto.offset.reset": "earliest"}) as consumer:
            for records, left in read_ranges(consumer, {key: (start, end)}, as_arrow=False):
                letters = []
                for record in records or ():
                    said, own = split(record.headers)
                    letters.append(Letter(record, said, own, said is not None and progress.has(said, record.offset)))
                yield end - left.get(key, 0), letters

    def replay(self, choice: Choice = ALL) -> Replayed:
        """Send the chosen letters that are there, and were not sent before, to the topics of their records.

        They are as they were, in their partition if the topic has it; else the key decides. A topic that is missing is
        an error, as the letter says its name. Another replay of the topic that is under way ends with `ProducerFenced`.
        """
        sent = others = 0
        settings = Settings(self._settings | {"transactional.id": self.group} | SIZES)
        with Producer.of_cluster(Cluster.connect(settings), creates_topics=False) as producer, Admin(settings) as admin:
            producer.init_transactions()  # what an earlier replay has left open is aborted
            ranges = self._ranges(admin.cluster)
            for key, progress in self._progress(admin.cluster, list(ranges)).items():
                first, end = ranges[key]
                done = start = max(first, progress.start(choice))
                waiting: list[Letter] = []
                for at, letters in self._read(key, start, end, progress):
                    chosen = [each for each in letters if choice == ALL or (each.said and choice.takes(each.said))]
                    sendable = [each for each in chosen if each.is_sendable]
                    others += len(chosen) - len(sendable)
                    waiting += [each for each in sendable if not each.is_replayed]
                    size = sum(len(each.record.key or b"") + len(each.record.value or b"") for each in waiting)
                    if at > done and (at - done >= _OFFSETS or size >= _BYTES or at >= end):
                        progress.advance(choice, at)
                        self._send(producer, waiting, key, progress.committed)
                        sent, waiting, done = sent + len(waiting), [], at
        return Replayed(sent, others)

    def _send(self, producer: Producer, letters: list[Letter], key: TopicPartition, progress: Committed) -> None:
        counts = {each.said.topic: producer.partitions(each.said.topic) for each in letters if each.said is not None}
        producer.begin_transaction()
        for record, said, own, _ in letters:
            assert said is not None
            partition = said.partition if 0 <= said.partition < counts[said.topic] else None
            place = said.topic, record.value, record.key, partition, max(-1, record.timestamp)
            Producer.send(producer, *place, own)  # without a span, whose context would be a header
        producer.send_offsets_to_transaction({key: progress}, self.group)
        producer.commit_transaction()


class Replayed(NamedTuple):
    """How many letters were sent, and how many records can't be: no letters, or the bytes of corrupt batches."""

    sent: int
    others: int
