"""Programs of `jobs/`, which are in the wheel here."""
