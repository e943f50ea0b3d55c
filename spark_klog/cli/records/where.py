"""Filters of `klog consume --where`: FIELD OPERATOR VALUE.

Fields: key, value, topic, partition, offset, timestamp (ms or ISO), header.NAME (the last one of that name), and .a.b.0
for a field within a value of JSON. Operators: = != < <= > >= and ~ !~ for regular expressions, which need to match
anywhere. A record that does not have the field (a null key, no such header, no JSON) matches no filter.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_klog.cli.records.form import milliseconds
from spark_klog.errors import ConfigError

_FILTER = re.compile(
    r"\s*(?P<field>key|value|topic|partition|offset|timestamp|header\.[^=!<>~]+?|\.[^=!<>~]+?)\s*"
    r"(?P<operator>!=|!~|>=|<=|=~|=|~|<|>)\s?(?P<value>.*)",
    re.DOTALL,
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ARROW = {"=": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
_NUMBERS = ("partition", "offset", "timestamp")
_MISSING = object()


class Where:
    """One filter. `ConfigError` for one that can't be parsed."""

    def __init__(self, text: str) -> None:
        found = _FILTER.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--where {text!r} must be FIELD OPERATOR VALUE: key, value, topic, partition, offset, timestamp, "
                "header.NAME or .json.field; = != < <= > >= ~ !~; for example 'key=42' or '.user.id >= 7'"
            )
        self._field, self._operator, self._text = found["field"], found["operator"], found["value"]
        if self._operator == "=~":
            self._operator = "~"
        self._regex = self._compiled() if self._operator in ("~", "!~") else None
        self._number = _number(self._text)
        if self._field in _NUMBERS:
            self._number = self._whole_number()
        self._parsed = _json_or(self._text)

    @property
    def needs_headers(self) -> bool:
        """Whether the batches must have the column headers."""
        return self._field.startswith("header.")

    def _compiled(self) -> re.Pattern[str]:
        if self._field in _NUMBERS:
            raise ConfigError(f"--where: {self._field} is a number: compare it by = != < <= > >=")
        try:
            return re.compile(self._text)
        except re.error as error:
            raise ConfigError(f"--where: {self._text!r} is not a regular expression: {error}") from None

    def _whole_number(self) -> int:
        if self._field == "timestamp" and not self._text.strip().isdecimal():
            from spark_klog.cli.records.places import parse_place
            from spark_klog.spark.offsets import TimeSpec

            place = parse_place("--where timestamp", self._text)
            if isinstance(place, TimeSpec) and place.everywhere is not None:
                return place.everywhere
        elif re.fullmatch(r"\s*\d{1,18}\s*", self._text):
            return int(self._text)
        raise ConfigError(f"--where: {self._text!r} is not {'an' if self._field == 'offset' else 'a'} {self._field}")

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """Whether each record matches; no entry is null."""
        if self._field in _NUMBERS:
            column = milliseconds(batch) if self._field == "timestamp" else batch.column(self._field)
            return pc.call_function(_ARROW[self._operator], [column, pa.scalar(self._number, pa.int64())])
        if self._field in ("key", "value") and self._operator in ("=", "!="):
            wanted = pa.scalar(self._text.encode(), pa.binary())
            return pc.call_function(_ARROW[self._operator], [batch.column(self._field), wanted]).fill_null(False)
        return pa.array([self._matches(one) for one in self._values(batch)], pa.bool_())

    def _values(self, batch: pa.RecordBatch) -> list[Any]:
        """The field of each record: text, or what JSON has; `_MISSING` if there is none."""
        if self._field in ("key", "value", "topic"):
            return [_text(one) for one in batch.column(self._field).to_pylist()]
        if self._field.startswith("header."):
            name = self._field.removeprefix("header.")
            return [_header(headers or (), name) for headers in batch.column("headers").to_pylist()]
        path = self._field.split(".")[1:]
        return [_within(value, path) for value in batch.column("value").to_pylist()]

    def _matches(self, value: Any) -> bool:
        if value is _MISSING:
            return False
        if self._regex is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return (self._regex.search(text) is not None) == (self._operator == "~")
        compare = _COMPARE[self._operator]
        if self._operator in ("=", "!="):
            is_equal = value == self._text if isinstance(value, str) else _same(value, self._parsed)
            return is_equal == (self._operator == "=")
        if self._number is not None:
            number = _number(value) if isinstance(value, str) else value
            return isinstance(number, int | float) and not isinstance(number, bool) and compare(number, self._number)
        return isinstance(value, str) and compare(value, self._text)


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON, in which 1 is not true."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _json_or(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(value: bytes | str | None) -> Any:
    if value is None:
        return _MISSING
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


def _header(headers: Any, name: str) -> Any:
    for each in reversed(headers):
        if each["key"] == name:
            return _text(each["value"])
    return _MISSING


def _within(value: bytes | None, path: list[str]) -> Any:
    """The field of a JSON value at a path of names and list indexes."""
    if value is None:
        return _MISSING
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return _MISSING
    for name in path:
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return _MISSING
    return found


def apply(filters: list[Where], batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records that match all filters."""
    for each in filters:
        if batch.num_rows:
            batch = batch.filter(each.mask(batch))
    return batch
