"""JSON records ↔ Arrow, by a JSON Schema, or by an Arrow type such as a DDL text has.

    reader = parse_schema(text, references)          # schema.py: JSON text, and the schemas that it refers to
    decoder = JsonDecoder(reader.column)             # decoder.py; decoder.type is the Arrow type
    decoded = decoder.decode(values, [None])         # a binary column → Arrow, and the rows that did not decode
    encoder = JsonSchemaEncoder(schema, array.type)  # encoder.py
    values = encoder.encode(array, prefix)           # an Arrow array → a binary column

schema.py       parsed schemas
columns.py      plans of columns, with their Arrow types, and what the ways to a plan differ in
merging.py      one column of several schemas: allOf, anyOf, oneOf
decoder.py      blocks of rows by Arrow's parser of JSON
row_values.py   rows by Python's, one by one: the reference, and what says why a row is bad
encoder.py      Arrow's columns as JSON records
texts.py        Arrow's columns as JSON text, by a plan of a schema, or as values are shown
writing.py      a plan of how an Arrow type is written by a schema
from_arrow.py   the plan, and the schema, of an Arrow type
validation.py   records checked in full against their schema, by jsonschema
"""
