"""The Spark connector: options, offsets, range planning, source, sink."""
