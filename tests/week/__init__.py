"""A week: all programs of this package beside each other for a long time, and what they may grow by."""
