"""The broker's counters, and the page that Prometheus reads."""
