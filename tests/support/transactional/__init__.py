"""Producers of transactions, by several clients."""
