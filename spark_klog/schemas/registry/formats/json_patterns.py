"""Whether a pattern of a JSON Schema is in a property's name, whatever the pattern is.

Python's `re` can take for ever, and holds up every thread meanwhile. Here it searches only for patterns with at most
one quantifier, in short names; a process of its own looks for others, which is ended when its time is over.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from math import ceil
from typing import Final

from spark_klog.schemas.registry.formats.contract import TooComplex

#: A quantifier, or what looks like one. Of two that follow each other, each may try as often as the text is long.
_QUANTIFIER: Final = re.compile(r"[*+?{]")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{?]")
#: Characters of a pattern, and of a name, for which a search is quick if there is one quantifier.
_SHORT: Final = 256
#: Characters of longer ones, for which no one searches.
_LONG: Final = 16 * 1024
_SEARCH_SECONDS: Final = 2.0
#: A program that ends with 0 if the pattern is found in the text, both of which it reads. An alarm ends it if nobody
#: else does, since the process that began it has ended.
_SEARCH: Final = (
    f"import json, re, signal, sys; signal.alarm({ceil(_SEARCH_SECONDS) + 1}); "
    "sys.exit(not re.search(*json.load(sys.stdin)))"
)
#: Seconds that all searches of a comparison may take in processes.
_ALL_SECONDS: Final = 10.0
_MOST_SEARCHES: Final = 100_000


class Patterns:
    """The searches of one comparison of two schemas."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, str], bool] = {}
        self._left = _ALL_SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern is in a name; not if it can't be said, as of a syntax that Python does not have.

        `TooComplex` after too many.
        """
        pair = pattern, name
        if pair not in self._results:
            if len(self._results) >= _MOST_SEARCHES:
                raise TooComplex(f"more than {_MOST_SEARCHES:,} patterns would have to be looked for in names")
            self._results[pair] = self._search(pattern, name)
        return self._results[pair]

    def _search(self, pattern: str, name: str) -> bool:
        longest = max(len(pattern), len(name))
        is_quick = len(_QUANTIFIER.findall(pattern[:_SHORT])) <= 1 and not _REPEATED_GROUP.search(pattern[:_SHORT])
        if longest <= _SHORT and is_quick:
            try:
                return re.search(pattern, name) is not None
            except (re.error, RecursionError, OverflowError):
                return False
        if longest > _LONG or self._left <= 0:
            return False
        command = [sys.executable, "-I", "-S", "-c", _SEARCH]
        given = json.dumps([pattern, name]).encode()
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, timeout=min(_SEARCH_SECONDS, self._left), check=False
            )
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._left -= time.monotonic() - started
        return done.returncode == 0
