"""A transaction of pyiceberg that goes to the catalog once."""

from __future__ import annotations

from contextlib import suppress

from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, AssertTableUUID


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
    def snapshots(self) -> list[Snapshot]:
        """Those that the transaction adds."""
        return [update.snapshot for update in self._updates if isinstance(update, AddSnapshotUpdate)]

    def set_operation(self, operation: Operation) -> None:
        """Change the operation of the snapshots; pyiceberg makes none of `replace`."""
        self._updates = tuple(
            _with(one, operation) if isinstance(one, AddSnapshotUpdate) else one for one in self._updates
        )

    def commit_transaction(self) -> Table:
        """Commit; CommitFailedException if the table is not as it was read. After other errors it may be committed."""
        requirements = (*self._requirements, AssertTableUUID(uuid=self._table.metadata.table_uuid))
        self._table._do_commit(self._updates, requirements)
        return self._table

    def remove_files(self) -> None:
        """Remove the metadata of a commit that is known to have failed."""
        io = self._table.io
        for snapshot in self.snapshots:
            with suppress(Exception):  # Iceberg's remove_orphan_files removes them later
                manifests = snapshot.manifests(io)
                ours = [one.manifest_path for one in manifests if one.added_snapshot_id == snapshot.snapshot_id]
                for path in (snapshot.manifest_list, *ours):
                    io.delete(path)


def _with(update: AddSnapshotUpdate, operation: Operation) -> AddSnapshotUpdate:
    texts = {} if update.snapshot.summary is None else update.snapshot.summary.additional_properties
    snapshot = update.snapshot.model_copy(update={"summary": Summary(operation, **texts)})
    return update.model_copy(update={"snapshot": snapshot})
