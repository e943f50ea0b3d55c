"""What any room may use: clock, names, addresses, files, settings, properties, interrupts, calls with a deadline."""
