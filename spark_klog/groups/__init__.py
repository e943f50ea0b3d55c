"""Consumer groups, for the command line: listing, lag, moving offsets, and the stores that keep offsets."""
