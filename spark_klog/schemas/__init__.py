"""Rows instead of bytes: record keys and values in a schema's format, decoded to Arrow and encoded from it.

    decoder = RecordDecoder(AvroDecoder(reader), writer_of)      # decoder.py; writer_of returns the schema of an id
    decoded = decoder.decode(batch["value"], batch["headers"])   # rows.py: an Arrow array, and the rows that did not

prefix.py   where a record's schema id stands: headers, prefix
decoder.py  each record by the schema that it names
rows.py     what decoders return
avro/       Avro
registry/   a registry's client, and a registry to embed
"""
