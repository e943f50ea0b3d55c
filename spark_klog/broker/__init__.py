"""The broker: network server, API handlers, metadata, groups, transactions and care of the logs."""
