"""Kafka record batches ↔ Arrow record batches: schema, decode, encode."""
