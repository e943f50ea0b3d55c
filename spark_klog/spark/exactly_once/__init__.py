"""Exactly-once writes of a stream: the protocol (without I/O), and who carries it out with brokers and files."""
