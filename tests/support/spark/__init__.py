"""Spark in processes of its own: other versions of it, and its connectors on the JVM."""
