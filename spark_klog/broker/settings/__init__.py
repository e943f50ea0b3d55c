"""Settings of brokers and topics, under Kafka's names."""
