"""What others may have made of a Delta table that a load does not write: features of tables that deltalake lacks, and
what a file that was written elsewhere, or a merge, would not comply with."""

from __future__ import annotations

from deltalake import DeltaTable

from spark_klog.errors import LoadError
from spark_klog.tables.table import Use

#: The features that deltalake writes (PROTOCOL.md, "Valid Feature Names in Table Features"). It refuses a commit to a
#: table with another one, which would be after the files of a run are written.
WRITTEN = {
    *("appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors", "generatedColumns"),
    *("invariants", "timestampNtz", "v2Checkpoint", "variantType", "variantType-preview"),
}
#: Others that Delta 4.1 can drop, the ones that need another one first.
_DROPPED = (
    *("inCommitTimestamp", "materializePartitionColumns", "rowTracking", "typeWidening", "vacuumProtocolCheck"),
    *("domainMetadata", "checkpointProtection"),
)
#: Those of them that readers know, too. Dropped without the history they leave checkpointProtection.
_OF_READERS = {"checkpointProtection", "typeWidening", "vacuumProtocolCheck"}
_WITH_HISTORY = " TRUNCATE HISTORY"
_ANOTHER = "load into another table"
_CONSTRAINT = "delta.constraints."
_MAPPING, _APPEND_ONLY = "delta.columnMapping.mode", "delta.appendOnly"
_EXPRESSIONS = {"delta.generationExpression": "is generated", "delta.invariants": "has an invariant"}
_IDENTITY = "delta.identity."


def check_features(address: str, table: DeltaTable, use: Use) -> None:
    """`LoadError` if `use` of the table is not possible; it says what to do."""
    protocol, properties = table.protocol(), table.metadata().configuration
    has = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    if others := sorted(has - WRITTEN):
        drop = ""
        if has - WRITTEN <= set(_DROPPED):
            drops = [f"{name}{_WITH_HISTORY * (name in _OF_READERS)}" for name in _DROPPED if name in has]
            drop = "".join(f"ALTER TABLE ... DROP FEATURE {each}, " for each in drops)
            drop += f"{'again after a day, ' if has & _OF_READERS else ''}or "
        raise LoadError(
            f"{address} has the table feature {', '.join(others)}, which deltalake does not write: {drop}{_ANOTHER}"
        )
    if (mode := properties.get(_MAPPING, "none")) != "none":
        raise LoadError(
            f"{address} maps its columns' names ({_MAPPING}={mode}), which a load does not do: ALTER TABLE ... SET "
            f"TBLPROPERTIES ('{_MAPPING}' = 'none'), which rewrites the table, or {_ANOTHER}"
        )
    if use == "compact":  # rows stay as they are
        return
    if use == "merge" and properties.get(_APPEND_ONLY) == "true":
        raise LoadError(
            f"{address} takes appends only ({_APPEND_ONLY}=true), and changes update and delete rows: ALTER TABLE ... "
            f"SET TBLPROPERTIES ('{_APPEND_ONLY}' = 'false'), or {_ANOTHER}"
        )
    for name in properties:
        if name.startswith(_CONSTRAINT):
            raise LoadError(
                f"{address} has the constraint {name}, which a load does not check: ALTER TABLE ... DROP CONSTRAINT "
                f"{name.removeprefix(_CONSTRAINT)}, or {_ANOTHER}"
            )
    for field in table.schema().fields:
        for key in field.metadata:
            if key in _EXPRESSIONS or key.startswith(_IDENTITY):
                what = _EXPRESSIONS.get(key, "is an identity")
                raise LoadError(f"{address}: the column {field.name} {what}, which a load does not compute: {_ANOTHER}")
