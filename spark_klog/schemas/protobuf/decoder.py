"""A column of Protobuf records → Arrow, each row by the message that it is of."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.arrow_columns import array_of, binary_parts, layout_of
from spark_klog.schemas.native_kernel import native_kernel
from spark_klog.schemas.protobuf.columns import columns_of
from spark_klog.schemas.protobuf.google_rows import GoogleRows
from spark_klog.schemas.protobuf.map_entries import has_maps, with_last_entries
from spark_klog.schemas.protobuf.message_indexes import read_indexes
from spark_klog.schemas.protobuf.resolution import check_readable
from spark_klog.schemas.protobuf.schema import ProtobufSchema
from spark_klog.schemas.protobuf.tables import VERSION, MessageTables, Reason
from spark_klog.schemas.rows import BadRow, Decoded
from spark_klog.wire.primitives import Buffer

#: Bytes that are no message: there is no field 0.
_NO_MESSAGE = b"\0"
_NATIVE = "spark_klog.schemas.protobuf._protobuf"


class ProtobufDecoder:
    """Decodes columns of Protobuf records into one Arrow type, that of the reader's message; see columns.py.

    One thread at a time uses a decoder. `SchemaError` if the message has no such type.
    """

    def __init__(self, reader: ProtobufSchema) -> None:
        self.reader = reader
        columns = columns_of(reader.message)
        self.type: pa.DataType = columns.type
        self._kernel = protobuf_kernel()
        self._tables = MessageTables(columns)
        self._builders = self._made_builders()
        self._has_maps = has_maps(self.type)
        self._rows = GoogleRows(columns)

    def program(self, writer: ProtobufSchema, rest: bytes | None = None) -> ProtobufSchema:
        """Check that records of `writer` can be read. `rest` are the indexes of their message, none: the writer's.

        `SchemaError` if they can't, or if it is another message.
        """
        indexes = None
        if rest:
            indexes, end = read_indexes(rest)
            if end != len(rest):
                raise SchemaError(f"{len(rest) - end} bytes are left over after the message indexes")
        check_readable(writer, self.reader, indexes)
        return writer  # records of all writers are decoded in one way: by the numbers of the reader's fields

    def decode(
        self,
        values: pa.Array | BinaryColumn,
        programs: Sequence[ProtobufSchema],
        which: Buffer | None = None,
        starts: int | Buffer = 0,
    ) -> Decoded:
        """Decode a binary column, see `codec.Decoder`; a row that does not decode is null, and in `bad`."""
        offsets, data, validity, first, count = binary_parts(values, "Protobuf")
        if not programs:
            which = memoryview(array("i", [-1]) * count)
        by_row = None if isinstance(starts, int) else starts
        start = starts if isinstance(starts, int) else 0
        if self._builders is None:
            return self._rows.decode(_records(offsets, data, validity, first, count, which, by_row, start))
        try:
            failures = self._builders.decode(which, data, offsets, validity, first, count, by_row, start)
            made = array_of(self._tables.column, self._builders.finish(), count)
        except BaseException:
            self._builders = self._made_builders()  # these may hold rows of this call
            raise
        bad = [BadRow(row, self._tables.describe(Reason(reason), field)) for row, reason, field in failures]
        return Decoded(with_last_entries(made) if self._has_maps else made, bad)

    def _made_builders(self) -> Any:
        return (
            None if self._kernel is None else self._kernel.ColumnBuilders(layout_of(self._tables.column), self._tables)
        )


def _records(
    offsets: Buffer,
    data: Buffer,
    validity: Buffer | None,
    first: int,
    count: int,
    which: Buffer | None,
    starts: Buffer | None,
    start: int,
) -> Iterator[bytes | None]:
    """The records of rows, None for those that are to be null."""
    ends = np.frombuffer(offsets, np.int32, count + 1, 4 * first).tolist()
    content = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    valid = np.ones(count, np.bool_)
    if validity is not None:
        bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
        valid = bits[first : first + count] != 0
    if which is not None:
        valid = valid & (np.frombuffer(which, np.int32, count) >= 0)
    begins = [start] * count if starts is None else np.frombuffer(starts, np.int32, count).tolist()
    for row, is_valid in enumerate(valid.tolist()):
        begin = ends[row] + begins[row]
        record = bytes(content[begin : ends[row + 1]]) if begin <= ends[row + 1] else _NO_MESSAGE
        yield record if is_valid else None


def protobuf_kernel() -> Any:
    """The native kernel, None if there is none; see `native_kernel`."""
    return native_kernel(_NATIVE, VERSION, "Protobuf", "rows are decoded by google.protobuf, some thirty times slower")
