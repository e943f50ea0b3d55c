"""What a registry does with texts of its clients: it may take long and much memory, so `processes` carries it out.

Each function depends on its arguments only, raises `RegistryRefusal`, and can be pickled, as can what it returns.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from math import isfinite
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from spark_klog.errors import MissingPackage, SchemaTimedOut
from spark_klog.registry import errors
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.formats import AVRO, JSON, PROTOBUF, InvalidSchema, ParsedSchema, parse, reasons_of

_T = TypeVar("_T")
#: Values in a body, with those in values. A schema is one of them.
_MOST_VALUES: Final = 20_000
#: Parsed schemas that a process keeps, and letters of their texts and of those of their references.
_MOST_PARSED: Final = 1000
_MOST_LETTERS: Final = 256 << 10


class Run(Protocol):
    """Carries out a function of this module until `deadline`, a time of `time.monotonic`."""

    def __call__(self, function: Callable[..., _T], *arguments: Any, deadline: float) -> _T: ...


def run_here(function: Callable[..., _T], *arguments: Any, deadline: float) -> _T:
    """A `Run` in the caller's thread, without a bound: for texts that the caller trusts."""
    return function(*arguments)


class Source(NamedTuple):
    """A schema's type, text, and the names and texts of all schemas that it needs."""

    schema_type: str
    text: str
    references: tuple[tuple[str, str], ...] = ()

    @property
    def letters(self) -> int:
        return len(self.text) + sum(len(reference) for _, reference in self.references)


def decoded(body: bytes) -> dict[str, Any]:
    """A request's JSON object, which can be sent as JSON again."""
    try:
        fields = json.loads(body or b"null", parse_constant=_refused, parse_float=_finite)
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise errors.bare(HTTPStatus.BAD_REQUEST, "the body has half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise errors.bare(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise errors.bare(HTTPStatus.UNPROCESSABLE_ENTITY, "the body must be a JSON object")
    for count, _ in enumerate(_values(fields)):
        if count > _MOST_VALUES:
            raise errors.schema_too_large(f"the body has more than {_MOST_VALUES:,} values")
    return fields


#: The smallest schema of each format.
_SMALLEST: Final = {AVRO: '"int"', JSON: "{}", PROTOBUF: 'syntax = "proto3";'}


@cache
def prepare(schema_type: str) -> None:
    """Load what a format needs, which is no schema's own work."""
    with suppress(RegistryRefusal):  # without its packages
        smallest = _parsed(Source(schema_type, _SMALLEST[schema_type]))
        smallest.normalized(), smallest.canonical(), smallest.unreadable(smallest)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text[:50]} is too large")
    return value


def _values(value: Any) -> Iterator[Any]:
    """A JSON value, and all those in it."""
    waiting = [value]
    while waiting:
        yield (value := waiting.pop())
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value


def canonical(source: Source, normalize: bool, is_new: bool) -> str:
    """The text of a schema as it is stored; `is_new` as of `formats.parse`."""
    try:
        parsed = _parsed(source, is_new=is_new)
        text = parsed.normalized() if normalize else parsed.canonical()
        text.encode()
    except RecursionError:
        raise errors.invalid_schema("the schema is nested too deeply") from None
    except UnicodeEncodeError:
        raise errors.invalid_schema("the schema has half of a surrogate pair") from None
    return text


def formatted(source: Source, form: str) -> str:
    """The text of a schema in a form, see `ParsedSchema.formatted`."""
    return _kept(source).formatted(form)


def unreadable(direction: str, new: Source, earlier: Source) -> list[str]:
    """Why a schema is not compatible with an earlier one: BACKWARD, FORWARD, FULL."""
    after, before = _kept(new), _kept(earlier)
    messages = []
    try:
        if direction in ("FORWARD", "FULL"):
            messages += reasons_of(before, after, "old", "new")
        if direction in ("BACKWARD", "FULL"):
            messages += reasons_of(after, before, "new", "old")
    except RecursionError:
        messages.append("Unexpected exception during compatibility check: the schemas are nested too deeply")
    return messages


def _parsed(source: Source, *, is_new: bool = False) -> ParsedSchema:
    try:
        return parse(source.schema_type, source.text, dict(source.references), is_new=is_new)
    except InvalidSchema as error:
        raise errors.invalid_schema(f"Invalid schema of type {source.schema_type}, details: {error}") from error
    except RecursionError:
        raise errors.invalid_schema("the schema is nested too deeply") from None
    except MissingPackage as error:
        raise errors.invalid_schema(str(error)) from error
    except SchemaTimedOut as error:
        raise errors.timed_out(str(error)) from error


#: Parsed schemas, the last used last: a subject's versions are compared with each new one.
_parsed_schemas: OrderedDict[Source, ParsedSchema] = OrderedDict()


def _kept(source: Source) -> ParsedSchema:
    """A parsed schema, which the next call may have again."""
    if (made := _parsed_schemas.pop(source, None)) is None:
        made = _parsed(source)
    _parsed_schemas[source] = made
    letters = sum(kept.letters for kept in _parsed_schemas)
    while len(_parsed_schemas) > 1 and (len(_parsed_schemas) > _MOST_PARSED or letters > _MOST_LETTERS):
        letters -= _parsed_schemas.popitem(last=False)[0].letters
    return made
