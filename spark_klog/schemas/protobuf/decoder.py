"""A column of Protobuf records → Arrow, each row by the message that it is of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.records.contract import BinaryColumn
from spark_klog.schemas.arrow_columns import array_of, binary_parts, layout_of
from spark_klog.schemas.native_kernel import native_kernel
from spark_klog.schemas.protobuf.columns import (
    BOOL,
    BYTES,
    DOUBLE,
    ENUM,
    FIXED32,
    FIXED64,
    FLOAT,
    GROUP,
    INT32,
    INT64,
    MESSAGE,
    SFIXED32,
    SFIXED64,
    SINT32,
    SINT64,
    STRING,
    TYPE_NAMES,
    UINT32,
    UINT64,
    columns_of,
    is_nullable,
)
from spark_klog.schemas.protobuf.message_indexes import read_indexes
from spark_klog.schemas.protobuf.schema import ProtobufSchema
from spark_klog.schemas.protobuf.tables import VERSION, MessageTables, Reason
from spark_klog.schemas.rows import BadRow, Decoded, FieldPair
from spark_klog.wire.primitives import Buffer

_NATIVE = "spark_klog.schemas.protobuf._protobuf"
#: Types of which the bytes of one are the bytes of another, by a type that stands for them.
_SAME = {
    **dict.fromkeys((INT32, INT64, UINT32, UINT64, BOOL, ENUM), INT64),
    **dict.fromkeys((SINT32, SINT64), SINT64),
    **dict.fromkeys((FIXED32, SFIXED32), FIXED32),
    **dict.fromkeys((FIXED64, SFIXED64), FIXED64),
    **{kind: kind for kind in (FLOAT, DOUBLE, STRING, BYTES, GROUP, MESSAGE)},
}
_SIZED = frozenset({STRING, BYTES, MESSAGE})
#: Bits of those numbers of which one may be read as a smaller one.
_BITS = {
    BOOL: 1,
    **dict.fromkeys((INT32, UINT32, SINT32, ENUM), 32),
    **dict.fromkeys((INT64, UINT64, SINT64), 64),
}


class ProtobufDecoder:
    """Decodes columns of Protobuf records into one Arrow type, that of the reader's message; see columns.py.

    One thread at a time uses a decoder. `SchemaError` if the message has no such type, `ConfigError` without the native
    kernel.
    """

    def __init__(self, reader: ProtobufSchema) -> None:
        self.reader = reader
        columns = columns_of(reader.message)
        self.type: pa.DataType = columns.type
        self._kernel = protobuf_kernel()
        self._tables = MessageTables(columns)
        self._layout = layout_of(self._tables.column)
        self._builders = self._made_builders()
        self._has_maps = _has_maps(self.type)

    def another(self) -> ProtobufDecoder:
        """See `codec.Decoder`."""
        made = copy(self)
        made._builders = self._made_builders()
        return made

    def program(self, writer: ProtobufSchema, rest: bytes | None = None) -> ProtobufSchema:
        """Check that records of `writer` can be read. `rest` are the indexes of their message, none: the writer's.

        `SchemaError` if they can't, or if it is another message.
        """
        _check_readable(writer, _message(writer, rest), self.reader)
        return writer  # records of all writers are decoded in one way: by the numbers of the reader's fields

    def field_pairs(self, writer: ProtobufSchema, rest: bytes | None, path: tuple[str, ...]) -> list[FieldPair]:
        """See `codec.Decoder`."""
        return _pairs(_message(writer, rest), self.reader.message, path)

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
        try:
            failures = self._builders.decode(which, data, offsets, validity, first, count, by_row, start)
            made = array_of(self._tables.column, self._builders.finish(), count)
        except BaseException:
            self._builders = self._made_builders()  # these may hold rows of this call
            raise
        bad = [BadRow(row, self._tables.describe(Reason(reason), field)) for row, reason, field in failures]
        return Decoded(_with_last_entries(made) if self._has_maps else made, bad)

    def _made_builders(self) -> Any:
        return self._kernel.ColumnBuilders(self._layout, self._tables)


def _message(writer: ProtobufSchema, rest: bytes | None) -> Any:
    """The message of records with `rest` after their ids; `SchemaError` if there is none."""
    if not rest:
        return writer.message
    indexes, end = read_indexes(rest)
    if end != len(rest):
        raise SchemaError(f"{len(rest) - end} bytes are left over after the message indexes")
    return writer.message_of(indexes)


def _pairs(writer: Any, reader: Any, path: tuple[str, ...]) -> list[FieldPair]:
    if path:
        field = reader.fields_by_name.get(path[0])
        written = None if field is None else writer.fields_by_number.get(field.number)
        if written is None or field.message_type is None or written.message_type is None:
            return []
        return _pairs(written.message_type, field.message_type, path[1:])
    pairs = []
    for written in writer.fields:
        field = reader.fields_by_number.get(written.number)
        is_cut = field is not None and _BITS.get(written.type, 0) > _BITS.get(field.type, 64)
        loss = f"is {_type_name(written)}, which is cut to {_type_name(field)}" if is_cut else ""
        pairs.append(FieldPair(written.name, None if field is None else field.name, loss))
    missing = [field for field in reader.fields if field.number not in writer.fields_by_number]
    return pairs + [FieldPair(None, field.name) for field in missing if not is_nullable(field)]


def _check_readable(writer: ProtobufSchema, message: Any, reader: ProtobufSchema) -> None:
    """Raise `SchemaError` if records of the writer's `message` can't be read by the reader.

    Fields meet by their numbers, as Protobuf's parsers do it: those that the reader lacks are skipped, those that the
    writer lacks are absent. Types that Protobuf's documentation calls compatible are read; for others the bytes would
    mean something else, so they are refused.
    """
    if message is reader.message:
        return
    wanted = reader.message.full_name
    has_wanted = any(message.full_name == wanted for message in writer.numbered.values())
    # a package may have moved; another name is another message, whatever the numbers of its fields
    if message.full_name != wanted and (has_wanted or message.name != reader.message.name):
        raise SchemaError(f"it is message {message.full_name}, another one than {wanted}")
    _check_fields(message, reader.message, "", set())


def _check_fields(writer: Any, reader: Any, path: str, seen: set[tuple[str, str]]) -> None:
    if (writer.full_name, reader.full_name) in seen:
        return
    seen.add((writer.full_name, reader.full_name))
    for field in reader.fields:
        written = writer.fields_by_number.get(field.number)
        if written is None:
            continue
        below = f"{path}.{field.name}" if path else field.name
        kinds = _SAME[written.type], _SAME[field.type]
        if kinds[0] != kinds[1] and not (set(kinds) <= _SIZED and BYTES in kinds):
            raise SchemaError(f"field {below} is {_type_name(field)}, but was written as {_type_name(written)}")
        if written.is_packed and not field.is_repeated:
            raise SchemaError(f"field {below} is one {_type_name(field)}, but was written as a list of them")
        if field.message_type is not None and written.message_type is not None:
            _check_fields(written.message_type, field.message_type, below, seen)


def _type_name(field: Any) -> str:
    if field.message_type is not None:
        return str(field.message_type.full_name)
    return str(field.enum_type.full_name) if field.enum_type is not None else TYPE_NAMES[field.type]


def _has_maps(kind: pa.DataType) -> bool:
    """Whether a type is a map, or has one in it."""
    if pa.types.is_map(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_has_maps(field.type) for field in kind)
    return pa.types.is_list(kind) and _has_maps(kind.value_type)


def _with_last_entries(values: pa.Array) -> pa.Array:
    """The values, without the entries of maps whose key a later one has: the last one counts, in Protobuf.

    `values` are whole, and no slice.
    """
    kind = values.type
    if not _has_maps(kind):
        return values
    validity = values.buffers()[0]
    if pa.types.is_struct(kind):
        children = [_with_last_entries(values.field(index)) for index in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, len(values), [validity], values.null_count, children=children)
    offsets = values.buffers()[1]
    if pa.types.is_list(kind):
        children = [_with_last_entries(values.values)]
        return pa.Array.from_buffers(kind, len(values), [validity, offsets], values.null_count, children=children)
    keys, items = values.keys, _with_last_entries(values.items)
    ends = np.frombuffer(offsets, np.int32, len(values) + 1)
    kept = _last(keys, ends)
    if kept is not None:
        counts = np.concatenate(([0], np.cumsum(kept, dtype=np.int32)))
        offsets = pa.py_buffer(counts[ends].astype(np.int32))
        mask = pa.array(kept)
        keys, items = keys.filter(mask), items.filter(mask)
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(values), [validity, offsets], values.null_count, children=[entries])


def _last(keys: pa.Array, ends: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray | None:
    """Which entries are the last of their map with their key; None if all are."""
    sizes = np.diff(ends)
    if not len(sizes) or sizes.max() < 2:
        return None
    codes = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
    places = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes) * (int(codes.max()) + 1) + codes
    # the first in reverse order
    _, last = np.unique(places[::-1], return_index=True)
    if len(last) == len(places):
        return None
    kept = np.zeros(len(places), np.bool_)
    kept[len(places) - 1 - last] = True
    return kept


def protobuf_kernel() -> Any:
    """See `native_kernel`."""
    return native_kernel(_NATIVE, VERSION, "Protobuf")
