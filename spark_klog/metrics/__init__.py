"""Metrics for Prometheus: its text format, and a dashboard for Grafana."""
