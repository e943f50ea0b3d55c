"""Bytes: primitive types over a bounded reader, frames, checksums and compression codecs."""
