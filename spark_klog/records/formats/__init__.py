"""The formats of record batches by magic, and what holds for all of them: sizes, headers, checksums."""
