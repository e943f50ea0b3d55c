"""Schemas of the formats that registries know: parsed, in canonical form, and compared."""

from __future__ import annotations

from spark_klog.registry.formats.contract import (
    AVRO,
    JSON,
    PROTOBUF,
    InvalidSchema,
    ParsedSchema,
)
from spark_klog.schemas.registry.schemas import References

#: In the order in which Confluent's registry lists them.
TYPES = (JSON, PROTOBUF, AVRO)

__all__ = ["AVRO", "JSON", "PROTOBUF", "TYPES", "InvalidSchema", "ParsedSchema", "parse"]


def parse(schema_type: str, text: str, references: References, *, is_new: bool = False) -> ParsedSchema:
    """Parse a schema; `is_new` also refuses what registries once accepted, such as defaults of another type.

    `InvalidSchema`; `MissingPackage` if what parses this format is not installed.
    """
    if schema_type == AVRO:
        from spark_klog.registry.formats.avro import AvroSchema

        return AvroSchema(text, references, is_new=is_new)
    if schema_type == JSON:
        from spark_klog.registry.formats.json_schema import JsonSchema

        return JsonSchema(text, references)
    if schema_type == PROTOBUF:
        from spark_klog.registry.formats.protobuf import ProtobufSchema

        return ProtobufSchema(text, references)
    raise InvalidSchema(f"Invalid schema type {schema_type}")
