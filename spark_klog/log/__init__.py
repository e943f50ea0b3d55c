"""Logs on disk: data directory, partition log, segments, indexes, recovery."""
