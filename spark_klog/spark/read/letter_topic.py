"""Dead letters of a query in a topic, of each record one, although its tasks may run twice.

A task writes the letters of a partition at its end, in a transaction with what is done: ranges of offsets whose letters
are written, in the metadata of an offset of the group `klog-dead-letters-of.QUERY.…`. Another attempt of the task, or a
repeated micro-batch, leaves those out. Sources of a query that read a topic in other formats, or write to another topic
of letters, have groups of their own. The transactional id belongs to query and partition, so that of two attempts at
once, or of two tasks with ranges of one partition, one is fenced: it begins again, with what the other has noted.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from spark_klog.base.clock import system_ms
from spark_klog.base.durable import check_version
from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.dead_letters import CONVERTERS, CORRUPT_BATCH, READING, SIZES, DeadLetter, told
from spark_klog.client.offsets import Committed, GroupOffsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProducerFenced, ProtocolError
from spark_klog.records.reading.reader import BadBatch, RecordFields
from spark_klog.spark.options import PREFIX, SourceOptions

_log = logging.getLogger(__name__)
GROUP = "klog-dead-letters-of."
_NOTE_VERSION = 1
#: Ranges that a note keeps, the last ones: brokers take 4,096 bytes of metadata.
_MOST_RANGES = 100
#: Letters in memory: then a task writes what it has; and what one takes there besides its bytes and reason.
_FULL, _OVERHEAD = 16 * 1024 * 1024, 1000
_ATTEMPTS, _LONGEST_PAUSE = 40, 3.0
#: The answers to a producer that another one has fenced.
_FENCED = (
    *(ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED),
    *(ErrorCode.INVALID_TXN_STATE, ErrorCode.TRANSACTION_ABORTABLE),
)
#: Spark's local property: the query's id, which its checkpoint keeps.
_QUERY = "sql.streaming.queryId"


class _Letter(NamedTuple):
    offset: int
    record: RecordFields
    said: DeadLetter


class LetterTopic:
    """The letters of a task, for the topic `deadLetterTopic`. `plan` stands for the query of a batch read."""

    def __init__(self, options: SourceOptions, topic: str, plan: str) -> None:
        from pyspark import TaskContext  # here: what reads without Spark needs none

        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context else None
        self._client, self._topic, self.reader = options.client, topic, query or plan
        formats = (f"{each.column}-{each.format}-{each.subject or ''}" for each in options.formats)
        self._group = ".".join([f"{GROUP}{self.reader}", topic, *formats])
        self._task = str(context.partitionId() if context else 0)
        self._letters: dict[TopicPartition, list[_Letter]] = {}
        self._size = 0

    @property
    def is_full(self) -> bool:
        return self._size >= _FULL

    def add(self, topic: str, partition: int, bad: BadBatch) -> None:
        """Have a record, or a corrupt batch, written by `flush`; `ConfigError` if it is a letter itself."""
        if topic == self._topic:
            raise ConfigError(
                f"{topic}-{partition}: {bad.error}; letters can't go to the topic that they are read from"
            )
        _, reason, _ = told(bad.error)
        stage, error = READING, CORRUPT_BATCH
        record = RecordFields(None, bytes(bad.data), ()) if bad.record is None else bad.record
        if bad.record is not None:
            error = f"{type(bad.error).__module__}.{type(bad.error).__qualname__}"
            stage = next(
                (CONVERTERS[name] for name in CONVERTERS if f"a {name} that does not decode" in reason), READING
            )
        said = DeadLetter(
            topic,
            partition,
            bad.offset,
            reader=self.reader,
            task=self._task,
            stage=stage,
            where="spark_klog.spark.read",
            error=error,
            reason=reason,
            time=system_ms(),
            attempts=1,
        )
        self._letters.setdefault((topic, partition), []).append(_Letter(bad.offset, record, said))
        fields = (*record[:2], *(data for header in record.headers for data in header))
        self._size += _OVERHEAD + len(reason) + sum(len(data) for data in fields if data is not None)

    def flush(self, done: Sequence[tuple[str, int, int, int]]) -> None:
        """Write the letters, and note these ranges of partitions as done: (topic, partition, start, end)."""
        for key, letters in self._letters.items():
            ranges = [(start, end) for topic, partition, start, end in done if (topic, partition) == key]
            for attempt in range(_ATTEMPTS):
                try:
                    self._write(key, letters, ranges)
                    break
                except (ProducerFenced, ProtocolError) as error:
                    is_lost = isinstance(error, ProducerFenced) or _is_passing(error)
                    if attempt + 1 == _ATTEMPTS or not is_lost:
                        raise
                    _log.info("letters of %s-%d, beginning again: %s", *key, error)
                    time.sleep(random.uniform(0, min(_LONGEST_PAUSE, 0.05 * 2**attempt)))
        self._letters.clear()
        self._size = 0

    def _write(self, key: TopicPartition, letters: Sequence[_Letter], ranges: Sequence[tuple[int, int]]) -> None:
        group = self._group
        settings = {**self._client, "transactional.id": f"{group}.{key[0]}-{key[1]}", **SIZES}
        cluster = Cluster(client_config(settings, PREFIX))
        with Producer.of_cluster(cluster, creates_topics=False) as producer:
            producer.init_transactions()  # from here on no other attempt writes, unless it fences this one
            with Cluster(client_config(self._client, PREFIX)) as reading:
                noted = GroupOffsets(reading, group, is_stable=True).committed([key]).get(key)
            known = [] if noted is None else _ranges(noted.metadata, f"group {group}")
            new = [letter for letter in letters if not any(start <= letter.offset < end for start, end in known)]
            if not new:
                return
            producer.begin_transaction()
            for _, record, said in new:
                headers = record.headers + said.headers
                moment = max(-1, record.timestamp)
                # without a span, whose context would be a header
                Producer.send(producer, self._topic, record.value, record.key, timestamp=moment, headers=headers)
            producer.send_offsets_to_transaction({key: _note([*known, *ranges])}, group)
            producer.commit_transaction()


def _note(ranges: Sequence[tuple[int, int]]) -> Committed:
    """What to commit for ranges that are done; of more than `_MOST_RANGES` the last ones are kept."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    text = json.dumps({"version": _NOTE_VERSION, "done": merged[-_MOST_RANGES:]}, separators=(",", ":"))
    return Committed(merged[-1][1], metadata=text)


def _ranges(text: str, where: str) -> list[tuple[int, int]]:
    try:
        note = json.loads(text)
        version, done = note["version"], note["done"]
    except (TypeError, ValueError, KeyError):
        raise KlogError(f"{where} has an offset that no query has committed: delete it") from None
    check_version(version, _NOTE_VERSION, where, "delete the group: letters may be written twice then", KlogError)
    return [(int(start), int(end)) for start, end in done]


def _is_passing(error: ProtocolError) -> bool:
    """Whether another attempt may do; for a topic that is missing the producer has waited."""
    return error.code in _FENCED or (error.retriable and error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
