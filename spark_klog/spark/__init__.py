"""The Spark connector: options, offsets, ranges, readers and writers."""
