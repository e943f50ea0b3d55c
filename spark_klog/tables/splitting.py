"""Rows of a load, dealt out to the partitions of its table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.columns.schema import is_text
from spark_klog.tables.partitions import Term, column_at, delta_folder, distinct, grouped, row_text
from spark_klog.tables.table import has_field_ids

if TYPE_CHECKING:
    from spark_klog.tables.iceberg_partitions import TermValues

#: Characters that names of Iceberg's folders have as they are, and how many of them are there.
_ODD, _SHOWN = re.compile(r"[^A-Za-z0-9.-]"), 40


class Splitter:
    """Deals rows out to the partitions of a table with these columns: one whose columns have ids is Iceberg's."""

    def __init__(self, terms: Sequence[Term], columns: pa.Schema) -> None:
        self._terms = terms
        roots = dict.fromkeys(_root(term.column, columns) for term in terms)
        #: The columns that the rows need.
        self.columns = pa.schema([columns.field(name) for name in roots])
        self._of_iceberg: TermValues | None = None
        if has_field_ids(columns):
            from spark_klog.tables.iceberg_partitions import TermValues

            self._of_iceberg = TermValues(terms, self.columns)

    def parts(self, rows: pa.RecordBatch) -> Iterator[tuple[str, NDArray[np.int64], str]]:
        """Of each partition a name for its folder, the numbers of its rows, and the metadata of its files."""
        columns = [column_at(rows, term.column) for term in self._terms]
        if self._of_iceberg is not None:
            parts = self._of_iceberg.of(columns)
        else:
            columns = [_without_empty(column) for column in columns]
            parts = [distinct(column) for column in columns]
        batch = pa.RecordBatch.from_pydict(
            {term.column: column for term, column in zip(self._terms, columns, strict=True)}
        )
        for values, numbers in grouped(parts, len(rows)):
            row = row_text(batch.take(pa.array(numbers[:1])))
            if self._of_iceberg is not None:
                name = _ODD.sub("_", ".".join(map(str, values)))[:_SHOWN]
                digest = sha256(repr(values).encode()).hexdigest()[:16]
                yield f"{digest}-{name}", numbers, row
            else:
                named = zip(self._terms, values, columns, strict=True)
                folders = (delta_folder(term.column, value, column.type) for term, value, column in named)
                yield "/".join(folders), numbers, row


def _without_empty(column: pa.Array) -> pa.Array:
    """Texts of a Delta partition, in which an empty one is null."""
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column) if is_text(column.type) else column


def _root(path: str, columns: pa.Schema) -> str:
    return path if path in columns.names else path.partition(".")[0]
