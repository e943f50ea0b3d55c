"""Read the files of a load in the order of offsets, a few rows of each at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.columns.schema import subset
from spark_klog.directories.trees.addresses import filesystem_at, local_path
from spark_klog.errors import LoadError
from spark_klog.load.journal.committed import CommittedFile
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
