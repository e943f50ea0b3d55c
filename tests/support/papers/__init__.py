"""The documentation and what it is compared with."""
