"""A column of Protobuf records → Arrow, each row by the message that it is of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.protobuf.columns import columns_of
from spark_klog.schemas.protobuf.google_rows import GoogleRows
from spark_klog.schemas.protobuf.message_indexes import read_indexes
from spark_klog.schemas.protobuf.resolution import check_readable
from spark_klog.schemas.protobuf.schema import ProtobufSchema
from spark_klog.schemas.rows import Decoded
from spark_klog.wire.primitives import Buffer


class ProtobufDecoder:
    """Decodes columns of Protobuf records into one Arrow type, that of the reader's message; see columns.py.

    One thread at a time uses a decoder. `SchemaError` if the message has no such type.
    """

    def __init__(self, reader: ProtobufSchema) -> None:
        self.reader = reader
        columns = columns_of(reader.message)
        self.type: pa.DataType = columns.type
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
        count = len(values) if isinstance(values, pa.Array) else memoryview(values.offsets).nbytes // 4 - 1
        read: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
        if which is not None:
            read = np.frombuffer(which, np.int32, count) >= 0
        elif not programs:
            read = np.zeros(count, np.bool_)
        begins = [starts] * count if isinstance(starts, int) else np.frombuffer(starts, np.int32, count).tolist()
        return self._rows.decode(
            value[begin:] if value is not None and (read is None or read[row]) else None
            for row, (value, begin) in enumerate(zip(_values(values), begins, strict=True))
        )


def _values(values: pa.Array | BinaryColumn) -> Iterator[bytes | None]:
    if isinstance(values, BinaryColumn):
        return iter(values.values())
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        raise SchemaError(f"Protobuf records are a binary column, not {values.type}: cast it")
    return iter(values.to_pylist())
