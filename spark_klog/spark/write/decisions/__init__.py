"""Where the decisions of exactly-once writes are kept: `decision_log.py` has the protocol, and who implements it."""
