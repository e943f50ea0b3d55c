"""An Arrow column → Protobuf records."""

from __future__ import annotations

import pyarrow as pa

from spark_klog.errors import EncodeError
from spark_klog.schemas.arrow_columns import nullable_type
from spark_klog.schemas.protobuf.decoder import protobuf_kernel
from spark_klog.schemas.protobuf.google_writer import GoogleWriter
from spark_klog.schemas.protobuf.message_indexes import write_indexes
from spark_klog.schemas.protobuf.schema import ProtobufSchema
from spark_klog.schemas.protobuf.tables import Reason
from spark_klog.schemas.protobuf.write_tables import WriteTables
from spark_klog.schemas.protobuf.writing import plan_writing


class ProtobufEncoder:
    """Encodes Arrow columns of one type as Protobuf records of one schema; see writing.py for what fits.

    `SchemaError` names the field whose type does not fit, that is missing, or that the message does not have.
    """

    def __init__(self, schema: ProtobufSchema, kind: pa.DataType) -> None:
        self.schema = schema
        self.type = kind
        self._plan = plan_writing(schema.message, kind)
        self._indexes = write_indexes(schema.indexes)
        self._kernel = protobuf_kernel()
        self._tables = WriteTables(self._plan)
        self._rows = GoogleWriter(self._plan)

    def encode(self, values: pa.Array, prefix: bytes = b"") -> pa.Array:
        """The binary column of the records; a null of `values` is a null.

        Each record stands after `prefix`, if there is one, and the indexes of its message. `EncodeError` names the row
        and field that do not fit: a null whose field has none, or what an enum does not have.
        """
        wanted = nullable_type(self._plan.type)
        if values.type != wanted:
            try:
                values = values.cast(wanted)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise EncodeError(f"{values.type} can't be written as {self.schema.name}: {error}") from None
        before = prefix and prefix + self._indexes
        if self._kernel is None:
            return pa.array(self._rows.encode(values, before), pa.binary())
        written = self._kernel.encode(self._tables, self._tables.inputs(values), len(values), before)
        if len(written) == 3:
            row, reason, field = written
            raise EncodeError(f"row {row}: {self._tables.describe(Reason(reason), field)}")
        offsets, data = map(pa.py_buffer, written)
        validity = values.is_valid().buffers()[1] if values.null_count else None
        return pa.Array.from_buffers(pa.binary(), len(values), [validity, offsets, data], values.null_count)
