"""`from_avro`, `to_avro`, and so for Protobuf and JSON Schema: columns of records to rows and back, in any DataFrame.

    from spark_klog.schemas import from_avro

    frame.select(from_avro("value", subject="orders-value", schemaRegistryAddress="http://127.0.0.1:8081"))

Names and order of parameters are those of Databricks' functions; `schema` is the same in all formats. Calls ask the
registry, so that Spark knows the type of the rows when it analyses the query; its workers read by that schema. All may
raise `ConfigError`, `SchemaError`, `RegistryError`, `ConnectionFailed` and `MissingPackage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

from spark_klog.base.extras import require
from spark_klog.base.names import Format

require("The functions of spark_klog.schemas", "pyspark")

from pyspark.sql import Column, functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import BinaryType, DataType

from spark_klog.errors import ConfigError
from spark_klog.schemas.column_format import PLANNING_MS
from spark_klog.schemas.prefix import HEADERS, ID_SIZE
from spark_klog.spark.functions.options import FunctionOptions
from spark_klog.spark.functions.udfs import INPUTS, FromRecords, ToRecords
from spark_klog.spark.versions import HAS_ARROW_FUNCTIONS, arrow_function

ColumnOrName = Union[Column, str]  # noqa: UP007 - evaluated; `|` needs classes of one pyspark, classic or Connect
Options = Mapping[str, Any]


def from_avro(
    data: ColumnOrName,
    jsonFormatSchema: str | None = None,
    options: Options | None = None,
    subject: ColumnOrName | None = None,
    schemaRegistryAddress: str | None = None,
    *,
    schema: str | None = None,
    headers: ColumnOrName | None = None,
    is_key: bool = False,
) -> Column:
    """Rows of a binary column of Avro records.

    Rows are of one schema: `schema` (also called `jsonFormatSchema`), a text; or with a registry the latest version of
    `subject`, or that of the option `schemaId`. With a registry each record is read by the schema that wrote it, whose
    id stands in the header of `headers`, a column as the source's, or before the record; without one all are bare
    records of `schema`. `is_key` if the column has keys, whose ids are in another header.
    """
    text = _one("from_avro", schema=schema, jsonFormatSchema=jsonFormatSchema)
    keywords = _registry("from_avro", subject, schemaRegistryAddress)
    return _rows("from_avro", "avro", data, text, options, keywords, headers, is_key)


def to_avro(
    data: ColumnOrName,
    jsonFormatSchema: str | None = None,
    subject: ColumnOrName | None = None,
    schemaRegistryAddress: str | None = None,
    options: Options | None = None,
    *,
    schema: str | None = None,
) -> Column:
    """Avro records of a column, binary; null stays null.

    By `schema` (also called `jsonFormatSchema`), else by one of the column's type. With a registry its id stands before
    each record, and the schema is registered under `subject`; the option `useLatestVersion` takes the subject's latest.
    """
    text = _one("to_avro", schema=schema, jsonFormatSchema=jsonFormatSchema)
    keywords = _registry("to_avro", subject, schemaRegistryAddress)
    return _records("to_avro", "avro", data, text, options, keywords)


def from_protobuf(
    data: ColumnOrName,
    messageName: str | None = None,
    descFilePath: str | None = None,
    options: Options | None = None,
    binaryDescriptorSet: bytes | None = None,
    *,
    schema: str | None = None,
    subject: ColumnOrName | None = None,
    schemaRegistryAddress: str | None = None,
    headers: ColumnOrName | None = None,
    is_key: bool = False,
) -> Column:
    """Rows of a binary column of Protobuf messages; see `from_avro`.

    `schema` is the text of a .proto file, and `messageName` the message of the schema that rows are, by default its
    first. Descriptors are refused.
    """
    _refuse_descriptors("from_protobuf", descFilePath, binaryDescriptorSet)
    keywords = {"messageName": messageName, **_registry("from_protobuf", subject, schemaRegistryAddress)}
    return _rows("from_protobuf", "protobuf", data, schema, options, keywords, headers, is_key)


def to_protobuf(
    data: ColumnOrName,
    messageName: str | None = None,
    descFilePath: str | None = None,
    options: Options | None = None,
    binaryDescriptorSet: bytes | None = None,
    *,
    schema: str | None = None,
    subject: ColumnOrName | None = None,
    schemaRegistryAddress: str | None = None,
) -> Column:
    """Protobuf messages of a column, binary; see `to_avro` and `from_protobuf`."""
    _refuse_descriptors("to_protobuf", descFilePath, binaryDescriptorSet)
    keywords = {"messageName": messageName, **_registry("to_protobuf", subject, schemaRegistryAddress)}
    return _records("to_protobuf", "protobuf", data, schema, options, keywords)


def from_json_schema(
    data: ColumnOrName,
    schema: str | None = None,
    options: Options | None = None,
    subject: ColumnOrName | None = None,
    schemaRegistryAddress: str | None = None,
    *,
    headers: ColumnOrName | None = None,
    is_key: bool = False,
) -> Column:
    """Rows of a binary column of JSON by a JSON Schema; see `from_avro`."""
    keywords = _registry("from_json_schema", subject, schemaRegistryAddress)
    return _rows("from_json_schema", "json-schema", data, schema, options, keywords, headers, is_key)


def to_json_schema(
    data: ColumnOrName,
    schema: str | None = None,
    subject: ColumnOrName | None = None,
    schemaRegistryAddress: str | None = None,
    options: Options | None = None,
) -> Column:
    """JSON of a column by a JSON Schema, binary; see `to_avro`."""
    keywords = _registry("to_json_schema", subject, schemaRegistryAddress)
    return _records("to_json_schema", "json-schema", data, schema, options, keywords)


def schema_id(data: ColumnOrName, headers: ColumnOrName | None = None, *, is_key: bool = False) -> Column:
    """The registry's id of each record's schema, INT: of its header, else of its first bytes.

    Null for a null, and for a record that names no id: it is too short, begins with another byte, or has a GUID.
    """
    value = _column(data)
    carrier = value
    if headers is not None:
        name, entries = HEADERS["key" if is_key else "value"], _column(headers)

        def is_it(entry: Column) -> Column:
            return entry["key"] == name

        last = F.get(F.filter(entries, is_it), F.size(F.filter(entries, is_it)) - 1)["value"]
        carrier = F.coalesce(last, value)
    number = F.conv(F.hex(F.substring(carrier, 2, 4)), 16, 10).try_cast("int")
    has_id = value.isNotNull() & (F.substring(carrier, 1, 1) == F.lit(b"\0")) & (F.length(carrier) >= ID_SIZE)
    return F.when(has_id, number).alias("schema_id")


def _rows(
    function: str,
    form: Format,
    data: ColumnOrName,
    text: str | None,
    options: Options | None,
    keywords: Options,
    headers: ColumnOrName | None,
    is_key: bool,
) -> Column:
    parsed = FunctionOptions.of(function, form, options, keywords, schema=text, is_key=is_key)
    reader = parsed.reading().reader(longest_ms=PLANNING_MS)
    if headers is not None and parsed.registry is None:
        raise ConfigError(f"{function}: headers need schemaRegistryUrl: they have the ids of schemas")
    kind = from_arrow_type(reader.type, prefer_timestamp_ntz=True)
    columns = [_column(column) for column in (data, headers) if column is not None]
    return _call(FromRecords(function, reader), kind, columns)


def _records(
    function: str,
    form: Format,
    data: ColumnOrName,
    text: str | None,
    options: Options | None,
    keywords: Options,
) -> Column:
    if not HAS_ARROW_FUNCTIONS:
        raise ConfigError(
            f"{function} needs pyspark 4.1: 4.0 gives functions no columns with their exact types; write the rows with "
            'format("klog") and valueFormat instead'
        )
    writing = FunctionOptions.of(function, form, options, keywords, schema=text).writing()
    writer = writing if writing.needs_type else writing.writer(longest_ms=PLANNING_MS)
    return _call(ToRecords(function, writer), BinaryType(), [_column(data)])


def _call(function: Callable[..., Any], kind: DataType, columns: list[Column]) -> Column:
    column: Column = arrow_function(function, kind, INPUTS[: len(columns)])(*columns)
    return column


def _column(column: ColumnOrName) -> Column:
    return F.col(column) if isinstance(column, str) else column


def _registry(function: str, subject: ColumnOrName | None, address: str | None) -> dict[str, str | None]:
    if isinstance(subject, Column):
        subject = _literal(function, subject)
    return {"subject": subject, "schemaRegistryUrl": address}


def _literal(function: str, subject: Column) -> str:
    """The text of `lit(...)`, which Databricks' functions take; `ConfigError` for any other column."""
    of_class, text = vars(subject), None  # any other attribute of a column is a field of it
    if "_expr" in of_class:  # of Spark Connect
        text = getattr(of_class["_expr"], "_value", None)
    elif (node := of_class["_jc"].node()).getClass().getSimpleName() == "Literal":
        text = node.value()
    if not isinstance(text, str):
        raise ConfigError(f"{function}: subject must be a text or lit(TEXT), as all rows are of one schema: {subject}")
    return text


def _refuse_descriptors(function: str, path: str | None, descriptors: bytes | None) -> None:
    if path is not None or descriptors is not None:
        name = "descFilePath" if path is not None else "binaryDescriptorSet"
        raise ConfigError(f"{function}: {name} is not supported: give the text of the .proto file as schema=")


def _one(function: str, **texts: str | None) -> str | None:
    """The one of several names of a parameter that is set."""
    given = {name: text for name, text in texts.items() if text is not None}
    if len(given) > 1:
        raise ConfigError(f"{function}: {' and '.join(given)} are the same: remove one of them")
    return next(iter(given.values()), None)
