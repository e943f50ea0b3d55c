"""Every API and version against kafka-python, whose messages come from Apache Kafka's own schema files.

Versions that Kafka 4 dropped from those files are checked against kafka-python's older, hand-written messages.
"""

from __future__ import annotations

import io
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from struct import calcsize as struct_size
from typing import Any

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
import kafka.protocol.sasl as sasl
import pytest

from spark_klog.protocol import apis
from spark_klog.protocol.codec import (
    Message,
    decode_request,
    decode_request_header,
    decode_response,
    encode_request,
    encode_response,
)
from spark_klog.protocol.schema import Api, Array, Field, Primitive, Struct, Type
from spark_klog.wire.primitives import Reader

ROOMS = (producer, consumer, metadata, admin, sasl)
# versions that Kafka 4 has removed (KIP-896) and only the older messages have
OLD: dict[tuple[str, int], Any] = {
    ("Produce", 0): (old_produce.ProduceRequest[0], old_produce.ProduceResponse[0]),
    ("Produce", 1): (old_produce.ProduceRequest[1], old_produce.ProduceResponse[1]),
    ("Produce", 2): (old_produce.ProduceRequest[2], old_produce.ProduceResponse[2]),
    ("Fetch", 0): (old_fetch.FetchRequest[0], old_fetch.FetchResponse[0]),
    ("Fetch", 1): (old_fetch.FetchRequest[1], old_fetch.FetchResponse[1]),
    ("Fetch", 2): (old_fetch.FetchRequest[2], old_fetch.FetchResponse[2]),
    ("Fetch", 3): (old_fetch.FetchRequest[3], old_fetch.FetchResponse[3]),
    ("ListOffsets", 0): (old_list_offsets.ListOffsetsRequest[0], old_list_offsets.ListOffsetsResponse[0]),
    ("CreateTopics", 0): (old_admin.CreateTopicsRequest[0], old_admin.CreateTopicsResponse[0]),
    ("CreateTopics", 1): (old_admin.CreateTopicsRequest[1], old_admin.CreateTopicsResponse[1]),
    ("DeleteTopics", 0): (old_admin.DeleteTopicsRequest[0], old_admin.DeleteTopicsResponse[0]),
    ("OffsetCommit", 0): (old_commit.OffsetCommitRequest[0], old_commit.OffsetCommitResponse[0]),
    ("OffsetCommit", 1): (old_commit.OffsetCommitRequest[1], old_commit.OffsetCommitResponse[1]),
    ("OffsetFetch", 0): (old_commit.OffsetFetchRequest[0], old_commit.OffsetFetchResponse[0]),
    ("DescribeConfigs", 0): (old_admin.DescribeConfigsRequest[0], old_admin.DescribeConfigsResponse[0]),
    ("OffsetForLeaderEpoch", 0): (old_epoch.OffsetForLeaderEpochRequest[0], old_epoch.OffsetForLeaderEpochResponse[0]),
    ("OffsetForLeaderEpoch", 1): (old_epoch.OffsetForLeaderEpochRequest[1], old_epoch.OffsetForLeaderEpochResponse[1]),
}
#: APIs that kafka-python does not know: see test_consumer_group_messages.py.
UNKNOWN = {"ConsumerGroupHeartbeat", "ConsumerGroupDescribe"}
#: Versions of Kafka 4.4 that kafka-python does not know yet: see test_messages_of_kafka_4_4.py.
UNKNOWN_VERSIONS = {("ApiVersions", 5), ("TxnOffsetCommit", 6), ("DeleteGroups", 3)}
KNOWN = [api for api in apis.BY_KEY.values() if api.name not in UNKNOWN]
CASES = [
    (api, version)
    for api in KNOWN
    for version in range(api.versions.first, api.versions.last + 1)
    if (api.name, version) not in UNKNOWN_VERSIONS
]
NEW = [case for case in CASES if (case[0].name, case[1]) not in OLD]
REMOVED = [case for case in CASES if (case[0].name, case[1]) in OLD]
SIDES = ("request", "response")
FLAVOURS = ("full", "nulls", "empty", "long", "defaults")
#: kafka-python turns these INT32 fields into sets of bits, most of them under this name.
BITS = "authorized_operations"
_RANGES = {Primitive.INT8: 7, Primitive.INT16: 15, Primitive.INT32: 31, Primitive.INT64: 63}


def _name(case: object) -> str:
    return case.name if isinstance(case, Api) else str(case)


def _kafka(api: Api, side: str) -> Any:
    name = api.name + side.capitalize()
    return next(getattr(room, name) for room in ROOMS if hasattr(room, name))


class Values:
    """Makes a message for a table; `flavour` decides how the fields are filled."""

    def __init__(self, flavour: str, version: int, flexible: bool) -> None:
        self.flavour = flavour
        self.version = version
        self.flexible = flexible
        self.random = random.Random(f"{flavour} {version}")

    def message(self, struct: Struct) -> Message:
        return {
            field.name: self.field(field)
            for field in struct.fields
            if self.version in field.versions and not (self.flavour == "defaults" and field.tag is not None)
        }

    def field(self, field: Field) -> Any:
        nullable = field.nullable is not None and self.version in field.nullable
        if self.flavour == "nulls" and nullable:
            return None
        if self.flavour == "defaults" and not isinstance(field.type, (Array, Struct)):
            return field.default
        return self.value(field.type)

    def value(self, kind: Type) -> Any:
        if isinstance(kind, Struct):
            return self.message(kind)
        if isinstance(kind, Array):
            return [self.value(kind.element) for _ in range(self.length(isinstance(kind.element, Struct)))]
        if kind in _RANGES:
            bits = _RANGES[kind]
            return self.random.choice((-1, 1, -(1 << bits), (1 << bits) - 1, self.random.getrandbits(bits)))
        if kind is Primitive.BOOLEAN:
            return self.random.random() < 0.5
        if kind is Primitive.FLOAT64:
            return self.random.choice((0.0, -1.5, 1e300, self.random.random()))
        if kind is Primitive.UUID:
            return uuid.UUID(int=self.random.getrandbits(128) | 1)
        size = {"empty": 0, "long": 300}.get(self.flavour, 5)
        if kind is Primitive.STRING:
            return "".join(self.random.choices("abcdefäöü€", k=size))
        return self.random.randbytes(size * 20)

    def length(self, of_structs: bool) -> int:
        lengths = {"empty": 0, "full": 3, "long": 2 if of_structs else 200}
        return lengths.get(self.flavour, 1)


def _values(api: Api, version: int, side: str, flavour: str) -> Message:
    message = Values(flavour, version, version >= api.flexible).message(getattr(api, side))
    if api.name == "ApiVersions" and side == "response":
        message["error_code"] = 0  # with an error, the body is that of version 0
    return message


def _normal(value: Any) -> Any:
    """Convert the values of both libraries to one form."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return [_normal(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _normal(entry) for name, entry in value.items()}
    return value


def _to_kafka(field: Any, struct: Struct, message: Message, version: int) -> Any:
    """Convert our message to kafka-python's object; check that both have the same fields."""
    values: dict[str, Any] = {}
    for ours in struct.fields:
        if ours.name not in message:
            continue
        value, name = message[ours.name], ours.name
        if name.endswith(BITS) and BITS in field.fields:
            name, value = BITS, {bit for bit in range(32) if value >> bit & 1}
        theirs = field.fields[name]
        if isinstance(ours.type, Struct) and value is not None:
            value = _to_kafka(theirs, ours.type, value, version)
        elif isinstance(ours.type, Array) and isinstance(ours.type.element, Struct) and value is not None:
            value = [_to_kafka(theirs, ours.type.element, entry, version) for entry in value]
        values[name] = value
    expected = {name for name, theirs in field.fields.items() if theirs.for_version_q(version)}
    missing = {name for name in expected - values.keys() if field.fields[name].tag is None}
    assert not missing, f"fields that our table lacks: {missing}"
    assert values.keys() <= expected, f"fields that version {version} does not have: {values.keys() - expected}"
    return field.data_class(version=version, **values)


def _from_kafka(item: Any, struct: Struct, version: int) -> Message:
    """Convert kafka-python's object to our message, with every field that the version has."""
    message: Message = {}
    for ours in struct.fields:
        if version not in ours.versions:
            continue
        if ours.name.endswith(BITS) and hasattr(item, BITS):
            bits = item.authorized_operations
            number = sum(1 << bit for bit in ({31} if bits is None else bits))
            message[ours.name] = number - (1 << 32) if number >> 31 else number
            continue
        value = getattr(item, ours.name)
        if isinstance(ours.type, Struct) and value is not None:
            value = _from_kafka(value, ours.type, version)
        elif isinstance(ours.type, Array) and isinstance(ours.type.element, Struct) and value is not None:
            value = [_from_kafka(entry, ours.type.element, version) for entry in value]
        elif ours.type is Primitive.UUID and value is None:
            value = uuid.UUID(int=0)
        message[ours.name] = value
    return message


def _present(message: Message, struct: Struct, version: int) -> Message:
    """The fields of a decoded message that the version has; all other fields must have their default."""
    result: Message = {}
    assert sorted(message) == sorted(field.name for field in struct.fields)
    for field in struct.fields:
        value = message[field.name]
        if version not in field.versions:
            assert value == field.default
            continue
        if isinstance(field.type, Struct) and value is not None:
            value = _present(value, field.type, version)
        elif isinstance(field.type, Array) and isinstance(field.type.element, Struct) and value is not None:
            value = [_present(entry, field.type.element, version) for entry in value]
        result[field.name] = value
    return result


def _decode(api: Api, version: int, side: str, data: bytes) -> Message:
    """Decode with our codec, and check the header; return the message."""
    if side == "response":
        correlation_id, message = decode_response(api, version, data)
    else:
        reader = Reader(data)
        key, got_version, correlation_id = decode_request_header(reader)
        assert (key, got_version) == (api.key, version)
        client_id, message = decode_request(api, version, reader)
        assert client_id == "tester"
    assert correlation_id == 77
    return _present(message, getattr(api, side), version)


def _encode(api: Api, version: int, side: str, message: Message) -> bytes:
    if side == "response":
        return encode_response(api, version, 77, message).to_bytes()
    return encode_request(api, version, 77, "tester", message).to_bytes()


def _kafka_decode(api: Api, version: int, side: str, data: bytes) -> Any:
    """Decode with kafka-python; all bytes must be used."""
    cls = _kafka(api, side)
    stream = io.BytesIO(data)
    header = cls.parse_header(stream, version=version)
    assert header.correlation_id == 77
    if side == "request":
        assert (header.request_api_key, header.request_api_version, header.client_id) == (
            api.key,
            version,
            "tester",
        )
    flexible = cls.flexible_version_q(version)
    decode = cls._struct.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=cls[None])
    item, end = decode(memoryview(data), stream.tell())
    assert end == len(data)
    return item


def _filled(message: Message, struct: Struct, version: int) -> Message:
    """The message with the defaults that a reader returns for tagged fields that were not sent."""
    result: Message = {}
    for field in struct.fields:
        if version not in field.versions:
            continue
        value = message.get(field.name, field.default)
        if isinstance(field.type, Array) and isinstance(field.type.element, Struct) and value is not None:
            value = [_filled(entry, field.type.element, version) for entry in value]
        elif isinstance(field.type, Struct) and value is not None:
            value = _filled(value, field.type, version)
        result[field.name] = value
    return _normal(result)


@contextmanager
def _case(*words: str) -> Iterator[None]:
    """A case of a test with a thousand of them, which pytest would name for longer than they take."""
    try:
        yield
    except Exception as error:
        raise AssertionError(" ".join(words)) from error


@pytest.mark.parametrize(("api", "version"), NEW, ids=_name)
def test_kafka_python_and_ours_agree(api: Api, version: int) -> None:
    for side in SIDES:
        for flavour in FLAVOURS:
            with _case(side, flavour):
                _agree(api, version, side, flavour)


def _agree(api: Api, version: int, side: str, flavour: str) -> None:
    cls, table = _kafka(api, side), getattr(api, side)
    message = _values(api, version, side, flavour)
    expected = _filled(message, table, version)

    theirs = _to_kafka(cls._struct, table, message, version)
    theirs.with_header(correlation_id=77, **({"client_id": "tester"} if side == "request" else {}))
    data = bytes(theirs.encode(header=True))
    assert _normal(_decode(api, version, side, data)) == expected

    ours = _encode(api, version, side, message)
    decoded = _from_kafka(_kafka_decode(api, version, side, ours), table, version)
    assert _normal(decoded) == expected
    assert ours == data


def _tuples(struct: Struct, message: Message, version: int) -> list[Any]:
    """Convert our message to the positional form of kafka-python's older messages."""
    items: list[Any] = []
    for field in struct.fields:
        if version in field.versions:
            value = message[field.name]
            if isinstance(field.type, Array) and isinstance(field.type.element, Struct):
                value = [tuple(_tuples(field.type.element, entry, version)) for entry in value]
            items.append(value)
    return items


def _names(field: Any) -> Iterator[Any]:
    """The field names of an older message's schema, nested."""
    for name, kind in zip(field.names, field.fields, strict=True):
        inner = getattr(kind, "array_of", None)
        yield (name, list(_names(inner))) if hasattr(inner, "names") else name


def _our_names(struct: Struct, version: int) -> Iterator[Any]:
    for field in struct.fields:
        if version in field.versions:
            is_nested = isinstance(field.type, Array) and isinstance(field.type.element, Struct)
            yield (field.name, list(_our_names(field.type.element, version))) if is_nested else field.name


@pytest.mark.parametrize(("api", "version"), REMOVED, ids=_name)
def test_removed_versions_agree_with_the_older_messages(api: Api, version: int) -> None:
    for side in SIDES:
        for flavour in ("full", "nulls", "empty", "long"):
            with _case(side, flavour):
                _agree_with_older(api, version, side, flavour)


def _agree_with_older(api: Api, version: int, side: str, flavour: str) -> None:
    cls, table = OLD[api.name, version][SIDES.index(side)], getattr(api, side)
    assert (api.key, version) == (cls.API_KEY, cls.API_VERSION)
    message = _values(api, version, side, flavour)
    values = _tuples(table, message, version)
    ours, body = _encode(api, version, side, message), cls(*values).encode()
    head = struct_size(">i") if side == "response" else struct_size(">hhih6s")
    assert ours[head:] == body
    stream = io.BytesIO(ours[head:])
    decoded = cls.SCHEMA.decode(stream)
    assert _normal(list(decoded)) == _normal(values)
    assert stream.read() == b""
    assert _normal(_decode(api, version, side, ours[:head] + body)) == _normal(message)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("api", "version"), REMOVED, ids=_name)
def test_removed_versions_have_the_same_fields(api: Api, version: int, side: str) -> None:
    cls = OLD[api.name, version][SIDES.index(side)]
    assert list(_names(cls.SCHEMA)) == list(_our_names(getattr(api, side), version))


def test_every_version_has_its_oracle() -> None:
    for api, version in NEW:
        for side in SIDES:
            first, last = _kafka(api, side).valid_versions
            assert first <= version <= last, f"{api.name} {version}: kafka-python has {first}-{last}"
    for api, _ in REMOVED:
        assert api in apis.BY_KEY.values()
    assert len(REMOVED) == len(OLD) == 17


@pytest.mark.parametrize("api", KNOWN, ids=_name)
def test_keys_and_first_flexible_versions(api: Api) -> None:
    for side in SIDES:
        cls = _kafka(api, side)
        assert api.key == cls.API_KEY
        for version in range(api.versions.first, api.versions.last + 1):
            assert (version >= api.flexible) == cls.flexible_version_q(version)


def _lines(struct: Struct, version: int) -> Iterator[tuple[str, Field]]:
    """The fields that a version has; nested ones by their path."""
    for field in struct.fields:
        if version not in field.versions:
            continue
        name = BITS if field.name.endswith(BITS) else field.name
        yield name, field
        inner = field.type.element if isinstance(field.type, Array) else field.type
        if isinstance(inner, Struct):
            yield from ((f"{name}.{below}", line) for below, line in _lines(inner, version))


def _their_lines(field: Any, version: int) -> Iterator[tuple[str, Any]]:
    for name, line in field.fields.items():
        if line.for_version_q(version):
            name = BITS if name.endswith(BITS) else name
            yield name, line
            if line.is_struct() or line.is_struct_array():
                yield from ((f"{name}.{below}", entry) for below, entry in _their_lines(line, version))


def _in(versions: str, version: int) -> bool:
    first, _, last = versions.rstrip("+").partition("-")
    return int(first) <= version <= (1 << 15 if versions.endswith("+") else int(last or first))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("api", "version"), NEW, ids=_name)
def test_fields_nulls_tags_and_defaults_are_those_of_the_schema_files(api: Api, version: int, side: str) -> None:
    theirs = dict(_their_lines(_kafka(api, side)._struct, version))
    ours = dict(_lines(getattr(api, side), version))
    assert ours.keys() == theirs.keys()
    for name, field in ours.items():
        schema = theirs[name]._json
        nullable = field.nullable is not None and version in field.nullable
        assert nullable == ("nullableVersions" in schema and _in(schema["nullableVersions"], version)), name
        assert field.tag == schema.get("tag"), name
        if "default" in schema and not field.name.endswith(BITS):
            assert field.default == theirs[name].default, name
