"""The language of the tables: a message is a `Struct` of `Field` lines, each with the versions that have it.

`F("leader_epoch", INT32, "7+", default=-1)`: versions 7 and later have an INT32 named leader_epoch. It is -1 if the
writer does not give it, or the reader decodes an older version. `structs("topics", F(...), ...)`: an array of structs.

Tables are compared by identity, since the codec looks up its functions by table for every request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

_NO_LIMIT = 1 << 15


@dataclass(frozen=True)
class Versions:
    """A closed range of versions, written "3+", "0-5" or "2"."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        if text.endswith("+"):
            return cls(int(text[:-1]), _NO_LIMIT)
        first, _, last = text.partition("-")
        return cls(int(first), int(last or first))

    def __contains__(self, version: int) -> bool:
        return self.first <= version <= self.last


class Primitive(Enum):
    """Primitive types; the value is the name of the methods in `wire.primitives` that read and write it."""

    BOOLEAN = "boolean"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT64 = "float64"
    UUID = "uuid"
    STRING = "nullable_string"
    BYTES = "nullable_bytes"
    #: As BYTES, but the value may also be a range of a file: anything with a length.
    RECORDS = "records"


BOOLEAN, INT8, INT16, INT32, INT64 = (
    Primitive.BOOLEAN,
    Primitive.INT8,
    Primitive.INT16,
    Primitive.INT32,
    Primitive.INT64,
)
FLOAT64, UUID, STRING, BYTES, RECORDS = (
    Primitive.FLOAT64,
    Primitive.UUID,
    Primitive.STRING,
    Primitive.BYTES,
    Primitive.RECORDS,
)

_DEFAULTS: dict[Primitive, Any] = {BOOLEAN: False, STRING: "", BYTES: b"", RECORDS: None, FLOAT64: 0.0}


@dataclass(frozen=True, eq=False)
class Struct:
    """Fields in wire order."""

    fields: tuple[Field, ...]


@dataclass(frozen=True, eq=False)
class Array:
    """A sequence of one type."""

    element: Primitive | Struct


Type = Primitive | Struct | Array


@dataclass(frozen=True, eq=False)
class Field:
    """One line of a table. `nullable`: the versions in which it may be null; `tag`: its tag if it is a tagged field."""

    name: str
    type: Type
    versions: Versions
    nullable: Versions | None
    default: Any
    tag: int | None


def F(
    name: str,
    type: Type,
    versions: str = "0+",
    *,
    nullable: str | None = None,
    default: Any = ...,
    tag: int | None = None,
) -> Field:
    """One line of a table; see the module."""
    if default is ...:
        if isinstance(type, Primitive):
            from uuid import UUID as Uuid

            default = Uuid(int=0) if type is UUID else _DEFAULTS.get(type, 0)
        else:
            default = () if isinstance(type, Array) else None
    return Field(name, type, Versions.parse(versions), Versions.parse(nullable) if nullable else None, default, tag)


#: The result of one of several items.
ERROR = F("error_code", INT16), F("error_message", STRING, nullable="0+", default=None)


def struct(*fields: Field) -> Struct:
    return Struct(fields)


def structs(name: str, *fields: Field, versions: str = "0+", **options: Any) -> Field:
    """A field that is an array of structs; `options` as of `F`."""
    return F(name, Array(Struct(fields)), versions, **options)


def array(element: Primitive) -> Array:
    return Array(element)


@dataclass(frozen=True, eq=False)
class Api:
    """An API of the protocol: its key, the versions that this package supports, the first flexible one (KIP-482)."""

    key: int
    name: str
    versions: Versions
    flexible: int
    request: Struct
    response: Struct


def api(key: int, name: str, versions: str, *, flexible: int) -> Callable[[Struct, Struct], Api]:
    """The head of an API's table, which is called with the request and the response."""
    return partial(Api, key, name, Versions.parse(versions), flexible)


@dataclass(frozen=True, eq=False)
class Versioned:
    """A message after its INT16 version, in a record or a member's metadata; "data" in Kafka's message definitions."""

    name: str
    versions: Versions
    flexible: int
    fields: Struct


def versioned(name: str, versions: str, *fields: Field, flexible: int = _NO_LIMIT) -> Versioned:
    return Versioned(name, Versions.parse(versions), flexible, Struct(fields))
