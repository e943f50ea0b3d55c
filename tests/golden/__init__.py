"""What each release wrote, which later code must go on with: see docs/reference/versions.md.

python -m tests.golden.make        make tests/golden/VERSION/ by the code that is here: before a release, and once

VERSION/*.tar.xz hold directories, VERSION/expected.json what readers must find in them, which the maker notes as it
writes. Tests unpack copies. Iceberg's metadata have absolute paths: theirs begin with /proc/self/cwd, which is the
directory in which the test runs.
"""
