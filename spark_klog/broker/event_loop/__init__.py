"""Keeping the event loop responsive: background tasks, garbage collection, large requests."""
