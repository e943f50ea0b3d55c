"""Care of the broker's logs: creation, deletion, flushes, compaction, rows of internal topics."""
