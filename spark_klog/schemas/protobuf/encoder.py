"""An Arrow column → Protobuf records."""

from __future__ import annotations

import pyarrow as pa

from spark_klog.errors import EncodeError
from spark_klog.schemas.protobuf.google_writer import GoogleWriter
from spark_klog.schemas.protobuf.message_indexes import write_indexes
from spark_klog.schemas.protobuf.schema import ProtobufSchema
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
        self._rows = GoogleWriter(self._plan)

    def encode(self, values: pa.Array, prefix: bytes = b"") -> pa.Array:
        """The binary column of the records; a null of `values` is a null.

        Each record stands after `prefix`, if there is one, and the indexes of its message. `EncodeError` names the row
        and field that do not fit: a null whose field has none, or what an enum does not have.
        """
        wanted = _nullable(self._plan.type)
        if values.type != wanted:
            try:
                values = values.cast(wanted)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise EncodeError(f"{values.type} can't be written as {self.schema.name}: {error}") from None
        return pa.array(self._rows.encode(values, prefix and prefix + self._indexes), pa.binary())


def _nullable(kind: pa.DataType) -> pa.DataType:
    """The type with nullable fields: below a null there are nulls, which pyarrow refuses in other fields."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _nullable(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, pa.field("value", _nullable(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _nullable(kind.value_type)))
    return kind
