"""Bytes on disk: index, segment, partition log, log directory."""
