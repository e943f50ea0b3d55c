"""Events of Debezium's connector for MongoDB, as those of other databases are.

Its rows are texts of extended JSON, of any of MongoDB's modes: `plain_events` makes records of them, with plain values
of what JSON has no type for. An update may have its changed fields only (`capture.mode=change_streams`). Then `after`
has these, and the field `UPDATE` of the envelope is a text of JSON:

    fields     the columns that `after` has as they are now; the row keeps its own values of the others
    changes    of columns of which a part has changed: [[step, ...], operation, value], in their order

A step is a name or a position; the operations are "set", "unset" and "truncate" (to a size).
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_klog.columns.schema import is_text
from spark_klog.schemas.json_schema.columns import DDL
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.from_arrow import column_of
from spark_klog.schemas.json_schema.texts import json_texts

#: The field of a row that is its key, and of the record's key that has it.
ID, KEY_FIELD = "_id", "id"
#: What an update says that has not the whole row: by Debezium as a record, here as a text.
UPDATE: Final = "updateDescription"
#: Part of a change: the steps to it, an operation, a value.
Part = tuple[list[str], str, Any]
#: A change that no value takes.
IMPOSSIBLE: Final[Part] = ([], "set", None)
#: What each event has somewhere, as the name of its connector.
_MARK: Final = "mongodb"
_WRAPPER: Final = "payload"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_OF_UUID: Final = {"3", "03", "4", "04"}
#: The largest position in an array that an update may set behind its end: MongoDB fills what is between with null.
_MOST_ITEMS: Final = 1_000_000
_RUBBISH: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


def plain_events(values: pa.Array) -> pa.Array:
    """JSON values, of which events of MongoDB's connector are as those of other databases; others stay as they are."""
    marked = np.flatnonzero(pc.fill_null(pc.match_substring(values, _MARK), False).to_numpy(zero_copy_only=False))
    if not len(marked):
        return values
    rows = values.to_pylist()
    for row in marked.tolist():
        with suppress(*_RUBBISH):  # it stays as it is, which the decoder refuses
            rows[row] = _plain_event(rows[row])
    return pa.array(rows, values.type)


def plain_keys(keys: pa.Array) -> pa.Array:
    """JSON keys, of which those of MongoDB's connector, {"id": TEXT}, have the field `ID` instead, with its value."""
    rows = keys.to_pylist()
    for number, row in enumerate(rows):
        key = _loaded(row)
        key = key.get(_WRAPPER, key) if isinstance(key, dict) else None
        if isinstance(key, dict) and isinstance(key.get(KEY_FIELD), str) and ID not in key:
            rows[number] = json_text({ID: _plain(_loaded(key[KEY_FIELD], key[KEY_FIELD]))}).encode()
    return pa.array(rows, keys.type)


def _plain_event(text: bytes) -> bytes:
    event = _loaded(text)
    inner = event.get(_WRAPPER) if isinstance(event, dict) else None
    event = inner if isinstance(inner, dict) else event
    rows = {name: event.get(name) for name in ("before", "after")} if isinstance(event, dict) else {}
    update = event.get(UPDATE) if rows else None
    if not rows or not all(row is None or isinstance(row, str) for row in rows.values()):
        return text  # of another connector
    made: dict[str, Any] = {name: _plain(_loaded(row, row)) for name, row in rows.items() if row is not None}
    if made.get("after") is None and isinstance(update, dict):
        changes = _changes(update)
        if isinstance(before := made.get("before"), dict):
            made["after"] = json.loads(json_text(before), parse_float=Decimal)
            for part in changes:
                changed(made["after"], part)
        else:
            # what has changed within a column stands there as well: the column may be of a new type
            made["after"] = {}
            for steps, operation, value in changes:
                if operation == "set" and not any(map(str.isdecimal, steps)):
                    changed(made["after"], (steps, operation, value))
            whole = [steps[0] for steps, operation, _ in changes if len(steps) == 1 and operation != "truncate"]
            parts = [part for part in changes if part[0][0] not in whole]
            made[UPDATE] = json_text({"fields": whole, "changes": parts})
    return json_text({name: value for name, value in event.items() if name not in (*rows, UPDATE)} | made).encode()


def _changes(update: Mapping[str, Any]) -> list[Part]:
    """What an update says, in the order in which MongoDB applies it."""
    fields = _plain(_loaded(update.get("updatedFields"), {}))
    made: list[Part] = []
    for each in update.get("truncatedArrays") or ():
        made.append((str(each["field"]).split("."), "truncate", int(each.get("newSize", each.get("size", 0)))))
    made += [(str(name).split("."), "unset", None) for name in update.get("removedFields") or ()]
    return made + [(name.split("."), "set", value) for name, value in fields.items()]


def changed(row: dict[str, Any], part: Part) -> None:
    """Change a record or a part of it; ValueError if it has no such place."""
    steps, operation, value = part
    if not steps:
        raise ValueError("an earlier change was impossible")
    at: Any = row
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        key: Any = int(step) if isinstance(at, list) and step.isdecimal() else step
        if isinstance(at, list) and isinstance(key, int):
            if key > len(at) + _MOST_ITEMS:
                raise ValueError(f"position {key} is beyond the end")
            at += [None] * (key + 1 - len(at))
        elif not isinstance(at, dict):
            raise ValueError(f"{'.'.join(steps)} is in no object")
        if not is_last:
            if isinstance(at, dict):
                at.setdefault(key, {})
            at[key] = {} if at[key] is None else at[key]
            at = at[key]
        elif operation == "set":
            at[key] = value
        elif operation == "truncate":
            at[key] = (list(at.get(key) or ()) if isinstance(at, dict) else list(at[key] or ()))[:value]
        elif isinstance(at, list):
            at[key] = None
        else:
            at.pop(key, None)


def changed_column(
    column: pa.Array, name: str, changes: Sequence[Sequence[Part]]
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Values of a column after these changes of each, and for which they are impossible: these are null."""
    has_text = is_text(column.type)
    texts = (column if has_text else json_texts(column)).to_pylist()
    decoder = JsonDecoder(column_of(pa.struct([pa.field(name, column.type)]), DDL))
    rows: list[Any] = []
    for text, is_valid, parts in zip(texts, column.is_valid().to_pylist(), changes, strict=True):
        try:
            row = {name: json.loads(text, parse_float=Decimal) if is_valid else None}
            for part in parts:
                changed(row, part)
            if has_text and row[name] is not None:
                row[name] = json_text(row[name])
            rows.append(json_text(row).encode())
        except _RUBBISH:
            rows.append(b"")
    made = decoder.decode(pa.array(rows, pa.binary()), [None])
    is_bad = np.zeros(len(column), np.bool_)
    is_bad[[row for row, _ in made.bad]] = True
    return pc.struct_field(made.values, 0).cast(column.type), is_bad


def _plain(value: Any) -> Any:
    """A value of extended JSON, with plain ones instead of MongoDB's types."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        return _scalar(value)
    except _RUBBISH:
        return {name: _plain(each) for name, each in value.items()}


def _scalar(value: dict[str, Any]) -> Any:
    """The value that an object stands for; KeyError or another error if it is an object."""
    if len(value) not in (1, 2):
        raise KeyError
    first, inner = next(iter(value.items()))
    if first in ("$oid", "$symbol", "$uuid", "$numberDecimal"):
        return str(inner)
    if first in ("$numberLong", "$numberInt"):
        return int(inner)
    if first == "$numberDouble":
        return Decimal(inner) if Decimal(inner).is_finite() else str(inner)
    if first == "$undefined":
        return None
    if first == "$date":
        if isinstance(inner, str):
            return inner
        ms = int(inner["$numberLong"] if isinstance(inner, dict) else inner)
        return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if first == "$timestamp":
        return (_EPOCH + timedelta(seconds=int(inner["t"]))).isoformat().replace("+00:00", "Z")
    if first == "$binary":
        text, kind = (inner["base64"], inner["subType"]) if isinstance(inner, dict) else (inner, value["$type"])
        return str(UUID(bytes=b64decode(text))) if kind in _OF_UUID else str(text)
    raise KeyError


def _loaded(text: Any, otherwise: Any = None) -> Any:
    """The value of a text of JSON; another one if it is none."""
    try:
        return json.loads(text, parse_float=Decimal)
    except _RUBBISH:
        return otherwise


def json_text(value: Any) -> str:
    """JSON, with fractions by all of their digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {json_text(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(json_text, value))}]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)
