"""Plausible requests but for one field: its longest legal or illegal value, or one item many times."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from typing import Any

from spark_klog.protocol.codec import encode_request
from spark_klog.protocol.schema import Api, Array, Field, Primitive, Struct, Type
from tests.support.brokers.raw_client import CLIENT_ID

#: Bytes of the longest string.
LONGEST = 32_767
_TIMES = 1000
_LARGE = 1_000_000
#: A value that the frame has only once; its length is one byte in the compact encoding.
_MARK = "~" * 60
_GIVEN: dict[str, Any] = {
    "acks": -1,
    "assignments": [],
    "committed_offset": 5,
    "count": 2,
    "current_leader_epoch": -1,
    "cursor": None,
    "generation_id": -1,
    "generation_id_or_member_epoch": -1,
    "group_instance_id": None,
    "max_bytes": 1 << 24,
    "max_num_offsets": 1000,
    "member_id": "",
    "num_partitions": 1,
    "partition_max_bytes": 1 << 20,
    "producer_epoch": -1,
    "producer_id": -1,
    "protocol_type": "consumer",
    "rebalance_timeout_ms": 6000,
    "replication_factor": 1,
    "resource_type": 2,
    "response_partition_limit": 2000,
    "session_timeout_ms": 6000,
    "transaction_timeout_ms": 60_000,
}
Path = tuple[str, ...]
Message = dict[str, Any]


class Requests:
    """Makes the requests of one API and version, about the topic and the group of that name."""

    def __init__(self, api: Api, version: int, name: str, topic_id: uuid.UUID, batch: bytes) -> None:
        self.api, self.version = api, version
        self._name, self._topic_id, self._batch = name, topic_id, batch

    def frames(self) -> Iterator[tuple[str, bytes]]:
        """(what is in it, frame) for each field with each of its values."""
        longest = Requests(self.api, self.version, "x" * LONGEST, self._topic_id, self._batch)
        yield f"{self.api.name} v{self.version}: all strings are the longest", longest.plain()
        for path, field in self._fields(self.api.request, ()):
            for label, frame in self._of_field(path, field):
                yield f"{self.api.name} v{self.version} {'.'.join(path)}: {label}", frame

    def repeated(self) -> list[bytes]:
        """The requests that name one item many times."""
        arrays = [(path, field.type) for path, field in self._fields(self.api.request, ())]
        items = [(path, self._value(kind.element, path[-1])) for path, kind in arrays if isinstance(kind, Array)]
        return [self._with(path, [item] * _TIMES) for path, item in items]

    def plain(self) -> bytes:
        """The request without any such value."""
        return self._encoded(self._message(self.api.request))

    def _fields(self, table: Struct, path: Path) -> Iterator[tuple[Path, Field]]:
        for field in table.fields:
            if self.version in field.versions:
                yield (*path, field.name), field
                inner = field.type.element if isinstance(field.type, Array) else field.type
                if isinstance(inner, Struct):
                    yield from self._fields(inner, (*path, field.name))

    def _of_field(self, path: Path, field: Field) -> Iterator[tuple[str, bytes]]:
        kind = field.type
        if kind is Primitive.STRING:
            yield "longest", self._with(path, "x" * LONGEST)
            yield "longest of two bytes a character", self._with(path, "é" * (LONGEST // 2))
            yield from self._illegal_strings(path)
        elif kind in (Primitive.BYTES, Primitive.RECORDS):
            yield "large", self._with(path, bytes(_LARGE))
            yield "many batches", self._with(path, self._batch * _TIMES)
        elif isinstance(kind, Array):
            item = self._value(kind.element, path[-1])
            yield "one item many times", self._with(path, [item] * _TIMES)
            yield "no item", self._with(path, [])
            if kind.element is Primitive.STRING:
                yield "the longest item many times", self._with(path, ["x" * LONGEST] * 100)
            elif isinstance(kind.element, Struct):
                strings = [each.name for each in kind.element.fields if each.type is Primitive.STRING]
                long = {name: "x" * LONGEST for name in strings if name in item}
                if long:
                    yield "the longest item many times", self._with(path, [item | long] * 100)
                different = [self._numbered(kind.element, item, number) for number in range(_TIMES)]
                yield "many different items", self._with(path, different)
        if field.nullable is not None and self.version in field.nullable:
            yield "null", self._with(path, None)

    def _numbered(self, table: Struct, item: Message, number: int) -> Message:
        """The item with all its strings and its first number changed."""
        changed = dict(item)
        for field in table.fields:
            if field.name in item and field.type is Primitive.STRING and item[field.name] is not None:
                changed[field.name] = f"{item[field.name]}-{number}"
            elif field.name in item and field.name in ("partition", "partition_index", "index"):
                changed[field.name] = number
        return changed

    def _illegal_strings(self, path: Path) -> Iterator[tuple[str, bytes]]:
        marked = self._with(path, _MARK)
        mark = _MARK.encode()
        plain, compact = struct.pack(">h", len(mark)) + mark, bytes([len(mark) + 1]) + mark
        for size in (LONGEST + 1, 10 * _LARGE):
            text = b"x" * size
            if plain in marked:
                yield f"{size} bytes", marked.replace(plain, struct.pack(">H", size & 0xFFFF) + text)
            elif compact in marked:
                length = bytes([(size + 1) >> shift & 0x7F | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21)])
                yield f"{size} bytes", marked.replace(compact, length + text)
        for bad in (b"\xff", b"\xed\xa0\x80", b"\0"):
            yield f"bytes {bad!r}", marked.replace(mark, bad * 60 if len(bad) == 1 else bad * 20)

    def _with(self, path: Path, value: Any) -> bytes:
        whole = self._message(self.api.request)
        place: Any = whole
        for step in path[:-1]:
            if not place.get(step):  # left out, or null: fill it
                place[step] = self._filled(path[: path.index(step) + 1])
            place = place[step][0] if isinstance(place[step], list) else place[step]
        place[path[-1]] = value
        return self._encoded(whole)

    def _filled(self, path: Path) -> Any:
        table = self.api.request
        for step in path:
            field = next(field for field in table.fields if field.name == step)
            inner = field.type.element if isinstance(field.type, Array) else field.type
            if isinstance(inner, Struct):
                table = inner
        return [self._message(table)] if isinstance(field.type, Array) else self._message(table)

    def _encoded(self, message: Message) -> bytes:
        return encode_request(self.api, self.version, 7, CLIENT_ID, message).to_bytes()

    def _message(self, table: Struct) -> Message:
        return {
            field.name: self._given(field)
            for field in table.fields
            if self.version in field.versions and field.tag is None
        }

    def _given(self, field: Field) -> Any:
        return _GIVEN[field.name] if field.name in _GIVEN else self._value(field.type, field.name)

    def _value(self, kind: Type, name: str) -> Any:
        if isinstance(kind, Struct):
            return self._message(kind)
        if isinstance(kind, Array):
            return [self._value(kind.element, name)]
        if kind is Primitive.STRING:
            return self._name
        if kind is Primitive.UUID:
            return self._topic_id
        if kind in (Primitive.BYTES, Primitive.RECORDS):
            return self._batch if kind is Primitive.RECORDS else b""
        return {Primitive.BOOLEAN: False, Primitive.FLOAT64: 0.0}.get(kind, 0)
