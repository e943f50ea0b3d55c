"""Protobuf: schemas, records as Arrow columns, and back.

schema.py           a schema: its files, and the message that records are
message_indexes.py  which message of a file a record is, as records say it
columns.py          the Arrow columns of a message
resolution.py       whether records of one schema can be read by another
decoder.py          records to columns
google_rows.py      the same by google.protobuf, row by row
writing.py          which column is written as which field
encoder.py          columns to records
google_writer.py    the same by google.protobuf, row by row
from_arrow.py       a schema of an Arrow type
codec.py            all of it as one of the formats of records
"""
