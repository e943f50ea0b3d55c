"""Iceberg tables, by pyiceberg: files of a load become data files of a table in one commit of its catalog.

`iceberg_runs` says how a run is recorded; that is set in the commit that adds its files, which the catalog refuses if
the table has moved meanwhile.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    RESTError,
    TableAlreadyExistsError,
    UnauthorizedError,
    ValidationError,
)
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import DoubleType

from spark_klog.base.addresses import without_user
from spark_klog.base.clock import doubled
from spark_klog.errors import ConfigError, LoadError
from spark_klog.files import open_folder
from spark_klog.tables.change_files import ChangeFiles
from spark_klog.tables.iceberg_compaction import Batch, Compaction
from spark_klog.tables.iceberg_expiry import Expiry
from spark_klog.tables.iceberg_files import Footers, data_entries, offsets_of, place_columns
from spark_klog.tables.iceberg_partitions import Pruning, by_partition, check_spec, spec_of, terms_in
from spark_klog.tables.iceberg_rows import REWRITE, NotProjected, Rows
from spark_klog.tables.iceberg_runs import last_run, run_properties, run_texts
from spark_klog.tables.iceberg_schema import changes, to_arrow, to_iceberg
from spark_klog.tables.iceberg_stores import opened, renewing, store_uri, table_place
from spark_klog.tables.iceberg_transaction import OneAttempt
from spark_klog.tables.iceberg_upsert import Upsert
from spark_klog.tables.partitions import Term, partition_row, terms_of
from spark_klog.tables.table import (
    COLUMNS_PROPERTY,
    LOAD_PROPERTY,
    STREAMS,
    DataFile,
    Offsets,
    Run,
    Stage,
    TableFile,
    Use,
    is_committed,
    key_mismatch,
    key_property,
    layout_advice,
    own_columns,
    own_columns_property,
)
from spark_klog.tables.upkeep import Expired, Kept, files_below

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Of tables that a load creates: metadata does not grow with each run.
_PROPERTIES = {
    "format-version": "2",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
#: The format versions that pyiceberg writes.
_WRITTEN = (1, 2)
#: How long a commit is tried again, and how often at least if others come before it: a merge may take longer.
_COMMIT_SECONDS, _LEAST_ATTEMPTS = 300.0, 5
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 5.0
#: Packages of catalogs and stores, whose errors may pass.
_REMOTE = ("sqlalchemy", "sqlite3", "botocore", "requests", "urllib3", "thrift", "google", "azure")
#: The module of SQL catalogs, which needs sqlalchemy.
_SQL = "pyiceberg.catalog.sql"
#: Characters of a long error.
_MOST_SHOWN = 300
_FINAL = (ForbiddenError, UnauthorizedError, AuthorizationExpiredError)


#: What a catalog in a database creates there when it is opened.
_CREATED = ("iceberg_tables", "iceberg_namespace_properties")


def _opened(name: str, options: Mapping[str, str]) -> Catalog:
    """A catalog of pyiceberg's configuration; errors of any package."""
    for _ in _CREATED:
        try:
            return opened(name, options)
        except Exception as error:
            # a thread or process that opens it at the same time was quicker
            if not any(f"{created} already exists" in str(error) for created in _CREATED):
                raise
    return opened(name, options)


def tables_below(beginning: str) -> list[str]:
    """The tables CATALOG.NAMESPACE.TABLE in the namespaces that the beginning of such a name has; `LoadError`."""
    name, *parts = beginning.split(".")

    def below(catalog: Catalog, namespace: tuple[str, ...]) -> Iterator[str]:
        if namespace:
            yield from (".".join((name, *table)) for table in catalog.list_tables(namespace))
        for child in catalog.list_namespaces(namespace):
            if len(child) > len(namespace):
                yield from below(catalog, child)

    try:
        return list(below(_opened(name, {}), tuple(parts[:-1])))
    except Exception as error:  # of any catalog's package
        raise LoadError(f"tables of catalog {name!r} can't be listed: {_text(error)}") from error


class IcebergTable:
    """A table `CATALOG.NAMESPACE.TABLE` of a catalog that pyiceberg's configuration has; namespaces may be nested.

    `options` are properties of the catalog (uri, warehouse, s3.endpoint ...), beside those of the configuration.
    Methods as of `Table`.
    """

    renames: ClassVar[bool] = True
    no_variant: ClassVar[str] = "Iceberg has the type from format version 3 on, which pyiceberg 0.12 does not write"
    partition_zone: ClassVar[str | None] = "UTC"

    def __init__(self, name: str, options: Mapping[str, str] | None = None) -> None:
        self.address = self.journal_name = f"iceberg:{name}"
        catalog, *rest = name.split(".")
        if len(rest) < 2 or not all((catalog, *rest)):
            raise ConfigError(f"{self.address} must be iceberg:CATALOG.NAMESPACE.TABLE")
        self._identifier = tuple(rest)
        self._options = dict(options or {})
        self._catalog_name = catalog
        self._known_catalog: Catalog | None = None
        self._location = self._seen = ""
        self._uri: str = ""
        self._seconds = _COMMIT_SECONDS
        #: Those of the next commit, by `prepare`.
        self._columns: Sequence[str] = ()
        #: By `expire`, of which files are removed.
        self._expired: Table | None = None
        self._terms: Sequence[Term] = ()

    @property
    def _catalog(self) -> Catalog:
        if self._known_catalog is None:
            name = self._catalog_name
            try:
                self._known_catalog = _opened(name, self._options)
            except Exception as error:  # of any catalog's package
                raise LoadError(
                    f"{self.address}: catalog {name!r} can't be opened: {_text(error)}: check .pyiceberg.yaml or "
                    f"PYICEBERG_CATALOG__{name.upper()}__URI"
                ) from None
        return self._known_catalog

    @property
    def location(self) -> str:
        """The URI of the folder, as `open_folder` takes it: with the catalog's endpoint and keys of the store."""
        if not self._uri:
            table = self._table()
            if table is None:
                self._location, properties = self._calling(self._future_location, "created")
            else:
                self._location, properties = table.metadata.location, table.io.properties
            self._uri = store_uri(self._location, properties, self._catalog, self._identifier)
        return self._uri

    def _future_location(self) -> tuple[str, Mapping[str, str]]:
        """Where the table will be, and the properties of its store.

        SQL catalogs know it before there is a namespace, others decide by one, so that it is created.
        """
        *namespace, name = self._identifier
        catalog = self._catalog
        if not any(one.__module__ == _SQL for one in type(catalog).__mro__):
            self._create_namespace()
            return table_place(catalog, self._identifier)
        folder = None
        with suppress(NoSuchNamespaceError):
            folder = catalog.load_namespace_properties(tuple(namespace)).get("location")
        if not folder:
            if "warehouse" not in catalog.properties:
                raise LoadError(f"{self.address}: catalog {catalog.name!r} has no property warehouse for new tables")
            folder = f"{catalog.properties['warehouse'].rstrip('/')}/{'.'.join(namespace)}"
        return f"{folder.rstrip('/')}/{name}", catalog.properties

    def schema(self) -> pa.Schema | None:
        table = self._table()
        return None if table is None else to_arrow(table.schema())

    def load_id(self) -> str | None:
        table = self._table()
        return None if table is None else table.properties.get(LOAD_PROPERTY)

    def prepare(
        self,
        columns: pa.Schema,
        layout: str,
        time_column: str,
        load: str,
        at: Stage = "commit",
        key: Sequence[str] = (),
    ) -> pa.Schema:
        """As of `Table.prepare`. Columns that only the table has are not in the schema: their values are null.

        A field with the name of one of the table's among its aliases (`with_aliases`) is that one, which is renamed;
        of columns only if it is the load's own.
        """
        return self._trying(lambda: self._prepare(columns, layout, time_column, load, at, key), "prepared")

    def _prepare(
        self, columns: pa.Schema, layout: str, time_column: str, load: str, at: Stage, key: Sequence[str]
    ) -> pa.Schema:
        self._terms = terms = terms_of(layout, time_column)
        table = self._table()
        if table is None:
            schema = to_iceberg(columns)
            if differences := changes(schema, columns, ()).differences:
                raise LoadError(f"{self.address}: {'; '.join(differences)}")
            spec = self._spec(schema, terms)
            self._create_namespace()
            location = self._location or None
            properties = {**_PROPERTIES, LOAD_PROPERTY: load, **own_columns_property(self.address, {}, columns.names)}
            for column in place_columns(schema)[:1]:  # whole names of topics; a column that is not there is an error
                properties[f"write.metadata.metrics.column.{schema.find_column_name(column)}"] = "full"
            try:
                table = self._catalog.create_table(self._identifier, schema, location, spec, properties=properties)
            except TableAlreadyExistsError:
                table = self._present()
        metadata = table.metadata
        self._check_owner(metadata, load)
        self._check_version(metadata)
        # another stream may be about to write to what this one does not have
        is_unused, drops = self._is_unused(metadata, load), load != STREAMS
        unwritten = _unwritten(metadata, () if is_unused else metadata.partition_specs)
        needed = changes(metadata.schema(), columns, _own(self.address, metadata), unwritten, drops=drops)
        if not is_unused:
            is_others = bool(terms) and LOAD_PROPERTY not in metadata.properties
            before = [replace(term, column=needed.path_before(term.column)) for term in terms]
            self._check_layout(metadata, before, is_any=bool(key) and not is_others)
        if needed.differences:
            raise LoadError(
                f"{self.address} does not fit: {'; '.join(needed.differences)}: change the table, or load into another"
            )
        renamed = {path[0]: name for path, name in needed.renamed if len(path) == 1}
        self._check_key(metadata, key, renamed)
        self._check_names(metadata, [path[0] for path, _ in needed.added if len(path) == 1])
        if others := [path[0] for path, kind in needed.widened if path[0] in key and isinstance(kind, DoubleType)]:
            raise LoadError(
                f"{self.address} has the key's column {others[0]} as float, and the load as double, in which 0.1 is "
                "another number: load into another table"
            )
        self._columns = columns.names
        if needed.renamed and at == "plan":
            return to_arrow(metadata.schema())
        gone = [*renamed, *(path[0] for path in needed.removed if len(path) == 1)]
        new = [path[0] for path, _ in needed.added if len(path) == 1] + list(renamed.values())
        is_older = COLUMNS_PROPERTY not in metadata.properties and LOAD_PROPERTY in metadata.properties
        names = columns.names if is_older else new
        properties = own_columns_property(self.address, metadata.properties, names, gone)
        transaction = OneAttempt(table)
        if is_unused and needed.removed:
            transaction.remove_specs()
        if needed:
            with transaction.update_schema() as update:
                for path, kind in needed.widened:
                    update.update_column(path, kind)
                for path, name in needed.renamed:
                    update.rename_column(path, name)
                for path in needed.removed:
                    update.delete_column(path)
                for path, kind in needed.added:
                    update.add_column(path, kind)
        if is_unused and (not key or terms or needed.removed):  # of a table of changes users decide
            self._replace_spec(transaction, terms)
        if transaction.has_updates or properties or LOAD_PROPERTY not in metadata.properties:
            if needed.removed or is_unused:  # others may be about to write to it
                transaction.require_snapshot()
            transaction.set_properties({LOAD_PROPERTY: load, **properties})
            table = transaction.commit_transaction()
            _log.info("changed %s: added %s", self.address, [".".join(path) for path, _ in needed.added])
        return to_arrow(table.schema(), columns)

    def _is_unused(self, metadata: TableMetadata, load: str) -> bool:
        """Whether the load has made the table, and nobody has committed anything to it."""
        is_ours = _PROPERTIES.items() <= {**metadata.properties, "format-version": "2"}.items()
        return is_ours and metadata.properties.get(LOAD_PROPERTY) == load and not metadata.snapshots

    def _replace_spec(self, transaction: OneAttempt, terms: Sequence[Term]) -> None:
        metadata = transaction.table_metadata
        spec = self._spec(metadata.schema(), terms)
        if not spec.compatible_with(metadata.spec()):
            with transaction.update_spec() as update:
                for old in metadata.spec().fields:
                    update.remove_field(old.name)
                for term, new in zip(terms, spec.fields, strict=True):
                    update.add_field(term.column, new.transform, new.name)

    def _check_key(self, metadata: TableMetadata, key: Sequence[str], renamed: Mapping[str, str] | None = None) -> None:
        """`LoadError` if changes by `key` would not find the table's rows, once it has `renamed` its columns."""
        ids = {(renamed or {}).get(name, name): number for name, number in _ids(metadata).items()}
        if key and _may_have_rows(metadata) and (mismatch := key_mismatch(self.address, metadata.properties, key, ids)):
            raise LoadError(f"{self.address} {mismatch}")

    def _check_names(self, metadata: TableMetadata, added: Iterable[str]) -> None:
        """`LoadError` if a column that is to be added is one that runs have written and others have renamed since."""
        names = {number: name for name, number in _ids(metadata).items()}
        own = _own(self.address, metadata) if _may_have_rows(metadata) else set()
        for name in sorted(own.intersection(added)):
            ids = [field.field_id for each in metadata.schemas for field in each.fields if field.name == name]
            if ids and (now := names.get(max(ids), name)) != name:
                raise LoadError(
                    f"{self.address}: the column {name}, which has values of the load, was renamed to {now}: rename it "
                    "back, or load into another table"
                )

    def _check_columns(self, metadata: TableMetadata, files: ChangeFiles) -> None:
        """`LoadError` if the table has no place for all values of the changes, as others have changed its columns."""
        lacks = changes(metadata.schema(), files.row, ())
        names = [".".join(path) for path, _ in (*lacks.added, *lacks.widened)]
        if texts := [*lacks.differences, *(f"no {name} of the changes' type" for name in names)]:
            raise LoadError(
                f"{self.address} has other columns than the changes ({'; '.join(texts)}), as another writer has "
                "changed them meanwhile: run again, which compares them anew"
            )

    def _spec(self, schema: Schema, terms: Sequence[Term]) -> PartitionSpec:
        try:
            return spec_of(schema, terms)
        except LoadError as error:
            raise LoadError(f"{self.address} {error}") from None

    def _check_layout(self, metadata: TableMetadata, terms: Sequence[Term], *, is_any: bool) -> None:
        """`LoadError` if the table is partitioned otherwise; unless it may be by `is_any`, as upserts write any."""
        spec, schema = metadata.spec(), metadata.schema()
        try:
            check_spec(spec)
        except LoadError as error:
            raise LoadError(f"{self.address} {error}: load into another table") from None
        if not is_any and sorted(terms_in(spec)) != sorted(terms_in(self._spec(schema, terms))):
            texts = [
                ", ".join(_term_text(schema, source, transform) for source, transform in terms_in(each))
                for each in (spec, self._spec(schema, terms))
            ]
            texts = [f"partitioned by {text}" if text else "not partitioned" for text in texts]
            raise LoadError(f"{self.address} is {texts[0]}; {layout_advice(texts[1])}")

    def check(self, use: Use) -> None:
        """As of `Table.check`; of any use it is the same."""
        if (table := self._table()) is not None:
            self._check_version(table.metadata)

    def _check_version(self, metadata: TableMetadata) -> None:
        if metadata.format_version not in _WRITTEN:
            raise LoadError(
                f"{self.address} has format version {metadata.format_version}: pyiceberg writes 1 and 2, and a table "
                "does not go back to an earlier version: load into another table"
            )

    def _check_owner(self, metadata: TableMetadata, load: str) -> None:
        owner = metadata.properties.get(LOAD_PROPERTY, load)
        if owner != load:
            raise LoadError(f"{self.address} belongs to load {owner}, this is {load}: load into another table")

    def last_run(self, load: str) -> Run | None:
        """As of `Table.last_run`. `LoadError` if the table was rolled back to before its last run."""
        table = self._table()
        return None if table is None else self._calling(lambda: last_run(self.address, table, load), "read")

    def append(self, files: Sequence[DataFile], run: Run) -> None:
        """As of `Table.append`; partitions are those of the files' rows, by their footers. Tries for five minutes.

        Nothing happens if the run is in the table with this token, after an attempt whose outcome nobody knew.
        """
        self._trying(lambda: self._append(files, run), f"given run {run.number}")

    def _append(self, files: Sequence[DataFile], run: Run) -> None:
        without = self._without(run)
        if without is None:
            return
        table, last = without
        footers, metadata = Footers(table.metadata), table.metadata
        base = metadata.location.rstrip("/")
        transaction = OneAttempt(table)
        append = transaction.update_snapshot(snapshot_properties=run_texts(run)).merge_append()
        for one in files:
            partition, row = None, partition_row(one.metadata)
            if row is not None:
                self._check_layout(metadata, self._terms, is_any=False)
                [(partition, _)] = by_partition(row, metadata.spec(), metadata.schema())
            append.append_data_file(footers.data_file(f"{base}/{one.path}", one.size, one.metadata, partition))
        has_rows = any(one.metadata.num_rows for one in files)
        self._commit_run(transaction, append, run, (last.offsets if last else {}) if has_rows else None)

    def upsert(self, changes: ChangeFiles | None, run: Run) -> None:
        if changes is None:
            self.append([], run)
        else:
            self._trying(lambda: self._upsert(changes, run), f"given run {run.number}")

    def _upsert(self, files: ChangeFiles, run: Run) -> None:
        without = self._without(run)
        if without is None:
            return
        table, last = without
        self._check_key(table.metadata, files.key)
        self._check_columns(table.metadata, files)
        upsert = Upsert(self.address, table, files)
        upsert.write()
        if not upsert.added and not upsert.gone:
            self._append([], run)
            return
        transaction = OneAttempt(table)
        if by_key := key_property(self.address, table.metadata.properties, files.key, _ids(table.metadata)):
            transaction.set_properties(by_key)
        texts = {**run_texts(run), **upsert.summary}
        overwrite = transaction.update_snapshot(snapshot_properties=texts).overwrite()
        # The files to delete are given one by one; this lets pyiceberg look for them in all manifests.
        overwrite.delete_by_predicate(AlwaysTrue())
        for file in upsert.gone:
            overwrite.delete_data_file(file)
        for file in upsert.added:
            overwrite.append_data_file(file)
        has_rows = bool(upsert.inserted)  # of one that only deletes no row can tell
        starts = (last.offsets if last else {}) if has_rows else run.offsets
        self._commit_run(transaction, overwrite, run, starts, [one.file_path for one in upsert.added])
        number, read, rows, size = upsert.summary.values()
        _log.info(
            "%s, run %s: read %s rows (%s bytes) of %s of %s files, replaced %d files by %d (%d rows, %d bytes)",
            *(self.address, run.number, rows, size, read, number, len(upsert.gone), len(upsert.added)),
            *(sum(one.record_count for one in upsert.added), sum(one.file_size_in_bytes for one in upsert.added)),
        )

    def _without(self, run: Run) -> tuple[Table, Run | None] | None:
        """The table before the run, and its last run; None if it has the run, after an attempt of unknown outcome."""
        table = self._present()
        self._check_owner(table.metadata, run.load)
        self._check_version(table.metadata)
        last = last_run(self.address, table, run.load)
        return None if is_committed(self.address, last, run) else (table, last)

    def _commit_run(
        self,
        transaction: OneAttempt,
        producer: Any,
        run: Run,
        starts: Offsets | None,
        data_files: Collection[str] = (),
    ) -> None:
        transaction.require_schema()
        sequence = transaction.table_metadata.next_sequence_number()
        own = own_columns_property(self.address, transaction.table_metadata.properties, self._columns)
        transaction.set_properties({**run_properties(run, producer.snapshot_id, sequence, starts), **own})
        producer.commit()
        self._commit(transaction, data_files)
        _log.info("committed run %s to %s, snapshot %s", run.number, self.address, producer.snapshot_id)

    def _commit(self, transaction: OneAttempt, data_files: Collection[str] = ()) -> None:
        """CommitFailedException although the table may have the commit: the next attempt looks first. `data_files` are
        of no other attempt."""
        try:
            transaction.commit_transaction()
        except CommitFailedException:
            transaction.remove_files(self._present(), data_files)
            raise

    def files(self) -> Iterator[TableFile]:
        table = self._table()
        if table is None:
            return
        base = table.metadata.location.rstrip("/") + "/"
        columns = place_columns(table.schema())
        for entry in data_entries(table):
            file = entry.data_file
            path = file.file_path.removeprefix(base)
            yield TableFile(path, file.file_size_in_bytes, file.record_count, offsets_of(file, columns))

    def deleted_rows(self) -> dict[str, NDArray[np.int64]]:
        table = self._table()
        if table is None:
            return {}
        base, known = table.metadata.location.rstrip("/") + "/", Rows(table)
        disturbed = [live for live in self._calling(known.files, "read") if live.is_disturbed]
        return {
            live.file.file_path.removeprefix(base): self._calling(partial(known.deleted, live), "read")
            for live in disturbed
        }

    def rows(self, columns: Sequence[str], keys: pa.Table | None = None) -> Iterator[pa.RecordBatch]:
        table = self._table()
        if table is not None:
            known = Rows(table)
            files = self._calling(known.files, "read")
            scan = table.scan(selected_fields=tuple(columns))
            may_have = (lambda _: True) if keys is None else Pruning(table.metadata, keys).may_have
            batches: Iterator[pa.RecordBatch]
            if any(live.values for live in files):
                schema = to_arrow(table.schema())
                wanted = pa.schema([schema.field(name) for name in columns])
                needed = [live for live in files if may_have(live.file)]
                batches = chain.from_iterable(known.batches(live, wanted, known.deleted(live)) for live in needed)
            else:  # it reads files of any format
                tasks = self._calling(lambda: [task for task in scan.plan_files() if may_have(task.file)], "read")
                reader = ArrowScan(table.metadata, table.io, scan.projection(), AlwaysTrue())
                batches = self._calling(lambda: reader.to_record_batches(tasks), "read")
            while (batch := self._calling(lambda: next(batches, None), "read")) is not None:
                yield batch.select(list(columns))

    def compact(self, target_bytes: int) -> int:
        """As of `Table.compact`. Files with rows that others have deleted, and files of other layouts, stay."""
        self.check("compact")
        compaction = Compaction(self.address, self._present(), target_bytes)
        return sum(
            self._trying(partial(self._replace, compaction, batch), "compacted") for batch in compaction.batches()
        )

    def _replace(self, compaction: Compaction, batch: Batch) -> int:
        table = self._present()
        self._check_version(table.metadata)
        load = table.properties.get(LOAD_PROPERTY)
        last = None if load is None else last_run(self.address, table, load)
        return compaction.commit(batch, table, {} if last is None else run_texts(last), self._commit)

    def expire(self, kept: Kept, is_needed: Callable[[str], bool], *, is_dry: bool) -> Expired:
        """As of `Table.expire`. Paths to remove are those of the metadata."""
        expiry = Expiry(self.address, kept, is_dry=is_dry)

        def commit() -> None:
            table = self._present()
            self._check_version(table.metadata)
            expiry.commit(table, self._commit)

        self._trying(commit, "expired")
        store = open_folder(self.location, LoadError)
        files = self._calling(lambda: files_below(store), "listed")  # first: what is committed since is in the table

        def expired() -> Expired:  # again if another call removes snapshots meanwhile
            self._expired = self._present()
            return expiry.expired(self._expired, files, is_needed)

        return self._trying(expired, "read")

    def remove(self, path: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                (self._expired or self._present()).io.delete(path)

        self._calling(remove, f"relieved of {without_user(path)}")

    def _table(self) -> Table | None:
        def load() -> Table | None:
            try:
                table = self._catalog.load_table(self._identifier)
            except NoSuchTableError:
                return None
            self._seen = table.metadata_location
            renewing(table, self._uri)
            return table

        return self._calling(load, "read")

    def _present(self) -> Table:
        table = self._table()
        if table is None:
            raise LoadError(f"{self.address} does not exist any more: restore it, or load into another table")
        return table

    def _create_namespace(self) -> None:
        """With the ones it is in, as not all catalogs have parents without being told."""
        namespace = self._identifier[:-1]

        def create() -> None:
            for depth in range(1, len(namespace) + 1):
                part = namespace[:depth]
                if not self._catalog.namespace_exists(part):
                    try:
                        self._catalog.create_namespace(part)
                    except Exception:  # of a database, if another run has created it meanwhile
                        if not self._catalog.namespace_exists(part):
                            raise

        self._calling(create, "given a namespace")

    def _calling(self, call: Callable[[], _T], action: str) -> _T:
        """Call a catalog or store once; its errors as `LoadError`."""
        try:
            return call()
        except LoadError:
            raise
        except NotProjected as error:
            raise LoadError(f"{self.address} can't be {action}: {error}: {REWRITE}") from None
        except ValidationError as error:
            raise LoadError(
                f"{self.address} has something that pyiceberg can't read, such as a type of a later format version "
                f"({_text(error)[:_MOST_SHOWN]}): load into another table"
            ) from None
        except Exception as error:  # of any catalog's package
            raise LoadError(f"{self.address} can't be {action}: {_text(error)}") from error

    def _trying(self, attempt: Callable[[], _T], action: str) -> _T:
        """Try again on what others have made of the table, or after errors that may pass, for a bounded time: some
        times however long that takes, if others have committed.

        An attempt may have succeeded although it raised: the next one looks first, through a catalog that is opened
        anew. After a COMMIT that failed, a connection to SQLite reads what is not committed. An attempt that arrives
        late conflicts with the next one, as both begin with the same table.
        """
        deadline = time.monotonic() + self._seconds
        attempts = 0
        while True:
            attempts += 1
            wait = doubled(_FIRST_WAIT, _LONGEST_WAIT, attempts)
            try:
                return attempt()
            except Exception as error:  # of any catalog's package
                cause = error.__cause__ if isinstance(error, LoadError) and error.__cause__ else error
                if not isinstance(cause, CommitFailedException):
                    self._close()
                is_over = time.monotonic() + wait > deadline
                if not _may_pass(cause) and (isinstance(cause, LoadError | ImportError) or not self._has_moved()):
                    if isinstance(error, LoadError):
                        raise
                    raise LoadError(f"{self.address} can't be {action}: {_text(error)}") from error
                if is_over and (attempts >= _LEAST_ATTEMPTS or not isinstance(cause, CommitFailedException)):
                    raise LoadError(
                        f"{self.address} can't be {action} within {self._seconds:g} s: {_text(error)}. "
                        "The last attempt may have succeeded: run again, which looks first"
                    ) from error
                _log.info("%s is tried again in up to %.1f s: %s", self.address, wait, _text(error))
            time.sleep(random.uniform(wait / 2, wait))

    def _close(self) -> None:
        catalog, self._known_catalog = self._known_catalog, None
        if catalog is not None:
            with suppress(Exception):
                catalog.close()

    def _has_moved(self) -> bool:
        """Whether others have committed since an attempt read the table; True if that is not known."""
        with suppress(Exception):
            return self._catalog.load_table(self._identifier).metadata_location != self._seen
        return True


def _term_text(schema: Schema, source: int, transform: str) -> str:
    """A field of a spec in words."""
    name = schema.find_column_name(source) or f"a dropped column ({source})"
    return name if transform == "identity" else f"the {transform} of {name}"


def _own(address: str, metadata: TableMetadata) -> set[str]:
    """The columns that are a load's: none before the first load, all of one that did not say which."""
    if COLUMNS_PROPERTY in metadata.properties:
        return own_columns(address, metadata.properties)
    return {one.name for one in metadata.schema().fields} if LOAD_PROPERTY in metadata.properties else set()


def _may_have_rows(metadata: TableMetadata) -> bool:
    head = metadata.current_snapshot()
    return head is not None and (head.summary is None or head.summary.get("total-records") != "0")


def _unwritten(metadata: TableMetadata, specs: Iterable[PartitionSpec]) -> Collection[int]:
    """The ids of fields that no snapshot has, so that no file has values of them, and that no spec is by."""
    schemas = {one.schema_id: one for one in metadata.schemas}
    used = [schemas.get(-1 if one.schema_id is None else one.schema_id) for one in metadata.snapshots]
    if None in used:
        return ()
    ids = {id for one in used if one is not None for id in one.field_ids}
    ids |= {field.source_id for spec in specs for field in spec.fields}
    now = metadata.schema()
    return now.field_ids.difference(ids, now.identifier_field_ids)


def _ids(metadata: TableMetadata) -> dict[str, int]:
    """The ids of the table's columns."""
    return {one.name: one.field_id for one in metadata.schema().fields}


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed: another one has committed, or a server can't be reached."""
    if isinstance(error, _FINAL):
        return False
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, CommitFailedException | RESTError | OSError) or package in _REMOTE


def _text(error: BaseException) -> str:
    text = " ".join(without_user(str(error)).split())
    return text or type(error).__name__
