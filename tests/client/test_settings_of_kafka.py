"""The client applies, ignores, or rejects with a reason every setting of Kafka's own clients."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest

from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.settings import RESET, consumer_config
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config, without_effect
from spark_klog.errors import ConfigError, ErrorCode, RecordTooLargeToSend, RequestTimedOut
from tests.support.brokers.faults import error
from tests.support.brokers.kafka_python_wire import read_records
from tests.support.brokers.model_cluster import Fate, ModelCluster
from tests.support.brokers.scripted_broker import ScriptedCluster

#: Rejected, as the client would do something else than the setting asks for.
REFUSED = {"config.providers"}
JAVAS = "org.apache.kafka.clients.producer"
SERVERS = {"bootstrap.servers": "h:1"}


@pytest.mark.parametrize(
    ("librdkafkas", "kafkas"),
    [("fetch.wait.max.ms", "fetch.max.wait.ms"), ("message.timeout.ms", "delivery.timeout.ms")],
)
def test_names_of_librdkafka_are_told_by_kafkas(librdkafkas: str, kafkas: str) -> None:
    """`make check` compares all names with those that Kafka and kcat list."""
    with pytest.raises(ConfigError, match=f"it is librdkafka's, Kafka's name for it is {re.escape(kafkas)}$"):
        client_config(SERVERS | {librdkafkas: "x"})


def test_names_that_kafka_does_not_have() -> None:
    with pytest.raises(ConfigError, match="remove it: it is not known to this version"):
        client_config(SERVERS | {"no.such.setting": "1"})
    with pytest.raises(ConfigError, match=re.escape("did you mean bootstrap.servers?")):
        client_config(SERVERS | {"bootstrap.server": "h:1"})


@pytest.mark.parametrize(("text", "wanted"), [("True", True), (" FALSE", False)])
def test_truth_is_taken_in_any_case(text: str, wanted: bool) -> None:
    """Kafka's ConfigDef ignores case, too."""
    assert client_config(SERVERS | {"enable.idempotence": text}).enable_idempotence is wanted


ZEROS = [
    "retry.backoff.ms",
    "retry.backoff.max.ms",
    "batch.size",
    "linger.ms",
    "buffer.memory",
    "max.request.size",
    "fetch.max.bytes",
    "max.partition.fetch.bytes",
    "reconnect.backoff.ms",
    "retries",
]


@pytest.mark.parametrize("name", ZEROS)
def test_zero_is_taken_where_kafka_takes_it(name: str) -> None:
    """Rows and records are still written and read, and no call spins."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.on("Fetch", error(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        with Cluster.connect({"bootstrap.servers": brokers.bootstrap_servers, name: "0"}) as cluster:
            producer = Producer.of_cluster(cluster)
            rows = pa.record_batch([pa.array([b"row"] * 5)], ["value"])
            is_refused = name in ("max.request.size", "buffer.memory")  # no record fits, as with Kafka
            with pytest.raises(RecordTooLargeToSend) if is_refused else nullcontext():
                producer.send_arrow(rows, "t")
            for _ in range(5):
                with pytest.raises(RecordTooLargeToSend) if is_refused else nullcontext():
                    producer.send("t", b"record")
            producer.flush()
            fetched = [bytes(read.data) for read in fetch_range(cluster, "t", 0, 0, 0 if is_refused else 10)]
        found = [value for data in fetched for _, _, value in read_records(data)]
        assert found == ([] if is_refused else [b"row"] * 5 + [b"record"] * 5)
        assert brokers.count("Fetch") < 50


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("request.timeout.ms", "0"),
        ("request.timeout.ms", "2147483648"),
        ("batch.size", "-1"),
        ("fetch.max.bytes", "1e6"),
        ("retry.backoff.ms", "9223372036854775808"),
        ("batch.size", "٣"),
    ],
)
def test_numbers_out_of_range_are_named_as_they_were_typed(name: str, text: str) -> None:
    for prefix in ("", "kafka."):
        with pytest.raises(ConfigError, match=rf"^{re.escape(prefix + name)}={text}: set a number from [01] to \d+$"):
            client_config(SERVERS | {name: text}, prefix)


def test_settings_are_named_as_they_were_typed() -> None:
    with pytest.raises(ConfigError, match=r"unknown client setting 'kafka\.aks'; did you mean kafka\.acks\?"):
        client_config(SERVERS | {"aks": "1"}, "kafka.")
    with ModelCluster(1, {"t": 1}, lambda node, keys: Fate(drop_before=True)) as brokers:
        settings = {"bootstrap.servers": brokers.servers, "delivery.timeout.ms": "200"}
        producer = Producer.of_cluster(Cluster.connect(settings, "kafka."))
        producer.send("t", b"a")
        with pytest.raises(RequestTimedOut, match=r"within 0\.2 s \(kafka\.delivery\.timeout\.ms\)"):
            producer.flush()
        producer.abort()


def test_what_has_no_effect_is_listed() -> None:
    given = SERVERS | {
        "metadata.max.idle.ms": "5",
        "send.buffer.bytes": "9",
        "request.timeout.ms": "7",
        "group.id": "g",
    }
    assert client_config(given).request_timeout_ms == 7
    assert without_effect(given) == ["metadata.max.idle.ms", "send.buffer.bytes"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_do_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {re.escape(name)}.* is not supported: "):
        client_config(SERVERS | {name: "true"})


def test_other_partitioners_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"partitioner\.class=com\.example\.Mine: set one of "):
        client_config(SERVERS | {"partitioner.class": "com.example.Mine"})
    with pytest.raises(ConfigError, match=r"kafka\.partitioner=mine: set one of consistent, "):
        client_config(SERVERS | {"partitioner": "mine"}, "kafka.")
    for name, value in [("partitioner.class", f"{JAVAS}.RoundRobinPartitioner"), ("partitioner.ignore.keys", "true")]:
        with pytest.raises(ConfigError, match=r"partitioner is librdkafka's, .*: set one of them"):
            client_config(SERVERS | {"partitioner": "murmur2", name: value})


def test_values_of_python() -> None:
    found = client_config(SERVERS | {"enable.idempotence": True, "acks": -1, "batch.size": 9, "client.id": 7})
    assert (found.enable_idempotence, found.acks, found.batch_size, found.client_id) == (True, -1, 9, "7")
    for servers in (["a:1", "b:2"], ("a:1", "b:2"), "a:1, b:2"):
        assert client_config({"bootstrap.servers": servers}).bootstrap_servers == (("a", 1), ("b", 2))


@pytest.mark.parametrize("name", ["bootstrap.servers", "client.rack", "group.id", "sasl.password", "client.id"])
@pytest.mark.parametrize("parse", [client_config, consumer_config])
def test_none_is_refused(name: str, parse: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(name)} is None: set a value, or leave the setting out$"):
        parse(SERVERS | {name: None})
    with pytest.raises(ConfigError, match=f"^{re.escape(name)} is of type bytes: "):
        parse(SERVERS | {name: b"s3kr1t"})


def test_a_scheme_before_a_host() -> None:
    for text in ("PLAINTEXT://h:1", "plaintext://h:1/", "EXTERNAL://h:1"):
        assert client_config({"bootstrap.servers": text}).bootstrap_servers == (("h", 1),)
    assert client_config({"bootstrap.servers": "SSL://[::1]:1", "security.protocol": "ssl"}).bootstrap_servers
    with pytest.raises(ConfigError, match=r"SSL://h:1 contradicts security\.protocol=PLAINTEXT: set SSL"):
        client_config({"bootstrap.servers": "SSL://h:1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("metadata.broker.list", "it is librdkafka's, Kafka's name for it is bootstrap.servers"),
        ("bootstrap_servers", "write bootstrap.servers"),
        ("kafka.bootstrap.servers", "write bootstrap.servers"),
        ("group_id", "write group.id"),
    ],
)
def test_names_are_checked_before_anything_is_missing(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown client setting '{name}'; {hint}"):
        client_config({name: ["h:1"]})


def test_librdkafkas_names_for_the_ends_of_a_log() -> None:
    for text, kafkas in [("smallest", "earliest"), ("beginning", "earliest"), ("largest", "latest"), ("end", "latest")]:
        assert RESET.parse(text) == RESET.parse(kafkas)
