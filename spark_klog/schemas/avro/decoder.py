"""A column of Avro records → Arrow, each row by the schema that wrote it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import pyarrow as pa

from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.arrow_columns import Buffers, Column, array_of, binary_parts, layout_of
from spark_klog.schemas.avro.columns import Types, columns_of
from spark_klog.schemas.avro.opcodes import VERSION, Reason
from spark_klog.schemas.avro.program import Program, compile_plan
from spark_klog.schemas.avro.resolution import field_pairs, resolve
from spark_klog.schemas.avro.schema import AvroSchema
from spark_klog.schemas.native_kernel import native_kernel
from spark_klog.schemas.rows import BadRow, Decoded, FieldPair
from spark_klog.wire.primitives import Buffer

_NATIVE = "spark_klog.schemas.avro._avro"


class ColumnBuilders(Protocol):
    """Builders of a reader's columns; `_avro.ColumnBuilders` says more."""

    def decode(
        self,
        programs: Sequence[Program],
        which: Buffer | None,
        data: Buffer,
        offsets: Buffer,
        validity: Buffer | None,
        first: int,
        count: int,
        starts: Buffer | None,
        start: int,
    ) -> list[tuple[int, int, int, int]]:
        """Append rows; return (row, program, reason, position) of those that do not decode."""

    def finish(self) -> list[Buffers]:
        """The buffers of each column: validity, nulls, offsets, data; the builders are empty then."""


class AvroDecoder:
    """Decodes columns of Avro records into one Arrow type, that of the reader's schema.

    `types` are "spark" (what Spark's from_avro has) or "arrow"; the table is in columns.py. `type` is the Arrow type.
    One thread at a time decodes by a decoder; the GIL is free while it decodes.

    `SchemaError` if the schema has no such type, `ConfigError` without the native kernel.
    """

    def __init__(self, reader: AvroSchema, types: Types = "spark") -> None:
        self.reader = reader
        self._column = columns_of(reader, types)
        self._layout = layout_of(self._column)
        self.type: pa.DataType = self._column.type
        self._builders = _builders(self._column, self._layout)

    def another(self) -> AvroDecoder:
        """See `codec.Decoder`."""
        made = copy(self)
        made._builders = _builders(self._column, self._layout)
        return made

    def program(self, writer: AvroSchema, rest: bytes | None = None) -> Program:
        """How rows of `writer` are read. Make it once for each schema and keep it.

        Records with a schema's id (`rest` is not None, and says no more in Avro) are as Confluent's serializers write
        them: bytes of the schema "bytes" are all of the record, without their length.
        `SchemaError` if no value of the writer's schema can be read by the reader's.
        """
        is_raw = rest is not None and writer.is_plain_bytes
        return compile_plan(resolve(writer, self.reader), self._column, is_raw=is_raw)

    def field_pairs(self, writer: AvroSchema, rest: bytes | None, path: tuple[str, ...]) -> list[FieldPair]:
        """See `codec.Decoder`."""
        return field_pairs(resolve(writer, self.reader), path)

    def decode(
        self,
        values: pa.Array | BinaryColumn,
        programs: Sequence[Program],
        which: Buffer | None = None,
        starts: int | Buffer = 0,
    ) -> Decoded:
        """Decode a binary column.

        `which` (INT32 a row) is the program of each row, -1 for a row that is to be null; without it all rows have the
        first. `starts` is where the Avro record begins in a value, in bytes: one number, or INT32 a row.
        A row that does not decode is null, and in the result's `bad`. `MemoryError`.
        """
        offsets, data, validity, first, count = binary_parts(values, "Avro")
        by_row = None if isinstance(starts, int) else starts
        start = starts if isinstance(starts, int) else 0
        if not programs:
            which = memoryview(array("i", [-1]) * count)
        builders = self._builders
        try:
            failures = builders.decode(programs, which, data, offsets, validity, first, count, by_row, start)
            result = array_of(self._column, builders.finish(), count)
        except BaseException:
            self._builders = _builders(self._column, self._layout)  # these may hold rows of this call
            raise
        bad = [BadRow(row, programs[number].describe(Reason(why), at)) for row, number, why, at in failures]
        return Decoded(result, bad)


def _builders(_: Column, layout: array[int]) -> ColumnBuilders:
    """Builders of a column and those in it, whose layout is `layout`."""
    builders: ColumnBuilders = avro_kernel().ColumnBuilders(layout)
    return builders


def avro_kernel() -> Any:
    """See `native_kernel`."""
    return native_kernel(_NATIVE, VERSION, "Avro")
