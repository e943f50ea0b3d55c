"""Patterns of topics mean what they mean in Java, or are refused: the JVM's own `java.util.regex` is the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_klog.base.names import topic_pattern
from spark_klog.errors import ConfigError

_NAMES = ["a", "b", "ab", "abc", "orders-1", "orders-eu.v2", "A_B", "a-b", "x.y.z", "clicks", "0", "aa", "aab1"]
_PIECES = [
    *("a", "b", "c", "-", "_", ".", "1", r"\.", r"\-", r"\d", r"\w", r"\W", r"\s", r"\b", r"\B", r"\A", r"\z", r"\Z"),
    *(
        "[a-c]",
        "[^a-c]",
        "[]a]",
        "[^]a]",
        "[a-z&&[^b]]",
        "[a-z&&b]",
        "[a[b]]",
        "[[:alpha:]]",
        r"[\[a]",
        "[a&b]",
        r"[a\&&b]",
    ),
    *("[a-]", "[-a]", "[a--b]", "[a||b]", "[a~~b]", r"[\d-]", r"[\w.]", "[.-]", "[a&&]", "[&&a]", "[^&&a]", "[a&&&b]"),
    *(
        r"\p{Alpha}",
        r"\p{L}",
        r"\Qa.b\E",
        r"\h",
        r"\R",
        r"\x61",
        r"\u0061",
        r"\x{61}",
        r"\0141",
        r"\141",
        r"\07",
        r"\1",
        r"\2",
    ),
    *(
        "(a)",
        "(?:ab)",
        "(?<n>a)",
        r"\k<n>",
        "(?P<n>a)",
        "(?i)",
        "(?i:A)",
        "(?-i)",
        "(?s)",
        "(?x)",
        "(?u)",
        "(?U)",
        "(?d)",
    ),
    *("(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?<=a|ab)", "(?>a)", "(?#x)", "|", "^", "$", "{", "}", "]", "&&"),
]
_REPEATS = [
    "",
    "",
    "",
    "",
    "*",
    "+",
    "?",
    "*?",
    "+?",
    "*+",
    "++",
    "?+",
    "{2}",
    "{1,2}",
    "{,2}",
    "{2,}",
    "{1,2}+",
    "{2}{2}",
]


def _java(spark: SparkSession, pattern: str) -> list[bool] | None:
    """Whether Java finds the pattern in each name; None if it does not compile."""
    jvm: Any = spark._jvm
    try:
        compiled = jvm.java.util.regex.Pattern.compile(pattern)
        return [bool(compiled.matcher(name).find()) for name in _NAMES]
    except (Py4JJavaError, PySparkException):
        return None


def _ours(pattern: str) -> list[bool] | None:
    try:
        compiled = topic_pattern("x", pattern)
    except ConfigError:
        return None
    return [compiled.search(name) is not None for name in _NAMES]


def test_what_is_accepted_means_the_same(spark: SparkSession) -> None:
    source = random.Random(25)
    patterns = [piece + repeat for piece in _PIECES for repeat in ("", "+")]
    while len(patterns) < 1000:
        parts = [source.choice(_PIECES) + source.choice(_REPEATS) for _ in range(source.randint(1, 4))]
        patterns.append("".join(parts))
    both, differing = 0, []
    for pattern in patterns:
        ours = _ours(pattern)
        if ours is None or (javas := _java(spark, pattern)) is None:
            continue
        if ours != javas:
            differing.append((pattern, ours, javas))
        both += 1
    assert differing == []
    assert both > 200


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("^[a-z&&[^b]]", "x has an intersection of classes at position 5, which Java knows and Python does not"),
        ("[&&a]", "x has an intersection of classes at position 1"),
        ("a[b[c]]", "x has a class within a class at position 3"),
        ("[[:alpha:]]", "x has a class within a class at position 1"),
        (r"\0141", "x has an octal escape at position 0: write the character itself"),
        (r"\p{Alpha}", r"x is not a regular expression: bad escape \p at position 0"),
    ],
)
def test_what_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topic_pattern("x", pattern)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("pattern", ["a&&b", r"[a\[]", r"[a\&&b]", "[]&]", "[^]a]", "[a]&&[b]"])
def test_what_is_not(pattern: str) -> None:
    topic_pattern("x", pattern)
