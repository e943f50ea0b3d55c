"""Progress of queries for others to see: offsets of groups, listeners, metrics."""
