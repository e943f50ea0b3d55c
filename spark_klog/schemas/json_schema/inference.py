"""The columns of JSON values without a schema: the types that Spark infers, where it does not guess.

| the values of a field | its type |
| --- | --- |
| booleans, strings | boolean, string |
| integers, with fractions among them | bigint, double |
| integers beyond 64 bits, up to 38 digits | decimal(p,0) |
| objects, arrays | struct, with its fields in the order of their names; array |
| of several kinds; fractions and integers that a double would round; longer integers | json, their text |
| objects with more than 1,000 names, as of a map; levels beyond the deepest | json, their text |
| null, [] and {} alone, which say nothing of what may come | none: there is no such field yet |

What is found does not depend on the order of values, nor on how they are divided among tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import pyarrow as pa

from spark_klog.errors import SchemaError
from spark_klog.schemas.json_schema.columns import JSON_TEXT, MAX_COLUMNS, stored_type
from spark_klog.schemas.json_schema.ddl import DEEPEST
from spark_klog.schemas.json_schema.row_values import load_json

#: Names that an object may have to be a struct.
MOST_NAMES: Final = 1000
#: Levels of objects and arrays, with room for the schema around them.
_LEVELS: Final = DEEPEST - 2
#: Kinds of values. `_ROUNDED`: integers of 64 bits that no double is; `_WIDE`: integers beyond 64 bits.
_BOOLEAN, _INTEGER, _ROUNDED, _WIDE, _NUMBER, _STRING, _OBJECT, _ARRAY, _ANY = (1 << bit for bit in range(9))
_NUMBERS: Final = _INTEGER | _ROUNDED | _WIDE | _NUMBER
_FIRST, _LAST, _EXACT = -(1 << 63), (1 << 63) - 1, 1 << 53
_MOST_DIGITS, _DIGITS_OF_BIGINT = 38, 20
_SCALARS: Final = {_BOOLEAN: pa.bool_(), _STRING: pa.string()}


class Seen:
    """What the values of one place have been. Only null has been there if `kinds` is 0."""

    __slots__ = ("digits", "fields", "items", "kinds")

    def __init__(self) -> None:
        self.kinds = 0
        #: Of the longest integer beyond 64 bits.
        self.digits = 0
        #: Of objects, by name; none of a map.
        self.fields: dict[str, Seen] = {}
        #: Of arrays.
        self.items: Seen | None = None

    @classmethod
    def of_type(cls, kind: pa.DataType) -> Seen:
        """What a column of a schema has seen."""
        seen, types = cls(), pa.types
        if kind == JSON_TEXT:
            seen.kinds = _ANY
        elif types.is_struct(kind):
            seen.kinds = _OBJECT
            seen.fields = {field.name: cls.of_type(field.type) for field in kind}
        elif types.is_list(kind):
            seen.kinds, seen.items = _ARRAY, cls.of_type(kind.value_type)
        elif types.is_decimal(kind):
            seen.kinds, seen.digits = _WIDE, kind.precision
        elif types.is_boolean(kind):
            seen.kinds = _BOOLEAN
        else:  # times are strings
            seen.kinds = _INTEGER if types.is_integer(kind) else _NUMBER if types.is_floating(kind) else _STRING
        return seen

    @classmethod
    def of_json(cls, value: Any) -> Seen:
        """What `to_json` has made; TypeError or ValueError of anything else."""
        seen = cls()
        seen.kinds, seen.digits, fields, items = value
        seen.fields = {name: cls.of_json(each) for name, each in fields.items()}
        seen.items = None if items is None else cls.of_json(items)
        return seen

    def to_json(self) -> list[Any]:
        fields = {name: each.to_json() for name, each in sorted(self.fields.items())}
        return [self.kinds, self.digits, fields, None if self.items is None else self.items.to_json()]

    def add_row(self, row: bytes) -> None:
        """Add a record's value, if it is a JSON object."""
        try:
            value = load_json(row, is_strict=True)
        except ValueError:  # a bad row
            return
        if isinstance(value, dict):
            self._add(value, 0)

    def _add(self, value: Any, level: int) -> None:
        kind = type(value)
        if kind is str:
            self.kinds |= _STRING
        elif kind is bool:
            self.kinds |= _BOOLEAN
        elif kind is int:
            self._add_integer(value)
        elif kind is float:
            self.kinds |= _NUMBER
        elif self.kinds & _ANY:
            return
        elif level > _LEVELS:
            self._give_up()
        elif kind is dict:
            self.kinds |= _OBJECT
            for name, each in value.items():
                if (seen := self._field(name, level)) is not None:
                    seen._add(each, level + 1)
        elif kind is list:
            self.kinds |= _ARRAY
            self.items = self.items or Seen()
            for each in value:
                self.items._add(each, level + 1)

    def _add_integer(self, value: int) -> None:
        if not _FIRST <= value <= _LAST:
            self.kinds |= _WIDE
            self.digits = max(self.digits, len(str(abs(value))))
        else:
            self.kinds |= _INTEGER | (_ROUNDED if _is_rounded(value) else 0)

    def _field(self, name: str, level: int) -> Seen | None:
        """What is known of a field; None if its object is a map."""
        if name not in self.fields and not self.kinds & _ANY:
            self.fields[name] = Seen()
            if len(self.fields) > MOST_NAMES:
                self._give_up(is_root=not level)
        return self.fields.get(name)

    def _give_up(self, *, is_root: bool = False) -> None:
        """Take what is here for a map, or too deep: its type is `JSON_TEXT`, that of a record none at all."""
        self.kinds |= _ANY
        self.items = None
        if not is_root:
            self.fields = {}

    def merge(self, other: Seen, level: int = 0) -> None:
        """Add what another one has seen."""
        self.kinds |= other.kinds
        self.digits = max(self.digits, other.digits)
        if self.kinds & _ANY:
            self._give_up(is_root=not level)
        for name, each in other.fields.items():
            if (seen := self._field(name, level)) is not None:
                seen.merge(each, level + 1)
        if other.items is not None and not self.kinds & _ANY:
            self.items = self.items or Seen()
            self.items.merge(other.items, level + 1)

    def bound(self) -> None:
        """Take the objects with most names for maps until there are no more than `MAX_COLUMNS` places."""
        while sum(1 for _ in self._places("")) > MAX_COLUMNS:
            objects = [(len(each.fields), path, each) for path, each in self._places("") if each is not self]
            max(objects, key=lambda entry: entry[:2])[2]._give_up()

    def _places(self, path: str) -> Iterator[tuple[str, Seen]]:
        yield path, self
        for name, each in self.fields.items():
            yield from each._places(f"{path}.{name}")
        if self.items is not None:
            yield from self.items._places(f"{path}[]")

    @property
    def type(self) -> pa.DataType | None:
        """The type of the values; None if they do not tell."""
        kinds = self.kinds
        if kinds == _OBJECT:
            if len({name.lower() for name in self.fields}) < len(self.fields) or "" in self.fields:
                return JSON_TEXT  # Spark, and tables, take such names for one, or refuse them
            types = {name: kind for name, each in sorted(self.fields.items()) if (kind := each.type) is not None}
            return pa.struct(types) if types else None
        if kinds == _ARRAY:
            element = None if self.items is None else self.items.type
            return None if element is None else pa.list_(element)
        if kinds and not kinds & ~_NUMBERS:
            return self._number_type()
        return _SCALARS.get(kinds, JSON_TEXT) if kinds else None

    def with_silent(self, kind: pa.DataType, around: Collection[str] = ()) -> pa.DataType:
        """A type with the fields, too, that have said nothing so far, as Arrow reads null, [] and {}.

        Of records in an envelope, in the fields `around`, it also has what others are in the envelope, if they are of
        one kind each.
        """
        if pa.types.is_struct(kind):
            known = {field.name: field for field in kind}
            for name, each in self.fields.items():
                if name in known:
                    inner = () if name in around else around
                    known[name] = known[name].with_type(each.with_silent(known[name].type, inner))
                elif name and (each.type is None or (around and not has_text(each.type))):
                    own = each._silent_type() if each.type is None else each.with_silent(each.type)
                    known[name] = pa.field(name, own)
            return pa.struct(list(known.values()))
        if pa.types.is_list(kind) and self.items is not None:
            return pa.list_(kind.value_field.with_type(self.items.with_silent(kind.value_type)))
        return kind

    def _silent_type(self) -> pa.DataType:
        if self.kinds == _OBJECT:
            return pa.struct([(name, each._silent_type()) for name, each in self.fields.items()])
        if self.kinds == _ARRAY:
            return pa.list_(pa.null() if self.items is None else self.items._silent_type())
        return pa.null()

    def _number_type(self) -> pa.DataType:
        if self.kinds & _NUMBER:
            return JSON_TEXT if self.kinds & (_ROUNDED | _WIDE) else pa.float64()
        if not self.kinds & _WIDE:
            return pa.int64()
        digits = max(self.digits, _DIGITS_OF_BIGINT if self.kinds & _INTEGER else 0)
        return pa.decimal128(digits, 0) if digits <= _MOST_DIGITS else JSON_TEXT


def has_text(kind: pa.DataType) -> bool:
    """Whether a type has JSON's text somewhere, which Arrow does not read."""
    return bool(kind != stored_type(kind))


def grown_schema(known: pa.DataType | None, seen: Seen, reserved: Collection[str] = ()) -> pa.DataType:
    """The schema of records of which this was seen, with the fields that are `known` first, which keep their types.

    Fields whose names in lower case are `reserved`, or those of others before them, get no column; `unplaced` finds
    them. `SchemaError` if there would be too many.
    """
    seen.bound()
    if seen.kinds & _ANY and known is None:
        raise SchemaError(
            f"the values have more than {MOST_NAMES:,} fields of different names, as of a map: give the DDL of those "
            "that are to be columns"
        )
    return _grown_struct(pa.struct([]) if known is None else known, seen, reserved)


def _grown(old: pa.DataType, seen: Seen | None) -> pa.DataType:
    if seen is None or old == JSON_TEXT:
        return old
    if pa.types.is_struct(old):
        return _grown_struct(old, seen, ())
    if pa.types.is_list(old):
        return pa.list_(old.value_field.with_type(_grown(old.value_type, seen.items)))
    return old


def _grown_struct(old: pa.DataType, seen: Seen, reserved: Collection[str]) -> pa.DataType:
    types = {field.name: _grown(field.type, seen.fields.get(field.name)) for field in old}
    names = {"", *reserved, *(name.lower() for name in types)}
    for name, each in () if seen.kinds & _ANY else sorted(seen.fields.items()):
        kind = each.type
        if kind is not None and name.lower() not in names:
            types[name] = kind
            names.add(name.lower())
    return pa.struct(types)


def _is_rounded(value: int) -> bool:
    """Whether no double is this integer."""
    try:
        return not -_EXACT <= value <= _EXACT and int(float(value)) != value
    except OverflowError:
        return True


def rounded(value: Any, kind: pa.DataType) -> str:
    """The path of an integer in a JSON value that a type would round, as it has a double there; "" without one."""
    if type(value) is int:
        return "." if pa.types.is_float64(kind) and _is_rounded(value) else ""
    inner: list[tuple[str, Any, pa.DataType]] = []
    if isinstance(value, dict) and pa.types.is_struct(kind):
        inner = [(f".{field.name}", value.get(field.name), field.type) for field in kind]
    elif isinstance(value, list) and pa.types.is_list(kind):
        inner = [("[]", each, kind.value_type) for each in value]
    paths = (f"{name}{path.rstrip('.')}" for name, each, below in inner if (path := rounded(each, below)))
    return next(paths, "")


def unplaced(value: Any, kind: pa.DataType) -> str:
    """The path of a field of a JSON value that a type has no place for; "" if it has one for all that say something."""
    if isinstance(value, dict) and pa.types.is_struct(kind):
        types = {field.name: field.type for field in kind}
        for name, each in value.items():
            if name not in types:
                if _says_something(each):
                    return name or "''"
            elif path := unplaced(each, types[name]):
                return f"{name}.{path}"
    if isinstance(value, list) and pa.types.is_list(kind):
        for each in value:
            if path := unplaced(each, kind.value_type):
                return f"[].{path}"
    return ""


def _says_something(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_says_something, value.values() if isinstance(value, dict) else value))
    return value is not None
