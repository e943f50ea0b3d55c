"""Where a $ref leads: within a document, or to another one by its name, its $id or the two joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin


class UnknownReference(ValueError):
    """A $ref that leads nowhere; the message says which."""


def base_of(value: Mapping[str, Any], base: str) -> str:
    """The base URI within a schema: its $id (draft 4: id), joined with that of the schema around it."""
    identifier = value.get("$id", value.get("id"))
    if isinstance(identifier, str) and not identifier.startswith("#"):
        return _joined(base, identifier)
    return base


def resolve(documents: Mapping[str, Any], reference: str, document: Any, base: str) -> tuple[Any, Any, str]:
    """What a $ref of a document means: the schema, the document that it is in, and the base URI there.

    `documents` are others, as `json.loads` makes them, by the names that references have for them. `UnknownReference`.
    """
    url, _, fragment = reference.partition("#")
    if not url:
        return _within(document, fragment, reference), document, base
    full = _joined(base, url)
    for name, other in documents.items():
        own = other.get("$id", other.get("id")) if isinstance(other, dict) else None
        if name in (url, full) or (isinstance(own, str) and own.rstrip("#") in (url, full)):
            return _within(other, fragment, reference), other, own if isinstance(own, str) and own else name
    for below in _objects(document):
        own = below.get("$id", below.get("id"))
        if isinstance(own, str) and own and _joined(base, own).rstrip("#") == full:
            return _within(below, fragment, reference), document, full
    raise UnknownReference(f"$ref {reference} is neither in the schema nor among its references")


def _joined(base: str, url: str) -> str:
    try:
        return urljoin(base, url)
    except ValueError as error:
        raise UnknownReference(f"{url!r} is no URL: {error}") from None


def _within(document: Any, fragment: str, reference: str) -> Any:
    """The schema at a fragment of a document: a JSON pointer, or an anchor."""
    place = document
    if fragment and not fragment.startswith("/"):
        for below in _objects(document):
            if below.get("$anchor", below.get("$dynamicAnchor")) == fragment or below.get("$id") == f"#{fragment}":
                return below
        raise UnknownReference(f"$ref {reference}: there is no such anchor")
    for part in fragment.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            raise UnknownReference(f"$ref {reference}: there is no {name!r}")
    return place


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects in a value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
