"""The records of one partition in one fetch response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_klog.errors import CorruptBatchError, DecodeError
from spark_klog.records.reading.reader import AbortedTransactions


@dataclass(slots=True, eq=False)
class Chunk:
    """Complete record batches with the records of [offset, following), perhaps with some before `offset`.

    `run` is that of the partition when they were fetched (see `Assigned`).
    `data` is a view of the connection's buffer: valid until the connection receives the next response. `aborted` is
    None without read_committed. `damaged` has the errors of batches with wrong offsets, by position in `data`.
    """

    topic: str
    partition: int
    run: int
    offset: int
    following: int
    leader_epoch: int
    data: memoryview
    aborted: AbortedTransactions | None
    damaged: Mapping[int, DecodeError]

    def __len__(self) -> int:
        """Bytes of the batches."""
        return len(self.data)

    def named(self, error: DecodeError) -> DecodeError:
        """The decoding error with the partition's name and offset."""
        kind = CorruptBatchError if isinstance(error, CorruptBatchError) else DecodeError
        return kind(f"{self.topic}-{self.partition} after offset {self.offset - 1}: {error}")
