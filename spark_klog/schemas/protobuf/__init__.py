"""Protobuf records ↔ Arrow.

    reader = parse_schema(text, references, message)   # schema.py
    decoder = ProtobufDecoder(reader)                  # decoder.py; decoder.type is the Arrow type
    program = decoder.program(writer, indexes)         # once a writer schema and message: whether they can be read
    decoded = decoder.decode(values, [program])        # a binary column → Arrow, and the rows that did not decode
    encoder = ProtobufEncoder(schema, array.type)      # encoder.py
    values = encoder.encode(array, prefix)             # an Arrow struct → a binary column

schema.py           a schema: its files, and the message that records are; `schemas/protoc` compiles the texts
message_indexes.py  which message of a file a record is, as records say it
columns.py          the columns, and so the Arrow and Spark type, of a message
tables.py           columns as the native kernel reads them, and why a row fails
writing.py          which column is written as which field
from_arrow.py       a schema of an Arrow type
_protobuf.pyx       the native kernel: messages to Arrow builders and back, without the GIL
codec.py            all of it as one of the formats of records
"""
