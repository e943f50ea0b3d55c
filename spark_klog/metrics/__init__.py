"""Metrics for Prometheus: its text format, and an HTTP server for it."""
