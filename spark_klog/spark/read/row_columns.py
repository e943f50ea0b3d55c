"""Columns of a read that are rows instead of bytes: their types at analysis, and the schemas of their tasks.

Spark analyses a query in one Python process and plans it in another, and in between a subject may get a new version. So
the type that analysis gives a column has the schema's id and version as metadata, and planning takes that one: the data
source brings it along, so that only analysis asks the registry, and without it planning looks it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField, StructType

from spark_klog.errors import ConfigError
from spark_klog.schemas.column_format import PLANNING_MS, ColumnFormat, ReaderSchema
from spark_klog.schemas.json_schema.ddl import INFER

#: Metadata of a column: what the registry calls its schema.
ID, SUBJECT, VERSION = "klog.schema.id", "klog.schema.subject", "klog.schema.version"
#: Metadata of a column of JSON: its DDL.
JSON = "klog.schema.json"


def analysed_readers(formats: Sequence[ColumnFormat]) -> tuple[ReaderSchema, ...]:
    """The schemas of columns that are rows, as the registry has them now; errors as of `ColumnFormat.reader`."""
    return tuple(form.reader(longest_ms=PLANNING_MS) for form in formats)


def with_rows(schema: StructType, readers: Sequence[ReaderSchema]) -> StructType:
    """The schema of a read, with the types of columns that are rows."""
    rows = {reader.column: reader for reader in readers}
    return StructType([_row_field(rows[field.name]) if field.name in rows else field for field in schema.fields])


def readers_of(
    formats: Sequence[ColumnFormat], schema: StructType, analysed: Sequence[ReaderSchema] = ()
) -> tuple[tuple[ReaderSchema, ...], dict[str, pa.DataType]]:
    """The schemas of those columns that the query reads, and their Arrow types by column.

    `analysed` are those of the analysis that gave `schema`, unless a user did: `ConfigError` if that says otherwise.
    """
    known = {reader.column: reader for reader in analysed}
    readers: list[ReaderSchema] = []
    types: dict[str, pa.DataType] = {}
    for form in formats:
        if form.column not in schema.fieldNames():
            continue
        field = schema[form.column]
        before = known.get(form.column)
        if before is not None and _row_field(before) == field:
            reader = replace(before, query=uuid4().hex)  # a plan is a query of its own, see `ReaderSchema`
        else:
            reader = _looked_up(form, field) or form.reader(longest_ms=PLANNING_MS)
        types[form.column] = reader.type
        ours = _spark_type(types[form.column])
        if field.dataType.simpleString() != ours.simpleString():
            raise ConfigError(
                f"column {form.column} is {ours.simpleString()} by its schema, but the query's schema says "
                f"{field.dataType.simpleString()}: read it as it is, then select from it"
            )
        readers.append(reader)
    return tuple(readers), types


def _looked_up(source: ColumnFormat, field: StructField) -> ReaderSchema | None:
    """The schema that the column's metadata names; None if options name another one, or it is another registry's.

    A user's schema may come from another query. `ConfigError` if it is to be inferred, and none names it.
    """
    if source.format == "json" and source.text == INFER:
        if JSON not in field.metadata:
            raise ConfigError(
                f"option {source.column}Schema=infer finds the schema itself: give its DDL there, and not by .schema()"
            )
        return replace(source, text=str(field.metadata[JSON])).reader()
    subject, version, schema_id = (field.metadata.get(name) for name in (SUBJECT, VERSION, ID))
    if source.text is not None or source.schema_id is not None or subject is None or subject != source.subject:
        return None
    return source.reader_of_version(int(version), int(schema_id), PLANNING_MS)


def _row_field(reader: ReaderSchema) -> StructField:
    metadata: dict[str, Any] = {JSON: reader.text} if reader.format.format == "json" else {}
    if reader.id is not None:
        metadata[ID] = reader.id
    if reader.version is not None:
        metadata |= {SUBJECT: reader.format.subject, VERSION: reader.version}
    return StructField(reader.column, _spark_type(reader.type), nullable=True, metadata=metadata)


def _spark_type(kind: pa.DataType) -> DataType:
    return from_arrow_type(kind, prefer_timestamp_ntz=True)
