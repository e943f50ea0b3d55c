"""Read data directories of Kafka 0.7 and later without a broker."""
