"""Offsets as text: every form of an offset spec, refused texts, and the JSON of a checkpoint."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from spark_klog.client.places import (
    BeforeEndSpec,
    GroupSpec,
    Offsets,
    OffsetSpec,
    Spec,
    TimeSpec,
    parse_assign,
    parse_offsets,
    parse_place,
    parse_timestamp,
    parse_timestamps,
)
from spark_klog.errors import ConfigError, DecodeError
from spark_klog.groups.checkpoint import from_json, start_in, to_json, with_start

NOW = 1_700_000_000_000
NOON = 1_795_262_400_000  # 2026-11-21T12:00:00Z
LARGEST = (1 << 63) - 1


def parse(text: str, group: str | None = None) -> Spec:
    return parse_offsets("startingOffsets", text, lambda: NOW, group)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("earliest", OffsetSpec(-2)),
        (" Latest ", OffsetSpec(-1)),
        ('{"t":{"0":23,"1":-2}}', OffsetSpec(each=((("t", 0), 23), (("t", 1), -2)))),
        (
            f' {{"b":{{"1":0}},"A":{{"10":-1,"2":{LARGEST}}}}}',
            OffsetSpec(each=((("A", 2), LARGEST), (("A", 10), -1), (("b", 1), 0))),
        ),
        ('{"t":"earliest"}', OffsetSpec(topics=(("t", -2),))),
        (
            '{"u":{"0":23,"1":-1},"t":" LATEST ","s":-2,"r":-1}',
            OffsetSpec(each=((("u", 0), 23), (("u", 1), -1)), topics=(("r", -1), ("s", -2), ("t", -1))),
        ),
        ("-1", BeforeEndSpec(1)),
        (" -1000 ", BeforeEndSpec(1000)),
        ("-0ms", TimeSpec(NOW)),
        ("-1ms", TimeSpec(NOW - 1)),
        ("-30s", TimeSpec(NOW - 30_000)),
        ("-10m", TimeSpec(NOW - 600_000)),
        ("-10 M", TimeSpec(NOW - 600_000)),
        ("-2h", TimeSpec(NOW - 7_200_000)),
        ("-7d", TimeSpec(NOW - 604_800_000)),
        ("-1w", TimeSpec(NOW - 604_800_000)),
        ("2026-11-21T12:00Z", TimeSpec(NOON)),
        ("2026-11-21 12:00:00Z", TimeSpec(NOON)),
        ("2026-11-21T12:00:00Z", TimeSpec(NOON)),
        (" 2026-11-21t12:00:00z ", TimeSpec(NOON)),
        ("2026-11-21T12:00:00.250Z", TimeSpec(NOON + 250)),
        ("2026-11-21T12:00:00.000900+00:00", TimeSpec(NOON + 1)),
        ("2026-11-21T13:30:00+01:30", TimeSpec(NOON)),
        ("2026-11-21T07:00:00-05:00", TimeSpec(NOON)),
    ],
)
def test_parse_offsets(text: str, spec: Spec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize("text", ["2026-11-21", "2026-11-21T12:00", "2026-11-21 12:00:00"])
def test_a_time_without_a_zone(text: str) -> None:
    """Filters read it in the session's zone, which a Python source is not told."""
    with pytest.raises(ConfigError, match=r"names no time zone: append Z for UTC or an offset like \+01:00"):
        parse(text)
    there = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("America/New_York"))
    found = parse_place(text, ZoneInfo("America/New_York"))
    assert found == TimeSpec(int(there.timestamp() * 1000))


@pytest.mark.parametrize("text", ["group", " GROUP "])
def test_group(text: str) -> None:
    assert parse(text, "g") == GroupSpec("g")
    with pytest.raises(ConfigError, match=r"option startingOffsets=group needs kafka\.group\.id"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "1970-01-01T00:00Z",
        "1969-12-31T23:59:59.999Z",
        "1969-12-31T23:59:59.998Z",
        "0001-01-01T00:00Z",
        "-9999w",
        f"-{'9' * 18}d",
    ],
)
def test_no_time_is_before_the_epoch(text: str) -> None:
    """Such times become 0: ListOffsets takes -1 and -2 ms for latest and earliest, and INT64 may overflow."""
    assert parse(text) == TimeSpec(0)


ANY_FORM = "earliest, latest, .* a time before now .* offsets before the end .* an ISO time with its zone, or group"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "0",
        "-0",
        "--5",
        "+5",
        "-5x",
        "-m",
        "-1.5h",
        "10m",
        "-" + "9" * 5000,
        "-" + "9" * 5000 + "m",
        "[1]",
        "latest!",
        "1700000000000",
        "20261121",  # from Python 3.11 on datetime accepts this and the next three
        "20261121T120000Z",
        "2026-W47-6",
        "2026112112",
        "2026-11-21X12:00:00",
        "2026-11-31",
        "2026-11-21T25:00:00Z",
        "2026-11-21T12:00:00ZZ",
        "21.11.2026",
    ],
)
def test_parse_offsets_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=f"option startingOffsets=.*{ANY_FORM}"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "must be a JSON object with one entry per topic"),
        ('{"t":1}', 'topic t has 1: give an offset for each partition .* or "earliest" or "latest" for all of them'),
        ('{"t":[0]}', r"topic t has \[0\]: give an offset for each partition"),
        ('{"t":"first"}', 'topic t has "first": give an offset for each partition'),
        ('{"t":"-1h"}', 'topic t has "-1h": give an offset for each partition'),
        ('{"t":-3}', "topic t has -3: give an offset for each partition"),
        ('{"t":null,"u":"latest"}', "topic t has null: give an offset for each partition"),
        ('{"t":true}', "topic t has true: give an offset for each partition"),
        ('{"t":-2.0}', "topic t has -2.0: give an offset for each partition"),
        ('{"u":"latest","t":{"0":"latest"}}', "t-0: 'latest' is not a valid offset"),
        ('{"t":{"x":1}}', "t-x: 1 is not a valid offset"),
        ('{"t":{"-1":1}}', "t--1: 1 is not a valid offset"),
        ('{"t":{"0":-3}}', "t-0: -3 is not a valid offset"),
        ('{"t":{"0":"5"}}', "t-0: '5' is not a valid offset"),
        ('{"t":{"0":1.5}}', "t-0: 1.5 is not a valid offset"),
        ('{"t":{"0":true}}', "t-0: True is not a valid offset"),
        ('{"t":{"0":null}}', "t-0: None is not a valid offset"),
        (f'{{"t":{{"0":{LARGEST + 1}}}}}', f"t-0: {LARGEST + 1} is not a valid offset"),
        (f'{{"t":{{"0":{"9" * 5000}}}}}', "is not JSON"),
    ],
)
def test_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"option startingOffsets.*{message}"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "latest", "earliest"),
    [
        ("latest", ["all partitions"], []),
        ("earliest", [], ["all partitions"]),
        ('{"t":{"0":5,"1":-1}}', ["t-1"], []),
        ('{"t":{"0":5,"1":-2}}', [], ["t-1"]),
        ('{"t":{"0":5}}', [], []),
        ('{"t":{"0":5},"u":"latest"}', ["topic u"], []),
        ('{"t":{"0":-1},"u":"earliest","v":"latest"}', ["t-0", "topic v"], ["topic u"]),
    ],
)
def test_what_has_an_offset(text: str, latest: list[str], earliest: list[str]) -> None:
    spec = parse(text)
    assert isinstance(spec, OffsetSpec)
    assert (spec.holders(-1), spec.holders(-2)) == (latest, earliest)


@pytest.mark.parametrize("strict", [True, False])
def test_timestamps(strict: bool) -> None:
    assert parse_timestamp("x", " 1700000000000 ", strict) == TimeSpec(NOW, strict=strict)
    assert parse_timestamp("x", str(LARGEST), strict) == TimeSpec(LARGEST, strict=strict)
    each = ((("a", 0), 0), (("a", 1), NOW), (("b", 0), LARGEST))
    text = f'{{"b":{{"0":{LARGEST}}},"a":{{"1":{NOW},"0":0}}}}'
    assert parse_timestamps("x", text, strict) == TimeSpec(each=each, strict=strict)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "2026-11-21", "earliest", str(LARGEST + 1), "9" * 5000])
def test_timestamp_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option endingTimestamp='.*' must be a timestamp in ms since the epoch"):
        parse_timestamp("endingTimestamp", text, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latest", "is not JSON"),
        ("1700000000000", "must be a JSON object with one entry per topic"),
        ('{"t":1700000000000}', "topic t must have a JSON object with one entry per partition"),
        ('{"t":{"0":-1}}', "t-0: -1 is not a valid timestamp"),
        ('{"t":{"0":"5"}}', "t-0: '5' is not a valid timestamp"),
        (f'{{"t":{{"0":{LARGEST + 1}}}}}', f"t-0: {LARGEST + 1} is not a valid timestamp"),
    ],
)
def test_timestamps_refuse(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"option endingOffsetsByTimestamp.*{message}"):
        parse_timestamps("endingOffsetsByTimestamp", text, False)


def test_parse_assign() -> None:
    assert parse_assign('{"b":[3,1,3],"a":[0]}') == {"b": [1, 3], "a": [0]}


moments = st.datetimes(datetime(1970, 1, 2), datetime(9999, 12, 30), timezones=st.just(timezone.utc))


@given(moments, st.integers(-14 * 60, 14 * 60))
def test_iso_times(moment: datetime, minutes: int) -> None:
    """The same moment in any time zone; microseconds become milliseconds."""
    exact = (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) / timedelta(milliseconds=1)
    there = moment.astimezone(timezone(timedelta(minutes=minutes)))
    local = parse_place(there.replace(tzinfo=None).isoformat(), there.tzinfo)
    for spec in (parse(moment.isoformat()), parse(there.isoformat()), local):
        assert isinstance(spec, TimeSpec)
        assert spec.everywhere is not None
        assert abs(spec.everywhere - exact) <= 1
        if not moment.microsecond % 1000:
            assert spec.everywhere == round(exact)


@given(st.one_of(st.text(), st.from_regex(r"-?[0-9TZ:{}\[\]\",. wdhms-]{0,30}", fullmatch=True)))
def test_any_text_is_a_place_or_refused(text: str) -> None:
    try:
        spec = parse(text, "g")
    except ConfigError:
        return
    if isinstance(spec, TimeSpec):
        assert spec.everywhere is not None
        assert 0 <= spec.everywhere <= LARGEST


offsets = st.dictionaries(
    st.tuples(st.text(st.sampled_from("abcXYZ0189._-"), min_size=1, max_size=10), st.integers(0, 10_000)),
    st.integers(0, LARGEST),
    max_size=8,
)


@given(offsets)
def test_json_round_trip(value: dict[tuple[str, int], int]) -> None:
    text = json.dumps(to_json(value))
    assert from_json(json.loads(text)) == value
    if value:
        assert parse(text) == OffsetSpec(each=tuple(sorted(value.items())))
        assert parse_timestamps("x", text, True) == TimeSpec(each=tuple(sorted(value.items())), strict=True)


@given(offsets, offsets, offsets, st.booleans())
def test_a_batch_says_where_it_starts(end: Offsets, start: Offsets, before: Offsets, is_first: bool) -> None:
    before = {} if is_first else before
    value = json.loads(json.dumps(with_start(end, start, before, is_first=is_first)))
    assert value, "an empty one is that of no batch"
    assert from_json(value) == end
    assert "start of " not in "".join(topic for topic, _ in from_json(value))
    begun = start_in(value, before, is_first=is_first)
    for key in end:
        if key in start:
            assert begun.get(key, 0) == start[key]
    # as Spark's own connector reads it: a map of topics to maps of partitions
    sparks = {(topic, int(name)): offset for topic, each in value.items() for name, offset in each.items()}
    assert sparks == end


def test_a_start_is_left_out_where_it_goes_without_saying() -> None:
    a, b = ("t", 0), ("t", 1)
    first = with_start({a: 5, b: 6}, {a: 0, b: 3}, {}, is_first=True)
    assert first == {"t": {"0": 5, "1": 6}, 'start of query {"t":{"1":3}}': {}}
    assert with_start({a: 5, b: 6}, {a: 4, b: 0}, {a: 4}, is_first=False) == {"t": {"0": 5, "1": 6}}
    again = with_start({a: 5}, {a: 0}, {a: 4}, is_first=False)
    assert again == {"t": {"0": 5}, 'start of micro-batch {"t":{"0":0}}': {}}
    assert with_start({}, {a: 1}, {a: 1}, is_first=False) == {"start of ": {}}


def test_the_start_of_a_query_is_not_that_of_a_later_batch() -> None:
    """Before pyspark 4.2 Spark does not pass the start when it asks a restarted query for an end."""
    value = with_start({("t", 0): 9}, {("t", 0): 7}, {}, is_first=True)
    assert start_in(value, {("t", 0): 4}, is_first=False) == {("t", 0): 4}


@pytest.mark.parametrize("name", ["start of t", "start of query", 'start of time {"t":{"0":7}}'])
def test_starts_of_a_newer_version_are_refused(name: str) -> None:
    with pytest.raises(DecodeError, match=r"is of a newer version: go on with the klog that wrote it, or begin"):
        start_in({"t": {"0": 9}, name: {}}, {}, is_first=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"t":1}', '{"t":{"x":1}}'])
def test_a_damaged_start(text: str) -> None:
    with pytest.raises(DecodeError, match="not JSON with offsets"):
        start_in({f"start of query {text}": {}}, {}, is_first=True)


def test_json_is_in_order() -> None:
    """A checkpoint does not depend on the order in which a broker lists partitions."""
    assert list(to_json({("b", 0): 1, ("a", 10): 2, ("a", 9): 3})) == ["a", "b"]
    assert list(to_json({("a", 10): 2, ("a", 9): 3})["a"]) == ["9", "10"]
