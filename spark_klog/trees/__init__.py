"""Trees of nodes like ZooKeeper's, in ZooKeeper, files or memory; paths and payloads of what Kafka keeps there."""
