"""The partition of each record of a producer."""
