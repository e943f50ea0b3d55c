"""The consumer: assignments and positions, fetch sessions, decoding into Arrow and into records."""
