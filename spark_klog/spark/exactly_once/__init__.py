"""Exactly-once writes of a stream: the protocol, without I/O."""
