"""Offsets of consumer groups: lag, and the stores that keep offsets, to read, move and delete them."""
