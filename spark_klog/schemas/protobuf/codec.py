"""Protobuf as one of the formats of records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa

from spark_klog.schemas.protobuf.decoder import ProtobufDecoder
from spark_klog.schemas.protobuf.encoder import ProtobufEncoder
from spark_klog.schemas.protobuf.from_arrow import NAME, schema_of
from spark_klog.schemas.protobuf.message_indexes import read_indexes
from spark_klog.schemas.protobuf.schema import ProtobufSchema, parse_schema
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References


class ProtobufCodec:
    """See `codec.Codec`; `message` is which of a schema's messages records are, None: the first."""

    has_indexes: ClassVar = True

    def __init__(self, message: str | None = None) -> None:
        self._message = message

    def parse(self, text: str, references: References = NO_REFERENCES) -> ProtobufSchema:
        return parse_schema(text, references, self._message)

    def name(self, schema: ProtobufSchema) -> str:
        return schema.name

    def decoder(self, reader: ProtobufSchema) -> ProtobufDecoder:
        return ProtobufDecoder(reader)

    def encoder(self, schema: ProtobufSchema, kind: pa.DataType) -> ProtobufEncoder:
        return ProtobufEncoder(schema, kind)

    def value_writer(self, schema: ProtobufSchema, prefix: bytes) -> Callable[[Any], bytes] | None:
        return None

    def message_of(self, schema: ProtobufSchema, rest: bytes) -> str | None:
        indexes, _ = read_indexes(rest)
        return str(schema.message_of(indexes).full_name)

    def schema_of(self, kind: pa.DataType) -> str:
        return schema_of(kind, self._message or NAME)
