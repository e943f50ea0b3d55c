"""Groups: who is in them, and which offsets they have committed."""
