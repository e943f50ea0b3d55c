"""Read the files of a load in the order of offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from spark_klog.directories.trees.addresses import filesystem_at, local_path
from spark_klog.errors import LoadError
from spark_klog.load.journal.committed import CommittedFile
from spark_klog.restore.plan import Part

_COLUMNS = ("key", "value", "partition", "offset", "timestamp", "headers")
#: Rows of a batch, and offsets that are read at once of files that have to be merged.
_ROWS = 65_536


def read_part(output: str, part: Part, start: int) -> Iterator[tuple[pa.Table, int]]:
    """Tables of the records from offset `start` on, each with the offset after it; `LoadError` for a damaged file."""
    for group in part.files:
        if group[0].last < start:
            continue
        try:
            read = _one_file if len(group) == 1 else _merged
            for table in read(_dataset(output, group), group, start):
                if len(table):
                    yield table, table["offset"][-1].as_py() + 1
        except (OSError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise LoadError(
                f"{group[0].path} can't be read ({reason}): `klog load status` shows what is missing"
            ) from None


def _dataset(output: str, group: Sequence[CommittedFile]) -> Any:
    format_name = "arrow" if ".arrow" in group[0].path else "parquet"
    if local_path(output) is not None:
        return ds.dataset([item.path for item in group], format=format_name)
    filesystem, _ = filesystem_at(output)
    paths = [item.path.partition("://")[2] for item in group]
    return ds.dataset(paths, format=format_name, filesystem=filesystem)


def _one_file(dataset: Any, group: Sequence[CommittedFile], start: int) -> Iterator[pa.Table]:
    scanner = dataset.scanner(
        columns=list(_COLUMNS),
        filter=ds.field("offset") >= start,
        batch_size=_ROWS,
        batch_readahead=1,
        use_threads=False,
    )
    for batch in scanner.to_batches():
        yield pa.Table.from_batches([batch])


def _merged(dataset: Any, group: Sequence[CommittedFile], start: int) -> Iterator[pa.Table]:
    """Files of the same offsets, by the time of their records: a window of offsets at a time."""
    last = max(item.last for item in group)
    for first in range(max(start, group[0].first), last + 1, _ROWS):
        offset = ds.field("offset")
        window = (offset >= first) & (offset < first + _ROWS)
        yield dataset.to_table(columns=list(_COLUMNS), filter=window).sort_by("offset")
