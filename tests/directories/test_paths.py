"""Paths and payloads, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from uuid import UUID

import pytest

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.trees import paths
from spark_klog.trees.consumers import OffsetDirectory
from spark_klog.trees.memory import MemoryTree

TOPIC_ID = UUID(bytes=bytes(range(16)))


def test_paths() -> None:
    assert paths.broker_id_path(3) == "/brokers/ids/3"
    assert paths.topic_path("flights") == "/brokers/topics/flights"
    assert paths.partition_state_path("flights", 2) == "/brokers/topics/flights/partitions/2/state"
    assert paths.topic_config_path("flights") == "/config/topics/flights"
    assert paths.consumer_offset_path("g", "flights", 2) == "/consumers/g/offsets/flights/2"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\0b"])
def test_names_that_would_leave_their_folder(name: str) -> None:
    for make in (
        lambda: paths.topic_path(name),
        lambda: paths.topic_config_path(name),
        lambda: paths.partition_state_path(name, 0),
        lambda: paths.consumer_offset_path(name, "t", 0),
        lambda: paths.consumer_offset_path("g", name, 0),
    ):
        with pytest.raises(ConfigError, match="name"):
            make()


def plain(host: str, port: int) -> paths.Endpoint:
    return paths.Endpoint("PLAINTEXT", "PLAINTEXT", host, port)


# What Kafka writes, in the field order of its builds for Scala 2.12.
GOLDEN = {
    "broker": (
        paths.broker_payload([plain("10.0.0.7", 9092)], 1700000000123),
        b'{"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT"},"endpoints":["PLAINTEXT://10.0.0.7:9092"],'
        b'"jmx_port":-1,"host":"10.0.0.7","timestamp":"1700000000123","port":9092,"version":4}',
    ),
    "broker, SSL": (
        paths.broker_payload([paths.Endpoint("SSL", "SSL", "kafka", 9093)], 1),
        b'{"listener_security_protocol_map":{"SSL":"SSL"},"endpoints":["SSL://kafka:9093"],'
        b'"jmx_port":-1,"host":null,"timestamp":"1","port":-1,"version":4}',
    ),
    "broker, IPv6": (
        paths.broker_payload([plain("::1", 9092)], 1),
        b'{"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT"},"endpoints":["PLAINTEXT://[::1]:9092"],'
        b'"jmx_port":-1,"host":"::1","timestamp":"1","port":9092,"version":4}',
    ),
    "broker, several listeners": (
        paths.broker_payload([paths.Endpoint("OUT", "SASL_SSL", "kafka", 9093), plain("::1", 9092)], 1),
        b'{"listener_security_protocol_map":{"OUT":"SASL_SSL","PLAINTEXT":"PLAINTEXT"},'
        b'"endpoints":["OUT://kafka:9093","PLAINTEXT://[::1]:9092"],'
        b'"jmx_port":-1,"host":"::1","timestamp":"1","port":9092,"version":4}',
    ),
    "topic": (
        paths.topic_payload({1: [1, 0], 0: [0, 1]}, TOPIC_ID),
        b'{"removing_replicas":{},"partitions":{"0":[0,1],"1":[1,0]},"topic_id":"AAECAwQFBgcICQoLDA0ODw",'
        b'"adding_replicas":{},"version":3}',
    ),
    "topic, no id": (
        paths.topic_payload({0: [0]}, None),
        b'{"version":2,"partitions":{"0":[0]},"adding_replicas":{},"removing_replicas":{}}',
    ),
    "deletion": (
        paths.deletion_payload(TOPIC_ID, {2, 0}),
        b'{"version":1,"topic_id":"AAECAwQFBgcICQoLDA0ODw","dropped":[0,2]}',
    ),
    "state": (
        paths.partition_state_payload(1, [1, 2], controller_epoch=1, leader_epoch=4),
        b'{"controller_epoch":1,"leader":1,"version":1,"leader_epoch":4,"isr":[1,2]}',
    ),
    "config": (
        paths.topic_config_payload({"retention.ms": "1000", "cleanup.policy": "compact"}),
        b'{"version":1,"config":{"cleanup.policy":"compact","retention.ms":"1000"}}',
    ),
    "cluster": (
        paths.cluster_id_payload("CIk0VgqRQx-D19YbArZDBA"),
        b'{"version":"1","id":"CIk0VgqRQx-D19YbArZDBA"}',
    ),
    "offset": (paths.offset_payload(1234), b"1234"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_payloads(name: str) -> None:
    ours, kafkas = GOLDEN[name]
    assert ours == kafkas


def test_what_kafka_3_9_1_wrote() -> None:
    """Captured from a broker with ZooKeeper (built for Scala 2.13)."""
    broker = (
        b'{"features":{},"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT"},'
        b'"endpoints":["PLAINTEXT://127.0.0.1:23485"],"jmx_port":-1,"port":23485,"host":"127.0.0.1","version":5,'
        b'"timestamp":"1795246742308"}'
    )
    topic = (
        b'{"partitions":{"0":[1],"1":[1]},"topic_id":"CkfewmLgQm2h3rKxNenmgQ","adding_replicas":{},'
        b'"removing_replicas":{},"version":3}'
    )
    state = b'{"controller_epoch":1,"leader":1,"version":1,"leader_epoch":0,"isr":[1]}'
    assert paths.parse_broker(broker) == [plain("127.0.0.1", 23485)]
    assert paths.parse_topic(topic) == ({0: [1], 1: [1]}, UUID("0a47dec2-62e0-426d-a1de-b2b135e9e681"))
    assert paths.partition_state_payload(1, [1], controller_epoch=1) == state
    assert paths.parse_partition_state(state) == paths.PartitionState(1, [1], 1, 0)


def test_older_versions_are_read() -> None:
    first = b'{"jmx_port":-1,"timestamp":"1","host":"h","version":1,"port":9092}'
    ssl = b'{"endpoints":["SSL://h:9093"],"host":null,"port":-1,"version":2}'
    assert paths.parse_broker(first) == [plain("h", 9092)]
    assert paths.parse_broker(ssl) == [paths.Endpoint("SSL", "SSL", "h", 9093)]
    assert paths.parse_topic(b'{"version":1,"partitions":{"0":[1,2]}}') == ({0: [1, 2]}, None)
    assert paths.parse_topic(GOLDEN["topic, no id"][0]) == ({0: [0]}, None)


def test_listeners_have_their_protocols() -> None:
    payload = (
        b'{"listener_security_protocol_map":{"OUT":"SSL","IN":"PLAINTEXT"},'
        b'"endpoints":["OUT://a:1","IN://[::1]:2"],"host":null,"port":-1,"version":4}'
    )
    assert paths.parse_broker(payload) == [
        paths.Endpoint("OUT", "SSL", "a", 1),
        paths.Endpoint("IN", "PLAINTEXT", "::1", 2),
    ]


def test_the_features_of_a_broker() -> None:
    """A registration that names none is of an earlier version, ours or Kafka's."""
    ours = (
        b'{"features":{"transaction.version":{"min_version":1,"max_version":2}},'
        b'"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT"},"endpoints":["PLAINTEXT://h:9092"],"jmx_port":-1,'
        b'"host":"h","timestamp":"1","port":9092,"version":5}'
    )
    assert paths.broker_payload([plain("h", 9092)], 1, 2) == ours
    assert paths.parse_broker(ours) == [plain("h", 9092)]
    assert paths.parse_transaction_version(ours) == 2
    none = (b"{}", b'{"features":{}}', b'{"features":1}', b'{"features":{"transaction.version":{"max_version":"2"}}}')
    assert [paths.parse_transaction_version(payload) for payload in none] == [0] * len(none)


def test_round_trips() -> None:
    endpoints = [plain("::1", 9092), paths.Endpoint("OUT", "SASL_SSL", "::1", 9093)]
    assert paths.parse_broker(paths.broker_payload(endpoints, 1)) == endpoints
    assert paths.parse_topic(GOLDEN["topic"][0]) == ({0: [0, 1], 1: [1, 0]}, TOPIC_ID)
    assert paths.parse_deletion(GOLDEN["deletion"][0]) == (TOPIC_ID, {0, 2})
    assert paths.parse_topic_config(paths.topic_config_payload({"a": "ü"})) == {"a": "ü"}
    assert paths.parse_cluster_id(paths.cluster_id_payload("x")) == "x"
    assert paths.parse_offset(paths.offset_payload(2**63 - 1)) == 2**63 - 1
    assert paths.parse_offset(b"12\n") == 12


MALFORMED: list[tuple[Callable[..., object], list[bytes]]] = [
    (
        paths.parse_broker,
        [
            b"{}",
            b'{"host":"h"}',
            b'{"host":"h","port":0}',
            b'{"endpoints":[1]}',
            b'{"endpoints":[]}',
            b'{"endpoints":["PLAINTEXT://h"]}',
            b'{"endpoints":["PLAINTEXT://h:99999999999999999999"]}',
            b'{"endpoints":["PLAINTEXT://:9092"]}',
        ],
    ),
    (
        paths.parse_topic,
        [
            b"{}",
            b'{"version":4,"partitions":{}}',
            b'{"version":[],"partitions":{}}',
            b'{"version":3}',
            b'{"version":3,"partitions":{"x":[1]}}',
            b'{"version":3,"partitions":{"-1":[1]}}',
            b'{"version":3,"partitions":{"99999999999":[1]}}',
            b'{"version":3,"partitions":{"0":[true]}}',
            b'{"version":3,"partitions":{"0":1}}',
            b'{"version":3,"partitions":{},"topic_id":"short"}',
            b'{"version":3,"partitions":{},"topic_id":7}',
        ],
    ),
    (
        paths.parse_partition_state,
        [
            b"{}",
            b'{"leader":1,"controller_epoch":0,"leader_epoch":0}',
            b'{"leader":"1","controller_epoch":0,"leader_epoch":0,"isr":[]}',
        ],
    ),
    (
        paths.parse_deletion,
        [b"{}", b'{"dropped":[]}', b'{"topic_id":"short","dropped":[]}', GOLDEN["deletion"][0].replace(b"0,", b"{},")],
    ),
    (paths.parse_topic_config, [b"{}", b'{"version":1,"config":[]}', b'{"version":1,"config":{"a":1}}']),
    (paths.parse_cluster_id, [b"{}", b'{"id":1}', b'{"id":""}']),
]


@pytest.mark.parametrize("parse", [parse for parse, _ in MALFORMED])
def test_malformed_payloads_name_the_path(parse: Callable[..., object]) -> None:
    everywhere = [b"", b"\xff", b"[]", b"1", b"null", b"{", b"[" * 100_000, b'{"a":' * 100_000]
    for payload in [*everywhere, *dict(MALFORMED)[parse]]:
        with pytest.raises(DecodeError, match=r"^/here: ") as error:
            parse(payload, "/here")
        assert len(str(error.value)) < 1200


@pytest.mark.parametrize("payload", [b"", b"-1", b"1.5", b"x", b"9223372036854775808", b"1" * 5000, "\u0661".encode()])
def test_malformed_offsets(payload: bytes) -> None:
    with pytest.raises(DecodeError, match=r"^/here: "):
        paths.parse_offset(payload, "/here")


@pytest.mark.parametrize("offset", [-1, 2**63])
def test_offsets_out_of_range(offset: int) -> None:
    with pytest.raises(ConfigError, match=str(offset)):
        paths.offset_payload(offset)


def test_offset_directory() -> None:
    tree = MemoryTree()
    offsets = OffsetDirectory(tree, "g")
    offsets.commit({("flights", 0): 5, ("flights", 1): 0})
    assert tree.get("/consumers/g/offsets/flights/0") == b"5"
    wanted = [("flights", 0), ("flights", 1), ("flights", 2), ("other", 0)]
    assert offsets.fetch(wanted) == {("flights", 0): 5, ("flights", 1): 0}
    assert OffsetDirectory(tree, "h").fetch(wanted) == {}
    with pytest.raises(ConfigError):
        offsets.commit({("flights", 0): 6, ("flights", 1): -1})
    assert offsets.fetch([("flights", 0)]) == {("flights", 0): 5}  # a commit with a wrong offset writes nothing
    tree.put("/consumers/g/offsets/flights/0", b"five")
    with pytest.raises(DecodeError, match="/consumers/g/offsets/flights/0"):
        offsets.fetch([("flights", 0)])
    with pytest.raises(ConfigError):
        OffsetDirectory(tree, "a/b").fetch([("flights", 0)])


def test_the_room_loads_neither_kazoo_nor_pyarrow() -> None:
    script = (
        "import importlib, sys\n"
        "for name in 'tree zookeeper files opening memory'.split():\n"
        "    importlib.import_module('spark_klog.trees.' + name)\n"
        "import spark_klog.trees.consumers, spark_klog.trees.paths\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'kazoo', 'pyarrow', 'pyspark'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
