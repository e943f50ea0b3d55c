"""Rows instead of bytes: record keys and values in a schema's format, decoded to Arrow and encoded from it."""
