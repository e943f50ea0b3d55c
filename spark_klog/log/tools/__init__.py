"""Tools for data directories: dump, verify, repair, upgrade."""
