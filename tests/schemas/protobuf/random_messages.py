"""Random Protobuf schemas and messages of them."""

from __future__ import annotations

import random
import struct
from typing import Any

_SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32"),
    *("sfixed64", "bool", "string", "bytes", "Color"),
)
_KEYS = ("int32", "int64", "uint32", "sint64", "fixed32", "sfixed64", "bool", "string")
_TIMES = ("google.protobuf.Timestamp", "google.protobuf.Duration")
_INTS = (0, 1, -1, 63, 300, -65, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63))


def random_schema(rng: random.Random, syntax: str) -> str:
    """The text of a schema: message M, with others in it."""
    return "\n".join(
        [
            f'syntax = "{syntax}";',
            "package random;",
            'import "google/protobuf/timestamp.proto";',
            'import "google/protobuf/duration.proto";',
            "enum Color { NONE = 0; RED = 1; GREEN = 5; BLUE = -3; }",
            *_message(rng, syntax, "M", 0),
        ]
    )


def _message(rng: random.Random, syntax: str, name: str, depth: int) -> list[str]:
    lines = [f"message {name} {{"]
    numbers = rng.sample([*range(1, 30), 1023, 1024, 1025, 5000, 536_870_911], rng.randrange(1, 9))
    oneof: list[str] = []
    for index, number in enumerate(numbers):
        field, kind, chance = f"f{index}", rng.choice(_SCALARS), rng.random()
        if depth < 3 and rng.random() < 0.3:
            kind = f"{name}{index}"
            lines += _message(rng, syntax, kind, depth + 1)
        elif rng.random() < 0.1:
            kind = rng.choice(_TIMES)
        if chance < 0.25:
            packed = rng.choice(("", " [packed = true]", " [packed = false]"))
            is_number = kind in _SCALARS and kind not in ("string", "bytes")
            lines.append(f"repeated {kind} {field} = {number}{packed if is_number else ''};")
        elif chance < 0.35:
            lines.append(f"map<{rng.choice(_KEYS)}, {kind}> {field} = {number};")
        elif chance < 0.5:
            oneof.append(f"{kind} {field} = {number};")
        elif syntax == "proto3":
            lines.append(f"{rng.choice(('', 'optional '))}{kind} {field} = {number};")
        else:
            label = "required" if chance > 0.95 else "optional"
            default = _default(rng, kind) if label == "optional" and rng.random() < 0.4 else ""
            lines.append(f"{label} {kind} {field} = {number}{default};")
    if oneof:
        lines += ["oneof choice {", *oneof, "}"]
    return [*lines, "}"]


def _default(rng: random.Random, kind: str) -> str:
    defaults = {"string": '"d\u20ac"', "bytes": '"\\001\\377"', "bool": "true", "Color": "GREEN", "float": "-1.5"}
    if kind not in _SCALARS:
        return ""
    value = defaults.get(kind) or str(rng.choice((7, 300) if "u" in kind or kind.startswith("f") else (7, -300)))
    return f" [default = {value}]"


def fill(rng: random.Random, message: Any, depth: int = 0) -> None:
    """Give a message random fields."""
    for field in message.DESCRIPTOR.fields:
        if not field.is_required and rng.random() < 0.4:
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            entries = getattr(message, field.name)
            for _ in range(rng.randrange(3)):
                key = _value(rng, inner.fields_by_name["key"])
                if inner.fields_by_name["value"].message_type is not None:
                    fill(rng, entries[key], depth + 1)
                else:
                    entries[key] = _value(rng, inner.fields_by_name["value"])
        elif inner is not None and field.is_repeated:
            for _ in range(rng.choice((0, 1, 1, 3))):
                fill(rng, getattr(message, field.name).add(), depth + 1)
        elif inner is not None:
            getattr(message, field.name).SetInParent()
            fill(rng, getattr(message, field.name), depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(rng, field) for _ in range(rng.choice((0, 1, 2, 20))))
        else:
            setattr(message, field.name, _value(rng, field))


def _value(rng: random.Random, field: Any) -> Any:
    kind = field.type
    if kind == field.TYPE_DOUBLE:
        return rng.choice((0.0, -0.0, 0.1, float("inf"), rng.random()))
    if kind == field.TYPE_FLOAT:
        return struct.unpack("<f", rng.randbytes(3) + b"\x3f")[0]
    if kind == field.TYPE_BOOL:
        return rng.random() < 0.5
    if kind == field.TYPE_STRING:
        return rng.choice(("", "a", "\u20ac" * 3, "long enough for sixteen bytes"))
    if kind == field.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 20, 200)))
    if kind == field.TYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return rng.choice(known if field.enum_type.is_closed else [*known, 77, -(2**31)])
    if field.name == "nanos":
        return rng.choice((0, 1, 999, 1000, 999_999_999, -1, -1001))
    if field.name == "seconds":
        return rng.choice((0, 1, -1, 1_700_000_000, -62_135_596_800))
    bits = 32 if kind in (field.TYPE_INT32, field.TYPE_UINT32, field.TYPE_SINT32) else 64
    bits = 32 if kind in (field.TYPE_FIXED32, field.TYPE_SFIXED32) else bits
    number = rng.choice(_INTS)
    if kind in (field.TYPE_UINT32, field.TYPE_UINT64, field.TYPE_FIXED32, field.TYPE_FIXED64):
        return number & ((1 << bits) - 1)
    return (number + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def shuffled(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """The bytes of a message as another writer may have written them: parts of others after or before them."""
    return b"".join(rng.sample([data, *rng.sample(others, min(2, len(others)))], rng.randrange(1, 4)))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, added or cut off."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            del changed[at:]
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 5))
        else:
            changed[at : at + rng.randrange(1, 5)] = b""
    return bytes(changed)
