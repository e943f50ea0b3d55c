"""What an Iceberg table no longer needs: old snapshots, the files that only they have, files that no snapshot has.

pyiceberg's `expire_snapshots` removes snapshots from the metadata, by their ids here, and no files. What the table has
is looked up after that commit: a file is removed if no snapshot that is left has it. If a call is killed in between,
these files are among those that no snapshot has, which go later.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from pyiceberg.manifest import ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update.snapshot import ExpireSnapshots
from pyiceberg.utils.properties import property_as_bool, property_as_int

from spark_klog.errors import LoadError
from spark_klog.files.folder import Entry
from spark_klog.tables.iceberg_runs import is_run_of
from spark_klog.tables.iceberg_transaction import OneAttempt
from spark_klog.tables.table import LOAD_PROPERTY
from spark_klog.tables.upkeep import ORPHAN_SECONDS, Expired, Kept, orphans

_log = logging.getLogger(__name__)
_AGE, _COUNT, _REMOVES = "history.expire.max-snapshot-age-ms", "history.expire.min-snapshots-to-keep", "gc.enabled"
_DEFAULT_AGE_MS = 5 * 24 * 3600 * 1000
#: How the names of an Iceberg table's files end; others are nobody's orphans.
_ENDINGS = (".parquet", ".avro", ".orc", ".puffin", ".stats", ".metadata.json", ".metadata.json.gz")


class Expiry:
    """Expires snapshots of a table; attempts to commit may be repeated, also if nobody knows whether one succeeded."""

    def __init__(self, address: str, kept: Kept, *, is_dry: bool) -> None:
        self._address, self._kept, self._is_dry = address, kept, is_dry
        self._old: dict[int, Snapshot] = {}
        self._before = 0.0

    def commit(self, table: Table, commit: Callable[[OneAttempt], None]) -> None:
        """Remove the old snapshots from the table. `LoadError` if its files are not to be removed."""
        properties = table.properties
        if not property_as_bool(properties, _REMOVES, True):
            raise LoadError(
                f"{self._address} has the property {_REMOVES}=false: its files may be those of other tables"
            )
        seconds = self._kept.seconds
        if seconds is None:
            seconds = (property_as_int(properties, _AGE, _DEFAULT_AGE_MS) or 0) / 1000
        count = self._kept.count or property_as_int(properties, _COUNT, 1) or 1
        self._before = time.time() - seconds
        needed = _needed(table, count, self._before * 1000)
        old = [snapshot for snapshot in table.snapshots() if snapshot.snapshot_id not in needed]
        self._old |= {snapshot.snapshot_id: snapshot for snapshot in old}
        if old and not self._is_dry:
            transaction = OneAttempt(table)
            transaction.require_refs()  # a rollback to an old one, or a tag of one, might come in between
            ExpireSnapshots(transaction).by_ids([snapshot.snapshot_id for snapshot in old]).commit()
            commit(transaction)

    def expired(self, now: Table, files: Mapping[str, Entry], is_needed: Callable[[str], bool]) -> Expired:
        """What the table, as it is `now`, does not need of its `files` and of those of old snapshots."""
        there = [snapshot for snapshot in now.snapshots() if not (self._is_dry and snapshot.snapshot_id in self._old)]
        ids = {snapshot.snapshot_id for snapshot in there}
        old = [snapshot for key, snapshot in self._old.items() if key not in ids]
        metadata = now.metadata
        known = {now.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
        for statistics in (*metadata.statistics, *metadata.partition_statistics):
            known.add(statistics.statistics_path)
        manifests: set[str] = set()
        for path, _ in _files(now, there, manifests):
            known.add(path)
        sizes: dict[str, int] = {}
        for snapshot in old:
            with suppress(FileNotFoundError):  # another call has removed it
                sizes.update(each for each in _files(now, [snapshot], manifests) if each[0] not in known)
        before = min(self._before, time.time() - ORPHAN_SECONDS)
        # pyiceberg would take "#" and "?" for the end of the path
        named = {path: each for path, each in files.items() if path.endswith(_ENDINGS) and not re.search("[#?]", path)}
        lost = orphans(named, {*known, *sizes}, before, is_needed)
        base = metadata.location.rstrip("/")
        return Expired(len(old), sizes | {f"{base}/{path}": size for path, size in lost.items()})


def _needed(table: Table, count: int, before_ms: float) -> set[int]:
    """The ids of the snapshots that stay: young ones, of each branch and tag its state at that time and the last
    `count` ones, and those by which the table's load finds its last run."""
    metadata = table.metadata
    needed = {snapshot.snapshot_id for snapshot in metadata.snapshots if snapshot.timestamp_ms >= before_ms}
    if (current := metadata.current_snapshot_id) is not None:
        needed.add(current)
    for ref in metadata.refs.values():
        for number, snapshot in enumerate(_ancestors(table, ref.snapshot_id), 1):
            needed.add(snapshot.snapshot_id)
            if number >= count and snapshot.timestamp_ms < before_ms:  # the state at that time, or an older one
                break
    if load := metadata.properties.get(LOAD_PROPERTY):
        for snapshot in _ancestors(table, current):
            needed.add(snapshot.snapshot_id)
            if is_run_of(snapshot, load):
                break
    return needed


def _ancestors(table: Table, snapshot_id: int | None) -> Iterator[Snapshot]:
    while snapshot_id is not None and (snapshot := table.metadata.snapshot_by_id(snapshot_id)) is not None:
        yield snapshot
        snapshot_id = snapshot.parent_snapshot_id


def _files(table: Table, snapshots: Iterable[Snapshot], read: set[str]) -> Iterator[tuple[str, int]]:
    """The files of snapshots with their bytes, 0 if these are unknown; of manifests that are not among those `read`."""
    for snapshot in snapshots:
        manifests: list[ManifestFile] = snapshot.manifests(table.io)
        yield snapshot.manifest_list, 0
        for manifest in manifests:
            if manifest.manifest_path not in read:
                for entry in manifest.fetch_manifest_entry(table.io):
                    yield entry.data_file.file_path, entry.data_file.file_size_in_bytes
                yield manifest.manifest_path, manifest.manifest_length
                read.add(manifest.manifest_path)
