"""Coverage-guided fuzzing of the record formats, see run.py; asan.py checks the native kernel's memory accesses."""
