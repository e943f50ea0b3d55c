"""Dead letters: the form of a record that can't be processed, in a topic.

A letter is the record as it was: key, value, timestamp and headers, byte for byte. After its own headers come those
that say where it is from and what was wrong, under the names that sinks of Kafka Connect write, with values of text in
UTF-8. They begin with the topic, so that a letter of a letter has two such blocks, and `split` undoes the last one.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from spark_klog.base.addresses import without_user
from spark_klog.records.contract import Headers

#: Connect's names, and ours for what Connect has no name for.
_CONNECT, _OWN = "__connect.errors.", "__klog.errors."
_TOPIC = f"{_CONNECT}topic"
#: The fields of `DeadLetter` by their headers, in the order in which Connect writes them.
HEADERS = {
    "topic": _TOPIC,
    "partition": f"{_CONNECT}partition",
    "offset": f"{_CONNECT}offset",
    "reader": f"{_CONNECT}connector.name",
    "task": f"{_CONNECT}task.id",
    "stage": f"{_CONNECT}stage",
    "where": f"{_CONNECT}class.name",
    "error": f"{_CONNECT}exception.class.name",
    "reason": f"{_CONNECT}exception.message",
    "trace": f"{_CONNECT}exception.stacktrace",
    "time": f"{_OWN}time",
    "attempts": f"{_OWN}attempts",
    "due": f"{_OWN}retry.at",
}
_NUMBERS = frozenset({"partition", "offset", "time", "attempts", "due"})
#: Stages by Connect's names: what makes keys or values of bytes, a record's processing, the reading of batches.
CONVERTERS = {"key": "KEY_CONVERTER", "value": "VALUE_CONVERTER"}
PROCESSING, READING = "TASK_PUT", "KAFKA_CONSUME"
#: The error of a letter whose value is a whole record batch, of which the records can't be read.
CORRUPT_BATCH = "spark_klog.errors.CorruptBatchError"
#: Settings of a producer of letters, which are as large as records and batches.
SIZES = dict.fromkeys(("max.request.size", "buffer.memory"), str(64 * 1024 * 1024))
#: Characters of texts: a letter should fit where its record did.
_MOST_REASON, _MOST_TRACE = 1000, 4000
_SECRET = re.compile(
    r"((?:password|passwd|secret|token|api[_-]?key|credentials?)[\"']?\s*[=:]\s*[\"']?)[^\s,;&\"']+", re.IGNORECASE
)


@dataclass(frozen=True)
class DeadLetter:
    """What a letter's headers say: the record's place, and why it is a letter.

    `reader` is the group or query that could not process it, `error` the name of the exception's class, `time` when
    the letter was made and `due` when a record in a retry topic is to be processed again (ms since 1970). `attempts`
    counts how often it was tried. What a letter of another program does not say is -1 or "".
    """

    topic: str
    partition: int
    offset: int
    reader: str = ""
    task: str = ""
    stage: str = PROCESSING
    where: str = ""
    error: str = ""
    reason: str = ""
    trace: str = ""
    time: int = -1
    attempts: int = -1
    due: int = -1

    @property
    def headers(self) -> Headers:
        """The block that follows the record's own headers."""
        values = ((name, getattr(self, field)) for field, name in HEADERS.items())
        given = ((name, str(value)) for name, value in values if value not in ("", -1))
        # a reason may quote the record, with half of a surrogate pair in its text
        return tuple((name, text.encode(errors="backslashreplace")) for name, text in given)


def split(headers: Headers) -> tuple[DeadLetter | None, Headers]:
    """What the last block of headers says, None if there is none, and the headers of the record as it was.

    Headers that another program has added after the block are the record's.
    """
    start = max((place for place, (name, _) in enumerate(headers) if name == _TOPIC), default=-1)
    if start < 0:
        return None, headers
    is_ours = [place >= start and name.startswith((_CONNECT, _OWN)) for place, (name, _) in enumerate(headers)]
    said = {name: data for (name, data), ours in zip(headers, is_ours, strict=True) if ours and data is not None}
    fields: dict[str, Any] = {}
    for field, name in HEADERS.items():
        if name in said:
            text = said[name].decode(errors="replace")
            if field not in _NUMBERS:
                fields[field] = text
            elif re.fullmatch("-?[0-9]{1,19}", text):
                fields[field] = int(text)
    own = tuple(header for header, ours in zip(headers, is_ours, strict=True) if not ours)
    return (DeadLetter(**fields), own) if {"topic", "partition", "offset"} <= fields.keys() else (None, headers)


def told(reason: str | BaseException, secrets: Collection[str] = ()) -> tuple[str, str, str]:
    """`error`, `reason` and `trace` of a letter, of an error or of a reason in words.

    Without `secrets`, and other passwords as far as they can be told.
    """

    def cleaned(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "[hidden]") if secret else text
        return _SECRET.sub(r"\1[hidden]", without_user(text))

    if isinstance(reason, str):
        return "", cleaned(reason)[:_MOST_REASON], ""
    kind = type(reason)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = "".join(traceback.format_exception(reason)) if reason.__traceback__ else ""
    return name, cleaned(str(reason))[:_MOST_REASON], cleaned(trace)[-_MOST_TRACE:]
