"""The sink: producers in tasks, and exactly-once writes with a decision log."""
