"""The generic codec: encodes and decodes messages by their tables.

A message is a dict from field name to value: int, bool, str, UUID, bytes or memoryview, list, dict, or None. A decoded
message has every field of the table; fields that the version lacks have their default. The encoder writes the default
of a missing field, and rejects names that are not in the table. A value that does not fit its field is an
`EncodeError`; error messages, which often name what a client sent, are cut instead.

    request header   INT16 api key, INT16 version, INT32 correlation id, nullable STRING client id
                     [flexible versions: tagged fields]
    response header  INT32 correlation id [flexible: tagged fields; ApiVersions never has them]

A table's version becomes the source of one Python function at its first use, as `dataclasses` does it: a walk through
the table for each message would cost several times the reads and writes themselves.
"""

from __future__ import annotations

import struct as packing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from struct import Struct as Packing, error as StructError
from typing import Any
from uuid import UUID

from spark_klog.errors import DecodeError, EncodeError, ErrorCode
from spark_klog.protocol.schema import Api, Array, Field, Primitive, Struct, Type, Versioned
from spark_klog.wire.primitives import (
    MAX_ELEMENTS,
    MAX_STRING,
    TAG_BYTES,
    AllowanceExceeded,
    Buffer,
    Reader,
    Writer,
    append_uvarint,
    utf8,
)

Message = dict[str, Any]
Decode = Callable[[Reader], Any]
Encode = Callable[[Writer, Any], None]

_API_VERSIONS_KEY = 18
_UNSUPPORTED_VERSION = int(ErrorCode.UNSUPPORTED_VERSION).to_bytes(2, "big")
#: Text for people, and its longest form in characters.
_ERROR_MESSAGE, _MESSAGE_LENGTH = "error_message", 1000
_FORMATS = {
    Primitive.BOOLEAN: "?",
    Primitive.INT8: "b",
    Primitive.INT16: "h",
    Primitive.INT32: "i",
    Primitive.INT64: "q",
    Primitive.FLOAT64: "d",
    Primitive.UUID: "16s",
}
#: Format of the length before a value, if it is not compact.
_LENGTHS = {Primitive.STRING: "h", Primitive.BYTES: "i", Primitive.RECORDS: "i"}
_VIEWS = (Primitive.BYTES, Primitive.RECORDS)
#: Memory of decoded values in bytes: rough upper estimates.
_DICT_BYTES, _FIELD_BYTES, _VALUE_BYTES, _VIEW_BYTES = 120, 50, 150, 240
#: A copy of shorter bytes is cheaper than a part of their own.
_COPIED_BYTES = 4096
_REQUEST_HEADER = Packing(">hhi")
#: What decoding raises; the latter three where the bytes end too early, or a string is no UTF-8.
_UNREADABLE = (DecodeError, StructError, IndexError, UnicodeDecodeError)


def _decoded_bytes(kind: Primitive | Struct) -> int:
    """Memory of an array's element in bytes, without the content of its own arrays."""
    if isinstance(kind, Struct):
        views = sum(field.type in _VIEWS for field in kind.fields)
        return _DICT_BYTES + _FIELD_BYTES * len(kind.fields) + _VIEW_BYTES * views
    return _VIEW_BYTES if kind in _VIEWS else _VALUE_BYTES


def _is_nullable(field: Field, version: int) -> bool:
    return field.nullable is not None and version in field.nullable


class _Source:
    """Source of one function. Values of fixed size that follow each other are read or written together: the run."""

    def __init__(self, version: int, flexible: bool) -> None:
        self.version, self.flexible = version, flexible
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._depth = 1
        self._variables = 0

    def variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"

    def constant(self, value: Any) -> str:
        """A name for a value that the function uses."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def add(self, *lines: str) -> None:
        self.lines += ["    " * self._depth + line for line in lines]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.add(head)
        self._depth += 1
        yield
        self._depth -= 1

    def function(self, head: str, shared: dict[str, Any], what: str) -> Any:
        source = "\n".join([head, *self.lines])
        names = {**shared, **self.names}
        exec(compile(source, f"<{what} v{self.version}>", "exec"), names)
        return names["function"]


class _DecoderSource(_Source):
    """The function's variables: `buffer`, the position `at`, its `end`, and the reader's `allowance`."""

    def __init__(self, version: int, flexible: bool) -> None:
        super().__init__(version, flexible)
        self._run: list[tuple[str, str]] = []
        self.add("buffer, at, end, allowance = reader.buffer, reader.position, reader.end, reader.allowance")

    def end_run(self) -> None:
        if self._run:
            run = Packing(">" + "".join(form for form, _ in self._run))
            self.add(f"{', '.join(name for _, name in self._run)}, = {self.constant(run.unpack_from)}(buffer, at)")
            self.add(f"at += {run.size}")
            self._run = []

    def fixed(self, form: str) -> str:
        self._run.append((form, name := self.variable()))
        return name

    def length(self, form: str) -> str:
        """Read the length of what follows, -1 for null."""
        if not self.flexible:
            name = self.fixed(form)
            self.end_run()
            return name
        self.end_run()
        name = self.variable()
        self.add(f"{name} = buffer[at]", "at += 1")
        with self.block(f"if {name} > 127:"):
            self.add("reader.position = at - 1", f"{name} = reader.uvarint()", "at = reader.position")
        self.add(f"{name} -= 1")
        return name

    def null(self, name: str, what: str, nullable: bool) -> None:
        reason = f"{what} is null, which version {self.version} does not allow"
        self.add(f"{name} = None" if nullable else f"raise DecodeError({reason!r})")

    def value(self, kind: Type, what: str, nullable: bool) -> str:
        """Read a value; returns its variable, which is set at the end of the run."""
        if isinstance(kind, Struct):
            return self.nullable_struct(kind, what) if nullable else self.struct(kind)
        if isinstance(kind, Array):
            return self.array(kind.element, what, nullable)
        if kind is Primitive.UUID:
            name = self.fixed(_FORMATS[kind])
            self.end_run()
            self.add(f"{name} = UUID(bytes={name})")
            return name
        if kind in _FORMATS:
            return self.fixed(_FORMATS[kind])
        size, name = self.length(_LENGTHS[kind]), self.variable()
        is_text = kind is Primitive.STRING
        with self.block(f"if 0 <= {size} <= end - at" + (f" and {size} <= {MAX_STRING}:" if is_text else ":")):
            self.add(
                f"{name} = str(buffer[at : at + {size}], 'utf-8')" if is_text else f"{name} = buffer[at : at + {size}]"
            )
            self.add(f"at += {size}")
        with self.block(f"elif {size} == -1:"):
            self.null(name, what, nullable or kind is Primitive.RECORDS)
        with self.block("else:"):  # both raise
            self.add("reader.position = at", f"reader.{'text' if is_text else 'take'}({size})")
        return name

    def nullable_struct(self, kind: Struct, what: str) -> str:
        marker, name = self.fixed("b"), self.variable()
        self.end_run()
        with self.block(f"if {marker} == 1:"):
            self.add(f"{name} = {self.struct(kind)}")
        with self.block(f"elif {marker} in (-1, 0):"):  # Kafka writes 0 if it is a tagged field
            self.add(f"{name} = None")
        with self.block("else:"):
            self.add(f"raise DecodeError(f'{what} begins with {{{marker}}}, which is neither null nor present')")
        return name

    def array(self, kind: Primitive | Struct, what: str, nullable: bool) -> str:
        count, name = self.length("i"), self.variable()
        with self.block(f"if 0 <= {count} <= end - at and {count} <= {MAX_ELEMENTS}:"):
            self.add(f"allowance -= {count} * {_decoded_bytes(kind)}")
            with self.block("if allowance < 0:"):
                self.add("raise exceeded(at)")
            if kind in _FORMATS and kind is not Primitive.UUID:
                assert isinstance(kind, Primitive)
                form = _FORMATS[kind]
                self.add(f"{name} = list(unpack_from(f'>{{{count}}}{form}', buffer, at))")
                self.add(f"at += {count} * {Packing(form).size}")
            else:
                self.add(f"{name} = []")
                with self.block(f"for _ in range({count}):"):
                    element = self.value(kind, what, nullable=False)
                    self.end_run()
                    self.add(f"{name}.append({element})")
        with self.block(f"elif {count} == -1:"):
            self.null(name, f"array {what}", nullable)
        with self.block("else:"):
            self.add(f"raise too_many({count}, at, end)")
        return name

    def struct(self, kind: Struct) -> str:
        values: list[tuple[str, str]] = []
        tagged: dict[int, tuple[str, Decode]] = {}
        for field in kind.fields:
            is_there, nullable = self.version in field.versions, _is_nullable(field, self.version)
            if is_there and field.tag is None:
                values.append((field.name, self.value(field.type, field.name, nullable)))
                continue
            values.append((field.name, self.constant(field.default)))
            if is_there and field.tag is not None:
                decode = _decoder(field.type, self.version, self.flexible, field.name, nullable)
                tagged[field.tag] = field.name, decode
        self.end_run()
        name = self.variable()
        self.add(f"{name} = {{{', '.join(f'{field!r}: {value}' for field, value in values)}}}")
        if self.flexible:
            self.tags(f"{name}.update(read_tags(reader, {self.constant(tagged)}))")
        return name

    def tags(self, read: str) -> None:
        """Read tagged fields, of which there mostly are none."""
        with self.block("if buffer[at]:"):
            self.add("reader.position, reader.allowance = at, allowance", read)
            self.add("at, allowance = reader.position, reader.allowance")
        with self.block("else:"):
            self.add("at += 1")

    def decoder(self, result: str, what: str) -> Decode:
        self.end_run()
        self.add("reader.position, reader.allowance = at, allowance", f"return {result}")
        decode: Decode = self.function("def function(reader):", _DECODER_NAMES, what)
        return decode


def _too_many(count: int, at: int, end: int) -> DecodeError:
    allowed = f", and at most {MAX_ELEMENTS} elements are allowed" if count > MAX_ELEMENTS else ""
    return DecodeError(f"array of {count} elements at position {at}, {end - at} bytes are left{allowed}")


def _exceeded(at: int) -> AllowanceExceeded:
    return AllowanceExceeded(f"its elements would take more memory than allowed, at position {at}")


def _read_tags(reader: Reader, known: dict[int, tuple[str, Decode]]) -> Message:
    """Read tagged fields; those that are not `known` are skipped."""
    fields: Message = {}
    for _ in range(reader.tag_count()):
        reader.spend(TAG_BYTES)
        tag = reader.uvarint()
        body = reader.take(reader.uvarint())
        if tag in known:
            name, decode = known[tag]
            field = Reader(body, reader.allowance)
            fields[name] = decode(field)
            reader.allowance = field.allowance
            if field.remaining:
                raise DecodeError(f"tagged field {name}: {field.remaining} bytes left over")
    return fields


_DECODER_NAMES = {
    "DecodeError": DecodeError,
    "UUID": UUID,
    "unpack_from": packing.unpack_from,
    "exceeded": _exceeded,
    "too_many": _too_many,
    "read_tags": _read_tags,
}


@cache
def _decoder(kind: Type, version: int, flexible: bool, what: str, nullable: bool = False) -> Decode:
    source = _DecoderSource(version, flexible)
    return source.decoder(source.value(kind, what, nullable), what)


@cache
def _request_decoder(api: Api, version: int) -> Decode:
    """A decoder of (client id, message)."""
    source = _DecoderSource(version, flexible=False)  # the header's string is never compact
    client_id = source.value(Primitive.STRING, "client id", nullable=True)
    source.flexible = version >= api.flexible
    if source.flexible:
        source.tags("read_tags(reader, {})")
    return source.decoder(f"{client_id}, {source.struct(api.request)}", f"{api.name} request")


class _EncoderSource(_Source):
    """The function's variables: the writer's buffer `data`, which a spliced part replaces."""

    def __init__(self, version: int, flexible: bool) -> None:
        super().__init__(version, flexible)
        self._run: list[tuple[str, str, str]] = []
        self.add("data = writer.current")

    def end_run(self) -> None:
        if self._run:
            forms, paths, values = zip(*self._run, strict=True)
            with self.block("try:"):
                self.add(f"data += {self.constant(Packing('>' + ''.join(forms)).pack)}({', '.join(values)})")
            with self.block("except StructError:"):
                self.add(f"raise unfit({paths}, {forms}, ({', '.join(values)},)) from None")
            self._run = []

    def length(self, form: str, value: str, path: str) -> None:
        """Write the length of what follows, -1 for null."""
        if not self.flexible:
            self._run.append((form, path, value))
            self.end_run()
            return
        self.end_run()
        with self.block(f"if {value} < 127:"):
            self.add(f"data.append({value} + 1)")
        with self.block("else:"):
            self.add(f"append_uvarint(data, {value} + 1)")

    @contextmanager
    def unless_null(self, value: str, path: str, nullable: bool, *when_null: str) -> Iterator[None]:
        reason = f"{path} must not be null in version {self.version}"
        with self.block(f"if {value} is None:"):
            self.add(*(when_null if nullable else [f"raise ValueError({reason!r})"]))
        with self.block("else:"):
            yield

    def value(self, kind: Type, value: str, path: str, nullable: bool) -> None:
        """Write what the expression `value` has."""
        if kind in _FORMATS:
            assert isinstance(kind, Primitive)
            self._run.append((_FORMATS[kind], path, f"{value}.bytes" if kind is Primitive.UUID else value))
            return
        name = self.variable()
        self.add(f"{name} = {value}")
        if isinstance(kind, Struct):
            if not nullable:
                self.struct(kind, name, path)
                return
            self.end_run()
            with self.unless_null(name, path, nullable, "data.append(255)"):
                self.add("data.append(1)")
                self.struct(kind, name, path)
        elif isinstance(kind, Array):
            self.array(kind.element, name, path, nullable)
        elif kind is Primitive.STRING:
            self.text(name, path, nullable)
        else:
            self.bytes(name, path, nullable or kind is Primitive.RECORDS)

    def text(self, name: str, path: str, nullable: bool) -> None:
        size = self.variable()
        with self.unless_null(name, path, nullable, f"{name}, {size} = b'', -1"):
            if path.rpartition(" ")[2] == _ERROR_MESSAGE:
                self.add(f"{name} = cut({name})")
            with self.block("try:"):
                self.add(f"{name} = {name}.encode()", f"{size} = len({name})")
            with self.block("except UnicodeEncodeError:"):
                self.add(f"raise wrong_text({path!r}, {name}) from None")
            with self.block(f"if {size} > {MAX_STRING}:"):
                self.add(f"raise wrong_text({path!r}, {name}.decode())")
        self.length("h", size, path)
        self.add(f"data += {name}")

    def bytes(self, name: str, path: str, nullable: bool) -> None:
        size = self.variable()
        with self.unless_null(name, path, nullable, f"{name}, {size} = b'', -1"):
            self.add(f"{size} = len({name})")
        self.length("i", size, path)
        with self.block(f"if {size} < {_COPIED_BYTES} and isinstance({name}, (bytes, bytearray, memoryview)):"):
            self.add(f"data += {name}")
        with self.block("else:"):
            self.add(f"writer.splice({name})", "data = writer.current")

    def array(self, kind: Primitive | Struct, name: str, path: str, nullable: bool) -> None:
        size = self.variable()
        with self.unless_null(name, path, nullable, f"{name}, {size} = (), -1"):
            self.add(f"{size} = len({name})")
            with self.block(f"if {size} > {MAX_ELEMENTS}:"):
                self.add(f"raise too_long({path!r}, {size})")
        self.length("i", size, path)
        element = self.variable()
        with self.block(f"for {element} in {name}:"):
            self.value(kind, element, path, nullable=False)
            self.end_run()

    def struct(self, kind: Struct, name: str, path: str) -> None:
        names = frozenset(field.name for field in kind.fields)
        with self.block(f"if not {name}.keys() <= {self.constant(names)}:"):
            self.add(f"raise ValueError(f'no such fields: {{sorted({name}.keys() - {self.constant(names)})}}')")
        get = self.variable()
        self.add(f"{get} = {name}.get")
        tagged: list[tuple[int, str, Encode, tuple[Any, ...]]] = []
        for field in kind.fields:
            if self.version not in field.versions:
                continue
            inner, nullable = f"{path}: {field.name}" if path else field.name, _is_nullable(field, self.version)
            if field.tag is None:
                default = self.constant(field.default)
                self.value(field.type, f"{get}({field.name!r}, {default})", inner, nullable)
            else:
                encode = _encoder(field.type, self.version, self.flexible, inner, nullable)
                left_out = (field.default, []) if isinstance(field.type, Array) else (field.default,)
                tagged.append((field.tag, field.name, encode, left_out))
        self.end_run()
        if self.flexible:
            self.add(f"write_tags(data, {name}, {self.constant(sorted(tagged))})" if tagged else "data.append(0)")

    def encoder(self, what: str) -> Encode:
        self.end_run()
        encode: Encode = self.function("def function(writer, value):", _ENCODER_NAMES, what)
        return encode


def _unfit(paths: tuple[str, ...], forms: tuple[str, ...], values: tuple[Any, ...]) -> EncodeError:
    """The error of the first value that its format can't hold."""
    for path, form, value in zip(paths, forms, values, strict=True):
        try:
            packing.pack(">" + form, value)
        except StructError as error:
            return EncodeError(f"{path}: {error}")
    raise AssertionError(paths)


def _too_long(path: str, size: int) -> EncodeError:
    return EncodeError(f"{path}: {size} elements, a request or response can have {MAX_ELEMENTS} of a kind")


def _wrong_text(path: str, text: str) -> EncodeError:
    try:
        utf8(text)
    except EncodeError as error:
        return EncodeError(f"{path}: {error}")
    raise AssertionError(path)


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_LENGTH else text[: _MESSAGE_LENGTH - 3] + "..."


def _write_tags(data: bytearray, message: Message, fields: list[tuple[int, str, Encode, tuple[Any, ...]]]) -> None:
    """Write the tagged fields that differ from their default."""
    given = [field for field in fields if message.get(field[1], field[3][0]) not in field[3]]
    append_uvarint(data, len(given))
    for tag, name, encode, _ in given:
        body = Writer()
        encode(body, message[name])
        append_uvarint(data, tag)
        append_uvarint(data, len(body))
        data += body.to_bytes()


_ENCODER_NAMES = {
    "StructError": StructError,
    "append_uvarint": append_uvarint,
    "cut": _cut,
    "too_long": _too_long,
    "unfit": _unfit,
    "write_tags": _write_tags,
    "wrong_text": _wrong_text,
}


@cache
def _encoder(kind: Type, version: int, flexible: bool, what: str, nullable: bool = False) -> Encode:
    source = _EncoderSource(version, flexible)
    source.value(kind, "value", what, nullable)
    return source.encoder(what)


def encode_request(api: Api, version: int, correlation_id: int, client_id: str | None, message: Message) -> Writer:
    """Encode a request with its header, without the frame's size. `EncodeError` names the field that does not fit."""
    writer = Writer()
    writer.raw(_REQUEST_HEADER.pack(api.key, version, correlation_id))
    writer.nullable_string(client_id)
    flexible = version >= api.flexible
    if flexible:
        writer.uvarint(0)
    try:
        _encoder(api.request, version, flexible, "")(writer, message)
    except EncodeError as error:
        raise EncodeError(f"{api.name} v{version} request: {error}") from None
    return writer


def decode_request_header(reader: Reader) -> tuple[int, int, int]:
    """(api key, version, correlation id): the part that is the same in all versions."""
    key, version, correlation_id = reader.unpack(_REQUEST_HEADER)
    return key, version, correlation_id


def decode_request(api: Api, version: int, reader: Reader) -> tuple[str | None, Message]:
    """The rest of a request after `decode_request_header`: (client id, message).

    `AllowanceExceeded`, a `DecodeError`, if the message would take more memory than the reader allows.

    Ignores bytes after the message, as Kafka does: in a Metadata request for all topics librdkafka 2.x writes null as
    INT32 0, although the varint has one byte.
    """
    try:
        return _request_decoder(api, version)(reader)  # type: ignore[no-any-return]
    except _UNREADABLE as error:
        raise _unreadable(f"{api.name} v{version} request", reader, error) from None


def encode_response(api: Api, version: int, correlation_id: int, message: Message) -> Writer:
    """Encode a response with its header, without the frame's size. `EncodeError` names the field that does not fit."""
    writer = Writer()
    writer.int32(correlation_id)
    flexible = version >= api.flexible
    if flexible and api.key != _API_VERSIONS_KEY:
        writer.uvarint(0)
    try:
        _encoder(api.response, version, flexible, "")(writer, message)
    except EncodeError as error:
        raise EncodeError(f"{api.name} v{version} response: {error}") from None
    return writer


def decode_response(api: Api, version: int, data: Buffer) -> tuple[int, Message]:
    """Decode a frame: (correlation id, message). `DecodeError` if it is malformed or bytes are left over.

    A broker that does not know the version of an ApiVersions request answers in version 0 (KIP-511).
    """
    reader = Reader(data)
    correlation_id = reader.int32()
    if api.key == _API_VERSIONS_KEY and data[reader.position : reader.position + 2] == _UNSUPPORTED_VERSION:
        version = 0
    flexible = version >= api.flexible
    if flexible and api.key != _API_VERSIONS_KEY:
        reader.skip_tags()
    message = _decoded(f"{api.name} v{version} response", reader, _decoder(api.response, version, flexible, ""))
    if reader.remaining:
        raise DecodeError(f"{api.name} v{version} response: {reader.remaining} bytes left over")
    return correlation_id, message


def encode_versioned(table: Versioned, version: int, message: Message) -> bytes:
    """Encode the version and the message; `EncodeError`."""
    writer = Writer()
    writer.int16(version)
    try:
        _encoder(table.fields, version, version >= table.flexible, "")(writer, message)
    except EncodeError as error:
        raise EncodeError(f"{table.name} v{version}: {error}") from None
    return writer.to_bytes()


def decode_versioned(table: Versioned, data: Buffer) -> Message:
    """Decode version and message; bytes after it are ignored, as in Kafka. `DecodeError`, also for the version."""
    reader = Reader(data)
    version = reader.int16()
    if version not in table.versions:
        raise DecodeError(f"{table.name} has unknown version {version}")
    decode = _decoder(table.fields, version, version >= table.flexible, "")
    return _decoded(f"{table.name} v{version}", reader, decode)


def _decoded(what: str, reader: Reader, decode: Decode) -> Message:
    try:
        return decode(reader)  # type: ignore[no-any-return]
    except _UNREADABLE as error:
        raise _unreadable(what, reader, error) from None


def _unreadable(what: str, reader: Reader, error: Exception) -> DecodeError:
    if isinstance(error, DecodeError):
        return type(error)(f"{what}: {error}")
    if isinstance(error, UnicodeDecodeError):
        return DecodeError(f"{what}: a string is not UTF-8: {error.reason}")
    return DecodeError(f"{what}: cut off after {reader.end} bytes")
