"""The model of exactly-once writes."""
