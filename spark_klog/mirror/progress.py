"""Where a mirror keeps its offsets: a compacted topic of the target, `klog-mirror.NAME.internal`.

It has a record for each run of offsets (see offset_map.py), and what else is noted of topics (see beginnings.py). Where
new partitions begin is written before their records. The record of a run is written after the records that it tells
of; with exactly-once it is part of their transaction, so that both are there or neither. Each partition of the topic
belongs to one process of the mirror (a slot): no other's open transaction hides what it has committed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence

from spark_klog.client import Admin, Consumer
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import list_offsets
from spark_klog.clock import system_ms
from spark_klog.errors import ConfigError, ErrorCode, ProtocolError, RequestTimedOut
from spark_klog.mirror.beginnings import Progress
from spark_klog.protocol.tables.list_offsets import EARLIEST, LATEST
from spark_klog.records.building.own_batch import own_batch

_READ_COMMITTED = 1
_SECONDS = 60.0
_MOST_COPIES = 3
#: Records of a batch: less than half a megabyte, whatever the topics' names.
_ROWS = 1_500


def progress_topic(name: str) -> str:
    """The topic of the mirror `name`."""
    return f"klog-mirror.{name}.internal"


def slot_of(key: TopicPartition, slots: int) -> int:
    """The slot that mirrors a partition; partitions of a topic take turns."""
    return (zlib.crc32(key[0].encode()) + key[1]) % slots


def prepare_progress(admin: Admin, name: str, slots: int | None = None, default: int = 1) -> int:
    """Make the topic of a mirror if it is missing, with `slots` or `default`; return its number of slots.

    `ConfigError` if it has another number of slots than the given one. Raises what `Admin` raises.
    """
    topic = progress_topic(name)
    if all(one.name != topic for one in admin.list_topics()):
        copies = max(1, min(_MOST_COPIES, len(admin.cluster.nodes)))
        try:
            admin.create_topic(
                topic, slots or default, replication_factor=copies, configs={"cleanup.policy": "compact"}
            )
        except ProtocolError as error:
            if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
    there = len(admin.describe_topic(topic).partitions)
    if slots is not None and slots != there:
        raise ConfigError(
            f"the mirror {name} runs as {there} {'process' if there == 1 else 'tasks'}, not {slots}: its topic {topic} "
            f"has {there} partitions. Use {'klog mirror' if there == 1 else 'jobs/mirror.py'}, or another name"
        )
    return there


class ProgressReader:
    """Reads a slot's partition of a mirror's topic: what is noted, and later which process has begun since."""

    def __init__(self, settings: Mapping[str, str], admin: Admin, topic: str, slot: int) -> None:
        self._admin, self._key = admin, (topic, slot)
        self.progress = Progress()
        own = {"isolation.level": "read_committed", "auto.offset.reset": "earliest", "enable.auto.commit": "false"}
        self._consumer = Consumer({**settings, **own})
        self._consumer.assign([(*self._key, EARLIEST)])

    def __enter__(self) -> ProgressReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._consumer.close()

    def load(self, *, notes_only: bool = False) -> Progress:
        """What is noted of the slot's partitions now. `DecodeError` if the topic holds other records.

        With `notes_only` without the maps of offsets, which may be large.
        """
        load = self.progress.load_note if notes_only else self.progress.load
        key = self._key
        end = list_offsets(self._admin.cluster, {key: LATEST}, _READ_COMMITTED)[key]
        until = time.monotonic() + _SECONDS
        while self._consumer.position(*key) < end:
            records = self._consumer.poll(1.0)
            for record in records:
                if record.key is not None and record.value is not None:
                    load(record.key, record.value)
            if records:
                until = time.monotonic() + _SECONDS
            elif time.monotonic() > until:
                raise RequestTimedOut(f"the offsets in topic {key[0]} could not be read within {_SECONDS:g} s")
        return self.progress

    def look(self) -> None:
        """Take in which process has begun since, without waiting; the mirror's own records come back, too."""
        while records := self._consumer.poll(0.0):
            for record in records:
                if record.key is not None and record.value is not None:
                    self.progress.load_owner(record.key, record.value)


def progress_batches(rows: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytearray, int]]:
    """Batches of records (key, value), in order, with their numbers of records."""
    parts = [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
    return [(own_batch(part, system_ms()), len(part)) for part in parts]
