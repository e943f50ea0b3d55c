"""Replay the values of a load that did not parse: send their records again, as they were."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_klog.client import Producer
from spark_klog.client.security.settings.secrets import Settings
from spark_klog.columns.decode import MAX_MILLISECONDS
from spark_klog.columns.schema import subset
from spark_klog.errors import LoadError
from spark_klog.load.journal.history import open_load
from spark_klog.load.journal.model import LETTERS
from spark_klog.load.journal.store import Store

_SCHEMA = pa.schema(
    [*subset(("key", "value", "partition", "headers")), pa.field("timestamp", pa.int64())]  # ms
)
_ROWS = 10_000


@dataclass(frozen=True)
class Replayed:
    """How many records were sent, and how many corrupt batches could not be: their bytes are no records."""

    records: int
    batches: int


def replay(output: str, client: Mapping[str, str], topic: str, source: str | None = None) -> Replayed:
    """Send the dead letters of a load, of the topic `source` or of all, to a topic in one transaction.

    All of them are sent or none. Another call sends them again. Partitions stay if the topic has them; else the
    key decides. Timestamps that no column holds or no producer sends become the current time. `LoadError` for a
    damaged letter, errors as of `Producer`.
    """
    store, _ = open_load(output)
    names = store.names(LETTERS)
    values = [name for name in names if name.startswith("values+") and source in (None, name.split("+")[1])]
    batches = [name for name in names if not name.startswith("values+")]
    settings = {**client, "transactional.id": f"klog-replay-{uuid.uuid4().hex}"}
    records = 0
    if values:
        with Producer(Settings(settings)) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            count = producer.partitions(topic)
            sent: dict[str, int] = {}
            for name in values:
                for rows in _rows(store, name, count, sent):
                    producer.send_arrow(pa.Table.from_pylist(rows, _SCHEMA), topic)
                    records += len(rows)
            producer.commit_transaction()
    if source is not None:  # TOPIC-PARTITION-OFFSET-CRC.json: another topic's name may begin with this one's and a "-"
        of_source = re.compile(rf"{re.escape(source)}-\d+--?\d+-[0-9a-f]{{8}}\.json")
        batches = [name for name in batches if of_source.fullmatch(name)]
    return Replayed(records, len(batches))


def _rows(store: Store, name: str, partitions: int, sent: dict[str, int]) -> Iterator[list[dict[str, Any]]]:
    """The records of a file of letters, but those up to `sent`, which has the last offset of each log.

    A range that was loaded in vain, as one before it was not, has letters, too; so has the one that was loaded instead.
    """
    rows: list[dict[str, Any]] = []
    parts = name.removesuffix(".jsonl").split("+")
    log = "+".join(parts[1:3] + parts[4:])  # without the first offset of the range
    for number, line in enumerate((store.read(f"{LETTERS}/{name}") or b"").splitlines(), 1):
        try:
            letter = json.loads(line)
            if letter["offset"] <= sent.get(log, -1):
                continue
            sent[log] = letter["offset"]
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
        if len(rows) == _ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)
