"""The broker's logs: creation, deletion, flushes, rows of internal topics."""
