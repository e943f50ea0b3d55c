"""An Arrow column → Avro records, in one pass over its rows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.errors import EncodeError
from spark_klog.schemas.arrow_columns import input_of, nullable_type
from spark_klog.schemas.avro.decoder import avro_kernel
from spark_klog.schemas.avro.opcodes import Reason
from spark_klog.schemas.avro.program import WriteProgram, compile_writing
from spark_klog.schemas.avro.schema import AvroSchema
from spark_klog.schemas.avro.writing import plan_writing
from spark_klog.wire.primitives import Buffer


class AvroEncoder:
    """Encodes Arrow columns of one type as Avro records of one schema; see writing.py for what fits.

    `SchemaError` names the field whose type does not fit, that is missing, or that the schema does not have.
    `ConfigError` without the native kernel.
    """

    def __init__(self, schema: AvroSchema, kind: pa.DataType) -> None:
        self.schema = schema
        self.type = kind
        self._program = compile_writing(plan_writing(schema, kind))
        self._kernel = avro_kernel()

    def encode(self, values: pa.Array, prefix: bytes = b"") -> pa.Array:
        """The binary column of the records, each after `prefix`; a null of `values` is a null, whatever the schema.

        After a prefix, which has a schema's id, bytes of the schema "bytes" are written without their length, as
        Confluent's serializers do.
        `EncodeError` names the row and field that do not fit the schema: null, or a symbol that an enum does not have.
        """
        wanted = self._program.plan.type
        if values.type != wanted:
            try:
                values = values.cast(nullable_type(wanted))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise EncodeError(f"{values.type} can't be written as {self.schema}: {error}") from None
        if prefix and self.schema.is_plain_bytes:
            return pc.binary_join_element_wise(prefix, values.cast(pa.binary()), b"")
        offsets, data = map(pa.py_buffer, self._written(values, prefix))
        validity = values.is_valid().buffers()[1] if values.null_count else None
        return pa.Array.from_buffers(pa.binary(), len(values), [validity, offsets, data], values.null_count)

    def _written(self, values: pa.Array, prefix: bytes) -> tuple[Buffer, Buffer]:
        """The offsets and data of the records."""
        inputs = [input_of(array) for array in _arrays(self._program, values)]
        written = self._kernel.encode(self._program, inputs, len(values), prefix)
        if len(written) == 3:
            row, reason, position = written
            raise EncodeError(f"row {row}: {self._program.describe(Reason(reason), position)}")
        offsets, data = written
        return offsets, data


def _arrays(program: WriteProgram, values: pa.Array) -> list[pa.Array]:
    """The array of each of the program's slots."""
    arrays: list[pa.Array] = []
    for parent, number in program.slots:
        if parent < 0:
            array = values
        else:
            above = arrays[parent]
            if pa.types.is_struct(above.type):
                array = above.field(number)
            elif pa.types.is_map(above.type):
                array = above.items if number else above.keys
            else:
                array = above.values
        arrays.append(array)
    return arrays
