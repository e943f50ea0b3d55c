"""Producer ids, and the coordinator of transactions (KIP-98)."""
