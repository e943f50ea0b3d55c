"""What tests fetch from registries and build: programs, jars, Pythons, wheels."""
