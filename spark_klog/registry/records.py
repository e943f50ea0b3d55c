"""Records of the topic `_schemas`, in the form of Confluent's registry: keys and values are JSON.

    {"keytype":"SCHEMA","subject":"clicks-value","version":1,"magic":1}
        {"subject":"clicks-value","version":1,"id":1,"schema":"...","deleted":false}; null deletes it for good
    {"keytype":"CONFIG","subject":"clicks-value","magic":0}            {"subject":..,"compatibilityLevel":"FULL"}
    {"keytype":"MODE","subject":"clicks-value","magic":0}              {"subject":..,"mode":"READONLY"}
    {"keytype":"DELETE_SUBJECT","subject":"clicks-value","magic":0}    {"subject":..,"version":3}: 1 to 3 are deleted
    {"keytype":"CLEAR_SUBJECT","subject":"clicks-value","magic":0}     {"subject":..}
    {"keytype":"CONTEXT","tenant":"default","context":".staging","magic":0}     {"tenant":..,"context":..}
    {"keytype":"NOOP","magic":0}                                       null

Keys without a subject are those of all subjects. Value fields that are not known here are kept when a value is written
again.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final, NamedTuple

SCHEMA: Final = "SCHEMA"
CONFIG: Final = "CONFIG"
MODE: Final = "MODE"
DELETE_SUBJECT: Final = "DELETE_SUBJECT"
CLEAR_SUBJECT: Final = "CLEAR_SUBJECT"
CONTEXT: Final = "CONTEXT"
NOOP: Final = "NOOP"
_KNOWN: Final = frozenset((SCHEMA, CONFIG, MODE, DELETE_SUBJECT, CLEAR_SUBJECT, CONTEXT, NOOP))


class Key(NamedTuple):
    """A record's key; `version` is that of a SCHEMA, `subject` a CONTEXT's name, too."""

    keytype: str
    subject: str | None = None
    version: int = 0

    def encode(self) -> bytes:
        fields: dict[str, Any] = {"keytype": self.keytype}
        if self.keytype == CONTEXT:
            fields |= {"tenant": "default", "context": self.subject}
        elif self.subject is not None:
            fields["subject"] = self.subject
        if self.keytype == SCHEMA:
            fields["version"] = self.version
        return dumps(fields | {"magic": 1 if self.keytype == SCHEMA else 0})


#: Versions of keys, that of a schema and that of others. Confluent's first schemas had 0, too.
_MAGICS = (0, 1)
#: The header of a record that was written again, since one behind it had to be passed over.
RESTORED: Final = "klog-restored"


class Record(NamedTuple):
    """A key and its value, None for a tombstone."""

    key: Key
    value: dict[str, Any] | None
    is_restored: bool = False


def dumps(value: Any) -> bytes:
    """The JSON text in the registry's form, without white space."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def decode_key(data: bytes | None) -> Key | None:
    """A key; None if it is of no kind that matters here. `ValueError` if it is malformed."""
    fields = _object(data, "key")
    keytype = fields.get("keytype")
    if keytype not in _KNOWN:
        return None
    if fields.get("magic", 0) not in _MAGICS:
        raise ValueError(f"the key {data!r} is of a newer version than {max(_MAGICS)}")
    subject = fields.get("context" if keytype == CONTEXT else "subject")
    version = fields.get("version", 0)
    if not isinstance(subject, str | None) or not isinstance(version, int):
        raise ValueError(f"the key {data!r} has a wrong subject or version")
    if subject is None and keytype in (SCHEMA, DELETE_SUBJECT, CONTEXT):
        raise ValueError(f"the key {data!r} has no subject")
    return Key(keytype, subject, version if keytype == SCHEMA else 0)


def decode_value(data: bytes | None) -> dict[str, Any] | None:
    """A value, None for a tombstone. `ValueError` if it is malformed."""
    return None if data is None else _object(data, "value")


def _finite(text: str) -> float | None:
    return value if isfinite(value := float(text)) else None


def _object(data: bytes | None, what: str) -> dict[str, Any]:
    data = data or b""
    try:
        # earlier releases took numbers that JSON does not have: null then, not an answer that nobody can read
        fields = json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
        if b"\\u" in data or b"\xed" in data:
            dumps(fields)  # half of a surrogate pair can't be sent to anyone
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {what} {data[:200]!r} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"the {what} {data[:200]!r} is no JSON object")
    return fields
