"""Coverage-guided fuzzing of the record formats: see run.py; asan.py for the native kernel's memory."""
