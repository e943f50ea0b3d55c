"""The generic codec: encodes and decodes messages by their tables.

A message is a dict from field name to value: int, bool, str, UUID, bytes or memoryview, list, dict, or None. A decoded
message has every field of the table; fields that the version lacks have their default. The encoder writes the default
of a missing field, and rejects names that are not in the table. A value that does not fit its field is an
`EncodeError`; error messages, which often name what a client sent, are cut instead.

    request header   INT16 api key, INT16 version, INT32 correlation id, nullable STRING client id
                     [flexible versions: tagged fields]
    response header  INT32 correlation id [flexible: tagged fields; ApiVersions never has them]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import error as StructError
from typing import Any

from spark_klog.errors import DecodeError, EncodeError
from spark_klog.protocol.schema import Api, Array, Field, Primitive, Struct, Type, Versioned
from spark_klog.wire.primitives import TAG_BYTES, Buffer, Reader, Writer

Message = dict[str, Any]
Decode = Callable[[Reader], Any]
Encode = Callable[[Writer, Any], None]

_API_VERSIONS_KEY = 18
#: Text for people, and its longest form in characters.
_ERROR_MESSAGE, _MESSAGE_LENGTH = "error_message", 1000
#: The INT8 before a struct that may be null.
_STRUCT_MARKERS = _NULL, _PRESENT = -1, 1
_COMPACTABLE = {
    Primitive.STRING: "nullable_string",
    Primitive.BYTES: "nullable_bytes",
    Primitive.RECORDS: "nullable_bytes",
}
#: Memory of decoded values in bytes: rough upper estimates.
_DICT_BYTES, _FIELD_BYTES, _VALUE_BYTES, _VIEW_BYTES = 120, 50, 150, 240


def _decoded_bytes(kind: Primitive | Struct) -> int:
    """Memory of an array's element in bytes, without the content of its own arrays."""
    if isinstance(kind, Struct):
        views = sum(field.type in (Primitive.BYTES, Primitive.RECORDS) for field in kind.fields)
        return _DICT_BYTES + _FIELD_BYTES * len(kind.fields) + _VIEW_BYTES * views
    return _VIEW_BYTES if kind in (Primitive.BYTES, Primitive.RECORDS) else _VALUE_BYTES


def _method(kind: Primitive, flexible: bool) -> str:
    name = _COMPACTABLE.get(kind, kind.value)
    return f"compact_{name}" if flexible and kind in _COMPACTABLE else name


@cache
def _decoder(kind: Type, version: int, flexible: bool, name: str, nullable: bool) -> Decode:
    if isinstance(kind, Struct):
        decode_present = _struct_decoder(kind, version, flexible)
        if not nullable:
            return decode_present

        def decode_struct_or_null(reader: Reader) -> Message | None:
            marker = reader.int8()
            if marker not in _STRUCT_MARKERS:
                raise DecodeError(f"{name} begins with {marker}, which is neither null nor present")
            return decode_present(reader) if marker == _PRESENT else None

        return decode_struct_or_null
    if isinstance(kind, Array):
        element = _decoder(kind.element, version, flexible, name, False)
        cost = _decoded_bytes(kind.element)

        def decode_array(reader: Reader) -> list[Any] | None:
            count = reader.count(flexible)
            if count < 0:
                if nullable:
                    return None
                raise DecodeError(f"array {name} is null, which version {version} does not allow")
            reader.spend(count * cost)
            return [element(reader) for _ in range(count)]

        return decode_array
    method: Decode = getattr(Reader, _method(kind, flexible))
    if kind not in _COMPACTABLE or nullable or kind is Primitive.RECORDS:
        return method

    def decode_value(reader: Reader) -> Any:
        value = method(reader)
        if value is None:
            raise DecodeError(f"{name} is null, which version {version} does not allow")
        return value

    return decode_value


def _is_nullable(field: Field, version: int) -> bool:
    return field.nullable is not None and version in field.nullable


@cache
def _struct_decoder(struct: Struct, version: int, flexible: bool) -> Decode:
    absent: list[tuple[str, Any]] = []
    present: list[tuple[str, Decode]] = []
    tagged: dict[int, tuple[str, Decode]] = {}
    for field in struct.fields:
        if version not in field.versions:
            absent.append((field.name, field.default))
            continue
        decode = _decoder(field.type, version, flexible, field.name, _is_nullable(field, version))
        if field.tag is None:
            present.append((field.name, decode))
        else:
            absent.append((field.name, field.default))
            tagged[field.tag] = (field.name, decode)

    def decode_struct(reader: Reader) -> Message:
        message: Message = dict(absent)
        for name, decode in present:
            message[name] = decode(reader)
        if flexible:
            for _ in range(reader.uvarint()):
                reader.spend(TAG_BYTES)
                tag = reader.uvarint()
                body = reader.take(reader.uvarint())
                if tag in tagged:
                    name, decode = tagged[tag]
                    field = Reader(body, reader.allowance)
                    message[name] = decode(field)
                    reader.allowance = field.allowance
                    if field.remaining:
                        raise DecodeError(f"tagged field {name}: {field.remaining} bytes left over")
        return message

    return decode_struct


@cache
def _encoder(kind: Type, version: int, flexible: bool, name: str, nullable: bool) -> Encode:
    if isinstance(kind, Struct):
        encode_present = _struct_encoder(kind, version, flexible)
        if not nullable:
            return encode_present

        def encode_struct_or_null(writer: Writer, value: Any) -> None:
            writer.int8(_NULL if value is None else _PRESENT)
            if value is not None:
                encode_present(writer, value)

        return encode_struct_or_null
    if isinstance(kind, Array):
        element = _encoder(kind.element, version, flexible, name, False)

        def encode_array(writer: Writer, values: Any) -> None:
            if values is None:
                if not nullable:
                    raise ValueError(f"array {name} must not be null in version {version}")
                writer.count(-1, flexible)
                return
            writer.count(len(values), flexible)
            for value in values:
                element(writer, value)

        return encode_array
    method: Encode = getattr(Writer, _method(kind, flexible))
    if name == _ERROR_MESSAGE:
        return lambda writer, text: method(writer, _cut(text))
    if kind not in _COMPACTABLE or nullable or kind is Primitive.RECORDS:
        return method

    def encode_value(writer: Writer, value: Any) -> None:
        if value is None:
            raise ValueError(f"{name} must not be null in version {version}")
        method(writer, value)

    return encode_value


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MESSAGE_LENGTH else text[: _MESSAGE_LENGTH - 3] + "..."


@cache
def _struct_encoder(struct: Struct, version: int, flexible: bool) -> Encode:
    names = frozenset(field.name for field in struct.fields)
    plain: list[tuple[str, Encode, Any]] = []
    tagged: list[tuple[int, str, Encode, tuple[Any, ...]]] = []
    for field in sorted(struct.fields, key=lambda field: -1 if field.tag is None else field.tag):
        if version in field.versions:
            encode = _encoder(field.type, version, flexible, field.name, _is_nullable(field, version))
            if field.tag is None:
                plain.append((field.name, encode, field.default))
            else:
                left_out = (field.default, []) if isinstance(field.type, Array) else (field.default,)
                tagged.append((field.tag, field.name, encode, left_out))

    def encode_struct(writer: Writer, message: Message) -> None:
        if not message.keys() <= names:
            raise ValueError(f"no such fields: {sorted(message.keys() - names)}")
        try:
            for name, encode, default in plain:
                encode(writer, message.get(name, default))
            if flexible:
                given = [entry for entry in tagged if message.get(entry[1], entry[3][0]) not in entry[3]]
                writer.uvarint(len(given))
                for tag, name, encode, _ in given:
                    body = Writer()
                    encode(body, message[name])
                    writer.uvarint(tag)
                    writer.uvarint(len(body))
                    writer.raw(body.to_bytes())
        except (StructError, EncodeError) as error:
            raise EncodeError(f"{name}: {error}") from None

    return encode_struct


def encode_request(api: Api, version: int, correlation_id: int, client_id: str | None, message: Message) -> Writer:
    """Encode a request with its header, without the frame's size. `EncodeError` names the field that does not fit."""
    writer = Writer()
    writer.int16(api.key)
    writer.int16(version)
    writer.int32(correlation_id)
    writer.nullable_string(client_id)
    flexible = version >= api.flexible
    if flexible:
        writer.uvarint(0)
    _encode(f"{api.name} v{version} request", writer, _struct_encoder(api.request, version, flexible), message)
    return writer


def decode_request_header(reader: Reader) -> tuple[int, int, int]:
    """(api key, version, correlation id): the part that is the same in all versions."""
    return reader.int16(), reader.int16(), reader.int32()


def decode_request(api: Api, version: int, reader: Reader) -> tuple[str | None, Message]:
    """The rest of a request after `decode_request_header`: (client id, message).

    `AllowanceExceeded`, a `DecodeError`, if the message would take more memory than the reader allows.

    Ignores bytes after the message, as Kafka does: in a Metadata request for all topics librdkafka 2.x writes null as
    INT32 0, although the varint has one byte.
    """
    client_id = reader.nullable_string()
    flexible = version >= api.flexible
    if flexible:
        reader.skip_tags()
    decode = _struct_decoder(api.request, version, flexible)
    return client_id, _decode(f"{api.name} v{version} request", reader, decode)


def encode_response(api: Api, version: int, correlation_id: int, message: Message) -> Writer:
    """Encode a response with its header, without the frame's size. `EncodeError` names the field that does not fit."""
    writer = Writer()
    writer.int32(correlation_id)
    flexible = version >= api.flexible
    if flexible and api.key != _API_VERSIONS_KEY:
        writer.uvarint(0)
    _encode(f"{api.name} v{version} response", writer, _struct_encoder(api.response, version, flexible), message)
    return writer


def decode_response(api: Api, version: int, data: Buffer) -> tuple[int, Message]:
    """Decode a frame: (correlation id, message). `DecodeError` if it is malformed or bytes are left over."""
    reader = Reader(data)
    correlation_id = reader.int32()
    flexible = version >= api.flexible
    if flexible and api.key != _API_VERSIONS_KEY:
        reader.skip_tags()
    message = _decode(f"{api.name} v{version} response", reader, _struct_decoder(api.response, version, flexible))
    if reader.remaining:
        raise DecodeError(f"{api.name} v{version} response: {reader.remaining} bytes left over")
    return correlation_id, message


def encode_versioned(table: Versioned, version: int, message: Message) -> bytes:
    """Encode the version and the message; `EncodeError`."""
    writer = Writer()
    writer.int16(version)
    encode = _struct_encoder(table.fields, version, version >= table.flexible)
    _encode(f"{table.name} v{version}", writer, encode, message)
    return writer.to_bytes()


def decode_versioned(table: Versioned, data: Buffer) -> Message:
    """Decode version and message; bytes after it are ignored, as in Kafka. `DecodeError`, also for the version."""
    reader = Reader(data)
    version = reader.int16()
    if version not in table.versions:
        raise DecodeError(f"{table.name} has unknown version {version}")
    decode = _struct_decoder(table.fields, version, version >= table.flexible)
    return _decode(f"{table.name} v{version}", reader, decode)


def _decode(what: str, reader: Reader, decode: Decode) -> Message:
    try:
        message: Message = decode(reader)
    except DecodeError as error:
        raise type(error)(f"{what}: {error}") from None
    return message


def _encode(what: str, writer: Writer, encode: Encode, message: Message) -> None:
    try:
        encode(writer, message)
    except EncodeError as error:
        raise EncodeError(f"{what}: {error}") from None
