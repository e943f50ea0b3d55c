"""Regular expressions over topic names, against Python's `re`, and those that would take it years."""

from __future__ import annotations

import re
import sys
import time

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.broker.groups import topic_pattern
from spark_klog.broker.groups.topic_pattern import TopicPattern
from spark_klog.errors import ConfigError

_ATOMS = ["a", "b", "c", "[ab]", "[^a]", "[a-c.]", ".", r"\w", r"\D", r"\.", "-", "(?:a)", "(?P<x1>b)", "^", "$"]
_EXPRESSIONS = st.recursive(
    st.sampled_from(_ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=8,
)


@given(_EXPRESSIONS, st.lists(st.text("abc.-1_", max_size=6), max_size=10))
@settings(max_examples=300, deadline=None)
def test_it_matches_as_python_does(expression: str, names: list[str]) -> None:
    expression = re.sub(r"\?P<x1>", "?:", expression) if expression.count("?P<x1>") > 1 else expression
    pattern = TopicPattern(expression)
    for name in names:
        assert pattern.matches(name) == bool(re.fullmatch(expression, name)), (expression, name)


@pytest.mark.parametrize(
    ("expression", "yes", "no"),
    [
        ("(?i)ab[c-d]", "ABD", "abx"),
        ("a(?i:b)c", "aBc", "ABc"),
        ("[[:alpha:]]+", "abC", "ab1"),
        ("[[:^alpha:]]+", "1.", "a"),
        (r"\Qa.b\E+", "a.bb", "axb"),
        (r"\Aab\z", "ab", "abc"),
        (r"\x61\x{62}", "ab", "b"),
        ("(^cl.*)", "clicks", "click-s\n"),
        ("[]a-]+", "a-", "b"),
        (r"[\w-]+", "a-", "a."),
        ("a{,2}", "none such", "aa"),
        ("", "none such", "a"),
    ],
)
def test_the_syntax_of_re2(expression: str, yes: str, no: str) -> None:
    pattern = TopicPattern(expression)
    assert not pattern.matches(no)
    assert pattern.matches(yes) == (yes != "none such")


@pytest.mark.parametrize("expression", ["(a+)+b", "(a|a)*b", "(a|b)*a(a|b){240}", "((a{0,9}){0,9}){0,9}b"])
def test_no_expression_takes_long(expression: str) -> None:
    pattern = TopicPattern(expression)
    start = time.process_time()
    for _ in range(3):
        assert not pattern.matches("a" * 239 + "c" * 10)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("expression", ["(.?){990}", "([ab]?[bc]?){400}", "(((((){1000}){1000}){1000}){1000}){1000}"])
def test_no_step_takes_long_and_little_is_kept(expression: str) -> None:
    longest, begin = 0.0, time.process_time()
    pattern = TopicPattern(expression)
    for number in range(200):
        for _ in pattern.steps("abc" * 60 + str(number)):
            longest, begin = max(longest, time.process_time() - begin), time.process_time()
    assert longest < 0.2
    assert len(pattern._steps) <= topic_pattern._MAX_STEPS
    assert sum(map(sys.getsizeof, pattern._steps.values())) < 2_000_000
    assert pattern.matches("")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(", "missing )"),
        (")", "unexpected )"),
        ("[a", "missing ]"),
        ("[z-a]", "bad range"),
        ("[[:none:]]", "unknown class"),
        ("a**", "repeated repetition"),
        ("*a", "nothing to repeat"),
        ("a{2000}", "bad repetition"),
        ("a{3,2}", "bad repetition"),
        ("((a{100}){100}){100}", "too large"),
        ("(((()a?){0,30}){0,30}){0,30}", "too large"),
        ("(" * 60 + ")" * 60, "more than 50 parentheses"),
        ("(?=a)", "can follow (?"),
        ("(?m)a", "only i and s"),
        (r"(a)\1", "is not supported"),
        (r"\b", "is not supported"),
        ("\\", "is not supported"),
        ("a" * 3000, "the limit is 2048"),
    ],
)
def test_what_is_refused(expression: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        TopicPattern(expression)
