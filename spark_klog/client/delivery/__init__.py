"""Delivery of a producer's batches: queues, requests, producer ids, transactions."""
