"""Avro records ↔ Arrow.

    reader = parse_schema(text, references)          # schema.py: JSON text, names, aliases
    decoder = AvroDecoder(reader)                    # decoder.py; decoder.type is the Arrow type
    program = decoder.program(writer)                # once a writer schema: resolution writer → reader
    decoded = decoder.decode(values, [program])      # a binary column → Arrow, and the rows that did not decode
    encoder = AvroEncoder(schema, array.type)        # encoder.py
    values = encoder.encode(array, prefix)           # an Arrow struct → a binary column

schema.py           parsed schemas
columns.py          the columns, and so the Arrow and Spark type, of a schema
resolution.py       a plan of how values of a writer's schema become values of a reader's
writing.py          a plan of how an Arrow type is written by a schema
program.py          plans compiled for the native kernel
opcodes.py          what a program is made of, and why a row fails
_avro.pyx           the native kernel: programs over Arrow builders, without the GIL
"""
