"""An Arrow column → Protobuf records."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa

from spark_klog.errors import EncodeError
from spark_klog.schemas.arrow_columns import Input, input_of, nullable_type
from spark_klog.schemas.protobuf.columns import MESSAGE, UINT32, unknown_name
from spark_klog.schemas.protobuf.decoder import protobuf_kernel
from spark_klog.schemas.protobuf.message_indexes import write_indexes
from spark_klog.schemas.protobuf.schema import ProtobufSchema
from spark_klog.schemas.protobuf.tables import SHAPES, TEXTS, WIRES, Op, Reason, op_of
from spark_klog.schemas.protobuf.writing import WriteField, WriteMessage, plan_writing


class ProtobufEncoder:
    """Encodes Arrow columns of one type as Protobuf records of one schema; see writing.py for what fits.

    `SchemaError` names the field whose type does not fit, that is missing, or that the message does not have.
    `ConfigError` without the native kernel.
    """

    def __init__(self, schema: ProtobufSchema, kind: pa.DataType) -> None:
        self.schema = schema
        self.type = kind
        self._plan = plan_writing(schema.message, kind)
        self._indexes = write_indexes(schema.indexes)
        self._kernel = protobuf_kernel()
        self._tables = _Tables(self._plan)

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
        return self._written(values, prefix and prefix + self._indexes)

    def _written(self, values: pa.Array, before: bytes) -> pa.Array:
        written = self._kernel.encode(self._tables, self._tables.inputs(values), len(values), before)
        if len(written) == 3:
            row, reason, field = written
            raise EncodeError(f"row {row}: {self._tables.describe(Reason(reason), field)}")
        offsets, data = map(pa.py_buffer, written)
        validity = values.is_valid().buffers()[1] if values.null_count else None
        return pa.Array.from_buffers(pa.binary(), len(values), [validity, offsets, data], values.null_count)


class _Tables:
    """A plan as the native kernel reads it: tables of INT32, see `_protobuf_encode.pxi`.

    Slots are Arrow arrays: the rows, then those of each message's fields.
    """

    def __init__(self, plan: WriteMessage) -> None:
        self._plan = plan
        self.messages = array("i")
        self.fields = array("i")
        self.enums = array("i")
        self.constants = bytearray()
        #: By the number of a field, for errors.
        self.paths: list[str] = []
        self._message_rows: list[tuple[int, int]] = []
        self._field_rows: list[list[int]] = []
        self._next_slot = 1
        self._message(plan, is_entry=False)
        for pair in self._message_rows:
            self.messages.extend(pair)
        for row in self._field_rows:
            self.fields.extend(row)

    def describe(self, reason: Reason, position: int) -> str:
        where = f"field {self.paths[position]}: " if position >= 0 else ""
        return f"{where}{TEXTS[reason]}"

    def inputs(self, values: pa.Array) -> list[Input]:
        """The arrays of the slots."""
        result = [input_of(values)]
        _add(self._plan, [values.field(index) for index in range(values.type.num_fields)], result)
        return result

    def _message(self, plan: WriteMessage, *, is_entry: bool) -> int:
        number = len(self._message_rows)
        first = len(self._field_rows)
        self._message_rows.append((first, len(plan.fields)))
        self._field_rows.extend([] for _ in plan.fields)
        self.paths.extend(field.path for field in plan.fields)
        last: dict[str, int] = {}
        for index, written in enumerate(plan.fields, first):
            oneof = written.field.containing_oneof
            before = -1 if oneof is None else last.get(oneof.name, -1)
            if oneof is not None:
                last[oneof.name] = index
            self._field_rows[index] = [*self._field(written, is_entry), before]
        return number

    def _field(self, written: WriteField, is_entry: bool) -> list[int]:
        field = written.field
        is_time = written.message is None and field.type == MESSAGE
        op = op_of(field, is_time)
        slot = self._next_slot
        self._next_slot += 2 if written.shape == "list" else 1
        message = -1 if written.message is None else self._message(written.message, is_entry=written.shape == "map")
        enum = self._enum(field.enum_type) if op == Op.ENUM else (0, 0, 0, -1)
        has_presence = field.has_presence or is_time or written.message is not None
        return [
            *(field.number, op, WIRES[op], SHAPES[written.shape], slot, message),
            has_presence and not field.is_required and not is_entry,
            *(not has_presence and not is_entry, field.is_packed, field.type == UINT32, *enum),
        ]

    def _enum(self, enum: Any) -> tuple[int, int, int, int]:
        first = len(self.enums) // 3
        for value in enum.values:
            self.enums.extend((value.number, *self._constant(value.name.encode())))
        unknown = (0, -1) if enum.is_closed else self._constant(unknown_name(enum, 0)[:-1].encode())
        return first, len(enum.values), *unknown

    def _constant(self, data: bytes) -> tuple[int, int]:
        place = len(self.constants), len(data)
        self.constants += data
        return place


def _add(plan: WriteMessage, columns: list[pa.Array], result: list[Input]) -> None:
    """Add the arrays of a message's fields, in the order of the slots."""
    for field in plan.fields:
        column = columns[field.index]
        result.append(input_of(column))
        inner = column
        if field.shape == "map":
            assert field.message is not None
            _add(field.message, [column.keys, column.items], result)
            continue
        if field.shape == "list":
            inner = column.values
            result.append(input_of(inner))
        if field.message is not None:
            _add(field.message, [inner.field(index) for index in range(inner.type.num_fields)], result)
