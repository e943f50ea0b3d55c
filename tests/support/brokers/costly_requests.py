"""Well-formed requests of a given size with as many elements as possible, to measure the cost of an element."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from spark_klog.protocol.codec import encode_request
from spark_klog.protocol.schema import Api, Array, Primitive, Struct, Type
from tests.support.brokers.raw_client import CLIENT_ID

_NUMBERS = (Primitive.INT8, Primitive.INT16, Primitive.INT32, Primitive.INT64)
_GIVEN = {"timeout_ms": 0, "max_wait_ms": 0, "session_timeout_ms": 6000, "rebalance_timeout_ms": 6000, "acks": -1}
_TOPIC = 2
Path = tuple[str, ...]


def arrays(struct: Struct, version: int, path: Path = ()) -> Iterator[Path]:
    """Yield the arrays of a message, each as the path of field names to it."""
    for field in struct.fields:
        if version in field.versions and field.tag is None and isinstance(field.type, Array):
            yield (*path, field.name)
            if isinstance(field.type.element, Struct):
                yield from arrays(field.type.element, version, (*path, field.name))


def costly_frame(
    api: Api, version: int, path: Path, size: int, name: str, topic_id: uuid.UUID, *, is_distinct: bool = False
) -> bytes:
    """A request of about `size` bytes whose array at `path` repeats one small element.

    `name` is the name of all its topics and groups, `topic_id` the id of all its topics. With `is_distinct` the
    elements are numbered: each has a name of its own.
    """

    def value(kind: Type, field: str) -> Any:
        if isinstance(kind, Struct):
            return message(kind)
        if isinstance(kind, Array):
            return []
        if kind in _NUMBERS:
            return _TOPIC if field == "resource_type" else 0
        if kind is Primitive.UUID:
            return topic_id
        return {Primitive.BOOLEAN: False, Primitive.STRING: name, Primitive.FLOAT64: 0.0}.get(kind, b"")

    def message(struct: Struct) -> dict[str, Any]:
        result = {}
        for field in struct.fields:
            if version in field.versions:
                is_null = field.nullable is not None and version in field.nullable and "name" not in field.name
                given = _GIVEN.get(field.name, None if is_null else value(field.type, field.name))
                result[field.name] = given
        return result

    whole = message(api.request)
    struct, parent = api.request, whole
    for step in path:
        field = next(field for field in struct.fields if field.name == step)
        assert isinstance(field.type, Array)
        kind = field.type.element
        if step != path[-1]:
            assert isinstance(kind, Struct)
            parent[step] = [message(kind)]
            struct, parent = kind, parent[step][0]
    element = value(kind, path[-1])

    def numbered(element: Any, number: int) -> Any:
        if isinstance(element, dict):
            return {field: numbered(inner, number) for field, inner in element.items()}
        return f"{element}-{number:06}" if isinstance(element, str) else element

    def encoded(count: int) -> bytes:
        parent[path[-1]] = [numbered(element, number) for number in range(count)] if is_distinct else [element] * count
        return encode_request(api, version, 7, CLIENT_ID, whole).to_bytes()

    each = (len(encoded(101)) - len(encoded(1))) / 100
    return encoded(int(size / each))
