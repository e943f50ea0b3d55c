"""The client: connections, cluster metadata, fetcher, producer, offsets, admin."""
