"""Tables of options: names, defaults, client settings, subscriptions, sink options, and messages of refusals.

test_options_of_reads.py tests the options of reads one by one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client.places import OffsetSpec
from spark_klog.errors import ConfigError
from spark_klog.schemas.json_schema.ddl import INFER
from spark_klog.spark.options import (
    BadRecordsOptions,
    SourceOptions,
    SplitLimits,
    Subscription,
    TriggerLimits,
    include_headers,
    source_formats,
    source_options,
)
from spark_klog.spark.write.sink_options import sink_options

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
BASE = SERVERS | {"subscribe": "t"}

#: Every option for reading only, except subscriptions, with a value that is valid in a batch query.
READING = {
    "startingTimestamp": "1",
    "startingOffsetsByTimestamp": '{"t":{"0":1}}',
    "startingOffsets": "earliest",
    "startingOffsetsByTimestampStrategy": "latest",
    "endingTimestamp": "1",
    "endingOffsetsByTimestamp": '{"t":{"0":1}}',
    "endingOffsets": "latest",
    "maxOffsetsPerTrigger": "1",
    "maxBytesPerTrigger": "1",
    "minOffsetsPerTrigger": "1",
    "maxTriggerDelay": "1s",
    "minPartitions": "1",
    "maxRecordsPerPartition": "1",
    "maxBytesPerPartition": "1",
    "failOnDataLoss": "false",
    "badRecords": "skip",
    "fetchOffset.numRetries": "1",
    "fetchOffset.retryIntervalMs": "1",
    "kafkaConsumer.pollTimeoutMs": "1",
    "groupIdPrefix": "p",
}
#: Options for reading that need another option.
READING_WITH_ANOTHER = {
    "badRecordsPath": {"badRecordsPath": "/x", "badRecords": "deadletter"},
    "deadLetterTopic": {"deadLetterTopic": "x", "badRecords": "deadletter"},
    "commitOffsets": {"commitOffsets": "true", "kafka.group.id": "g"},
    "offsetsPath": {"offsetsPath": "/x", "kafka.group.id": "g", "commitOffsets": "true"},
}


def test_defaults() -> None:
    expected: dict[str, Any] = {
        "client": {"bootstrap.servers": "127.0.0.1:9092"},
        "subscription": Subscription(topics=("t",)),
        "starting_option": "startingOffsets",
        "ending": OffsetSpec(-1),
        "ending_option": "endingOffsets",
        "on_data_loss": "fail",
        "trigger": TriggerLimits(None, None, None, 900_000),
        "split": SplitLimits(None, None, None),
        "bad_records": BadRecordsOptions("fail", None),
        "offset_retries": 5,
        "offset_retry_ms": 200,
        "group_offsets": None,
    }
    assert source_options(BASE, streaming=False) == SourceOptions(starting=OffsetSpec(-2), **expected)
    assert source_options(BASE, streaming=True) == SourceOptions(starting=OffsetSpec(-1), **expected)
    assert sink_options(SERVERS).topic is None
    assert sink_options(SERVERS).client == {"bootstrap.servers": "127.0.0.1:9092"}
    assert include_headers({}) is False


@pytest.mark.parametrize("change", [str.lower, str.upper, str.swapcase])
def test_names_in_any_case(change: Any) -> None:
    given = {
        "kafka.Bootstrap.servers": "h:1",
        "subscribePattern": "A.*",
        "startingTimestamp": "5",
        "maxRecordsPerPartition": "6",
        "badRecords": "SKIP",
        "failOnDataLoss": "Report",
        "fetchOffset.numRetries": "7",
        "kafka.group.id": "Group",
        "offsetsPath": "/A",
        "commitOffsets": "True",
    }
    plain = source_options(given, streaming=True)
    assert source_options({change(name): value for name, value in given.items()}, streaming=True) == plain
    assert (plain.client["group.id"], plain.subscription.pattern) == ("Group", "A.*")
    assert (plain.split.max_records, plain.on_data_loss, plain.offset_retries) == (6, "report", 7)
    assert sink_options({change("kafka.bootstrap.servers"): "h:1", change("topic"): "T"}).topic == "T"
    assert include_headers({change("includeHeaders"): "TRUE"})


@pytest.mark.parametrize(("text", "wanted"), [("true", True), ("True", True), ("false", False), ("FALSE", False)])
def test_include_headers(text: str, wanted: bool) -> None:
    assert include_headers({"includeHeaders": text}) is wanted
    assert source_options(BASE | {"includeHeaders": text}, streaming=False)


def test_include_headers_refuses() -> None:
    with pytest.raises(ConfigError, match=r"option includeHeaders=yes must be true or false"):
        include_headers({"includeHeaders": "yes"})


@pytest.mark.parametrize(
    ("options", "subscription"),
    [
        ({"subscribe": "a"}, Subscription(topics=("a",))),
        ({"subscribe": " a ,b,, a"}, Subscription(topics=("a", "b"))),
        ({"subscribePattern": "a.*"}, Subscription(pattern="a.*")),
        ({"subscribePattern": " a,b "}, Subscription(pattern="a,b")),
        ({"assign": '{"a":[1,0,1],"b":[2]}'}, Subscription(assign={"a": [0, 1], "b": [2]})),
    ],
)
def test_subscriptions(options: dict[str, str], subscription: Subscription) -> None:
    assert source_options(SERVERS | options, streaming=False).subscription == subscription
    assert source_options(SERVERS | options, streaming=True).subscription == subscription


EXACTLY_ONE = "set exactly one of the options assign, subscribe and subscribePattern; "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, EXACTLY_ONE + "none is set"),
        ({"subscribe": "t", "assign": '{"t":[0]}'}, EXACTLY_ONE + "found assign and subscribe"),
        (
            {"subscribe": "t", "subscribePattern": "t"},
            EXACTLY_ONE + "found subscribe and subscribePattern",
        ),
        ({"subscribe": " , "}, "option subscribe=' , ' names no topic"),
        ({"subscribePattern": "("}, "option subscribePattern='(' is not a regular expression"),
        ({"subscribePattern": " "}, "option subscribePattern is empty"),
        ({"assign": "t"}, "option assign='t' is not JSON"),
        ({"assign": '{"t":[0],"t":[1]}'}, """option assign='{"t":[0],"t":[1]}' has 't' twice in one object"""),
        ({"assign": "[]"}, "option assign='[]' must be a JSON object with one entry per topic"),
        ({"assign": "{}"}, "option assign='{}' must be a JSON object with one entry per topic"),
        ({"assign": '{"t":[]}'}, "option assign: topic t must have a list of partitions"),
        ({"assign": '{"t":0}'}, "option assign: topic t must have a list of partitions"),
        ({"assign": '{"t":[-1]}'}, "option assign: topic t must have a list of partitions"),
        ({"assign": '{"t":["0"]}'}, "option assign: topic t must have a list of partitions"),
        ({"assign": '{"t":[true]}'}, "option assign: topic t must have a list of partitions"),
        ({"subscribe": "t", "topic": "t"}, "option topic is for writing"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_refused_subscriptions(options: dict[str, str], message: str, streaming: bool) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        source_options(SERVERS | options, streaming=streaming)


def test_the_pattern_that_leaves_internal_topics_out() -> None:
    """As docs/recipes/exactly-once.md has it: a query must not read the decisions that it writes."""
    page = (Path(__file__).parents[2] / "docs" / "recipes" / "exactly-once.md").read_text()
    found = re.search(r"exclude names that begin with `__`, as in `([^`]+)`", page)
    assert found is not None
    subscription = source_options(SERVERS | {"subscribePattern": found[1]}, streaming=True).subscription
    names = ("clicks", "_a", "a__b", "__klog_decisions", "__consumer_offsets", "__transaction_state")
    assert [name for name in names if subscription.names(name, 0)] == ["clicks", "_a", "a__b"]


def test_client_settings_lose_their_prefix() -> None:
    given = {"kafka.isolation.level": "read_committed", "KAFKA.Fetch.Max.Bytes": "7", "kafka.max.poll.records": "5"}
    expected = {"isolation.level": "read_committed", "fetch.max.bytes": "7", "max.poll.records": "5"}
    expected["bootstrap.servers"] = "127.0.0.1:9092"
    assert source_options(BASE | given, streaming=True).client == expected
    assert sink_options(SERVERS | given).client == expected


REFUSED_BY_BOTH = [
    ({"startingOffset": "earliest"}, "unknown option 'startingOffset'; did you mean startingOffsets?"),
    ({"topics": "x"}, "unknown option 'topics'; did you mean subscribe (to read"),
    ({"asign": "x"}, "unknown option 'asign'; did you mean assign?"),
    ({"maxOffsetPerTrigger": "1"}, "unknown option 'maxOffsetPerTrigger'; did you mean maxOffsetsPerTrigger?"),
    ({"kafkabootstrap.servers": "x"}, "did you mean kafka.bootstrap.servers?"),
    ({"kafka.schema.registry.url": "http://h"}, "unknown option 'kafka.schema.registry.url': write schemaRegistryUrl"),
    (
        {"kafka.schema.registry.basic.auth.user.info": "env:LOGIN"},
        "unknown option 'kafka.schema.registry.basic.auth.user.info': write schemaRegistry.basic.auth.user.info",
    ),
    ({"sasl.mechanism": "PLAIN"}, "unknown option 'sasl.mechanism': write kafka.sasl.mechanism"),
    ({"kafka.metadata.broker.list": "x"}, "Kafka's name for it is kafka.bootstrap.servers"),
    ({"zzzzzzz": "1"}, "unknown option 'zzzzzzz'"),
    ({"kafka.nonsense": "1"}, "unknown client setting 'kafka.nonsense'; remove it: "),
    ({"kafka.bootstrap.servers": "host"}, "bootstrap.servers: 'host' is not HOST:PORT"),
    ({"kafka.bootstrap.servers": ","}, "bootstrap.servers is empty"),
    ({"kafka.acks": "2"}, "kafka.acks=2: set 0, 1, -1 or all"),
    ({"kafka.isolation.level": "x"}, "kafka.isolation.level=x: set read_uncommitted or read_committed"),
    ({"kafka.request.timeout.ms": "0"}, "kafka.request.timeout.ms=0: set a number from 1 to 2147483647"),
    ({"kafka.security.protocol": "TLS"}, "kafka.security.protocol=TLS: set PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL"),
    (
        {"kafka.sasl.mechanism": "PLAIN"},
        "kafka.sasl.mechanism is set, but kafka.security.protocol=PLAINTEXT uses no SASL",
    ),
    ({"kafka.compression.type": "brotli"}, "brotli"),
    *(
        ({f"kafka.{name}": "x"}, f"option kafka.{name} can't be set: {why}")
        for name, why in [
            ("key.deserializer", "keys are binary"),
            ("Value.Deserializer", "values are binary"),
            ("key.serializer", "keys are binary or strings"),
            ("value.serializer", "values are binary or strings"),
            ("auto.offset.reset", "use startingOffsets and failOnDataLoss"),
            ("enable.auto.commit", "a query's progress is in Spark's checkpoint"),
            ("interceptor.classes", "interceptors are not supported"),
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


def test_no_servers() -> None:
    with pytest.raises(ConfigError, match=r"option kafka\.bootstrap\.servers is required"):
        source_options({"subscribe": "t"}, streaming=False)
    with pytest.raises(ConfigError, match=r"option kafka\.bootstrap\.servers is required"):
        sink_options({})


def test_an_empty_path_is_what_load_without_one_gives() -> None:
    assert source_options(BASE | {"path": ""}, streaming=False) == source_options(BASE, streaming=False)
    assert sink_options(SERVERS | {"path": ""}) == sink_options(SERVERS)


def test_what_spark_hands_to_a_streaming_sink_is_taken() -> None:
    options = sink_options(SERVERS | {"topic": " t ", "checkpointlocation": "/x", "queryName": "q"})
    assert (options.topic, options.client) == ("t", {"bootstrap.servers": "127.0.0.1:9092"})


@pytest.mark.parametrize("topic", ["", " "])
def test_an_empty_topic_is_none(topic: str) -> None:
    assert sink_options(SERVERS | {"topic": topic}).topic is None


def test_options_of_the_sink() -> None:
    assert sink_options(SERVERS).create_topics is None
    assert sink_options(SERVERS | {"CREATETOPICS": "3"}).create_topics == 3
    assert sink_options(SERVERS | {"includeHeaders": "true"}) == sink_options(SERVERS)
    for options, message in [
        ({"createTopics": "0"}, "option createTopics=0 must be an integer of at least 1"),
        ({"createTopics": "2147483648"}, "option createTopics=2147483648 must be at most 2147483647"),
        ({"includeHeaders": "yes"}, "option includeHeaders=yes must be true or false"),
        ({"topic": "a b"}, "option topic: illegal topic name 'a b': 1 to 249 of a-z A-Z 0-9 . _ - are allowed$"),
        ({"topic": "a,b"}, "illegal topic name 'a,b': .*; to write to several topics add a column 'topic'"),
        ({"path": "clicks"}, "option path is for reading: set the option topic"),
    ]:
        with pytest.raises(ConfigError, match=message):
            sink_options(SERVERS | options)
    with pytest.raises(ConfigError, match="option createTopics is for writing"):
        source_options(BASE | {"createTopics": "3"}, streaming=False)


@pytest.mark.parametrize("name", ["kafka.acks", "kafka.linger.ms", "kafka.bootstrap.servers", "createTopics", "topic"])
@pytest.mark.parametrize("rest", ["\nkafka.sasl.password=hunter2", ", sasl.jaas.config=M required password='hunter2';"])
def test_a_password_pasted_into_another_option_is_not_shown(name: str, rest: str) -> None:
    with pytest.raises(ConfigError, match=f"^option {name} is not shown, as a password or another secret") as caught:
        sink_options(SERVERS | {name: f"1{rest}"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["assign", "subscribe", "subscribePattern", *READING, *READING_WITH_ANOTHER])
def test_reading_options_are_refused_by_the_sink(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option {re.escape(name)} is for reading"):
        sink_options(SERVERS | {name: READING.get(name, "x")})


def test_every_option_for_reading_is_taken() -> None:
    for options in [*({name: value} for name, value in READING.items()), *READING_WITH_ANOTHER.values()]:
        assert source_options(BASE | options, streaming=False)
        if not any(name.startswith("ending") for name in options):
            assert source_options(BASE | options, streaming=True)


def test_the_registry_of_a_named_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = tmp_path / "clusters.toml"
    clusters.write_text(
        '[prod]\nbootstrap.servers = "h:9092"\nschema.registry.url = "http://r:8081"\n'
        'schema.registry.basic.auth.user.info = "env:INFO"\n'
    )
    monkeypatch.setenv("KLOG_CONFIG", str(clusters))
    named = {"cluster": "prod", "subscribe": "clicks"}
    assert source_options(named, streaming=False).client == {"bootstrap.servers": "h:9092"}
    for options in (named, named | {"schemaRegistryUrl": "http://r:8081"}):
        (form,) = source_formats(options | {"valueFormat": "avro"})
        assert form.registry is not None
        assert form.registry.settings == {"url": "http://r:8081", "basic.auth.user.info": "env:INFO"}
    with pytest.raises(ConfigError, match=r"schemaRegistryUrl and schema\.registry\.url of the cluster differ"):
        source_formats(named | {"valueFormat": "avro", "schemaRegistryUrl": "http://other:8081"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"valueFormat": "jsonschema"}, "must be one of avro, protobuf, json-schema, json; did you mean json-schema?"),
        ({"valueFormat": "JSON_SCHEMA"}, "did you mean json-schema?"),
        (
            {"keyFormat": "JSON"},
            "keyFormat=json needs keySchema: its fields as DDL, 'id bigint, at timestamp', or infer",
        ),
        ({"valueFormat": "json", "valueSchema": "a int", "valueSubject": "s"}, "valueSubject needs schemaRegistryUrl"),
        ({"valueFormat": "avro", "valueSchema": "/a b/c.avsc"}, "valueSchema=/a b/c.avsc looks like a file's name"),
        ({"keyFormat": "protobuf", "keySchema": "order.proto"}, "keySchema=order.proto looks like a file's name"),
        ({"valueFormat": "avro", "valueSchema": "s3://b/c"}, "must be the text of the schema: read the file"),
        ({"valueFormat": "avro", "valueSchema": "Infer"}, "valueSchema=Infer is for valueFormat=json: give avro the"),
        ({"keyFormat": "json-schema", "keySchema": "infer"}, "keySchema=infer is for keyFormat=json: give json-schema"),
    ],
)
def test_wrong_formats_and_schemas(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        source_formats(BASE | options)


def test_infer_in_any_case() -> None:
    (form,) = source_formats(BASE | {"valueFormat": "json", "valueSchema": " Infer"})
    assert form.text == INFER


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("avro", "string"),
        ("avro", '{"type": "record", "name": "a.b", "fields": [], "doc": "see http://x/y.json"}'),
        ("protobuf", '// a/b.proto\nsyntax = "proto3"; message M { int32 a = 1; }'),
        ("json-schema", "true"),
    ],
)
def test_texts_of_schemas_are_no_files(form: str, text: str) -> None:
    (found,) = source_formats(BASE | {"valueFormat": form, "valueSchema": text})
    assert found.text == text
