"""Histories and models: what a correct log, or a correct client of it, may do."""
