"""Brokers in the test's process, scripted, modelled or real, their logs, and the bytes that are sent to them."""
