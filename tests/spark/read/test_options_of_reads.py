"""Tables of read options: offset specs, precedence, limits, losses, bad records, group offsets, and refusals."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest

from spark_klog.client.places import BeforeEndSpec, GroupSpec, OffsetSpec, Spec, TimeSpec
from spark_klog.errors import ConfigError
from spark_klog.spark.options import (
    BadRecordsOptions,
    GroupOffsetsOptions,
    SourceOptions,
    SplitLimits,
    TriggerLimits,
    source_options,
)
from spark_klog.spark.read.source import KlogDataSource
from spark_klog.spark.versions import ReadAllAvailable

BASE = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "t"}
EACH = ((("t", 0), 7),)


def batch(**options: str) -> SourceOptions:
    return source_options(BASE | options, streaming=False)


def stream(**options: str) -> SourceOptions:
    return source_options(BASE | options, streaming=True)


def refusal(options: dict[str, str], streaming: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        source_options(BASE | options, streaming=streaming)
    return str(caught.value)


ISO, ISO_MS = "2026-11-21T10:00:00Z", 1_795_255_200_000
PLACES: list[tuple[dict[str, str], Spec]] = [
    ({"Offsets": "earliest"}, OffsetSpec(-2)),
    ({"Offsets": " Latest "}, OffsetSpec(-1)),
    ({"Offsets": '{"t":{"0":7}}'}, OffsetSpec(each=EACH)),
    # the name of a topic, not of a secret
    ({"Offsets": '{"user.password": {"0":7}}'}, OffsetSpec(each=((("user.password", 0), 7),))),
    ({"Offsets": "-1000"}, BeforeEndSpec(1000)),
    ({"Offsets": ISO}, TimeSpec(ISO_MS)),
    ({"OffsetsByTimestamp": '{"t":{"0":7}}'}, TimeSpec(each=EACH)),
    ({"Timestamp": "7"}, TimeSpec(7)),
    # precedence: a timestamp for all partitions, one for each, offsets; overridden options are not parsed
    ({"OffsetsByTimestamp": '{"t":{"0":7}}', "Offsets": "nonsense"}, TimeSpec(each=EACH)),
    ({"Timestamp": "7", "Offsets": "-10m"}, TimeSpec(7)),
    ({"Timestamp": "7", "OffsetsByTimestamp": "nonsense", "Offsets": "nonsense"}, TimeSpec(7)),
]


@pytest.mark.parametrize(("places", "expected"), PLACES)
def test_where_to_start_and_end(places: dict[str, str], expected: Spec) -> None:
    starting = {f"starting{name}": text for name, text in places.items()}
    ending = {f"ending{name}": text for name, text in places.items()}
    start: Spec = expected
    if isinstance(expected, TimeSpec) and places.keys() != {"Offsets"}:
        start = TimeSpec(expected.everywhere, expected.each, strict=True)
    assert stream(**starting).starting == start
    if expected != OffsetSpec(-1):
        assert batch(**starting).starting == start
    # without a record at or after the time, the end is always the partition's end
    if expected != OffsetSpec(-2):
        assert batch(**ending).ending == expected


def test_start_and_end_have_precedences_of_their_own() -> None:
    options = batch(startingOffsets="earliest", endingTimestamp="5", endingOffsets="nonsense")
    assert (options.starting, options.ending) == (OffsetSpec(-2), TimeSpec(5))
    options = batch(startingTimestamp="5", startingOffsets="latest", endingOffsets='{"t":{"0":7}}')
    assert (options.starting, options.ending) == (TimeSpec(5, strict=True), OffsetSpec(each=EACH))


@pytest.mark.parametrize(("strategy", "strict"), [(None, True), ("error", True), ("ERROR", True), ("latest", False)])
def test_what_to_do_without_a_record_that_late(strategy: str | None, strict: bool) -> None:
    given = {} if strategy is None else {"startingOffsetsByTimestampStrategy": strategy}
    assert batch(startingTimestamp="7", **given).starting == TimeSpec(7, strict=strict)
    assert stream(startingTimestamp="7", **given).starting == TimeSpec(7, strict=strict)
    assert stream(startingOffsetsByTimestamp='{"t":{"0":7}}', **given).starting == TimeSpec(None, EACH, strict)
    assert batch(endingTimestamp="7", **given).ending == TimeSpec(7, strict=False)
    assert batch(startingOffsets=ISO, **given).starting == TimeSpec(ISO_MS, strict=False)


def test_a_time_before_now() -> None:
    before = time.time_ns() // 1_000_000
    options = batch(startingOffsets="-10m", endingOffsets="-5 s")
    after = time.time_ns() // 1_000_000
    assert isinstance(options.starting, TimeSpec)
    assert isinstance(options.ending, TimeSpec)
    assert options.starting.everywhere is not None
    assert options.ending.everywhere is not None
    assert before <= options.starting.everywhere + 600_000 <= after
    assert before <= options.ending.everywhere + 5_000 <= after


def test_where_the_group_is() -> None:
    given = {"startingOffsets": "Group", "kafka.group.id": "g"}
    assert batch(**given).starting == stream(**given).starting == GroupSpec("g")
    assert batch(**{"endingOffsets": "group", "kafka.group.id": "g"}).ending == GroupSpec("g")


FORMS = (
    'earliest, latest, {"topic":{"0":23},"other":"earliest"}, a time before now (-10m), '
    "offsets before the end (-1000), an ISO time"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "first"}, f"option startingOffsets='first' must be {FORMS}"),
        ({"startingOffsets": "group"}, "option startingOffsets=group needs kafka.group.id"),
        ({"startingOffsets": "{"}, "option startingOffsets='{' is not JSON"),
        ({"startingOffsets": "2026-11-21 10:00"}, "option startingOffsets='2026-11-21 10:00' names no time zone"),
        ({"startingOffsets": '{"t":{"0":-3}}'}, "option startingOffsets: t-0: -3 is not a valid offset"),
        ({"startingTimestamp": "-1"}, "option startingTimestamp='-1' must be a timestamp in ms since the epoch"),
        ({"startingTimestamp": ISO}, f"option startingTimestamp='{ISO}' must be a timestamp in ms since the epoch"),
        (
            {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "latests"},
            "Strategy=latests must be one of error, latest",
        ),
        ({"startingOffsetsByTimestampStrategy": "earliest"}, "Strategy=earliest must be one of error, latest"),
        (
            {"startingOffsetsByTimestamp": "1"},
            "option startingOffsetsByTimestamp='1' must be a JSON object with one entry per topic",
        ),
        ({"startingOffsetsByTimestamp": '{"t":{"0":-1}}'}, "t-0: -1 is not a valid timestamp"),
        ({"startingOffsetsByTimestamp": '{"t":{"0":-2}}'}, "t-0: -2 is not a valid timestamp"),
    ],
)
def test_refused_starts(options: dict[str, str], message: str) -> None:
    assert message in refusal(options, streaming=False)
    assert message in refusal(options, streaming=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "latest"}, "option startingOffsets can't be latest (-1) in a batch query"),
        ({"startingOffsets": '{"t":{"0":7,"1":-1}}'}, "option startingOffsets can't be latest (-1) in a batch query"),
        ({"endingOffsets": "earliest"}, "option endingOffsets can't be earliest (-2)"),
        ({"endingOffsets": '{"t":{"0":-2}}'}, "option endingOffsets can't be earliest (-2)"),
        ({"endingOffsets": "last"}, f"option endingOffsets='last' must be {FORMS}"),
        ({"endingOffsets": "group"}, "option endingOffsets=group needs kafka.group.id"),
        ({"endingTimestamp": "x"}, "must be a timestamp in ms since the epoch; endingOffsets takes ISO times"),
        (
            {"endingOffsetsByTimestamp": '{"t":[1]}'},
            "option endingOffsetsByTimestamp: topic t must have a JSON object",
        ),
    ],
)
def test_refused_in_a_batch_query(options: dict[str, str], message: str) -> None:
    assert message in refusal(options, streaming=False)


def test_a_stream_may_start_at_the_end() -> None:
    assert stream(startingOffsets="latest").starting == OffsetSpec(-1)
    assert stream(startingOffsets='{"t":{"0":7,"1":-1}}').starting == OffsetSpec(each=(*EACH, (("t", 1), -1)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("endingTimestamp", "1"), ("endingOffsetsByTimestamp", '{"t":{"0":7}}'), ("endingOffsets", "latest")],
)
def test_a_stream_has_no_end(name: str, text: str) -> None:
    assert refusal({name: text}, streaming=True) == f"option {name} is for batch queries: a stream has no end"


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"maxOffsetsPerTrigger": " 12 "}, TriggerLimits(max_offsets=12)),
        ({"maxOffsetsPerTrigger": str(2**63 - 1)}, TriggerLimits(max_offsets=2**63 - 1)),
        ({"maxBytesPerTrigger": "1000000"}, TriggerLimits(max_bytes=1_000_000)),
        ({"minOffsetsPerTrigger": "5"}, TriggerLimits(min_offsets=5)),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "5"}, TriggerLimits(max_offsets=5, min_offsets=5)),
        *(
            ({"maxTriggerDelay": text}, TriggerLimits(max_delay_ms=milliseconds))
            for text, milliseconds in [
                ("250", 250),
                ("500ms", 500),
                ("30s", 30_000),
                ("15m", 900_000),
                ("2MIN", 120_000),
                (" 1 h ", 3_600_000),
                ("1d", 86_400_000),
                ("0s", 0),
            ]
        ),
    ],
)
def test_limits_of_micro_batches(options: dict[str, str], limits: TriggerLimits) -> None:
    assert stream(**options).trigger == limits


@pytest.mark.parametrize(
    ("limits", "is_any"),
    [
        (TriggerLimits(), False),
        (TriggerLimits(max_delay_ms=1), False),
        (TriggerLimits(max_offsets=1), True),
        (TriggerLimits(max_bytes=1), True),
        (TriggerLimits(min_offsets=1), True),
    ],
)
def test_whether_there_is_any_limit(limits: TriggerLimits, is_any: bool) -> None:
    assert limits.any is is_any


@pytest.mark.parametrize(
    "name", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"]
)
def test_limits_of_micro_batches_have_no_effect_in_a_batch_query(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spark_klog"):
        stream(**{name: "5"})
        assert caplog.messages == []
        batch(**{name.upper(): "abc"})
    assert caplog.messages == [f"option {name} has no effect in a batch query"]


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"minPartitions": "8"}, SplitLimits(min_partitions=8)),
        ({"maxRecordsPerPartition": "9"}, SplitLimits(max_records=9)),
        ({"maxBytesPerPartition": "10"}, SplitLimits(max_bytes=10)),
        ({"minPartitions": "1", "maxRecordsPerPartition": "2", "maxBytesPerPartition": "3"}, SplitLimits(1, 2, 3)),
    ],
)
def test_limits_of_tasks(options: dict[str, str], limits: SplitLimits) -> None:
    assert batch(**options).split == stream(**options).split == limits


#: Options of streams; batch queries log that they have no effect.
TRIGGER_COUNTS = {"maxOffsetsPerTrigger": 1, "maxBytesPerTrigger": 1, "minOffsetsPerTrigger": 1}
COUNTS = {
    **TRIGGER_COUNTS,
    "minPartitions": 1,
    "maxRecordsPerPartition": 1,
    "maxBytesPerPartition": 1,
    "kafkaConsumer.pollTimeoutMs": 1,
    "fetchOffset.numRetries": 0,
    "fetchOffset.retryIntervalMs": 0,
}


@pytest.mark.parametrize("text", ["-1", "", "1k", "1.5", "1_000", "0x10", "²", "9" * 5000])
@pytest.mark.parametrize(("name", "smallest"), COUNTS.items())
def test_refused_counts(name: str, smallest: int, text: str) -> None:
    message = f"option {name}={text} must be an integer of at least {smallest}"
    assert refusal({name: text}, streaming=True) == message
    if name not in TRIGGER_COUNTS:
        assert refusal({name: text}, streaming=False) == message


@pytest.mark.parametrize(("name", "smallest"), COUNTS.items())
def test_the_smallest_count(name: str, smallest: int) -> None:
    assert stream(**{name: str(smallest)})
    if smallest:
        assert refusal({name: "0"}, True) == f"option {name}=0 must be an integer of at least 1"


@pytest.mark.parametrize("text", ["", "m", "-1s", "1.5s", "15 minutes", "1w", "9" * 5000])
def test_refused_delays(text: str) -> None:
    message = f"option maxTriggerDelay={text} must be a duration like 15m, 30s or 500ms"
    assert refusal({"maxTriggerDelay": text}, streaming=True) == message


def test_the_least_of_a_micro_batch_is_not_above_the_most() -> None:
    message = "option maxOffsetsPerTrigger=5 is below minOffsetsPerTrigger=6"
    assert refusal({"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, streaming=True) == message


@pytest.mark.parametrize(
    ("text", "mode"),
    [("true", "fail"), ("TRUE", "fail"), ("false", "warn"), ("False", "warn"), ("report", "report")],
)
def test_fail_on_data_loss(text: str, mode: str) -> None:
    assert batch(failOnDataLoss=text).on_data_loss == stream(failOnDataLoss=text).on_data_loss == mode


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"badRecords": "fail"}, BadRecordsOptions("fail")),
        ({"badRecords": "Skip"}, BadRecordsOptions("skip")),
        ({"badRecords": "deadletter", "badRecordsPath": "/a"}, BadRecordsOptions("deadletter", "/a")),
        ({"badRecords": "deadLetter", "badRecordsPath": "s3://B/p"}, BadRecordsOptions("deadletter", "s3://B/p")),
    ],
)
def test_bad_records(options: dict[str, str], expected: BadRecordsOptions) -> None:
    assert batch(**options).bad_records == stream(**options).bad_records == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failOnDataLoss": "yes"}, "option failOnDataLoss=yes must be one of true, false, report"),
        ({"failOnDataLoss": ""}, "option failOnDataLoss= must be one of true, false, report"),
        ({"badRecords": "drop"}, "option badRecords=drop must be one of fail, skip, deadletter"),
        (
            {"badRecords": "deadletter"},
            "option badRecords=deadletter needs either badRecordsPath or deadLetterTopic, and they need it",
        ),
        (
            {"badRecordsPath": "/x"},
            "option badRecords=deadletter needs either badRecordsPath or deadLetterTopic, and they need it",
        ),
        (
            {"badRecords": "skip", "badRecordsPath": "/x"},
            "option badRecords=deadletter needs either badRecordsPath or deadLetterTopic, and they need it",
        ),
    ],
)
def test_refused_choices(options: dict[str, str], message: str) -> None:
    assert refusal(options, streaming=False) == message
    assert refusal(options, streaming=True) == message


def test_how_often_offsets_are_asked_for() -> None:
    options = stream(**{"fetchOffset.numRetries": "0", "fetchOffset.retryIntervalMs": "0"})
    assert (options.offset_retries, options.offset_retry_ms) == (0, 0)
    options = batch(**{"fetchOffset.numRetries": "3", "fetchOffset.retryIntervalMs": "1000"})
    assert (options.offset_retries, options.offset_retry_ms) == (3, 1000)


def test_poll_timeout_is_not_that_of_requests() -> None:
    options = batch(**{"kafkaConsumer.pollTimeoutMs": "120000", "kafka.request.timeout.ms": "5"})
    assert (options.poll_timeout_ms, options.client["request.timeout.ms"]) == (120000, "5")
    assert batch(**{"kafka.request.timeout.ms": "5"}).poll_timeout_ms is None


def test_group_id_prefix_is_taken_and_has_no_effect() -> None:
    assert stream(groupIdPrefix="p") == stream()


CONNECT, TREE = "kafka.zookeeper.connect", "zookeeper://h:1/x"
GROUP = {"kafka.group.id": "g"}
COMMIT = {"commitOffsets": "true"}
STORAGE, DUAL = "kafka.offsets.storage", "kafka.dual.commit.enabled"


@pytest.mark.parametrize(
    ("options", "coordinator", "trees"),
    [
        ({}, True, ()),
        ({STORAGE: "kafka"}, True, ()),
        ({DUAL: "false"}, True, ()),
        ({CONNECT: "h:1/x"}, False, (TREE,)),
        ({CONNECT: "h:1/x", STORAGE: "zookeeper"}, False, (TREE,)),
        ({CONNECT: "h:1/x", STORAGE: "zookeeper", DUAL: "false"}, False, (TREE,)),
        ({CONNECT: "h:1/x", STORAGE: "zookeeper", DUAL: "true"}, True, (TREE,)),
        ({CONNECT: "h:1/x", STORAGE: "kafka"}, True, (TREE,)),
        ({CONNECT: "h:1/x", STORAGE: "kafka", DUAL: "TRUE"}, True, (TREE,)),
        ({CONNECT: "h:1/x", STORAGE: "kafka", DUAL: "false"}, True, ()),
        ({"offsetsPath": "/a/b"}, False, ("/a/b",)),
        ({"offsetsPath": "s3://B/p"}, False, ("s3://B/p",)),
        ({"offsetsPath": "/a", STORAGE: "kafka"}, True, ("/a",)),
        ({"offsetsPath": "/a", CONNECT: "h:1/x"}, False, ("/a", TREE)),
        ({"offsetsPath": "/a", CONNECT: "h:1/x", STORAGE: "kafka"}, True, ("/a", TREE)),
        ({"offsetsPath": "/a", CONNECT: "h:1/x", STORAGE: "kafka", DUAL: "false"}, True, ("/a",)),
    ],
)
def test_where_a_groups_offsets_are_kept(options: dict[str, str], coordinator: bool, trees: tuple[str, ...]) -> None:
    expected = GroupOffsetsOptions("g", coordinator, trees, dual=coordinator and TREE in trees)
    assert stream(**GROUP, **COMMIT, **options).group_offsets == expected
    read_only = dataclasses.replace(expected, commits=None)
    assert batch(**GROUP, **options).group_offsets == read_only
    assert stream(**GROUP, startingOffsets="group", **options).group_offsets == read_only


@pytest.mark.parametrize("commit", [None, "false"])
def test_a_group_alone_commits_nothing(commit: str | None) -> None:
    """With format("kafka") it never does: another application may use the group."""
    found = stream(**GROUP, **({} if commit is None else {"commitOffsets": commit})).group_offsets
    assert found is not None
    assert found.commits is (None if commit is None else False), "the reader tells a user who has not said it"


def test_a_path_alone_commits_nothing() -> None:
    for commit in ({}, {"commitOffsets": "false"}):
        found = refusal(GROUP | commit | {"offsetsPath": "/x"}, streaming=True)
        assert found == "option offsetsPath needs commitOffsets=true, to commit a query's progress there"


@pytest.mark.parametrize("options", [{}, {CONNECT: "h:1"}, {CONNECT: "h:1", DUAL: "true"}])
def test_without_a_group_nothing_is_kept(options: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spark_klog"):
        assert stream(**options).group_offsets is None
    why = "has no effect without kafka.group.id: offsets are stored per group"
    assert caplog.messages == [f"option {name} {why}" for name in options]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offsetsPath": "/x"}, "option offsetsPath needs kafka.group.id: offsets are stored per group"),
        ({STORAGE: "kafka"}, "option kafka.offsets.storage needs kafka.group.id: offsets are stored per group"),
        (GROUP | {STORAGE: "disk"}, "option kafka.offsets.storage=disk must be kafka or zookeeper"),
        (GROUP | {STORAGE: "zookeeper"}, "option kafka.offsets.storage=zookeeper needs kafka.zookeeper.connect"),
        (
            GROUP | {STORAGE: "zookeeper", "offsetsPath": "/x"},
            "option kafka.offsets.storage=zookeeper needs kafka.zookeeper.connect",
        ),
        (GROUP | {DUAL: "maybe"}, "option kafka.dual.commit.enabled=maybe must be true or false"),
    ],
)
def test_refused_group_offsets(options: dict[str, str], message: str) -> None:
    assert refusal(options, streaming=False) == message
    assert refusal(options | (COMMIT if "kafka.group.id" in options else {}), streaming=True) == message


def test_commits_need_a_group() -> None:
    message = "option commitOffsets needs kafka.group.id, the group whose offsets to commit"
    assert refusal(COMMIT, streaming=True) == message


def test_an_error_of_a_streams_options_is_not_hidden() -> None:
    """If `streamReader` raised the error, Spark's runner would hide it behind an UnboundLocalError of its own."""
    source = KlogDataSource({"kafka.bootstrap.servers": "h:1", "subscribe": "t", "endingOffsets": "latest"})
    reader = source.streamReader(source.schema())
    try:
        for ask in (
            reader.initialOffset,
            reader.getDefaultReadLimit,
            lambda: reader.latestOffset({}, ReadAllAvailable()),
            lambda: reader.partitions({}, {"t": {"0": 1}}),  # pyspark 4.0 and 4.1 call it first after a kill
        ):
            with pytest.raises(ConfigError, match="option endingOffsets is for batch queries"):
                ask()
    finally:
        reader.stop()
