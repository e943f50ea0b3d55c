"""Offsets as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import OffsetSpec, from_json, parse_assign, parse_offsets, to_json


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("earliest", OffsetSpec(-2)),
        (" Latest ", OffsetSpec(-1)),
        ('{"t":{"0":23,"1":-2}}', OffsetSpec(each=((("t", 0), 23), (("t", 1), -2)))),
        ('{"b":{"1":0},"A":{"10":-1,"2":9223372036854775807}}', None),
    ],
)
def test_parse_offsets(text: str, spec: OffsetSpec | None) -> None:
    found = parse_offsets("startingOffsets", text)
    if spec is not None:
        assert found == spec
    else:
        assert dict(found.each) == {("b", 1): 0, ("A", 10): -1, ("A", 2): 9223372036854775807}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "earliest, latest or"),
        ("12", "earliest, latest or"),
        ("[1]", "earliest, latest or"),
        ("{", "is no JSON"),
        ("{}", "a JSON object by topic is wanted"),
        ('{"t":1}', "an object by partition is wanted for topic t"),
        ('{"t":{"x":1}}', "t-x: 1 is no offset of a partition"),
        ('{"t":{"-1":1}}', "t--1: 1 is no offset"),
        ('{"t":{"0":-3}}', "t-0: -3 is no offset"),
        ('{"t":{"0":"5"}}', "t-0: '5' is no offset"),
        ('{"t":{"0":1.5}}', "t-0: 1.5 is no offset"),
        ('{"t":{"0":true}}', "t-0: True is no offset"),
        ('{"t":{"0":null}}', "t-0: None is no offset"),
    ],
)
def test_parse_offsets_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"option endingOffsets.*{message}"):
        parse_offsets("endingOffsets", text)


@pytest.mark.parametrize(
    ("text", "latest", "earliest"),
    [
        ("latest", True, False),
        ("earliest", False, True),
        ('{"t":{"0":5,"1":-1}}', True, False),
        ('{"t":{"0":5,"1":-2}}', False, True),
        ('{"t":{"0":5}}', False, False),
    ],
)
def test_what_a_spec_holds(text: str, latest: bool, earliest: bool) -> None:
    spec = parse_offsets("startingOffsets", text)
    assert (spec.holds_latest, spec.holds_earliest) == (latest, earliest)


def test_parse_assign() -> None:
    assert parse_assign('{"b":[3,1,3],"a":[0]}') == {"b": [1, 3], "a": [0]}


offsets = st.dictionaries(
    st.tuples(st.text(st.sampled_from("abcXYZ0189._-"), min_size=1, max_size=10), st.integers(0, 10_000)),
    st.integers(0, (1 << 63) - 1),
    max_size=8,
)


@given(offsets)
def test_json_round_trip(value: dict[tuple[str, int], int]) -> None:
    text = json.dumps(to_json(value))
    assert from_json(json.loads(text)) == value
    if value:
        assert dict(parse_offsets("startingOffsets", text).each) == value
