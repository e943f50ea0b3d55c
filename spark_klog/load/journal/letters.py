"""Dead letters in the folder of a load: what their files hold, and what is left of them for another place."""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from spark_klog.base.durable import check_version
from spark_klog.errors import LoadError
from spark_klog.load.journal import paths
from spark_klog.load.journal.model import VERSION
from spark_klog.load.journal.store import Store

_log = logging.getLogger(__name__)
_KINDS = {"topic": str, "partition": int, "offset": int, "reason": str}
_OF_BATCH = _KINDS | {"bytes": str}
_OF_RECORD = _KINDS | {"timestamp": int, "key": str | None, "value": str | None, "headers": list}
#: Letters that are in memory, at most, and their bytes, about: those of a transaction or a row group.
_MOST, _BYTES = 10_000, 16 * 1024 * 1024
#: Bits of the progress that number a file's transactions; those above have the file's place in its run, and the run.
_OF_FILE, _OF_RUN = 22, 42


@dataclass(frozen=True)
class StoredLetter:
    """A record that a load has left out, or a corrupt record batch: then `batch` has its bytes, and `offset` is the one
    that it claims. Times are in ms: the record's, and that at which the batch was found.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    timestamp: int | None
    time: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    batch: bytes | None

    @property
    def size(self) -> int:
        parts = (self.key, self.value, self.batch, *(value for _, value in self.headers))
        return sum(len(part or b"") for part in parts)


def dead_letters(store: Store, name: str) -> Iterator[StoredLetter]:
    """The letters in a file; none if there is no such file, `LoadError` if it is damaged."""
    path = paths.dead_letter(name)
    is_of_values = paths.is_of_values(name)
    for number, text in enumerate(store.lines(path) if is_of_values else filter(None, [store.read(path)]), 1):
        where = f"{store.address}/{path}{f', line {number},' * is_of_values}"
        try:
            letter = json.loads(text)
            check_version(letter["version"], VERSION, where, "remove it", LoadError)
            made = _letter(letter, _OF_RECORD if is_of_values else _OF_BATCH)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LoadError(f"{where} is not a dead letter ({error!r}): restore it, or remove it") from None
        yield made


def _letter(letter: dict[str, Any], kinds: Mapping[str, Any]) -> StoredLetter:
    if wrong := [name for name, kind in kinds.items() if not isinstance(letter[name], kind)]:
        raise TypeError(f"{wrong[0]}: {letter[wrong[0]]!r}")
    headers = [(str(name), _bytes(value)) for name, value in letter.get("headers", ())]
    key, value, batch = (_bytes(letter.get(name)) for name in ("key", "value", "bytes"))
    times = letter.get("timestamp"), letter.get("time")
    place = letter["topic"], letter["partition"], letter["offset"]
    return StoredLetter(*place, letter["reason"], *times, key, value, headers, batch)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text, validate=True)


def first_letter(store: Store, names: Sequence[str]) -> str:
    """The place of the first dead letter in these files of values, and its reason; "" if there is none."""
    for name in filter(paths.is_of_values, names):
        for letter in dead_letters(store, name):
            return f"{letter.topic}-{letter.partition} at offset {letter.offset}: {letter.reason}"
    return ""


def in_parts(letters: Iterable[StoredLetter]) -> Iterator[list[StoredLetter]]:
    """The letters of each transaction or row group."""
    part: list[StoredLetter] = []
    size = 0
    for letter in letters:
        part.append(letter)
        size += letter.size
        if len(part) == _MOST or size >= _BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def is_there(store: Store, name: str) -> bool:
    """Whether there is a file of letters; that somebody has removed one is logged."""
    path = paths.dead_letter(name)
    if store.size(path) is None:
        _log.warning("%s/%s is not there, and its letters are left out", store.address, path)
        return False
    return True


def unsent(store: Store, files: Mapping[str, tuple[int, int]], start: int) -> Iterator[tuple[int, list[StoredLetter]]]:
    """The letters of files, each with its run and its place in that, behind the progress `start`: those of a
    transaction at a time, with the progress that it is to have. Errors as of `dead_letters`."""
    for name, (run, place) in sorted(files.items(), key=itemgetter(1)):
        first = (run << _OF_RUN) + (place << _OF_FILE)
        if first >> _OF_FILE < start >> _OF_FILE:
            continue  # a later file was begun with
        if first < start or is_there(store, name):
            for number, part in enumerate(in_parts(dead_letters(store, name)), first + 1):
                if number > start:
                    yield number, part
