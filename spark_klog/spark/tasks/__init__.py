"""What runs in the tasks of a read."""
