"""A consumer as a member of a group: its subscription, rebalances, heartbeats and commits."""
