"""Restore a partition: its records in transactions, each with the progress."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.base.addresses import filesystem_at, local_path
from spark_klog.client import Producer
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.security.config import Settings
from spark_klog.columns.schema import subset
from spark_klog.errors import KlogError, LoadError
from spark_klog.load.journal.history import CommittedFile
from spark_klog.load.tasks.writers import MOST_OPEN
from spark_klog.restore.plan import Part

_SCHEMA = subset(("key", "value", "partition", "offset", "timestamp", "headers"))
_COLUMNS = _SCHEMA.names
#: A table ends at either.
_ROWS, _BYTES = 65_536, 16 * 1024 * 1024
#: About the bytes that are read of each file at once; files of one group are open at the same time.
_BATCH_BYTES, _BUFFER_BYTES = 1024 * 1024, 64 * 1024


def read_part(output: str, part: Part, start: int) -> Iterator[tuple[pa.Table, int]]:
    """Tables of the records from offset `start` on, each with the offset after it; `LoadError` for a damaged file."""
    for group in part.files:
        if group[0].last < start:
            continue
        try:
            if len(group) > MOST_OPEN:  # they have the records of one Arrow batch
                read = [batch for item in group for batch in _batches(output, item, start)]
                files = [iter(pa.Table.from_batches(read, _SCHEMA).sort_by("offset").to_batches(_ROWS))]
            else:
                files = [_batches(output, item, start) for item in group]
            for table in _merged(files):
                yield table, table["offset"][-1].as_py() + 1
        except (OSError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise LoadError(
                f"{group[0].path} can't be read ({reason}): `klog load status` shows what is missing"
            ) from None


def _batches(output: str, item: CommittedFile, start: int) -> Iterator[pa.RecordBatch]:
    """The records of a file from offset `start` on, in batches that are not empty."""
    with _open(output, item.path) as file:
        for batch in (_of_arrow if ".arrow" in item.path else _of_parquet)(file, start):
            if batch["offset"][0].as_py() < start:
                batch = batch.filter(pc.greater_equal(batch["offset"], start))
            if len(batch):
                yield batch


def _open(output: str, path: str) -> Any:
    if local_path(output) is not None:
        return pa.OSFile(path)
    filesystem, _ = filesystem_at(output)
    return filesystem.open_input_file(path.partition("://")[2])


def _of_arrow(file: Any, start: int) -> Iterator[pa.RecordBatch]:
    schema = pa.ipc.open_file(file).schema
    included = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in _COLUMNS])
    reader = pa.ipc.open_file(file, options=included)
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number).select(_COLUMNS)
        if len(batch) and batch["offset"][-1].as_py() >= start:
            for at in range(0, len(batch), _ROWS):
                yield batch.slice(at, _ROWS)


def _of_parquet(file: Any, start: int) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    reader = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    index = reader.schema_arrow.get_field_index("offset")
    for number in range(reader.num_row_groups):
        group = reader.metadata.row_group(number)
        known = group.column(index).statistics if index >= 0 else None
        if known is not None and known.has_min_max and known.max < start:
            continue
        rows = _BATCH_BYTES * max(1, group.num_rows) // max(1, group.total_byte_size)
        for batch in reader.iter_batches(max(1, min(_ROWS, rows)), [number], _COLUMNS, use_threads=False):
            if len(batch):
                yield batch.select(_COLUMNS)


def _merged(files: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.Table]:
    """The batches of files, each in the order of offsets, as tables in that order."""
    heads: list[tuple[pa.RecordBatch, Iterator[pa.RecordBatch]]] = []
    for file in files:
        if (head := next(file, None)) is not None:
            heads.append((head, file))
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    while heads:
        # Of each file the head has the next records: up to the first end of one of them nothing is missing.
        last = min(head["offset"][-1].as_py() for head, _ in heads)
        left = []
        for head, file in heads:
            count = int(pc.sum(pc.less_equal(head["offset"], last)).as_py())
            if count:
                waiting.append(head.slice(0, count))
                rows += count
                size += waiting[-1].nbytes
            rest = head.slice(count) if count < len(head) else next(file, None)
            if rest is not None:
                left.append((rest, file))
        heads = left
        if rows >= _ROWS or size >= _BYTES or not heads:
            table = pa.Table.from_batches(waiting)
            yield table if len(files) == 1 else table.sort_by("offset")
            waiting, rows, size = [], 0, 0


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
