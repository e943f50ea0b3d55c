"""Send requests and read answers with kafka-python's classes; uses no protocol code of this package.

Messages are dicts with the names of Kafka's schema files, in snake case. Fields that a request's version lacks are left
out.
"""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import kafka.protocol.admin as admin
import kafka.protocol.consumer as consumer
import kafka.protocol.metadata as metadata
import kafka.protocol.old.admin as old_admin
import kafka.protocol.old.commit as old_commit
import kafka.protocol.old.fetch as old_fetch
import kafka.protocol.old.list_offsets as old_list_offsets
import kafka.protocol.old.offset_for_leader_epoch as old_epoch
import kafka.protocol.old.produce as old_produce
import kafka.protocol.producer as producer
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder

from tests.support.servers.kafka import HOST

_ROOMS = (producer, consumer, metadata, admin)
#: Modules for the versions that Kafka 4 removed from its schema files and kafka-python from its newer classes.
_OLD_ROOMS: dict[str, Any] = {
    "Produce": old_produce,
    "Fetch": old_fetch,
    "ListOffsets": old_list_offsets,
    "CreateTopics": old_admin,
    "DeleteTopics": old_admin,
    "DescribeConfigs": old_admin,
    "OffsetCommit": old_commit,
    "OffsetFetch": old_commit,
    "OffsetForLeaderEpoch": old_epoch,
}
_REQUESTS = {
    request.API_KEY: request
    for room in _ROOMS
    for name, request in vars(room).items()
    if name.endswith("Request") and isinstance(request, type)
}
_CORRELATION_ID = 4711
_CLIENT_ID = "kafka-python"

Message = dict[str, Any]


def make_records(magic: int, values: list[bytes], timestamp: int, key: bytes | None = None, codec: int = 0) -> bytes:
    """Make a message set or a batch with kafka-python; `codec` is Kafka's codec id."""
    builder = MemoryRecordsBuilder(magic, codec, 1 << 30)
    for number, value in enumerate(values):
        assert builder.append(timestamp + number, key, value) is not None
    builder.close()
    return bytes(builder.buffer())


def read_records(data: bytes) -> list[tuple[int, int, bytes]]:
    """Return (magic, offset, value) of each record; checks CRCs, ignores a partial message at the end."""
    records, found = MemoryRecords(data), []
    while (batch := records.next_batch()) is not None:
        assert batch.validate_crc()
        for record in batch:
            magic = batch.magic if hasattr(batch, "magic") else batch._magic
            found.append((magic, record.offset, bytes(record.value)))
    return found


class KafkaPythonWire:
    """A connection to a broker."""

    def __init__(self, servers: str) -> None:
        self.socket = socket.create_connection((HOST, int(servers.rpartition(":")[2])), 20)

    def close(self) -> None:
        self.socket.close()

    def ask(self, name: str, version: int, message: Mapping[str, Any]) -> Message:
        """Send a request and return the answer; AssertionError if it is not exactly one message."""
        request = _class(name, "Request", version)
        is_old = hasattr(request, "SCHEMA")
        self.send(_encoded_old(request, message) if is_old else _encoded(request, version, message))
        data = self.receive()
        return _decoded_old(_class(name, "Response", version), data) if is_old else _decoded(name, version, data)

    def send(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack(">i", len(frame)) + frame)

    def receive(self) -> bytes:
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            received = self.socket.recv(size - len(data))
            assert received, "closed by the broker"
            data += received
        return bytes(data)


def encode(name: str, version: int, message: Mapping[str, Any]) -> bytes:
    """Encode a request's frame without its size."""
    request = _class(name, "Request", version)
    return _encoded_old(request, message) if hasattr(request, "SCHEMA") else _encoded(request, version, message)


class Request(NamedTuple):
    """A request as a broker receives it."""

    name: str
    version: int
    correlation_id: int
    message: Message


def decode_request(frame: bytes) -> Request:
    """Decode a request's frame without its size, in a version that kafka-python's newer classes know."""
    key, version, correlation_id, size = struct.unpack_from(">hhih", frame)
    request = _REQUESTS[key]
    flexible = request.flexible_version_q(version)
    start = 10 + max(0, size) + flexible  # the header has no tagged fields
    decode = request._struct.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=request)
    item, end = decode(memoryview(frame), start)
    assert end == len(frame), f"{len(frame) - end} bytes left over"
    return Request(
        request.__name__[: -len("Request")], version, correlation_id, _as_dict(request._struct, item, version)
    )


def encode_response(request: Request, message: Mapping[str, Any]) -> bytes:
    """Encode an answer's frame without its size."""
    cls = _class(request.name, "Response", request.version)
    tags = b"\0" if cls.flexible_version_q(request.version) and request.name != "ApiVersions" else b""
    body = _item(cls._struct, cls, message, request.version).encode(version=request.version)
    return struct.pack(">i", request.correlation_id) + tags + bytes(body)


def known_versions(name: str) -> tuple[int, int, int]:
    """(key, first version, last version) that `decode_request` and `encode_response` support."""
    request = next(request for request in _REQUESTS.values() if request.__name__ == name + "Request")
    return (request.API_KEY, *request.valid_versions)


def _class(name: str, side: str, version: int) -> Any:
    new = next(getattr(room, name + side) for room in _ROOMS if hasattr(room, name + side))
    first, last = new.valid_versions
    if version >= first:
        assert version <= last, f"kafka-python knows no {name} {version}"
        return new
    return getattr(_OLD_ROOMS[name], name + side)[version]


def _encoded(request: Any, version: int, message: Mapping[str, Any]) -> bytes:
    item = _item(request._struct, request, message, version)
    item.with_header(correlation_id=_CORRELATION_ID, client_id=_CLIENT_ID)
    return bytes(item.encode(header=True))


def _item(kind: Any, cls: Any, message: Mapping[str, Any], version: int) -> Any:
    assert message.keys() <= kind.fields.keys(), message.keys() - kind.fields.keys()
    values: Message = {}
    for name, field in kind.fields.items():
        if name not in message or not field.for_version_q(version):
            continue
        value = message[name]
        if field.is_struct_array() and value is not None:
            value = [_item(field, field.data_class, entry, version) for entry in value]
        elif field.is_struct() and value is not None:
            value = _item(field, field.data_class, value, version)
        values[name] = value
    return cls(version=version, **values)


def _decoded(name: str, version: int, data: bytes) -> Message:
    response = _class(name, "Response", version)
    stream = io.BytesIO(data)
    header = response.parse_header(stream, version=version)
    assert header.correlation_id == _CORRELATION_ID
    flexible = response.flexible_version_q(version)
    decode = response._struct.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=response)
    item, end = decode(memoryview(data), stream.tell())
    assert end == len(data), f"{len(data) - end} bytes left over"
    return _as_dict(response._struct, item, version)


def _as_dict(kind: Any, item: Any, version: int) -> Message:
    values: Message = {}
    for name, field in kind.fields.items():
        if not field.for_version_q(version):
            continue
        value = getattr(item, name)
        if field.is_struct_array() and value is not None:
            value = [_as_dict(field, entry, version) for entry in value]
        elif field.is_struct() and value is not None:
            value = _as_dict(field, value, version)
        values[name] = bytes(value) if isinstance(value, memoryview) else value
    return values


def _encoded_old(request: Any, message: Mapping[str, Any]) -> bytes:
    head = struct.pack(">hhih", request.API_KEY, request.API_VERSION, _CORRELATION_ID, len(_CLIENT_ID))
    return head + _CLIENT_ID.encode() + bytes(request(*_positional(request.SCHEMA, message)).encode())


def _positional(schema: Any, message: Mapping[str, Any]) -> list[Any]:
    values = []
    for name, kind in zip(schema.names, schema.fields, strict=True):
        inner = getattr(kind, "array_of", None)
        value = message[name]
        values.append([tuple(_positional(inner, entry)) for entry in value] if hasattr(inner, "names") else value)
    return values


def _decoded_old(response: Any, data: bytes) -> Message:
    assert struct.unpack_from(">i", data) == (_CORRELATION_ID,)
    stream = io.BytesIO(data[4:])
    item = response.SCHEMA.decode(stream)
    left = stream.read()
    assert not left, f"{len(left)} bytes left over"
    return _named(response.SCHEMA, item)


def _named(schema: Any, values: Any) -> Message:
    message: Message = {}
    for name, kind, value in zip(schema.names, schema.fields, values, strict=True):
        inner = getattr(kind, "array_of", None)
        message[name] = [_named(inner, entry) for entry in value] if hasattr(inner, "names") else value
    return message
