"""The decisions of exactly-once writes, in a compacted topic of the target cluster."""
