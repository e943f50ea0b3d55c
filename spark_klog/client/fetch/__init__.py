"""Fetches: of ranges, of a consumer's partitions in sessions, and of samples."""
