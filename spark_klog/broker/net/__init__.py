"""Connections: accepting, frames, responses in order, limits on memory and time, shutdown."""
