"""Rows instead of bytes: record keys and values in a schema's format, decoded to Arrow and encoded from it.

    records = RecordDecoder(decoder, program_of)                 # decoder.py; program_of(id): one of decoder
    decoded = records.decode(batch["value"], batch["headers"])   # rows.py: an Arrow array, and the rows that did not

prefix.py         where a record's schema id stands: headers, prefix
decoder.py        each record by the schema that it names
rows.py           what decoders return
codec.py          what a format is to the rest
arrow_columns.py  columns as native kernels build them (`_builders.pxi`), and the arrays that come of them
values.py, row_serializing.py, plain_columns.py      the client's: Python values, and columns to send
avro/             Avro
protobuf/         Protobuf
protoc/           .proto texts to descriptors and back, for decoders and the registry
json_schema/      JSON Schema; json_references.py says where a $ref leads
registry/         a registry's client; the registry itself is spark_klog/registry/

The functions for DataFrames are Spark's room's, and imported from here:

    from spark_klog.schemas import from_avro
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_klog.base.names import imported_at_first_use

if TYPE_CHECKING:
    from spark_klog.spark.functions.columns import (
        from_avro,
        from_json_schema,
        from_protobuf,
        schema_id,
        to_avro,
        to_json_schema,
        to_protobuf,
    )

__all__ = [
    "from_avro",
    "from_json_schema",
    "from_protobuf",
    "schema_id",
    "to_avro",
    "to_json_schema",
    "to_protobuf",
]

__getattr__ = imported_at_first_use(__name__, {"columns": " ".join(__all__)}, "spark_klog.spark.functions")
