"""How a JSON Schema differs from an earlier one, by the rules of Confluent's registry ("strict" policy).

Its documentation, "JSON Schema compatibility rules", has the rules: an open content model admits properties that are
not named, a closed one none, a partially open one those that a pattern or a schema of additional properties admits.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from math import ceil
from typing import Any, Final

from spark_klog.registry.formats import MOST_DIFFERENCES, READER, WRITER, TooComplex

#: Changes after which a reader with the new schema still accepts all that the old one does.
_NAMES: Final = """
    ID_CHANGED DESCRIPTION_CHANGED TITLE_CHANGED DEFAULT_CHANGED SCHEMA_REMOVED TYPE_EXTENDED
    MAX_LENGTH_INCREASED MAX_LENGTH_REMOVED MIN_LENGTH_DECREASED MIN_LENGTH_REMOVED PATTERN_REMOVED
    MAXIMUM_INCREASED MAXIMUM_REMOVED MINIMUM_DECREASED MINIMUM_REMOVED
    EXCLUSIVE_MAXIMUM_INCREASED EXCLUSIVE_MAXIMUM_REMOVED EXCLUSIVE_MINIMUM_DECREASED EXCLUSIVE_MINIMUM_REMOVED
    MULTIPLE_OF_REDUCED MULTIPLE_OF_REMOVED
    REQUIRED_ATTRIBUTE_WITH_DEFAULT_ADDED REQUIRED_ATTRIBUTE_REMOVED
    DEPENDENCY_ARRAY_NARROWED DEPENDENCY_ARRAY_REMOVED DEPENDENCY_SCHEMA_REMOVED
    MAX_PROPERTIES_INCREASED MAX_PROPERTIES_REMOVED MIN_PROPERTIES_DECREASED MIN_PROPERTIES_REMOVED
    ADDITIONAL_PROPERTIES_ADDED ADDITIONAL_PROPERTIES_EXTENDED
    UNEVALUATED_PROPERTIES_ADDED UNEVALUATED_PROPERTIES_EXTENDED
    PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL
    REQUIRED_PROPERTY_WITH_DEFAULT_ADDED_TO_UNOPEN_CONTENT_MODEL OPTIONAL_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL
    PROPERTY_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL PROPERTY_REMOVED_FROM_OPEN_CONTENT_MODEL
    PROPERTY_ADDED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL
    PROPERTY_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL
    MAX_ITEMS_INCREASED MAX_ITEMS_REMOVED MIN_ITEMS_DECREASED MIN_ITEMS_REMOVED
    MAX_CONTAINS_INCREASED MAX_CONTAINS_REMOVED MIN_CONTAINS_DECREASED MIN_CONTAINS_REMOVED UNIQUE_ITEMS_REMOVED
    ADDITIONAL_ITEMS_ADDED ADDITIONAL_ITEMS_EXTENDED UNEVALUATED_ITEMS_ADDED UNEVALUATED_ITEMS_EXTENDED
    ITEM_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL ITEM_ADDED_TO_CLOSED_CONTENT_MODEL
    ITEM_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL ITEM_REMOVED_FROM_OPEN_CONTENT_MODEL
    ITEM_ADDED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL ITEM_REMOVED_IS_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL
    ENUM_ARRAY_EXTENDED COMBINED_TYPE_EXTENDED PRODUCT_TYPE_NARROWED SUM_TYPE_EXTENDED NOT_TYPE_NARROWED
"""
_COMPATIBLE: Final = frozenset(_NAMES.split())
_KEYWORDS_OF_NUMBERS: Final = ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum")
_KEYWORDS_OF_STRINGS: Final = ("maxLength", "minLength")
_KEYWORDS_OF_OBJECTS: Final = ("maxProperties", "minProperties")
_KEYWORDS_OF_ARRAYS: Final = ("maxItems", "minItems", "maxContains", "minContains")
_CAPITAL: Final = re.compile("([A-Z])")
#: Passes until recursive schemas are decided; each one finds at least one more pair that is incompatible.
_MOST_PASSES: Final = 100
#: Pairs of schemas that are compared, in all passes.
_MOST_PAIRS: Final = 50_000
#: Changes that are said again of a pair at a second place.
_MOST_REPEATED: Final = 10
#: A quantifier, or what looks like one. Of two that follow each other, each may try as often as the text is long.
_QUANTIFIER: Final = re.compile(r"[*+?{]")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{?]")
#: Characters of a pattern, and of a name, for which a search is quick if there is one quantifier.
_SHORT: Final = 256
#: Characters of longer ones, for which no one searches.
_LONG: Final = 16 * 1024
_SEARCH_SECONDS: Final = 2.0
#: A program that ends with 0 if the pattern is found in the text, both of which it reads. An alarm ends it if nobody
#: else does, since the process that began it has ended.
_SEARCH: Final = (
    f"import json, re, signal, sys; signal.alarm({ceil(_SEARCH_SECONDS) + 1}); "
    "sys.exit(not re.search(*json.load(sys.stdin)))"
)
#: Around each search in a process: for who counts the time that this takes.
around_search: Callable[[], AbstractContextManager[None]] = nullcontext
#: Seconds that all searches of a comparison may take in processes.
_ALL_SECONDS: Final = 10.0
_MOST_SEARCHES: Final = 100_000


@dataclass(eq=False)
class Node:
    """A schema, or its part of one kind: array, object, number, string, boolean, null, enum, const, not, empty, false,
    combined, conditional.
    """

    kind: str
    #: The JSON object with the keywords.
    keywords: dict[str, Any] = field(default_factory=dict)
    #: Of combined: allOf, anyOf or oneOf.
    criterion: str = ""
    subschemas: list[Node] = field(default_factory=list)
    properties: dict[str, Node] = field(default_factory=dict)
    patterns: dict[str, Node] = field(default_factory=dict)
    dependent: dict[str, Node] = field(default_factory=dict)
    required_with: dict[str, set[str]] = field(default_factory=dict)
    #: The schema of each item, if there is one for all.
    items: Node | None = None
    #: Schemas of the first items.
    first_items: list[Node] = field(default_factory=list)
    #: Whether there may be other properties or items, and their schema.
    permits_more: bool = True
    more: Node | None = None
    unevaluated: Node | None = None
    #: Of not.
    negated: Node | None = None

    @property
    def required(self) -> set[str]:
        return set(self.keywords.get("required") or ())


@dataclass(frozen=True)
class Change:
    """A difference; `path` is a JSON pointer into the schemas, `kind` the name that Confluent's documentation has."""

    kind: str
    path: str

    @property
    def is_compatible(self) -> bool:
        return self.kind in _COMPATIBLE

    def text(self) -> str:
        return f'{{errorType:"{self.kind}", description:"{self._described()}\'}}'

    def _described(self) -> str:
        kind, place, new, old = self.kind, f"'{self.path}'", READER, WRITER
        if kind in ("PATTERN_CHANGED", "MULTIPLE_OF_CHANGED", "DEPENDENCY_ARRAY_CHANGED"):
            return f"The value at path {place} is different between the {new} and {old} schema"
        if kind.endswith("_NARROWED") and kind != "TYPE_NARROWED":
            return (
                f"An array or combined type at path {place} has fewer elements in the {new} schema than the {old} "
                "schema"
            )
        if kind.endswith("_EXTENDED"):
            return (
                f"An array or combined type at path {place} has more elements in the {new} schema than the {old} schema"
            )
        if kind.endswith("CHANGED") or kind == "TYPE_NARROWED":
            return f"A type at path {place} is different between the {new} schema and the {old} schema"
        if kind.endswith("ADDED_TO_OPEN_CONTENT_MODEL"):
            return (
                f"The {new} schema has an open content model and has a property or item at path {place} which is "
                f"missing in the {old} schema"
            )
        if kind == "REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL":
            return (
                f"The {new} schema has an unopen content model and has a required property at path {place} which is "
                f"missing in the {old} schema"
            )
        if kind.endswith("REMOVED_FROM_CLOSED_CONTENT_MODEL"):
            return (
                f"The {new} has a closed content model and is missing a property or item present at path {place} in "
                f"the {old} schema"
            )
        if kind.endswith("REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"):
            return (
                f"A property or item is missing in the {new} schema but present at path {place} in the {old} schema "
                "and is not covered by its partially open content model"
            )
        if kind.endswith("ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL"):
            return (
                f"The {new} schema has a property or item at path {place} which is missing in the {old} schema and is "
                "not covered by its partially open content model"
            )
        if kind.endswith("_INCREASED") or kind == "MULTIPLE_OF_EXPANDED":
            return f"The value at path {place} in the {new} schema is more than its value in the {old} schema"
        if kind.endswith("_DECREASED"):
            return f"The value at path {place} in the {new} schema is less than its value in the {old} schema"
        return f"The keyword at path {place} in the {new} schema is not present in the {old} schema"


def differences(old: Node, new: Node) -> list[Change]:
    """The changes from one schema to another; the first, and the incompatible ones, if there are very many.

    `TooComplex` if they have too many parts to compare each with each.
    """
    incompatible: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    patterns, pairs = _Patterns(), _MOST_PAIRS
    for _ in range(_MOST_PASSES):
        comparison = _Comparison(incompatible, patterns, pairs)
        told = comparison.compare(old, new)
        again = {pair: changes for pair, changes in comparison.compared.items() if not _is_compatible(changes)}
        if not comparison.has_assumed or again.keys() == incompatible.keys():
            break
        pairs -= len(comparison.compared)
        incompatible = again
    return [Change(kind, "#/" + "/".join(path)) for kind, *path in told]


#: A change's kind, then the parts of its path.
_Changes = list[tuple[str, ...]]
#: How two values of a keyword differ.
_Compared = Callable[[Any, Any], str]


def _is_compatible(changes: Iterable[tuple[str, ...]]) -> bool:
    return all(kind in _COMPATIBLE for kind, *_ in changes)


def _kept(changes: _Changes, count: int) -> _Changes:
    """At most as many of the changes; incompatible ones rather than others."""
    if len(changes) <= count:
        return changes
    return sorted(changes, key=lambda change: change[0] in _COMPATIBLE)[:count]


def _below(part: str, changes: Iterable[tuple[str, ...]]) -> _Changes:
    return [(kind, *part.split("\0"), *path) for kind, *path in changes]


class _Comparison:
    """One pass: a pair of recursive schemas that is being compared is taken for compatible, unless an earlier pass has
    found that it is not.
    """

    def __init__(self, incompatible: dict[tuple[int, int], _Changes], patterns: _Patterns, pairs: int) -> None:
        self._incompatible = incompatible
        self._patterns = patterns
        self._most_pairs = pairs
        self._under_way: set[tuple[int, int]] = set()
        self.compared: dict[tuple[int, int], _Changes] = {}
        self.has_assumed = False

    def compare(self, old: Node | None, new: Node | None) -> _Changes:
        if old is None or new is None:
            return [] if old is new else [("SCHEMA_ADDED" if old is None else "SCHEMA_REMOVED",)]
        pair = id(old), id(new)
        if pair in self.compared:
            # schemas that use each of a few others twice have places by the million
            return _kept(self.compared[pair], _MOST_REPEATED)
        if pair in self._under_way:
            if pair not in self._incompatible:
                self.has_assumed = True
            return self._incompatible.get(pair, [])
        if len(self.compared) + len(self._under_way) >= self._most_pairs:
            raise TooComplex(f"more than {_MOST_PAIRS:,} pairs of their parts would have to be compared")
        self._under_way.add(pair)
        changes = self.compared[pair] = _kept(self._nodes(old, new), MOST_DIFFERENCES)
        self._under_way.discard(pair)
        return changes

    def _nodes(self, old: Node, new: Node) -> _Changes:
        if (old.kind == "combined") != (new.kind == "combined"):
            changes = self._combined_with_plain(old, new)
            if changes is not None:
                return changes
        if old.kind != new.kind:
            is_bytes = old.keywords.get("connect.type") == new.keywords.get("connect.type") == "bytes"
            return [] if old.kind == "false" or new.kind == "empty" or is_bytes else [("TYPE_CHANGED",)]
        made: _Changes = []
        for names, kind in (
            (("$id", "id"), "ID_CHANGED"),
            (("title",), "TITLE_CHANGED"),
            (("description",), "DESCRIPTION_CHANGED"),
            (("default",), "DEFAULT_CHANGED"),
        ):
            if any(old.keywords.get(name) != new.keywords.get(name) for name in names):
                made.append((kind,))
        of_kind: dict[str, Callable[[Node, Node], _Changes]] = {
            "string": _strings,
            "number": _numbers,
            "enum": _values,
            "const": _values,
            "combined": self._combined,
            "not": self._negated,
            "object": self._objects,
            "array": self._arrays,
        }
        return made + of_kind[old.kind](old, new) if old.kind in of_kind else made

    def _negated(self, old: Node, new: Node) -> _Changes:
        narrowed = _is_compatible(self.compare(new.negated, old.negated))
        return [("NOT_TYPE_NARROWED" if narrowed else "NOT_TYPE_EXTENDED", "not")]

    def _combined_with_plain(self, old: Node, new: Node) -> _Changes | None:
        """The changes between a combined schema and one that is not, if one of its parts will do."""
        combined, is_new = (new, True) if new.kind == "combined" else (old, False)
        if len(combined.subschemas) == 1:
            kind = ""
        elif is_new and combined.criterion in ("anyOf", "oneOf"):
            kind = "SUM_TYPE_EXTENDED"
        elif not is_new and combined.criterion == "allOf":
            kind = "PRODUCT_TYPE_NARROWED"
        else:
            return None
        for part in combined.subschemas:
            changes = self.compare(old, part) if is_new else self.compare(part, new)
            if _is_compatible(changes):
                return [*changes, (kind,)] if kind else changes
        return None

    def _combined(self, old: Node, new: Node) -> _Changes:
        made: _Changes = []
        if old.criterion != new.criterion:
            is_one, is_one_new = len(old.subschemas) == 1, len(new.subschemas) == 1
            if not (
                new.criterion == "anyOf"
                or (is_one and is_one_new)
                or (is_one and new.criterion == "oneOf")
                or (is_one_new and old.criterion == "allOf")
            ):
                return [("COMBINED_TYPE_CHANGED",)]
            made.append(("COMBINED_TYPE_EXTENDED",))
        olds, news = _distinct(old.subschemas), _distinct(new.subschemas)
        if len(olds) < len(news):
            made.append(("PRODUCT_TYPE_EXTENDED" if new.criterion == "allOf" else "SUM_TYPE_EXTENDED",))
        elif len(olds) > len(news):
            made.append(("PRODUCT_TYPE_NARROWED" if old.criterion == "allOf" else "SUM_TYPE_NARROWED",))
        fitting: list[dict[int, _Changes]] = []
        for index, part in enumerate(olds):
            compared = [self.compare(part, other) for other in news]
            place = f"{old.criterion}\0{index}"
            fitting.append({n: _below(place, changes) for n, changes in enumerate(compared) if _is_compatible(changes)})
        partners = _matched(fitting)
        for index, partner in sorted(partners.items()):
            made += fitting[index][partner]
        if len(partners) < min(len(olds), len(news)):
            made.append(("COMBINED_TYPE_SUBSCHEMAS_CHANGED",))
        return made

    # --- objects

    def _objects(self, old: Node, new: Node) -> _Changes:
        made: _Changes = []
        for name in old.properties:
            if name in new.properties and (name in old.required) != (name in new.required):
                if name in old.required:
                    kind = "REQUIRED_ATTRIBUTE_REMOVED"
                elif "default" in new.properties[name].keywords:
                    kind = "REQUIRED_ATTRIBUTE_WITH_DEFAULT_ADDED"
                else:
                    kind = "REQUIRED_ATTRIBUTE_ADDED"
                made.append((kind, "required", name))
        for name in dict.fromkeys((*old.properties, *new.properties)):
            before, after = old.properties.get(name), new.properties.get(name)
            if before is not None and after is not None:
                changes = self.compare(before, after)
            elif before is not None:
                changes = self._removed(before, new, self._admitted(new, name), "PROPERTY")
            else:
                assert after is not None
                changes = self._property_added(old, new, name, after)
            made += _below(f"properties\0{name}", changes)
        made += self._dependencies(old, new)
        made += _below("additionalProperties", self._more(old, new, "ADDITIONAL_PROPERTIES"))
        made += _below("unevaluatedProperties", self._unevaluated(old, new, "UNEVALUATED_PROPERTIES"))
        return made + _limits(old, new, _KEYWORDS_OF_OBJECTS)

    def _removed(self, before: Node, new: Node, admitted: Node | None, what: str) -> _Changes:
        """A property or item that the new schema does not name; `admitted` is its schema for such ones."""
        if _is_open(new):
            return [(f"{what}_REMOVED_FROM_OPEN_CONTENT_MODEL",)]
        if admitted is not None:
            return self._covered(f"{what}_REMOVED", before, admitted)
        if before.kind == "false":
            return [(f"{what}_WITH_FALSE_REMOVED_FROM_CLOSED_CONTENT_MODEL",)]
        return [(f"{what}_REMOVED_FROM_CLOSED_CONTENT_MODEL",)]

    def _admitted(self, node: Node, name: str) -> Node | None:
        """The schema of a property that an object does not name, if there is one."""
        for pattern, schema in node.patterns.items():
            if self._patterns.matches(pattern, name):
                return schema
        return _admitted_item(node)

    def _property_added(self, old: Node, new: Node, name: str, after: Node) -> _Changes:
        is_open = _is_open(old)
        if is_open and after.kind == "empty":
            return [("PROPERTY_WITH_EMPTY_SCHEMA_ADDED_TO_OPEN_CONTENT_MODEL",)]
        kind = "OPTIONAL_PROPERTY"
        if name in new.required:
            kind = f"REQUIRED_PROPERTY{'_WITH_DEFAULT' * ('default' in after.keywords)}"
        admitted = None if is_open else self._admitted(old, name)
        made = [] if admitted is None else self._covered("PROPERTY_ADDED", admitted, after)
        return [*made, (f"{kind}_ADDED_TO_{'OPEN' if is_open else 'UNOPEN'}_CONTENT_MODEL",)]

    def _covered(self, kind: str, old: Node, new: Node) -> _Changes:
        """A property or item that one of the schemas names, and the other admits by a schema for such ones."""
        changes = self.compare(old, new)
        covered = "IS" if _is_compatible(changes) else "NOT"
        return [*changes, (f"{kind}_{covered}_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL",)]

    def _dependencies(self, old: Node, new: Node) -> _Changes:
        made: _Changes = []
        for name in dict.fromkeys((*old.required_with, *new.required_with)):
            sets = old.required_with.get(name), new.required_with.get(name)
            made += _changed("DEPENDENCY_ARRAY", ("dependencies", name), *sets, _compared_sets)
        for name in dict.fromkeys((*old.dependent, *new.dependent)):
            before, after = old.dependent.get(name), new.dependent.get(name)
            if before is not None and after is not None:
                made += _below(f"dependencies\0{name}", self.compare(before, after))
            else:
                made += _changed("DEPENDENCY_SCHEMA", ("dependencies", name), before, after)
        return made

    def _more(self, old: Node, new: Node, what: str) -> _Changes:
        """Properties or items that neither schema names."""
        if old.permits_more != new.permits_more:
            return [(f"{what}_{'ADDED' if new.permits_more else 'REMOVED'}",)]
        if (old.more is None) != (new.more is None):
            return [(f"{what}_{'NARROWED' if old.more is None else 'EXTENDED'}",)]
        return self.compare(old.more, new.more)

    def _unevaluated(self, old: Node, new: Node, what: str) -> _Changes:
        before, after = old.unevaluated, new.unevaluated
        if before is None and after is None:
            return []
        was_false, is_false = (node is not None and node.kind == "false" for node in (before, after))
        if was_false != is_false:
            return [(f"{what}_{'ADDED' if was_false else 'REMOVED'}",)]
        was_empty = before is None or before.kind == "empty"
        is_empty = after is None or after.kind == "empty"
        if was_empty != is_empty or before is None or after is None:
            return [(f"{what}_{'NARROWED' if was_empty and (before is None or not is_empty) else 'EXTENDED'}",)]
        return self.compare(before, after)

    # --- arrays

    def _arrays(self, old: Node, new: Node) -> _Changes:
        made = _below("items", self.compare(old.items, new.items))
        for index in range(max(len(old.first_items), len(new.first_items))):
            if index >= len(new.first_items):
                changes = self._removed(old.first_items[index], new, _admitted_item(new), "ITEM")
            elif index >= len(old.first_items):
                changes = self._item_added(old, new.first_items[index])
            else:
                changes = self.compare(old.first_items[index], new.first_items[index])
            made += _below(f"items\0{index}", changes)
        made += _below("additionalItems", self._more(old, new, "ADDITIONAL_ITEMS"))
        made += _below("unevaluatedItems", self._unevaluated(old, new, "UNEVALUATED_ITEMS"))
        was_unique, is_unique = (bool(node.keywords.get("uniqueItems")) for node in (old, new))
        if was_unique != is_unique:
            made.append((f"UNIQUE_ITEMS_{'REMOVED' if was_unique else 'ADDED'}", "uniqueItems"))
        return made + _limits(old, new, _KEYWORDS_OF_ARRAYS)

    def _item_added(self, old: Node, after: Node) -> _Changes:
        if _is_open(old):
            kind = "ITEM_WITH_EMPTY_SCHEMA" if after.kind == "empty" else "ITEM"
            return [(f"{kind}_ADDED_TO_OPEN_CONTENT_MODEL",)]
        admitted = _admitted_item(old)
        if admitted is None:
            return [("ITEM_ADDED_TO_CLOSED_CONTENT_MODEL",)]
        return self._covered("ITEM_ADDED", admitted, after)


def _is_open(node: Node) -> bool:
    """Whether an object or array may have properties or items of any kind beside those that it names."""
    if not node.permits_more or node.more is not None or node.patterns:
        return False
    return node.unevaluated is None or node.unevaluated.kind == "empty"


def _admitted_item(node: Node) -> Node | None:
    if node.more is not None:
        return node.more
    unevaluated = node.unevaluated
    if node.permits_more and unevaluated is not None and unevaluated.kind not in ("false", "empty"):
        return unevaluated
    return None


def _strings(old: Node, new: Node) -> _Changes:
    patterns = old.keywords.get("pattern"), new.keywords.get("pattern")
    return _limits(old, new, _KEYWORDS_OF_STRINGS) + _changed("PATTERN", ("pattern",), *patterns)


def _numbers(old: Node, new: Node) -> _Changes:
    multiples = _decimal(old.keywords.get("multipleOf")), _decimal(new.keywords.get("multipleOf"))
    made = _limits(old, new, _KEYWORDS_OF_NUMBERS)
    made += _changed("MULTIPLE_OF", ("multipleOf",), *multiples, _compared_multiples)
    was_integer, is_integer = (node.keywords.get("type") == "integer" for node in (old, new))
    if was_integer != is_integer:
        made.append(("TYPE_EXTENDED" if was_integer else "TYPE_NARROWED",))
    return made


def _changed(
    kind: str,
    place: tuple[str, ...],
    before: Any,
    after: Any,
    compared: Callable[[Any, Any], str] = lambda *_: "CHANGED",
) -> _Changes:
    """The change of a keyword, None where a schema does not have it."""
    if before == after:
        return []
    change = "ADDED" if before is None else "REMOVED" if after is None else compared(before, after)
    return [(f"{kind}_{change}", *place)]


def _limits(old: Node, new: Node, names: Iterable[str]) -> _Changes:
    """Changes of keywords that are limits."""
    made: _Changes = []
    for name in names:
        limits = _decimal(old.keywords.get(name)), _decimal(new.keywords.get(name))
        keyword = _CAPITAL.sub(r"_\1", name).upper()
        made += _changed(keyword, (name,), *limits, lambda low, high: "INCREASED" if low < high else "DECREASED")
    return made


def _decimal(value: Any) -> Decimal | None:
    """A number as a decimal; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Decimal(str(value))


def _compared_multiples(before: Decimal, after: Decimal) -> str:
    try:
        if before and after % before == 0:
            return "EXPANDED"
        if after and before % after == 0:
            return "REDUCED"
    except InvalidOperation:  # numbers of very different sizes
        pass
    return "CHANGED"


def _compared_sets(before: set[Any], after: set[Any]) -> str:
    return "EXTENDED" if after >= before else "NARROWED" if before >= after else "CHANGED"


def _values(old: Node, new: Node) -> _Changes:
    """Changes of an enum's or a const's values."""
    before, after = ({_frozen(value) for value in _listed(node)} for node in (old, new))
    if before == after:
        return []
    if old.kind == "const":
        return [("ENUM_ARRAY_CHANGED", "const")]
    return [(f"ENUM_ARRAY_{_compared_sets(before, after)}", "enum")]


def _listed(node: Node) -> list[Any]:
    return [node.keywords["const"]] if node.kind == "const" else list(node.keywords["enum"])


def _frozen(value: Any) -> Any:
    """A JSON value that can be in a set; true and 1 differ."""
    if isinstance(value, dict):
        return "{}", frozenset((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return "[]", tuple(_frozen(item) for item in value)
    return type(value) if isinstance(value, bool) else None, value


def _distinct(nodes: list[Node]) -> list[Node]:
    """The nodes without those that say the same as an earlier one."""
    seen: dict[Any, Node] = {}
    for node in nodes:
        seen.setdefault((node.kind, node.criterion, _frozen(node.keywords)), node)
    return list(seen.values())


def _matched(fitting: list[dict[int, Any]]) -> dict[int, int]:
    """As many pairs as can be: of each left one with one of the right ones that fit it, and no other (Kuhn)."""
    taken: dict[int, int] = {}

    def place(left: int, tried: set[int]) -> bool:
        for right in fitting[left]:
            if right not in tried:
                tried.add(right)
                if right not in taken or place(taken[right], tried):
                    taken[right] = left
                    return True
        return False

    for left in range(len(fitting)):
        place(left, set())
    return {left: right for right, left in taken.items()}


class _Patterns:
    """The searches of one comparison of two schemas for patterns in names of properties, whatever the patterns are.

    Python's `re` can take for ever, and holds up every thread meanwhile. Here it searches only for patterns with at
    most one quantifier, in short names; a process of its own looks for others, which is ended when its time is over.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[str, str], bool] = {}
        self._left = _ALL_SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern is in a name; not if it can't be said, as of a syntax that Python does not have.

        `TooComplex` after too many.
        """
        pair = pattern, name
        if pair not in self._results:
            if len(self._results) >= _MOST_SEARCHES:
                raise TooComplex(f"more than {_MOST_SEARCHES:,} patterns would have to be looked for in names")
            self._results[pair] = self._search(pattern, name)
        return self._results[pair]

    def _search(self, pattern: str, name: str) -> bool:
        longest = max(len(pattern), len(name))
        is_quick = len(_QUANTIFIER.findall(pattern[:_SHORT])) <= 1 and not _REPEATED_GROUP.search(pattern[:_SHORT])
        if longest <= _SHORT and is_quick:
            try:
                return re.search(pattern, name) is not None
            except (re.error, RecursionError, OverflowError):
                return False
        if longest > _LONG or self._left <= 0:
            return False
        command = [sys.executable, "-I", "-S", "-c", _SEARCH]
        given = json.dumps([pattern, name]).encode()
        started = time.monotonic()
        try:
            with around_search():
                done = subprocess.run(
                    command, input=given, capture_output=True, timeout=min(_SEARCH_SECONDS, self._left), check=False
                )
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._left -= time.monotonic() - started
        return done.returncode == 0
