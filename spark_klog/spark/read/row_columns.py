"""Columns of a read that are rows instead of bytes: their types at analysis, and the schemas of their tasks.

Spark analyses a query in one Python process and plans it in another, and in between a subject may get a new version. So
the type that analysis gives a column has the schema's id and version as metadata, and planning takes that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StructField, StructType

from spark_klog.errors import ConfigError
from spark_klog.schemas.column_format import PLANNING_MS, ColumnFormat, ReaderSchema

#: Metadata of a column: what the registry calls its schema.
ID, SUBJECT, VERSION = "klog.schema.id", "klog.schema.subject", "klog.schema.version"


def with_rows(schema: StructType, formats: Sequence[ColumnFormat]) -> StructType:
    """The schema of a read, with the types of columns that are rows. Asks the registry; errors as of `reader`."""
    rows = {one.column: one.reader(longest_ms=PLANNING_MS) for one in formats}
    return StructType([_row_field(rows[field.name]) if field.name in rows else field for field in schema.fields])


def readers_of(
    formats: Sequence[ColumnFormat], schema: StructType
) -> tuple[tuple[ReaderSchema, ...], dict[str, pa.DataType]]:
    """The schemas of those columns that the query reads, and their Arrow types by column.

    `ConfigError` if a user's schema says otherwise.
    """
    readers: list[ReaderSchema] = []
    types: dict[str, pa.DataType] = {}
    for one in formats:
        if one.column not in schema.fieldNames():
            continue
        field = schema[one.column]
        reader = _analysed(one, field) or one.reader(longest_ms=PLANNING_MS)
        types[one.column] = reader.decoder().type
        ours = _spark_type(types[one.column])
        if field.dataType.simpleString() != ours.simpleString():
            raise ConfigError(
                f"column {one.column} is {ours.simpleString()} by its schema, but the query's schema says "
                f"{field.dataType.simpleString()}: read it as it is, then select from it"
            )
        readers.append(reader)
    return tuple(readers), types


def _analysed(source: ColumnFormat, field: StructField) -> ReaderSchema | None:
    """The schema that the column's metadata names; None if options name another one, or it is another registry's.

    A user's schema may come from another query.
    """
    subject, version, schema_id = (field.metadata.get(name) for name in (SUBJECT, VERSION, ID))
    if source.text is not None or source.schema_id is not None or subject is None or subject != source.subject:
        return None
    return source.reader_of_version(int(version), int(schema_id), PLANNING_MS)


def _row_field(reader: ReaderSchema) -> StructField:
    metadata: dict[str, Any] = {}
    if reader.id is not None:
        metadata[ID] = reader.id
    if reader.version is not None:
        metadata |= {SUBJECT: reader.format.subject, VERSION: reader.version}
    return StructField(reader.column, _spark_type(reader.decoder().type), nullable=True, metadata=metadata)


def _spark_type(kind: pa.DataType) -> DataType:
    return from_arrow_type(kind, prefer_timestamp_ntz=True)
