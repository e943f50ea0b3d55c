"""The connector's options: their names, values, and what reads and writes make of them."""
