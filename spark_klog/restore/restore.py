"""Restore a partition: its records in transactions, each with the progress."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from spark_klog.client import Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.security.settings.secrets import Settings
from spark_klog.errors import KlogError
from spark_klog.restore.plan import Part
from spark_klog.restore.reading import read_part

_log = logging.getLogger(__name__)
#: Settings of consumers and transactions in shared files of settings: a restore and a replay have their own.
_OWN = ("group.id", "group.instance.id", "transactional.id", "enable.auto.commit", "auto.offset.reset")


@dataclass(frozen=True)
class Restored:
    """The outcome of a partition. `error` says why it is incomplete, else it is ""."""

    topic: str
    partition: int
    records: int
    error: str = ""


def restore_partition(client: Mapping[str, str], output: str, parts: Sequence[Part]) -> Restored:
    """Restore the parts of one partition, from where the last restore of them stopped.

    A process that is still restoring them is fenced. Errors of the target and of files are in the result.
    """
    first, records = parts[0], 0
    try:
        with transactions_of(client, f"{first.group}-{first.topic}-{first.partition}") as producer:
            for part in parts:
                start = progress_of(client, [part]).get((part.topic, part.partition), 0)
                after = start
                for table, after in read_part(output, part, start):
                    _write(producer, part, table, after)
                    records += len(table)
                if after < part.end:  # offsets without a record
                    _write(producer, part, None, part.end)
    except KlogError as error:
        return Restored(first.topic, first.partition, records, f"{type(error).__name__}: {error}")
    _log.info("restored %d records of %s-%d", records, first.topic, first.partition)
    return Restored(first.topic, first.partition, records)


def transactions_of(client: Mapping[str, str], transactional_id: str) -> Producer:
    """A producer that may begin a transaction; an older one with the same id is fenced, and its transaction ended."""
    settings = {name: value for name, value in client.items() if name not in _OWN}
    producer = Producer(Settings(settings | {"transactional.id": transactional_id}))
    try:
        producer.init_transactions()
    except BaseException:
        producer.close()
        raise
    return producer


def _write(producer: Producer, part: Part, table: pa.Table | None, after: int) -> None:
    """Write records and the progress in one transaction."""
    producer.begin_transaction()
    if table is not None:
        producer.send_arrow(table, part.topic, is_any_time=True)
    producer.send_offsets_to_transaction({(part.topic, part.partition): after}, part.group)
    producer.commit_transaction()


def progress_of(client: Mapping[str, str], parts: Sequence[Part]) -> dict[tuple[str, int], int]:
    """The progress of parts of one group: by partition the offset after the last one that is restored."""
    return offsets_of(client, parts[0].group, [(part.topic, part.partition) for part in parts])


def offsets_of(client: Mapping[str, str], group: str, keys: Collection[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """The offsets that transactions have committed of a group, by topic and partition."""
    settings = {name: value for name, value in client.items() if name not in _OWN}
    with Cluster.connect(settings) as cluster:
        return GroupOffsets(cluster, group, is_stable=True).fetch(keys)
