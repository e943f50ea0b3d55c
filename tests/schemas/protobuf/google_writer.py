"""Rows encoded one by one by google.protobuf: what the native kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from spark_klog.errors import EncodeError
from spark_klog.schemas.protobuf.columns import (
    ENUM,
    FIXED32,
    FIXED64,
    MESSAGE,
    UINT32,
    UINT64,
    enum_names,
    unknown_name,
)
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.tables import TEXTS, Reason
from spark_klog.schemas.protobuf.writing import WriteField, WriteMessage

_MICROSECONDS = 1_000_000
_BITS = {UINT32: 32, FIXED32: 32, UINT64: 64, FIXED64: 64}
#: Sets a field of a message to a value that is not null.
_Set = Callable[[Any, Any], None]
IS_NULL = "is null, which its Protobuf type is not: make it optional, or fill the column"


class GoogleEncoder(ProtobufEncoder):
    """As `ProtobufEncoder`."""

    def _written(self, values: pa.Array, before: bytes) -> pa.Array:
        return pa.array(GoogleWriter(self._plan).encode(values, before), pa.binary())


class GoogleWriter:
    """Encodes rows as a message."""

    def __init__(self, plan: WriteMessage) -> None:
        from google.protobuf.message_factory import GetMessageClass

        self._class = GetMessageClass(plan.message)
        self._set = _message(plan)

    def encode(self, values: pa.Array, prefix: bytes) -> list[bytes | None]:
        """The records, each after `prefix`. `EncodeError` names the row and field that do not fit."""
        result: list[bytes | None] = []
        for number, row in enumerate(numbers(values).to_pylist()):
            if row is None:
                result.append(None)
                continue
            message = self._class()
            try:
                self._set(message, row)
            except EncodeError as error:
                raise EncodeError(f"row {number}: {error}") from None
            result.append(prefix + message.SerializeToString(deterministic=True))
        return result


def numbers(values: pa.Array) -> pa.Array:
    """The values with times as numbers, which Python's own types of times may not have."""
    return values.cast(_number_type(values.type))


def _number_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _number_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _number_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _number_type(kind.value_type)))
    return pa.int64() if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) else kind


def _message(plan: WriteMessage) -> _Set:
    names = [field.name for field in plan.type]
    steps = [(names[one.index], _field(one)) for one in plan.fields]
    oneofs: dict[str, list[WriteField]] = {}
    for one in plan.fields:
        if one.field.containing_oneof is not None:
            oneofs.setdefault(one.field.containing_oneof.name, []).append(one)

    def set_fields(message: Any, row: dict[str, Any]) -> None:
        for fields in oneofs.values():
            given = [one for one in fields if row[names[one.index]] is not None]
            if len(given) > 1:
                raise EncodeError(f"field {given[1].path}: {TEXTS[Reason.TWO_OF_ONEOF]}")
        for name, step in steps:
            step(message, row[name])

    return set_fields


def _field(plan: WriteField) -> _Set:
    name = plan.field.name
    if plan.shape == "map":
        return _map(plan)
    if plan.message is not None or plan.field.type == MESSAGE:
        fill = _time if plan.message is None else _message(plan.message)

        def set_messages(message: Any, value: Any) -> None:
            for each in value or ():
                if each is None:
                    raise EncodeError(f"field {plan.path}[]: {IS_NULL}")
                fill(getattr(message, name).add(), each)

        def set_message(message: Any, value: Any) -> None:
            if value is not None:
                inner = getattr(message, name)
                inner.SetInParent()
                fill(inner, value)
            elif plan.field.is_required:
                raise EncodeError(f"field {plan.path}: {IS_NULL}")

        return set_messages if plan.shape == "list" else set_message
    convert = _leaf(plan)

    def set_list(message: Any, value: Any) -> None:
        if value:
            if None in value:
                raise EncodeError(f"field {plan.path}[]: {IS_NULL}")
            getattr(message, name).extend(map(convert, value))

    def set_value(message: Any, value: Any) -> None:
        if value is not None:
            setattr(message, name, convert(value))
        elif plan.field.is_required or not plan.field.has_presence:
            raise EncodeError(f"field {plan.path}: {IS_NULL}")

    return set_list if plan.shape == "list" else set_value


def _map(plan: WriteField) -> _Set:
    assert plan.message is not None
    key, value = plan.message.fields
    key_of = _leaf(key)
    name = plan.field.name
    if value.message is not None or value.field.type == MESSAGE:
        fill = _time if value.message is None else _message(value.message)

        def set_entry(entries: Any, key: Any, value: Any) -> None:
            fill(entries[key], value)

    else:
        value_of = _leaf(value)

        def set_entry(entries: Any, key: Any, value: Any) -> None:
            entries[key] = value_of(value)

    def set_map(message: Any, pairs: Any) -> None:
        entries = getattr(message, name)
        for one, each in pairs or ():
            if each is None:
                raise EncodeError(f"field {plan.path}{{}}: {IS_NULL}")
            set_entry(entries, key_of(one), each)

    return set_map


def _time(message: Any, value: int) -> None:
    """Set a Timestamp or a Duration to microseconds."""
    seconds, rest = divmod(value, _MICROSECONDS)
    if seconds < 0 and rest and message.DESCRIPTOR.name == "Duration":  # its parts have one sign
        seconds, rest = seconds + 1, rest - _MICROSECONDS
    message.seconds, message.nanos = seconds, rest * 1000


def _leaf(plan: WriteField) -> Callable[[Any], Any]:
    kind, enum = plan.field.type, plan.field.enum_type
    if kind == ENUM:
        numbers = {value.name: value.number for value in enum.values}

        def number_of(name: str) -> int:
            number: int | None = numbers.get(name)
            if number is None and not enum.is_closed:
                number = unknown_number(enum, name)
            if number is None:
                raise EncodeError(f"field {plan.path}: {name!r} is no value of enum {enum.full_name}")
            return number

        return number_of
    if kind in _BITS:
        mask = (1 << _BITS[kind]) - 1
        return lambda value: value & mask
    return lambda value: value


def unknown_number(enum: Any, name: str) -> int | None:
    """The number of a name of `unknown_name`, None of another one."""
    begin = unknown_name(enum, 0)[:-1]
    digits = name[len(begin) :]
    try:
        number = int(digits)
    except ValueError:
        return None
    is_unknown = name == unknown_name(enum, number) and -(1 << 31) <= number < 1 << 31
    return number if is_unknown and number not in enum_names(enum) else None
