"""The producer: intake, partitions, batches, delivery, producer ids, transactions."""
