"""Segments and their indexes: append, look-up, scan."""
