"""Options by tables: what is taken, and each that is refused, by its name and message."""

from __future__ import annotations

import re

import pytest

from spark_klog.errors import ConfigError
from spark_klog.spark.offsets import OffsetSpec
from spark_klog.spark.options import (
    GroupOffsetsOptions,
    Subscription,
    include_headers,
    sink_options,
    source_options,
)

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
BASE = SERVERS | {"subscribe": "t"}


def test_defaults() -> None:
    batch, stream = source_options(BASE, streaming=False), source_options(BASE, streaming=True)
    assert (batch.starting, batch.ending) == (OffsetSpec(-2), OffsetSpec(-1))
    assert stream.starting == OffsetSpec(-1)
    assert batch.fail_on_data_loss
    assert batch.max_offsets_per_trigger is None
    assert batch.group_offsets is None
    assert batch.client == {"bootstrap.servers": "127.0.0.1:9092"}
    assert sink_options(SERVERS).topic is None


@pytest.mark.parametrize(
    ("options", "subscription"),
    [
        ({"subscribe": "a"}, Subscription(topics=("a",))),
        ({"subscribe": " a ,b,, a"}, Subscription(topics=("a", "b"))),
        ({"SUBSCRIBE": "a"}, Subscription(topics=("a",))),
        ({"subscribePattern": "a.*"}, Subscription(pattern="a.*")),
        ({"subscribepattern": "a,b"}, Subscription(pattern="a,b")),
        ({"assign": '{"a":[1,0,1],"b":[2]}'}, Subscription(assign={"a": [0, 1], "b": [2]})),
    ],
)
def test_subscriptions(options: dict[str, str], subscription: Subscription) -> None:
    assert source_options(SERVERS | options, streaming=False).subscription == subscription


@pytest.mark.parametrize(
    ("options", "group_offsets"),
    [
        ({"kafka.group.id": "g"}, None),
        ({"kafka.zookeeper.connect": "h:1"}, None),
        (
            {"kafka.group.id": "g", "kafka.zookeeper.connect": "h:1/x"},
            GroupOffsetsOptions("g", "zookeeper://h:1/x"),
        ),
        ({"kafka.group.id": "g", "offsetsPath": "/a/b"}, GroupOffsetsOptions("g", "/a/b")),
        ({"kafka.group.id": "g", "offsetspath": "s3://b/p"}, GroupOffsetsOptions("g", "s3://b/p")),
    ],
)
def test_group_offsets(options: dict[str, str], group_offsets: GroupOffsetsOptions | None) -> None:
    assert source_options(BASE | options, streaming=True).group_offsets == group_offsets


def test_other_values() -> None:
    options = source_options(
        BASE
        | {
            "failOnDataLoss": "FALSE",
            "maxOffsetsPerTrigger": " 12 ",
            "kafka.isolation.level": "read_committed",
            "KAFKA.Fetch.Max.Bytes": "7",
            "path": "",
        },
        streaming=True,
    )
    assert not options.fail_on_data_loss
    assert options.max_offsets_per_trigger == 12
    assert options.client["isolation.level"] == "read_committed"
    assert options.client["fetch.max.bytes"] == "7"
    assert sink_options(SERVERS | {"topic": " t "}).topic == "t"


@pytest.mark.parametrize(("text", "wanted"), [("true", True), ("True", True), ("false", False)])
def test_include_headers(text: str, wanted: bool) -> None:
    assert include_headers({"includeheaders": text}) is wanted
    assert include_headers({"includeHeaders": text}) is wanted
    assert include_headers({}) is False


EXACTLY_ONE = "exactly one of the options assign, subscribe, subscribePattern is wanted: "
REFUSED_BY_BOTH = [
    ({"startingOffset": "earliest"}, "unknown option 'startingOffset'; did you mean startingOffsets?"),
    ({"asign": "x"}, "unknown option 'asign'; did you mean assign?"),
    ({"kafkabootstrap.servers": "x"}, "did you mean kafka.bootstrap.servers?"),
    ({"zzzzzzz": "1"}, "unknown option 'zzzzzzz'"),
    ({"path": "/x"}, "unknown option 'path'"),
    ({"kafka.nonsense": "1"}, "unknown client setting 'nonsense'; is it misspelt?"),
    ({"kafka.bootstrap.servers": "host"}, "bootstrap.servers: 'host' is not HOST:PORT"),
    ({"kafka.bootstrap.servers": ","}, "bootstrap.servers is empty"),
    ({"kafka.acks": "2"}, "acks=2: 0, 1, -1 or all is wanted"),
    ({"kafka.isolation.level": "x"}, "isolation.level=x: read_uncommitted or read_committed is wanted"),
    ({"kafka.request.timeout.ms": "0"}, "request.timeout.ms=0: a number above 0 is wanted"),
    ({"kafka.security.protocol": "SSL"}, "security.protocol=SSL is not supported yet"),
    ({"kafka.sasl.mechanism": "PLAIN"}, "sasl.mechanism: TLS and SASL are not supported yet"),
    ({"kafka.compression.type": "brotli"}, "brotli"),
    *(
        ({f"kafka.{name}": "x"}, f"option kafka.{name} can't be set: {why}")
        for name, why in [
            ("key.deserializer", "keys are binary"),
            ("value.deserializer", "values are binary"),
            ("key.serializer", "keys are binary or strings"),
            ("value.serializer", "values are binary or strings"),
            ("auto.offset.reset", "use startingOffsets and failOnDataLoss"),
            ("enable.auto.commit", "Spark's checkpoint is the truth"),
            ("interceptor.classes", "there are none"),
        ]
    ),
    *(
        ({name: "1"}, f"option {name} is not supported yet")
        for name in [
            "startingTimestamp",
            "endingTimestamp",
            "startingOffsetsByTimestamp",
            "endingOffsetsByTimestamp",
            "startingOffsetsByTimestampStrategy",
            "minOffsetsPerTrigger",
            "maxTriggerDelay",
            "minPartitions",
            "maxRecordsPerPartition",
            "groupIdPrefix",
            "fetchOffset.numRetries",
            "fetchOffset.retryIntervalMs",
            "kafkaConsumer.pollTimeoutMs",
        ]
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_BY_BOTH)
def test_refused_by_source_and_sink(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        source_options(BASE | options, streaming=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        source_options(BASE | options, streaming=True)
    with pytest.raises(ConfigError, match=re.escape(message)):
        sink_options(SERVERS | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, EXACTLY_ONE + "none is set"),
        ({"subscribe": "t", "assign": '{"t":[0]}'}, EXACTLY_ONE + "assign and subscribe exclude each other"),
        (
            {"subscribe": "t", "subscribePattern": "t"},
            EXACTLY_ONE + "subscribe and subscribePattern exclude each other",
        ),
        ({"subscribe": " , "}, "option subscribe=' , ' names no topic"),
        ({"subscribePattern": "("}, "option subscribePattern='(' is no regular expression"),
        ({"assign": "t"}, "option assign='t' is no JSON"),
        ({"assign": "[]"}, "option assign='[]': a JSON object by topic is wanted"),
        ({"assign": '{"t":[]}'}, "option assign: a list of partitions is wanted for topic t"),
        ({"assign": '{"t":[-1]}'}, "option assign: a list of partitions is wanted for topic t"),
        ({"assign": '{"t":["0"]}'}, "option assign: a list of partitions is wanted for topic t"),
        ({"subscribe": "t", "topic": "t"}, "option topic is for writing"),
        ({"subscribe": "t", "failOnDataLoss": "yes"}, "option failOnDataLoss=yes: true or false is wanted"),
        (
            {"subscribe": "t", "maxOffsetsPerTrigger": "0"},
            "option maxOffsetsPerTrigger=0: a number above 0 is wanted",
        ),
        (
            {"subscribe": "t", "maxOffsetsPerTrigger": "1k"},
            "option maxOffsetsPerTrigger=1k: a number above 0 is wanted",
        ),
        ({"subscribe": "t", "startingOffsets": "first"}, "option startingOffsets='first': earliest, latest or"),
        ({"subscribe": "t", "endingOffsets": "earliest"}, "endingOffsets"),
        ({"subscribe": "t", "offsetsPath": "/x"}, "option offsetsPath needs kafka.group.id"),
        (
            {
                "subscribe": "t",
                "offsetsPath": "/x",
                "kafka.group.id": "g",
                "kafka.zookeeper.connect": "h:1",
            },
            "options offsetsPath and kafka.zookeeper.connect exclude each other",
        ),
    ],
)
def test_refused_by_the_source(options: dict[str, str], message: str) -> None:
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=re.escape(message)):
            source_options(SERVERS | options, streaming=streaming)


@pytest.mark.parametrize(
    ("streaming", "options", "message"),
    [
        (False, {"startingOffsets": "latest"}, "option startingOffsets can't be latest (-1) in a batch query"),
        (False, {"startingOffsets": '{"t":{"0":-1}}'}, "option startingOffsets can't be latest (-1)"),
        (False, {"endingOffsets": '{"t":{"0":-2}}'}, "option endingOffsets can't be earliest (-2)"),
        (True, {"endingOffsets": "latest"}, "option endingOffsets is for batch queries"),
    ],
)
def test_refused_in_one_kind_of_query(streaming: bool, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        source_options(BASE | options, streaming=streaming)


def test_no_servers() -> None:
    with pytest.raises(ConfigError, match=r"option kafka\.bootstrap\.servers is not set"):
        source_options({"subscribe": "t"}, streaming=False)
    with pytest.raises(ConfigError, match=r"option kafka\.bootstrap\.servers is not set"):
        sink_options({})


def test_what_spark_hands_to_a_streaming_sink_is_taken() -> None:
    options = sink_options(SERVERS | {"topic": "t", "checkpointlocation": "/x", "queryName": "q"})
    assert (options.topic, options.client) == ("t", {"bootstrap.servers": "127.0.0.1:9092"})


@pytest.mark.parametrize(
    "name",
    [
        "assign",
        "subscribe",
        "subscribePattern",
        "startingOffsets",
        "endingOffsets",
        "failOnDataLoss",
        "maxOffsetsPerTrigger",
    ],
)
def test_reading_options_are_refused_by_the_sink(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option {name} is for reading"):
        sink_options(SERVERS | {name: "x"})
