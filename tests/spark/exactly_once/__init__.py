"""Tests of exactly-once writes."""
