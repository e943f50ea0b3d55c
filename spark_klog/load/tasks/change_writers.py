"""Write the changes of a range of records into files that wait for the run's commit, in its folder `changes`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from spark_klog.load.journal.model import FileEntry, Range, changes_path, file_path
from spark_klog.tables.change_files import ChangeWriter
from spark_klog.tables.changes import ChangeFormat


class ChangeRangeWriter:
    """As `RangeWriter`, of records that are changes: a file has the last change of each key among its records.

    The `records` of a file's entry are those of the log, also the ones that it has no changes of.
    """

    def __init__(
        self,
        item: Range,
        change_format: ChangeFormat,
        scratch: Path,
        put: Callable[[Path, FileEntry], None],
        token: str,
        run: int,
    ) -> None:
        self._range, self._format, self._put, self._token, self._run = item, change_format, put, token, run
        self._writer = ChangeWriter(change_format.key, scratch, self._complete)
        self._first, self._last = item.start, item.start - 1
        self._records = 0
        self._times: list[int] = []

    def add(self, batch: pa.RecordBatch, times: NDArray[np.int64], _layout_times: NDArray[np.int64]) -> None:
        """Add records in the order of offsets; `times` are their timestamps in microseconds."""
        self._records += len(batch)
        self._last = batch["offset"][len(batch) - 1].as_py()
        self._times += [int(times.min()) // 1000, int(times.max()) // 1000]
        self._writer.add(self._format.changes(batch, self._range.incarnation))

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
