"""An Arrow column → JSON records: the text of each column at once, joined column by column, without a Python object for
a row.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.errors import EncodeError
from spark_klog.schemas.json_schema.row_values import Misfit
from spark_klog.schemas.json_schema.schema import JsonSchema
from spark_klog.schemas.json_schema.texts import plan_texts
from spark_klog.schemas.json_schema.validation import Validator
from spark_klog.schemas.json_schema.writing import plan_writing


class JsonSchemaEncoder:
    """Encodes Arrow columns of one type as JSON records of one schema; see writing.py for what fits.

    If it `validates`, each record is checked in full against the schema, by jsonschema. `SchemaError` names the field
    whose type does not fit, that is missing, or that the schema does not have.
    """

    def __init__(self, schema: JsonSchema, kind: pa.DataType, *, validates: bool = False) -> None:
        self.schema = schema
        self.type = kind
        self._plan = plan_writing(schema.column, kind)
        self._validator = Validator(schema) if validates else None

    def encode(self, values: pa.Array, prefix: bytes = b"") -> pa.Array:
        """The binary column of the records, each after `prefix`; a null of `values` is a null, whatever the schema.

        `EncodeError` names the row and field that do not fit the schema: null, NaN, no symbol of an enum.
        """
        try:
            text = self._texts(values)
        except Misfit as misfit:
            row = self._first_bad(values)
            raise EncodeError(f"row {row}: {misfit}") from None
        if self._validator is not None:
            for row, record in enumerate(text.to_pylist()):
                try:
                    if record is not None:
                        self._validator.check(record)
                except ValueError as error:
                    raise EncodeError(f"row {row}: {error}") from None
        return pc.binary_join_element_wise(prefix, text, b"") if prefix else text

    def _texts(self, values: pa.Array) -> pa.Array:
        texts = plan_texts(self._plan, values, values.null_count).cast(pa.binary())
        return pc.if_else(values.is_valid(), texts, pa.scalar(None, pa.binary())) if values.null_count else texts

    def _first_bad(self, values: pa.Array) -> int:
        """The first row that does not fit; one is there."""
        begin, end = 0, len(values)
        while end - begin > 1:
            middle = (begin + end) // 2
            try:
                self._texts(values[begin:middle])
            except Misfit:
                end = middle
            else:
                begin = middle
        return begin
