"""ZooKeeper-style directories: paths, payloads, and a tree in ZooKeeper, in files or in memory."""
