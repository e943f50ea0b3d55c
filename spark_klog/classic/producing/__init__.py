"""The parts of the classic producer."""
