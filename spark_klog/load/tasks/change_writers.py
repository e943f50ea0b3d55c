"""Write the changes of a range of records into files that wait for the run's commit, in its folder `changes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_klog.load.journal.model import FileEntry, Range, changes_path, file_path
from spark_klog.tables.change_files import ChangeWriter


class ChangeRangeWriter:
    """As `RangeWriter`, for changes: a file has the last change of each key among its records.

    The `records` of a file's entry are those of the log, also the ones that it has no changes of.
    """

    def __init__(
        self,
        item: Range,
        key: Sequence[str],
        scratch: Path,
        put: Callable[[Path, FileEntry], None],
        token: str,
        run: int,
    ) -> None:
        self._range, self._put, self._token, self._run = item, put, token, run
        self._writer = ChangeWriter(key, scratch, self._complete)
        self._first, self._last = item.start, item.start - 1
        self._records = 0
        self._times: list[int] = []

    def add(self, changes: pa.RecordBatch, times: NDArray[np.int64], last: int) -> None:
        """Add the changes of records up to offset `last`, whose `times` are their timestamps in microseconds."""
        self._records += len(times)
        self._last = last
        self._times += [int(times.min()) // 1000, int(times.max()) // 1000]
        self._writer.add(changes)

    def finish(self, until: int) -> None:
        """Complete the last file; the range has been read up to `until`."""
        self._last = until - 1
        self._writer.finish()

    def _complete(self, source: Path, _changes: int) -> None:
        item = self._range
        name = file_path(item, self._first, self._last, "", self._token, "parquet").rpartition("/")[2]
        low, high = min(self._times), max(self._times)
        place = item.topic, item.partition, self._first, self._last
        size = source.stat().st_size
        self._put(source, FileEntry(changes_path(self._run, name), *place, self._records, size, low, high))
        self._first, self._records, self._times = self._last + 1, 0, []
