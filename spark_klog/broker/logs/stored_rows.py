"""Keys and values in a partition of an internal topic, from its start.

There may be millions, most of them in batches of one record: the kernel decodes runs of plain batches in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from spark_klog.log.partition_log import PartitionLog
from spark_klog.records import kernels
from spark_klog.records.formats.batch import check_crc, iter_batches
from spark_klog.records.formats.batch_v2 import BatchHeader
from spark_klog.records.reading.reader import COMMIT, read_marker, records_of

#: Bytes of a log read at once; the kernel decodes them in one call, during which nothing else runs.
_READ_BYTES = 512 * 1024
_READ_AT_ONCE = 16 * 1024
_NO_LIMIT = (1 << 31) - 1
_LAST_OFFSET = (1 << 63) - 1
_T = TypeVar("_T")
Row = tuple[bytes | None, bytes | None]


async def read_log(read: Callable[[PartitionLog], _T], log: PartitionLog) -> _T:
    """The result of `read` with the log: a large one in a thread; after a small one other work gets its turn."""
    if log.size > _READ_AT_ONCE:
        return await asyncio.to_thread(read, log)
    found = read(log)
    await asyncio.sleep(0)
    return found


class Rows(NamedTuple):
    """Records of one producer's transaction, or outside of transactions (producer id -1)."""

    producer_id: int
    rows: Iterable[Row]


class TransactionEnd(NamedTuple):
    """End of a producer's transaction."""

    producer_id: int
    commits: bool


def stored_rows(log: PartitionLog) -> Iterator[Rows | TransactionEnd]:
    """All rows in order. Raises `DecodeError` if batches are damaged, OSError, `LogRetired` if the log is deleted."""
    builder = kernels.load().builder(frozenset({"key", "value"}))
    offset = log.start_offset
    while (found := log.read(offset, _READ_BYTES)) is not None:
        log.check_open()
        data = memoryview(found.read())
        position, begin = 0, offset
        while True:
            position, offset = builder.append_batches(data, position, offset, _LAST_OFFSET, _NO_LIMIT, _NO_LIMIT)
            columns = builder.finish()
            if columns.count:
                assert columns.key is not None
                assert columns.value is not None
                yield Rows(-1, zip(columns.key.values(), columns.value.values(), strict=True))
            other = next(iter_batches(data[position:]), None)
            if other is None:
                break
            header, batch = other
            check_crc(header, batch)
            position, offset = position + len(batch), header.next_offset
            if isinstance(header, BatchHeader) and header.is_control:
                marker = read_marker(header, batch)
                if marker is not None:
                    yield TransactionEnd(header.producer_id, marker.type == COMMIT)
                continue
            is_open = isinstance(header, BatchHeader) and header.is_transactional
            rows = [(record.key, record.value) for record in records_of(header, batch)]
            yield Rows(header.producer_id if isinstance(header, BatchHeader) and is_open else -1, rows)
        if offset == begin:
            return
