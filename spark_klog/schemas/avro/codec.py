"""Avro as one of the formats of records."""

from __future__ import annotations

import pyarrow as pa

from spark_klog.schemas.avro.decoder import AvroDecoder
from spark_klog.schemas.avro.encoder import AvroEncoder
from spark_klog.schemas.avro.from_arrow import schema_of
from spark_klog.schemas.avro.schema import AvroSchema, parse_schema
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References


class AvroCodec:
    """See `codec.Codec`."""

    def parse(self, text: str, references: References = NO_REFERENCES) -> AvroSchema:
        return parse_schema(text, references.values())

    def name(self, schema: AvroSchema) -> str:
        return schema.name

    def decoder(self, reader: AvroSchema) -> AvroDecoder:
        return AvroDecoder(reader)

    def encoder(self, schema: AvroSchema, kind: pa.DataType) -> AvroEncoder:
        return AvroEncoder(schema, kind)

    def schema_of(self, kind: pa.DataType) -> str:
        return schema_of(kind)
