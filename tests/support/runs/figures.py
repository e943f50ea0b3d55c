"""Figures of a test for the report card: what it counts, and the processes that it kills, by kind.

They are properties of the test in pytest's --junitxml; without that option nothing is counted. `python -m
tests.report_card` reads them.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

#: Kinds of processes by their command lines, the first that matches.
_KINDS = (
    ("Spark's Python worker", r"pyspark[./](daemon|worker)"),
    ("Spark's JVM", r"org\.apache\.spark\."),
    ("Apache Kafka", r"\bkafka\.Kafka\b"),
    ("ZooKeeper", r"ZooKeeperServerMain"),
    ("broker", r"spark_klog\S* broker\b"),
    ("schema registry", r"spark_klog\S* schema-registry\b|spark_klog\.registry"),
    ("mirror", r"spark_klog\S* mirror\b|jobs[./]mirror"),
    ("load", r"batch_load|tests\.load\."),
    ("client", r"tests\.support\.clients|connector_program|^java "),
    ("Python driver of Spark", r"_program\b|tests\.spark\."),
)
_OTHER = "other process"
_counted: Counter[str] = Counter()
_notes: list[str] = []


def count(name: str, number: int = 1) -> None:
    """Add to a figure of the test that runs."""
    _counted[name] += number


def note(text: str) -> None:
    """Add a sentence that the report card has beside the test's figures."""
    _notes.append(text)


def kind_of(pid: int) -> str | None:
    """The kind of a process; None if it has ended."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    if state == "Z":  # its parent has not waited for it yet
        return None
    return next((kind for kind, pattern in _KINDS if re.search(pattern, line)), _OTHER)


class Figures:
    """A plugin that adds the figures of each test to its report, and counts each SIGKILL that the test sends.

    What fixtures kill as they end is not counted.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        _counted.clear()
        _notes.clear()
        functions = os.kill, os.killpg
        os.kill, os.killpg = (_counting(function) for function in functions)
        try:
            return (yield)
        finally:
            os.kill, os.killpg = functions
            item.user_properties += [(name, number) for name, number in _counted.items() if number]
            item.user_properties += [("note", text) for text in _notes]


def _counting(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def counting(pid: int, number: int) -> None:
        if number == signal.SIGKILL and (kind := kind_of(pid)) is not None:
            count(f"kills: {kind}")
        function(pid, number)

    return counting
