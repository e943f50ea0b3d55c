"""Avro records ↔ Arrow.

    reader = parse_schema(text)                      # schema.py: JSON text, names, aliases, references
    decoder = AvroDecoder(reader)                    # decoder.py; decoder.type is the Arrow type
    program = decoder.program(writer)                # once a writer schema: resolution writer → reader
    decoded = decoder.decode(values, [program])      # a binary column → Arrow, and the rows that did not decode
    encoder = AvroEncoder(schema, array.type)        # encoder.py
    values = encoder.encode(array, prefix)           # an Arrow struct → a binary column

schema.py        parsed schemas
resolution.py    a plan of how values of a writer's schema become values of a reader's
columns.py       the columns, and so the Arrow and Spark type, of a schema
program.py       a plan compiled for the native kernel
opcodes.py       what a program is made of
_avro.pyx        the native kernel: programs over Arrow builders, without the GIL
fastavro_rows.py the same without the native kernel, row by row by fastavro
"""
