"""What readers of record batches see, and which batches no log may hold."""
