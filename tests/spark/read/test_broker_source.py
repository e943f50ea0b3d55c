"""Subscriptions and offset specs, resolved against a fake cluster: a dict of logs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from spark_klog.base.names import TopicPartition
from spark_klog.client.places import BeforeEndSpec, GroupSpec, Offsets, OffsetSpec, Spec, TimeSpec
from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError, ErrorCode, ProtocolError
from spark_klog.spark.options import SplitLimits, Subscription
from spark_klog.spark.read import broker_source
from spark_klog.spark.read.broker_source import BrokerSource
from spark_klog.spark.read.ranges import OffsetRange

A, B, C = ("a", 0), ("a", 1), ("b", 0)


class Logs:
    """Fake cluster: for each partition the first offset, and the timestamps of the records from there on."""

    def __init__(self, logs: dict[TopicPartition, tuple[int, list[int]]]) -> None:
        self.config = client_config({"bootstrap.servers": "h:1,i:2"})
        self._logs = logs
        self.topic_ids: dict[str, UUID] = {}
        self.internal = {"__consumer_offsets"}
        self.asked: list[Offsets] = []

    def last_leader(self, topic: str, partition: int) -> int | None:
        return 0

    def metadata(self, topics: Collection[str] | None) -> dict[str, Any]:
        assert topics is None
        topic_entries: dict[str, Any] = {}
        for topic, partition in self._logs:
            entry = {"is_internal": topic in self.internal, "error_code": 0, "partitions": []}
            topic_entries.setdefault(topic, entry)["partitions"].append({"partition_index": partition})
        return topic_entries

    def partitions(self, topics: Collection[str], missing_ok: bool) -> dict[str, list[int]]:
        found = {name: sorted(partition for topic, partition in self._logs if topic == name) for name in topics}
        for name, partitions in found.items():
            if "/" in name and not missing_ok:
                raise ProtocolError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"topic {name}")
            if not partitions and not missing_ok:
                raise ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name}")
        return {name: partitions for name, partitions in found.items() if partitions}

    def list_offsets(self, cluster: object, times: Mapping[TopicPartition, int]) -> Offsets:
        """Answer as ListOffsets does."""
        assert cluster is self
        assert times, "nothing to ask for"
        self.asked.append(dict(times))
        return {key: self._offset(key, time) for key, time in times.items()}

    def _offset(self, key: TopicPartition, time: int) -> int:
        first, timestamps = self._logs[key]
        if time in (-2, -1):
            return first if time == -2 else first + len(timestamps)
        return next((first + index for index, timestamp in enumerate(timestamps) if timestamp >= time), -1)


def source(logs: Any, progress: Any = None, **options: Any) -> BrokerSource:
    given: Any = SimpleNamespace(**options)
    return BrokerSource(logs, given, progress)


@pytest.fixture
def logs() -> Iterator[Any]:
    there = Logs(
        {
            A: (10, [100, 300, 200]),
            B: (0, [100]),
            C: (5, []),
            ("b", 1): (0, []),
            ("ab", 0): (0, []),
            ("__consumer_offsets", 0): (0, []),
        }
    )
    with mock.patch.object(broker_source, "list_offsets", there.list_offsets):
        yield there


@pytest.mark.parametrize(
    ("subscription", "expected"),
    [
        (Subscription(topics=("b", "a")), [A, B, C, ("b", 1)]),
        (Subscription(pattern="^a$"), [A, B]),
        (Subscription(pattern="b"), [("ab", 0), C, ("b", 1)]),
        (Subscription(pattern="a.*"), [A, B, ("ab", 0)]),
        (Subscription(pattern=".*"), [A, B, ("ab", 0), C, ("b", 1)]),
        (Subscription(pattern="nothing"), []),
        (Subscription(assign={"b": [1], "a": [0, 1]}), [A, B, ("b", 1)]),
        (Subscription(topics=("__consumer_offsets",)), [("__consumer_offsets", 0)]),
    ],
)
def test_partitions(logs: Any, subscription: Subscription, expected: list[TopicPartition]) -> None:
    assert source(logs, subscription=subscription).partitions() == expected


@pytest.mark.parametrize(
    ("subscription", "message"),
    [
        (
            Subscription(topics=("a", "c")),
            "topic c does not exist at h:1,i:2; create it",
        ),
        (
            Subscription(topics=("x/y",)),
            "illegal topic name 'x/y': 1 to 249 of a-z A-Z 0-9 . _ - are allowed",
        ),
        (
            Subscription(assign={"c": [0]}),
            "topic c does not exist at h:1,i:2; create it",
        ),
        (Subscription(assign={"a": [0, 2, 7]}), "topic a has no partition 2, 7"),
    ],
)
def test_what_does_not_exist(logs: Any, subscription: Subscription, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}(, or set subscribePattern to read topics that .*)?$"):
        source(logs, subscription=subscription).partitions()


def test_what_is_missing_may_be_left_out(logs: Any) -> None:
    for wanted in (Subscription(topics=("c", "x/y", "a")), Subscription(assign={"a": [1, 0, 2], "c": [0]})):
        assert sorted(source(logs, subscription=wanted).partitions(missing_ok=True)) == [A, B]


def test_other_errors_of_a_topic_are_passed_on(logs: Any) -> None:
    error = ProtocolError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "topic a")
    with mock.patch.object(logs, "partitions", side_effect=error), pytest.raises(ProtocolError) as caught:
        source(logs, subscription=Subscription(topics=("a",))).partitions()
    assert caught.value is error


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (OffsetSpec(-2), {A: 10, B: 0, C: 5}),
        (OffsetSpec(-1), {A: 13, B: 1, C: 5}),
        (OffsetSpec(each=((A, 11), (B, -1), (C, -2))), {A: 11, B: 1, C: 5}),
        (OffsetSpec(each=((A, 0), (B, 99), (C, 0))), {A: 0, B: 99, C: 0}),
        # the first record at or after the time, even if earlier ones follow; the end if there is none
        (TimeSpec(0), {A: 10, B: 0, C: 5}),
        (TimeSpec(101), {A: 11, B: 1, C: 5}),
        (TimeSpec(301), {A: 13, B: 1, C: 5}),
        (TimeSpec(each=((A, 300), (B, 100), (C, 0))), {A: 11, B: 0, C: 5}),
        (BeforeEndSpec(1), {A: 12, B: 0, C: 5}),
        (BeforeEndSpec(2), {A: 11, B: 0, C: 5}),
        (BeforeEndSpec(10**18), {A: 10, B: 0, C: 5}),
    ],
)
def test_places(logs: Any, spec: Spec, expected: Offsets) -> None:
    assert source(logs).resolve(spec, [A, B, C], "x") == expected


def test_given_offsets_are_not_asked_for(logs: Any) -> None:
    source(logs).resolve(OffsetSpec(each=((A, 11), (B, 5))), [A, B], "x")
    assert logs.asked == []
    source(logs).resolve(OffsetSpec(each=((A, 11), (B, -1))), [A, B], "x")
    assert logs.asked == [{B: -1}]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (TimeSpec(301, strict=True), r"a-0 \(at 301\), a-1 \(at 301\), b-0 \(at 301\)"),
        (TimeSpec(100, strict=True), r"b-0 \(at 100\)"),
        (TimeSpec(each=((A, 300), (B, 101), (C, 7)), strict=True), r"a-1 \(at 101\), b-0 \(at 7\)"),
    ],
)
def test_a_strict_time_without_a_record(logs: Any, spec: TimeSpec, names: str) -> None:
    message = (
        rf"^\[KLOG_NO_OFFSET_FOR_TIMESTAMP\] option x: no record at or after the timestamp in {names}; "
        "set startingOffsetsByTimestampStrategy=latest"
    )
    with pytest.raises(ConfigError, match=message):
        source(logs).resolve(spec, [A, B, C], "x")


def test_a_strict_time_with_records(logs: Any) -> None:
    assert source(logs).resolve(TimeSpec(100, strict=True), [A, B], "x") == {A: 10, B: 0}


def test_where_a_group_is(logs: Any) -> None:
    """Partitions without a committed offset are read from their first record on."""
    progress: Any = mock.Mock()
    progress.fetch.return_value = {A: 12}
    assert source(logs, progress).resolve(GroupSpec("g"), [A, B, C], "x") == {A: 12, B: 0, C: 5}
    progress.fetch.assert_called_once_with([A, B, C])
    assert logs.asked == [{B: -2, C: -2}]


def test_no_partitions(logs: Any) -> None:
    for spec in (OffsetSpec(-1), TimeSpec(5, strict=True)):
        assert source(logs).resolve(spec, [], "x") == {}
    assert logs.asked == []


def test_sizes_are_asked_for_only_where_they_count(logs: Any) -> None:
    wanted = [OffsetRange(*A, 10, 14), OffsetRange(*B, 0, 1)]
    with mock.patch.object(broker_source, "record_sizes", return_value={A: 50.0}) as sizes:
        found = source(logs, split=SplitLimits(min_partitions=1, max_records=9)).tasks(wanted)
        assert found == [(item,) for item in wanted]
        assert source(logs, split=SplitLimits(max_bytes=1)).tasks([]) == []
        sizes.assert_not_called()
        found = source(logs, split=SplitLimits(max_bytes=100)).tasks(wanted)
        assert found == [(OffsetRange(*A, 10, 12),), (OffsetRange(*A, 12, 14),), (OffsetRange(*B, 0, 1),)]
        sizes.assert_called_once_with(logs, {A: 10, B: 0})


def test_a_group_that_has_committed_nothing_is_told_of(logs: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt group name reads everything, as a new group does: the source logs a warning."""

    class Nothing:
        def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
            return {}

    nothing: Any = Nothing()
    assert source(logs, nothing).resolve(GroupSpec("g"), [A, B], "startingOffsets") == {A: 10, B: 0}
    assert caplog.messages == [
        "option startingOffsets=group: group g has no committed offset of the partitions that are read; check its "
        "name. All of them start at their first record"
    ]


def test_partitions_without_an_offset_of_the_group_are_named(logs: Any, caplog: pytest.LogCaptureFixture) -> None:
    class One:
        def fetch(self, partitions: Collection[TopicPartition]) -> Offsets:
            return {A: 12}

    one: Any = One()
    source(logs, one).resolve(GroupSpec("g"), [A, B, C], "startingOffsets")
    assert caplog.messages == [
        "option startingOffsets=group: group g has no committed offset of a-1, b-0; these start at their first record"
    ]
