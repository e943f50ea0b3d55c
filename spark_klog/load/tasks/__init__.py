"""The tasks of a run: they read ranges of offsets and write them to files."""
