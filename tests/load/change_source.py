"""A topic of changes of rows, and the rows that a table of them has to have."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from spark_klog.load.settings import WriteSettings
from spark_klog.tables.opening import open_table
from tests.spark.support import Sent, create_topic, produce

ROW = "id bigint, name string"
#: A tombstone has its row's id in its key only: keys are bytes, so those of the source are not read as rows.
KEYED = WriteSettings(schema=ROW, upsert_key="key")
#: The same into a table that the load partitions, by fields that change, too; by the name of a format.
PARTITIONED = {
    kind: replace(KEYED, schema=f"{ROW}, part int", layout=layout)
    for kind, layout in {"delta": "part", "iceberg": "part, bucket(3, id), truncate(6, name)"}.items()
}
_PARTITIONS = 4


class ChangeSource:
    """A topic of changes of rows, and what it says."""

    def __init__(self, servers: str, topic: str, keys: int) -> None:
        self.servers, self.topic, self._keys = servers, topic, keys
        self._chance = random.Random(44)
        self._logs: list[list[tuple[int, str | None]]] = [[] for _ in range(_PARTITIONS)]
        create_topic(servers, topic, _PARTITIONS)

    def change(self, count: int) -> None:
        """Changes of keys in any order, a tenth of them tombstones; a key has its partition."""
        sent = []
        for number in range(count):
            key = self._chance.randrange(self._keys)
            name = None if self._chance.random() < 0.1 else f"name {number} of {key}"
            value = None if name is None else json.dumps({"id": key, "name": name, "part": number % 3}).encode()
            sent.append(Sent(value, json.dumps({"id": key}).encode(), key % _PARTITIONS))
            self._logs[key % _PARTITIONS].append((key, name))
        produce(self.servers, self.topic, sent)

    def rows(self, offsets: Mapping[str, int]) -> list[tuple[int, str, int]]:
        """(id, name, offset) of the rows at some offsets."""
        found: dict[int, tuple[int, str, int]] = {}
        for partition, log in enumerate(self._logs):
            for offset, (key, name) in enumerate(log[: offsets.get(str(partition), 0)]):
                if name is None:
                    found.pop(key, None)
                else:
                    found[key] = key, name, offset
        return sorted(found.values())

    @property
    def end(self) -> dict[str, int]:
        return {str(number): len(log) for number, log in enumerate(self._logs)}


def offsets_of(address: str, topic: str) -> Mapping[str, int]:
    """The offsets at which the table's last run ends, by partition; none before the first run."""
    table = open_table(address)
    owner = table.load_id()
    last = None if owner is None else table.last_run(owner)
    return {} if last is None else last.offsets[topic]


def rows_of(table: pa.Table) -> list[tuple[int, str, int]]:
    """(id, name, offset) of all rows, sorted."""
    columns = [table[name].to_pylist() for name in ("id", "name", "_klog_offset")] if len(table) else [[], [], []]
    return sorted(zip(*columns, strict=True))
