"""kcat (Debian: kafkacat)."""

from __future__ import annotations

import subprocess

from tests.support.packages.registries import program


class ToolFailed(Exception):
    """A tool failed; the text contains its standard error."""


def kcat_path() -> str:
    """The path of the `kcat` binary, see `program`."""
    return program(("kcat", "kafkacat"), "kafkacat")


def kcat(*arguments: str, stdin: bytes = b"", timeout: float = 60) -> bytes:
    """Run kcat and return its standard output; `ToolFailed` if it fails."""
    # a consumer that ends at the end of a partition (-e) makes a last fetch, which waits this long for more records
    quick = ("-X", "fetch.wait.max.ms=10") if "-C" in arguments else ()
    done = subprocess.run([kcat_path(), *quick, *arguments], input=stdin, capture_output=True, timeout=timeout)
    if done.returncode:
        raise ToolFailed(f"kcat {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr.decode()}")
    return done.stdout
