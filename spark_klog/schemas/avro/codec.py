"""Avro as one of the formats of records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa

from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.from_arrow import schema_of
from spark_klog.schemas.avro.schema import AvroSchema, parse_schema
from spark_klog.schemas.avro.value_writer import value_writer
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References


class AvroCodec:
    """See `codec.Codec`."""

    has_indexes: ClassVar = False

    def parse(self, text: str, references: References = NO_REFERENCES) -> AvroSchema:
        return parse_schema(text, references.values())

    def name(self, schema: AvroSchema) -> str:
        return schema.name

    def decoder(self, reader: AvroSchema) -> AvroDecoder:
        return AvroDecoder(reader)

    def encoder(self, schema: AvroSchema, kind: pa.DataType) -> AvroEncoder:
        return AvroEncoder(schema, kind)

    def value_writer(self, schema: AvroSchema, prefix: bytes) -> Callable[[Any], bytes] | None:
        return value_writer(schema, prefix)

    def message_of(self, schema: AvroSchema, rest: bytes) -> str | None:
        return None

    def schema_of(self, kind: pa.DataType) -> str:
        return schema_of(kind)
