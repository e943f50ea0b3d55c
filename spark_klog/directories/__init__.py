"""ZooKeeper-style directories: paths and payloads, and one tree interface over ZooKeeper, files and memory."""
