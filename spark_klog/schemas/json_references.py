"""Where a $ref leads: within a document, or to another one by its name, its $id or the two joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urljoin

#: $ids that are compared with those that $refs mean.
_MOST_IDENTIFIERS: Final = 500_000


class UnknownReference(ValueError):
    """A $ref that leads nowhere; the message says which."""


def base_of(value: Mapping[str, Any], base: str) -> str:
    """The base URI within a schema: its $id (draft 4: id), joined with that of the schema around it."""
    identifier = value.get("$id", value.get("id"))
    if isinstance(identifier, str) and not identifier.startswith("#"):
        return _joined(base, identifier)
    return base


class Documents:
    """What the $refs of a schema may lead to: its own document, and others by the names that references have for them.

    Documents are what `json.loads` makes; they must not change.
    """

    def __init__(self, others: Mapping[str, Any]) -> None:
        self._others = others
        #: Objects with an $id, and by their anchors, by the identity of the document.
        self._identified: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        self._anchored: dict[int, dict[str, dict[str, Any]]] = {}
        self._compared = 0

    def resolve(self, reference: str, document: Any, base: str) -> tuple[Any, Any, str]:
        """What a $ref of a document means: the schema, the document that it is in, and the base URI there.

        `UnknownReference`.
        """
        url, _, fragment = reference.partition("#")
        if not url:
            return self._within(document, fragment, reference), document, base
        full = _joined(base, url)
        for name, other in self._others.items():
            own = other.get("$id", other.get("id")) if isinstance(other, dict) else None
            if name in (url, full) or (isinstance(own, str) and own.rstrip("#") in (url, full)):
                return self._within(other, fragment, reference), other, own if isinstance(own, str) and own else name
        self._index(document)
        for own, below in self._identified[id(document)]:
            self._compared += 1
            if self._compared > _MOST_IDENTIFIERS:
                raise UnknownReference("the schema has too many $refs and $ids to find each among the others")
            if _joined(base, own).rstrip("#") == full:
                return self._within(below, fragment, reference), document, full
        raise UnknownReference(f"$ref {reference} is neither in the schema nor among its references")

    def _index(self, document: Any) -> None:
        """Find the objects of a document that have names, once."""
        if id(document) in self._identified:
            return
        identified = self._identified[id(document)] = []
        anchored = self._anchored[id(document)] = {}
        for below in objects_in(document):
            own = below.get("$id", below.get("id"))
            if isinstance(own, str) and own:
                identified.append((own, below))
            names = [below.get("$anchor", below.get("$dynamicAnchor"))]
            if isinstance(below.get("$id"), str) and below["$id"].startswith("#"):
                names.append(below["$id"][1:])
            for name in names:
                if isinstance(name, str):
                    anchored.setdefault(name, below)

    def _within(self, document: Any, fragment: str, reference: str) -> Any:
        """The schema at a fragment of a document: a JSON pointer, or an anchor."""
        place = document
        if fragment and not fragment.startswith("/"):
            self._index(document)
            if fragment in self._anchored[id(document)]:
                return self._anchored[id(document)][fragment]
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


def _joined(base: str, url: str) -> str:
    try:
        return urljoin(base, url)
    except ValueError as error:
        raise UnknownReference(f"{url!r} is no URL: {error}") from None


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects in a value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
