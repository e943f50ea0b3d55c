"""A column of values without a schema, such as texts or numbers of fixed size, → Arrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pyarrow as pa

from spark_klog.records.contract import BinaryColumn, HeadersColumn
from spark_klog.schemas.column_format import ColumnDecoder
from spark_klog.schemas.rows import BadRow, Decoded, cut


def plain_decoder(arrow: str, read: Callable[[bytes], Any]) -> ColumnDecoder:
    """A decoder to the Arrow type of that name; a value that `read` refuses, by any exception, is a bad row."""
    kind = pa.type_for_alias(arrow)

    def decode(values: pa.Array | BinaryColumn, headers: pa.Array | HeadersColumn | None) -> Decoded:
        rows: list[Any] = []
        bad: list[BadRow] = []
        for row, data in enumerate(values.values() if isinstance(values, BinaryColumn) else values.to_pylist()):
            value = None
            if data is not None:
                try:
                    value = read(data)
                except Exception as error:
                    bad.append(BadRow(row, cut(f"{type(error).__name__}: {error}")))
            rows.append(str(value) if isinstance(value, UUID) else value)
        return Decoded(pa.array(rows, kind), bad)

    return ColumnDecoder(kind, False, decode)
