"""Trees of nodes like ZooKeeper's: in ZooKeeper, in files, and in memory."""
