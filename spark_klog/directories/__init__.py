"""ZooKeeper-style directories: paths, payloads, and one tree interface (ZooKeeper, files, memory)."""
