"""Bytes: primitive types, frames, checksums and compression codecs."""
