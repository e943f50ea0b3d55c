"""Counters, and the page that Prometheus reads."""
