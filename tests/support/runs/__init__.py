"""The run of the tests itself: its order, its start, and what it says at its end."""
