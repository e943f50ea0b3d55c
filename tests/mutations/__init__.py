"""A check of the tests: faults as people make them, planted one at a time, which the tests must find."""
