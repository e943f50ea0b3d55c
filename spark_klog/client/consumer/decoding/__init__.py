"""Decoders of fetched record batches, into records or Arrow record batches."""
