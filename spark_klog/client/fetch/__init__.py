"""Fetches of ranges of offsets and of samples; `client/consumer/fetches.py` has those of a consumer, in sessions."""
