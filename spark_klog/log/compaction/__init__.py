"""Compaction: plan, passes, cleaner."""
