"""Files of a partition: creation, replacement, checkpoints, locks, names."""
