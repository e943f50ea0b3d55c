"""Replay the values of a load that did not parse: send their records again, as they were."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_klog.columns.decode import MAX_MILLISECONDS
from spark_klog.columns.schema import subset
from spark_klog.errors import LoadError
from spark_klog.load.journal.history import committed_letters, manifests, open_load
from spark_klog.load.journal.model import LETTERS, is_of_values
from spark_klog.load.journal.store import Store
from spark_klog.restore.restore import offsets_of, transactions_of, write_with_progress

_SCHEMA = pa.schema(
    [*subset(("key", "value", "partition", "headers")), pa.field("timestamp", pa.int64())]  # ms
)
#: A transaction ends at either, so that it is shorter than transaction.timeout.ms. Progress counts transactions.
_ROWS, _BYTES = 10_000, 16 * 1024 * 1024


@dataclass(frozen=True)
class Replayed:
    """How many records were sent, and how many corrupt batches could not be: their bytes are no records."""

    records: int
    batches: int


def replay(output: str, client: Mapping[str, str], topic: str, source: str | None = None) -> Replayed:
    """Send the dead letters of a load, of the topic `source` or of all, to a topic in transactions.

    Each is sent once: a call that was interrupted is continued by the next one of the same topics, as each transaction
    has the progress, the offset of a group. A call after a complete one sends all of them again. Partitions stay if the
    topic has them; else the key decides. Timestamps that no column holds or no producer sends become the current time.
    `LoadError` for a damaged letter, errors as of `Producer`.
    """
    store, identity = open_load(output)
    letters = committed_letters(manifests(store))
    files = {
        place: name for name, place in letters.items() if is_of_values(name) and source in (None, name.split("+")[1])
    }
    records = 0
    if files:
        name = hashlib.sha256(json.dumps([identity.load, topic, source]).encode()).hexdigest()[:32]
        records = _send(store, files, client, topic, f"klog-replay-{name}")
    batches = [name for name in store.names(LETTERS) if not is_of_values(name)]
    if source is not None:  # TOPIC-PARTITION-OFFSET-CRC.json: another topic's name may begin with this one's and a "-"
        of_source = re.compile(rf"{re.escape(source)}-\d+--?\d+-[0-9a-f]{{8}}\.json")
        batches = [name for name in batches if of_source.fullmatch(name)]
    return Replayed(records, len(batches))


def _send(store: Store, files: Mapping[tuple[int, int], str], client: Mapping[str, str], topic: str, group: str) -> int:
    """Send the letters of files, by run and place in it, from where the last call stopped; return how many.

    `group` has the progress, and is the transactional id.
    """
    records, key = 0, (topic, 0)
    with transactions_of(client, group) as producer:
        start = offsets_of(client, group, [key]).get(key, 0)
        count = producer.partitions(topic)
        for (run, place), name in sorted(files.items()):
            for number, rows in enumerate(_rows(store, name, count), 1):
                # so many transactions of a run's file are sent; it grows in the order of sending
                progress = (run << 42) + (place << 22) + number
                if progress > start:
                    table = pa.Table.from_pylist(rows, _SCHEMA)
                    write_with_progress(producer, table, key, progress, group, is_any_time=False)
                    records += len(rows)
        write_with_progress(producer, None, key, 0, group, is_any_time=False)
    return records


def _rows(store: Store, name: str, partitions: int) -> Iterator[list[dict[str, Any]]]:
    """The records of a file of letters, those of a transaction at a time; `LoadError` for a damaged one."""
    rows: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(store.lines(f"{LETTERS}/{name}"), 1):
        try:
            letter = json.loads(line)
            rows.append(
                {
                    "key": _bytes(letter["key"]),
                    "value": _bytes(letter["value"]),
                    "partition": letter["partition"] if letter["partition"] < partitions else None,
                    "timestamp": letter["timestamp"] if -1 <= letter["timestamp"] <= MAX_MILLISECONDS else None,
                    "headers": [{"key": key, "value": _bytes(value)} for key, value in letter["headers"]] or None,
                }
            )
        except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise LoadError(
                f"{store.address}/{LETTERS}/{name}, line {number}, is not a dead letter ({error!r}): restore it, or "
                "remove it"
            ) from None
        size += len(line)
        if len(rows) == _ROWS or size >= _BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)
