"""JSON as formats of records: by a JSON Schema, and by a DDL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa

from spark_klog.errors import ConfigError, SchemaError
from spark_klog.schemas.json_schema import ddl
from spark_klog.schemas.json_schema.columns import DDL, VARIANT
from spark_klog.schemas.json_schema.decoder import JsonDecoder
from spark_klog.schemas.json_schema.encoder import JsonSchemaEncoder
from spark_klog.schemas.json_schema.from_arrow import column_of, schema_of
from spark_klog.schemas.json_schema.schema import JsonSchema, parse_schema
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References


class JsonSchemaCodec:
    """See `codec.Codec`. If it `validates`, records are checked in full against their schemas, which is slow."""

    has_indexes: ClassVar = False

    def __init__(self, *, validates: bool = False) -> None:
        self._validates = validates

    def parse(self, text: str, references: References = NO_REFERENCES) -> JsonSchema:
        return parse_schema(text, references)

    def name(self, schema: JsonSchema) -> str:
        return schema.name

    def decoder(self, reader: JsonSchema) -> JsonDecoder:
        return JsonDecoder(reader.column, validates=self._validates)

    def encoder(self, schema: JsonSchema, kind: pa.DataType) -> JsonSchemaEncoder:
        return JsonSchemaEncoder(schema, kind, validates=self._validates)

    def value_writer(self, schema: JsonSchema, prefix: bytes) -> Callable[[Any], bytes] | None:
        return None

    def message_of(self, schema: JsonSchema, rest: bytes) -> str | None:
        return None

    def schema_of(self, kind: pa.DataType) -> str:
        return schema_of(kind)


class JsonCodec(JsonSchemaCodec):
    """JSON by a DDL, to read: no registry has one, and `to_json` writes."""

    def parse(self, text: str, references: References = NO_REFERENCES) -> JsonSchema:
        try:
            if (kind := ddl.parse_schema(text)) == VARIANT:
                raise ConfigError(f"schema {text!r}: rows have no VARIANT here: {ddl.NO_VARIANT}")
            return JsonSchema(column_of(kind, DDL), "", None, {})
        except ConfigError as error:
            raise SchemaError(str(error)) from None
