"""A table per API: a line per field, with its versions."""
