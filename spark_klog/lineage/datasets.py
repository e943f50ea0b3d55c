"""Datasets of lineage: their names, as OpenLineage's integrations give them, and what a run did with each.

| dataset | namespace | name |
| --- | --- | --- |
| a topic | `kafka://HOST:PORT`, the first of the bootstrap servers as the user wrote it | the topic |
| a local folder | `file` | its absolute path |
| a folder of an object store | `s3://BUCKET`, `gs://BUCKET`, `abfss://CONTAINER@ACCOUNT` | its path without the slash |
| a folder elsewhere | `hdfs://HOST:PORT` and the like | its path |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spark_klog.base.addresses import without_user

_SERVER = re.compile(r"(?:[A-Za-z_]+://)?(\[[0-9A-Fa-f:.%]+\]|[^\s/,:\[\]@]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORT = "9092"
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://([^/]*))?(/.*)?", re.DOTALL)
#: Hadoop's names of Amazon's object store.
_S3 = frozenset({"s3", "s3a", "s3n"})
_AZURE = frozenset({"abfs", "abfss", "wasb", "wasbs"})
_OBJECT_STORES = _S3 | _AZURE | {"gs", "gcs"}


@dataclass
class DatasetUse:
    """What a run has read from, or written to, a dataset.

    `ranges` has what was read, by partition: the first offset, and the one after the last. `rows` and `size` (bytes)
    are None if they are not known.
    """

    namespace: str
    name: str
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: int | None = None
    size: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    def add(self, other: DatasetUse) -> None:
        """Add a later use of the same dataset: the ranges become wider, the counts are added."""
        for partition, (start, end) in other.ranges.items():
            first, last = self.ranges.get(partition, (start, end))
            # a topic that was created again begins anew
            self.ranges[partition] = (first, max(last, end)) if start >= first else (start, end)
        self.rows = _sum(self.rows, other.rows)
        self.size = _sum(self.size, other.size)


class DatasetUses(dict[tuple[str, str], DatasetUse]):
    """The uses of a run by dataset."""

    def add(self, uses: Iterable[DatasetUse]) -> None:
        for use in uses:
            if use.key in self:
                self[use.key].add(use)
            else:
                self[use.key] = DatasetUse(use.namespace, use.name, dict(use.ranges), use.rows, use.size)


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def kafka_namespace(bootstrap_servers: str) -> str | None:
    """The namespace of a cluster's topics; None if the first server is not HOST:PORT.

    OpenLineage's agent for Spark names the first server, too: name the servers in one order everywhere.
    """
    first = _SERVER.fullmatch(bootstrap_servers.split(",")[0].strip())
    return None if first is None else f"kafka://{first[1]}:{first[2] or _DEFAULT_PORT}"


def topic_uses(
    namespace: str, ranges: Mapping[tuple[str, int], tuple[int, int]], rows: int | None = None
) -> list[DatasetUse]:
    """The topics of (start, end) by topic and partition; `rows` of all of them count only if there is one topic."""
    uses: dict[str, DatasetUse] = {}
    for (topic, partition), bounds in sorted(ranges.items()):
        uses.setdefault(topic, DatasetUse(namespace, topic)).ranges[partition] = bounds
    if len(uses) == 1:
        next(iter(uses.values())).rows = rows
    return list(uses.values())


def is_uri(address: str) -> bool:
    """Whether the address says which file system it is in."""
    return _URI.fullmatch(address) is not None


def folder_use(address: str, rows: int | None = None) -> DatasetUse:
    """A folder, by its path or URI, without the user and password of a URI.

    A path is one of this machine, from the working directory on.
    """
    if address.lower().startswith(tuple(f"{scheme}:" for scheme in _S3)):  # a secret may contain a slash
        address = without_user(address).replace("***@", "", 1)
    uri = _URI.fullmatch(address)
    if uri is None or uri[1].lower() == "file":
        return DatasetUse("file", os.path.abspath(uri[3] or "/" if uri else address), rows=rows)
    scheme, authority, path = uri[1].lower(), uri[2] or "", (uri[3] or "/").rstrip("/")
    if scheme not in _AZURE:
        authority = authority.rpartition("@")[2]
    if scheme in _S3:
        scheme = "s3"
    name = path.lstrip("/") if scheme in _OBJECT_STORES else path
    return DatasetUse(f"{scheme}://{authority}", name or "/", rows=rows)
