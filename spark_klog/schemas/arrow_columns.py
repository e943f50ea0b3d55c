"""Columns of rows as native kernels build them, numbered in preorder, and the Arrow arrays that come of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field as dataclass_field
from enum import IntEnum

import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn
from spark_klog.wire.primitives import Buffer

#: Of a column: validity, number of nulls, offsets, data.
Buffers = tuple[bytes | None, int, Buffer, Buffer]
#: Of an array: data, offsets, validity, and its offset.
Input = tuple[pa.Buffer | None, pa.Buffer | None, pa.Buffer | None, int]


class Kind(IntEnum):
    """How a column's values are kept."""

    #: No values: Arrow's null.
    NOTHING = 0
    #: `width` bytes each.
    FIXED = 1
    #: A byte each, a bit in Arrow.
    BOOLEAN = 2
    #: Ends of values, and bytes.
    VARIABLE = 3
    #: Ends of lists, and the column of the items.
    LIST = 4
    #: Columns of the fields.
    STRUCT = 5


@dataclass
class Column:
    """A column: its slot, and those of the columns in it, [slot, end) in preorder."""

    slot: int
    kind: Kind
    type: pa.DataType
    #: Bytes of a value, if all have the same.
    width: int = 0
    nullable: bool = False
    #: Fields of a struct, the items of a list, the entries of a map.
    children: list[Column] = dataclass_field(default_factory=list)
    end: int = 0
    #: Of a union that is a struct of members: the child of each branch, -1 for null.
    members: tuple[int, ...] | None = None
    #: Of an enum that is a dictionary.
    symbols: tuple[str, ...] | None = None

    def tree(self) -> Iterator[Column]:
        """This column and all in it, by slot."""
        yield self
        for child in self.children:
            yield from child.tree()


def layout_of(column: Column) -> array[int]:
    """What `Builders` of a kernel are made of: kind, width, end and whether it has nulls, of each column."""
    layout = array("i")
    for below in column.tree():
        is_nullable = below.nullable and below.kind != Kind.NOTHING
        layout.extend((below.kind, below.width, below.end, is_nullable))
    return layout


def arrow_field(name: str, column: Column) -> pa.Field:
    """The column as a field of a struct, list or map."""
    return pa.field(name, column.type, column.nullable)


def binary_parts(values: pa.Array | BinaryColumn, format_name: str) -> tuple[Buffer, Buffer, Buffer | None, int, int]:
    """Offsets, data, validity, first row and number of rows; `SchemaError` of another column than a binary one."""
    if isinstance(values, BinaryColumn):
        count = max(memoryview(values.offsets).nbytes // 4 - 1, 0)
        return values.offsets or bytes(4), values.data, values.validity, 0, count
    if pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type):
        values = values.cast(pa.binary())
    if not (pa.types.is_binary(values.type) or pa.types.is_string(values.type)):
        raise SchemaError(f"{format_name} records are a binary column, not {values.type}: cast it")
    if not len(values):
        return bytes(4), b"", None, 0, 0
    validity, offsets, data = values.buffers()
    return offsets, b"" if data is None else data, validity, values.offset, len(values)


def array_of(column: Column, buffers: list[Buffers], length: int) -> pa.Array:
    """The Arrow array of a column, of the buffers by slot."""
    kind = column.type
    if column.kind == Kind.NOTHING:
        return pa.nulls(length)
    validity, nulls, offsets, data = buffers[column.slot]
    valid = None if validity is None else pa.py_buffer(validity)
    if column.kind == Kind.STRUCT:
        children = [array_of(child, buffers, length) for child in column.children]
        return pa.Array.from_buffers(kind, length, [valid], nulls, children=children)
    if column.kind == Kind.LIST:
        items = memoryview(offsets).cast("B").cast("i")[length]
        children = [array_of(column.children[0], buffers, items)]
        return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(offsets)], nulls, children=children)
    if column.kind == Kind.VARIABLE:
        return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(offsets), pa.py_buffer(data)], nulls)
    if column.symbols is not None:
        indices = pa.Array.from_buffers(pa.int32(), length, [valid, pa.py_buffer(data)], nulls)
        return pa.DictionaryArray.from_arrays(indices, pa.array(column.symbols, pa.string()))
    return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(data)], nulls)


def nullable_type(kind: pa.DataType) -> pa.DataType:
    """The type with nullable fields: below a null there are nulls, which pyarrow refuses in other fields."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, nullable_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, pa.field("value", nullable_type(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, nullable_type(kind.value_type)))
    return kind


def input_of(array: pa.Array) -> Input:
    """Data, offsets, validity and offset of an array."""
    kind = array.type
    buffers = array.buffers()
    validity = buffers[0] if array.null_count else None
    if pa.types.is_struct(kind) or pa.types.is_null(kind):
        return None, None, validity, array.offset
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return None, buffers[1], validity, array.offset
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return buffers[2], buffers[1], validity, array.offset
    return buffers[1], None, validity, array.offset
