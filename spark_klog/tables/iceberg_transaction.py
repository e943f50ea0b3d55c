"""A transaction of pyiceberg that goes to the catalog once."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Literal

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRef
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemovePartitionSpecsUpdate,
    ValidatableTableRequirement,
)


class _AssertRefs(ValidatableTableRequirement):
    """The table has these branches and tags, and no others."""

    type: Literal["assert-refs"] = "assert-refs"
    refs: dict[str, SnapshotRef]

    def validate(self, base_metadata: TableMetadata | None) -> None:  # type: ignore[override]
        if base_metadata is None or base_metadata.refs != self.refs:
            raise CommitFailedException("a branch or tag of the table was made, moved or dropped meanwhile")


class OneAttempt(Transaction):
    """A transaction that goes to the catalog once, and whose metadata stays where it is if that fails.

    pyiceberg's own goes on by itself on what others have committed, among them another attempt of the same run; and
    after the last failure it deletes manifests, although a lost response may have been a commit.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._staged: tuple[object, TableMetadata] = self._updates, table.metadata

    @property
    def table_metadata(self) -> TableMetadata:
        """The metadata with the updates so far. pyiceberg's own copies all snapshots at each of a dozen reads."""
        if self._staged[0] is not self._updates:
            self._staged = self._updates, super().table_metadata
        return self._staged[1]

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    @property
    def snapshots(self) -> list[Snapshot]:
        """Those that the transaction adds."""
        return [update.snapshot for update in self._updates if isinstance(update, AddSnapshotUpdate)]

    def set_operation(self, operation: Operation) -> None:
        """Change the operation of the snapshots; pyiceberg makes none of `replace`."""
        self._updates = tuple(
            _with(update, operation) if isinstance(update, AddSnapshotUpdate) else update for update in self._updates
        )

    def remove_specs(self) -> None:
        """Leave the table unpartitioned, with no spec of before, so that the columns that these were by can go."""
        if fields := self.table_metadata.spec().fields:
            with self.update_spec() as update:
                for field in fields:
                    update.remove_field(field.name)
        now = self.table_metadata.default_spec_id
        if others := [spec.spec_id for spec in self.table_metadata.partition_specs if spec.spec_id != now]:
            self._apply((RemovePartitionSpecsUpdate.model_validate({"spec-ids": others}),))

    def require_snapshot(self) -> None:
        """Let the commit fail if there is another snapshot by then."""
        now = self.table_metadata.current_snapshot_id
        self._requirements += (AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": now}),)

    def require_refs(self) -> None:
        """Let the commit fail if a branch or tag was made, moved or dropped by then. A REST catalog, which checks it by
        itself, knows no requirement about one that is new."""
        refs = self.table_metadata.refs
        if hasattr(self._table.catalog, "_session"):
            known = ((name, ref.snapshot_id) for name, ref in refs.items())
            made = [AssertRefSnapshotId.model_validate({"ref": name, "snapshot-id": number}) for name, number in known]
            self._requirements += tuple(made)
        else:
            self._requirements += (_AssertRefs(refs=refs),)  # type: ignore[operator]

    def require_schema(self) -> None:
        """Let the commit fail if the table has other columns by then: its files are written by those of now."""
        now = self.table_metadata.current_schema_id
        self._requirements += (AssertCurrentSchemaId.model_validate({"current-schema-id": now}),)

    def commit_transaction(self) -> Table:
        """Commit. The table may have it after any error: of a request that a proxy sends twice one is a conflict."""
        requirements = (*self._requirements, AssertTableUUID(uuid=self._table.metadata.table_uuid))
        self._table._do_commit(self._updates, requirements)
        return self._table

    def remove_files(self, now: Table, data_files: Collection[str] = ()) -> None:
        """Remove the metadata of a commit that failed, and its data files, unless the table as it is `now` names them.

        Nothing is removed while the current snapshot is the one that the commit follows: a request that is still on its
        way may succeed. Iceberg's remove_orphan_files removes later what is left.
        """
        io, before = self._table.io, self._table.metadata
        if now.metadata.current_snapshot_id == before.current_snapshot_id:
            return
        with suppress(Exception):  # of any store's package
            named = named_files(now, before)
            for snapshot in self.snapshots:
                manifests = snapshot.manifests(io)
                ours = [each.manifest_path for each in manifests if each.added_snapshot_id == snapshot.snapshot_id]
                for path in {snapshot.manifest_list, *ours, *data_files} - named:
                    with suppress(FileNotFoundError):
                        io.delete(path)


def named_files(table: Table, before: TableMetadata) -> set[str]:
    """The manifest lists, manifests and data files that a table has got since its metadata was `before`.

    They are those of all its snapshots, and entries of files that these have removed.
    """
    io, paths = table.io, set[str]()
    known = {snapshot.snapshot_id for snapshot in before.snapshots}
    head, read = before.current_snapshot(), set[str]()
    with suppress(FileNotFoundError):  # another call has expired it
        read.update(() if head is None else (manifest.manifest_path for manifest in head.manifests(io)))
    for snapshot in table.metadata.snapshots:
        if snapshot.snapshot_id not in known:
            paths.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(io):
                if manifest.manifest_path not in read:
                    read.add(manifest.manifest_path)
                    paths.add(manifest.manifest_path)
                    entries = manifest.fetch_manifest_entry(io, discard_deleted=False)
                    paths.update(entry.data_file.file_path for entry in entries)
    return paths


def _with(update: AddSnapshotUpdate, operation: Operation) -> AddSnapshotUpdate:
    texts = {} if update.snapshot.summary is None else update.snapshot.summary.additional_properties
    snapshot = update.snapshot.model_copy(update={"summary": Summary(operation, **texts)})
    return update.model_copy(update={"snapshot": snapshot})
