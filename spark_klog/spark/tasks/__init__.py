"""The code that runs in the tasks of a read."""
