"""What any room may use: clock, durable files, names, addresses, Java properties, retries, calls with a deadline."""
