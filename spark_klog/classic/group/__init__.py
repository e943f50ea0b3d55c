"""A member of a group in ZooKeeper."""
