"""Topics, settings, partitions, records and the cluster through third-party admin clients and tools.

What one client sets the others must see; wrong values must return the errors that Kafka has for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kafka.admin as kafka_python
import pytest
from confluent_kafka import (
    ElectionType,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition as ConfluentPartition,
)
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic
from kafka.errors import InvalidReplicationAssignmentError, UnsupportedVersionError
from kafka.structs import TopicPartition

from spark_klog.embedded import EmbeddedCluster
from tests.support.servers.java_tools import JavaTools
from tests.support.servers.kafka import HOST, NEWEST, Version

TOPICS, CONFIGS = "org.apache.kafka.tools.TopicCommand", "kafka.admin.ConfigCommand"
DELETE_RECORDS, LOG_DIRS = "org.apache.kafka.tools.DeleteRecordsCommand", "org.apache.kafka.tools.LogDirsCommand"
OFFSETS = "org.apache.kafka.tools.GetOffsetShell"
ELECTION, QUORUM = "org.apache.kafka.tools.LeaderElectionCommand", "org.apache.kafka.tools.MetadataQuorumCommand"
REASSIGN = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
METRICS = "org.apache.kafka.tools.ClientMetricsCommand"
_SECONDS = 30


@pytest.fixture(scope="module")
def confluent(cluster: EmbeddedCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap_servers})


@pytest.fixture(scope="module")
def python_admin(cluster: EmbeddedCluster) -> Iterator[kafka_python.KafkaAdminClient]:
    with closing(kafka_python.KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        yield admin


@pytest.fixture(
    scope="module",
    params=[NEWEST, *(pytest.param(old, marks=pytest.mark.test_all("version")) for old in ("4.1.0", "3.9.1"))],
)
def tools(request: pytest.FixtureRequest) -> Iterator[JavaTools]:
    version: Version = request.param
    with JavaTools(version) as running:
        yield running


@pytest.fixture
def tool(tools: JavaTools, cluster: EmbeddedCluster) -> Callable[..., str]:
    """Run a tool against the cluster and return its output; with `fails` it must exit with an error."""

    def run(name: str, *arguments: str, fails: bool = False) -> str:
        code, told = tools.run(name, "--bootstrap-server", cluster.bootstrap_servers, *arguments)
        assert (code != 0) == fails, told
        return told

    return run


@pytest.fixture
def made(confluent: AdminClient, topic: str) -> str:
    """A topic of two partitions."""
    _done(confluent.create_topics([NewTopic(topic, 2, 1)]))
    return topic


def _done(futures: dict[Any, Any]) -> list[Any]:
    return [future.result(_SECONDS) for future in futures.values()]


def _error(futures: dict[Any, Any]) -> int:
    with pytest.raises(KafkaException) as caught:
        _done(futures)
    code: int = caught.value.args[0].code()
    return code


def _settings(confluent: AdminClient, topic: str) -> dict[str, ConfigEntry]:
    (entries,) = _done(confluent.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))
    found: dict[str, ConfigEntry] = entries
    return found


def _produce(cluster: EmbeddedCluster, topic: str, count: int, partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=partition)
    assert producer.flush(_SECONDS) == 0


def _set(topic: str, *changes: tuple[str, str | None, AlterConfigOpType]) -> list[ConfigResource]:
    entries = [ConfigEntry(name, value, incremental_operation=kind) for name, value, kind in changes]
    return [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)]


def test_settings_of_confluent(confluent: AdminClient, topic: str) -> None:
    settings = {"retention.ms": "7000", "min.insync.replicas": "2", "compression.type": "producer"}
    _done(confluent.create_topics([NewTopic(topic, 1, 1, config=settings)]))
    found = _settings(confluent, topic)
    assert {name: found[name].value for name in settings} == settings
    assert found["retention.ms"].source == 1  # the topic's own
    assert found["segment.bytes"].source == 5  # the default
    operations = AlterConfigOpType
    changes = _set(
        topic,
        ("retention.ms", None, operations.DELETE),
        ("cleanup.policy", "compact", operations.APPEND),
        ("max.message.bytes", "2000", operations.SET),
    )
    _done(confluent.incremental_alter_configs(changes, validate_only=True))
    assert _settings(confluent, topic)["retention.ms"].value == "7000"
    _done(confluent.incremental_alter_configs(changes))
    found = _settings(confluent, topic)
    assert {name: found[name].value for name in ("retention.ms", "cleanup.policy", "max.message.bytes")} == {
        "retention.ms": "-1",
        "cleanup.policy": "delete,compact",
        "max.message.bytes": "2000",
    }
    _done(confluent.incremental_alter_configs(_set(topic, ("cleanup.policy", "delete", operations.SUBTRACT))))
    assert _settings(confluent, topic)["cleanup.policy"].value == "compact"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compression.type", "brotli"),
        ("retention.ms", "soon"),
        ("retention.ms", "1_000"),
        ("segment.bytes", str(2**31)),
        ("segment.bytes", "10"),
        ("segment.bytes", str(2**20 - 1)),
        ("retention.ms", str(2**63)),
        ("max.message.bytes", "-1"),
        ("cleanup.policy", "keep"),
        ("min.cleanable.dirty.ratio", "2"),
        ("message.timestamp.type", "Never"),
        ("no.such.setting", "1"),
    ],
)
def test_settings_that_are_refused(confluent: AdminClient, made: str, name: str, value: str) -> None:
    new = NewTopic(f"{made}-new", 1, 1, config={name: value})
    assert _error(confluent.create_topics([new])) == KafkaError.INVALID_CONFIG
    assert f"{made}-new" not in confluent.list_topics(timeout=_SECONDS).topics
    change = _set(made, (name, value, AlterConfigOpType.SET))
    assert _error(confluent.incremental_alter_configs(change)) == KafkaError.INVALID_CONFIG
    assert _settings(confluent, made)["retention.ms"].value == "-1"


def test_errors_that_confluent_gets(confluent: AdminClient, made: str) -> None:
    missing = f"{made}-missing"
    partition = AlterConfigOpType.SET
    resource = ConfigResource(ResourceType.TOPIC, missing)
    assert _error(confluent.create_topics([NewTopic(made, 1, 1)])) == KafkaError.TOPIC_ALREADY_EXISTS
    assert _error(confluent.create_topics([NewTopic("bad name", 1, 1)])) == KafkaError.TOPIC_EXCEPTION
    assert _error(confluent.create_topics([NewTopic(missing, 100_000, 1)])) == KafkaError.INVALID_PARTITIONS
    assert _error(confluent.create_topics([NewTopic(missing, 1, 2)])) == KafkaError.INVALID_REPLICATION_FACTOR
    wrong = NewTopic(missing, 1, replica_assignment=[[7]])
    assert _error(confluent.create_topics([wrong])) == KafkaError.INVALID_REPLICA_ASSIGNMENT
    assert _error(confluent.describe_configs([resource])) == KafkaError.UNKNOWN_TOPIC_OR_PART
    change = _set(missing, ("retention.ms", "1", partition))
    assert _error(confluent.incremental_alter_configs(change)) == KafkaError.UNKNOWN_TOPIC_OR_PART
    broker = ConfigResource(
        ResourceType.BROKER, "0", incremental_configs=[ConfigEntry("a", "b", incremental_operation=partition)]
    )
    assert _error(confluent.incremental_alter_configs([broker])) == KafkaError.INVALID_REQUEST
    assert _error(confluent.create_partitions([NewPartitions(made, 1)])) == KafkaError.INVALID_PARTITIONS
    assert _error(confluent.create_partitions([NewPartitions(missing, 2)])) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert _error(confluent.delete_topics([missing])) == KafkaError.UNKNOWN_TOPIC_OR_PART
    far = confluent.delete_records([ConfluentPartition(made, 0, 99)])
    assert _error(far) == KafkaError.OFFSET_OUT_OF_RANGE
    _done(confluent.incremental_alter_configs(_set(made, ("cleanup.policy", "compact", partition))))
    assert _error(confluent.delete_records([ConfluentPartition(made, 0, 0)])) == KafkaError.POLICY_VIOLATION


def test_names_that_collide(cluster: EmbeddedCluster, confluent: AdminClient, made: str) -> None:
    """Kafka's metrics do not distinguish '.' and '_', so a second such topic is refused, however it is created."""
    one, other = f"{made}.a_b", f"{made}_a.b"
    _done(confluent.create_topics([NewTopic(one, 1, 1)]))
    assert _error(confluent.create_topics([NewTopic(other, 1, 1)])) == KafkaError.TOPIC_EXCEPTION
    with pytest.raises(KafkaException, match=f"'{other}' collides with existing topics: {one}") as refused:
        confluent.create_topics([NewTopic(other, 1, 1)], validate_only=True)[other].result(_SECONDS)
    assert refused.value.args[0].code() == KafkaError.TOPIC_EXCEPTION
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "message.timeout.ms": 20_000})
    producer.produce(other, b"x", on_delivery=lambda error, _: failed.append(error))
    producer.flush(30)
    assert [error.code() for error in failed] == [KafkaError.TOPIC_EXCEPTION]
    assert _error(confluent.create_topics([NewTopic(one, 1, 1)])) == KafkaError.TOPIC_ALREADY_EXISTS
    assert other not in confluent.list_topics(timeout=_SECONDS).topics


def test_partitions_records_and_the_cluster(cluster: EmbeddedCluster, confluent: AdminClient, made: str) -> None:
    _done(confluent.create_partitions([NewPartitions(made, 5)], validate_only=True))
    assert len(confluent.list_topics(made, timeout=_SECONDS).topics[made].partitions) == 2
    _done(confluent.create_partitions([NewPartitions(made, 5)]))
    (described,) = _done(confluent.describe_topics(TopicCollection([made])))
    assert [(entry.id, entry.leader.id, [node.id for node in entry.isr]) for entry in described.partitions] == [
        (index, 0, [0]) for index in range(5)
    ]
    _produce(cluster, made, 10, partition=4)
    (deleted,) = _done(confluent.delete_records([ConfluentPartition(made, 4, 6)]))
    assert deleted.low_watermark == 6
    found = {}
    for name, spec in (("earliest", OffsetSpec.earliest()), ("latest", OffsetSpec.latest())):
        (offset,) = _done(confluent.list_offsets({ConfluentPartition(made, 4): spec}))
        found[name] = offset.offset
    assert found == {"earliest": 6, "latest": 10}
    nodes = confluent.describe_cluster().result(_SECONDS)
    port = int(cluster.bootstrap_servers.rpartition(":")[2])
    assert [(node.id, node.host, node.port) for node in nodes.nodes] == [(0, HOST, port)]
    assert (len(nodes.cluster_id), nodes.controller.id) == (22, 0)


def test_the_broker_described(confluent: AdminClient, cluster: EmbeddedCluster) -> None:
    (entries,) = _done(confluent.describe_configs([ConfigResource(ResourceType.BROKER, "0")]))
    assert (entries["log.retention.ms"].value, entries["log.retention.ms"].source) == ("-1", 4)
    assert entries["num.partitions"].source == 5
    assert all(entry.is_read_only for entry in entries.values())


def test_kafka_python_and_confluent_see_the_same(
    python_admin: kafka_python.KafkaAdminClient, confluent: AdminClient, cluster: EmbeddedCluster, topic: str
) -> None:
    python_admin.create_topics({topic: {"num_partitions": 2, "configs": {"retention.ms": "9000"}}})
    assert _settings(confluent, topic)["retention.ms"].value == "9000"
    _done(confluent.incremental_alter_configs(_set(topic, ("retention.ms", "8000", AlterConfigOpType.SET))))
    resource = kafka_python.ConfigResource("TOPIC", topic)
    described = python_admin.describe_configs([resource])
    assert "'8000'" in repr(described), described
    change = kafka_python.ConfigResource("TOPIC", topic, {"flush.messages": "7"})
    python_admin.alter_configs([change])
    assert _settings(confluent, topic)["flush.messages"].value == "7"
    assert _settings(confluent, topic)["retention.ms"].value == "8000"
    python_admin.create_partitions({topic: 4})
    assert len(confluent.list_topics(topic, timeout=_SECONDS).topics[topic].partitions) == 4
    _produce(cluster, topic, 5)
    python_admin.delete_records({TopicPartition(topic, 0): 3})
    (offset,) = _done(confluent.list_offsets({ConfluentPartition(topic, 0): OffsetSpec.earliest()}))
    assert offset.offset == 3
    assert topic in repr(python_admin.describe_log_dirs())
    assert "127.0.0.1" in repr(python_admin.describe_cluster())
    python_admin.delete_topics([topic])
    assert topic not in confluent.list_topics(timeout=_SECONDS).topics


def test_java_tools_for_topics(tool: Callable[..., str], confluent: AdminClient, topic: str) -> None:
    create = ("--create", "--topic", topic, "--partitions", "2", "--replication-factor", "1")
    assert f"Created topic {topic}" in tool(TOPICS, *create, "--config", "retention.ms=5000")
    assert _settings(confluent, topic)["retention.ms"].value == "5000"
    assert "TopicExistsException" in tool(TOPICS, *create, fails=True)
    _done(confluent.incremental_alter_configs(_set(topic, ("segment.bytes", "1048576", AlterConfigOpType.SET))))
    described = tool(TOPICS, "--describe", "--topic", topic)
    assert re.search(r"PartitionCount: 2\s+ReplicationFactor: 1\s+Configs: (\S+)", described)
    settings = re.findall(r"Configs: (\S+)", described)[0].split(",")
    assert {"retention.ms=5000", "segment.bytes=1048576"} <= set(settings)
    assert len(re.findall(r"Leader: 0\s+Replicas: 0\s+Isr: 0", described)) == 2
    assert topic in tool(TOPICS, "--list").split()
    tool(TOPICS, "--alter", "--topic", topic, "--partitions", "3")
    assert "InvalidPartitionsException" in tool(TOPICS, "--alter", "--topic", topic, "--partitions", "3", fails=True)
    assert "PartitionCount: 3" in tool(TOPICS, "--describe", "--topic", topic)
    bad = ("--create", "--topic", f"{topic}-bad", "--config", "preallocate=true")
    assert "InvalidConfigurationException" in tool(TOPICS, *bad, fails=True)
    tool(TOPICS, "--delete", "--topic", topic)
    assert topic not in tool(TOPICS, "--list").split()


def test_java_tools_for_settings(tool: Callable[..., str], confluent: AdminClient, made: str) -> None:
    entity = ("--entity-type", "topics", "--entity-name", made)
    add = ("--alter", "--add-config", "max.message.bytes=2000,cleanup.policy=[compact,delete],min.insync.replicas=1")
    tool(CONFIGS, *entity, *add)
    found = _settings(confluent, made)
    assert (found["max.message.bytes"].value, found["cleanup.policy"].value) == ("2000", "compact,delete")
    told = tool(CONFIGS, *entity, "--describe")
    assert "max.message.bytes=2000" in told
    assert "retention.ms" not in told  # only the topic's own
    assert "retention.ms=-1" in tool(CONFIGS, *entity, "--describe", "--all")
    tool(CONFIGS, *entity, "--alter", "--delete-config", "max.message.bytes")
    assert _settings(confluent, made)["max.message.bytes"].value == "1048588"
    bad = tool(CONFIGS, *entity, "--alter", "--add-config", "preallocate=true", fails=True)
    assert "InvalidConfigurationException" in bad
    broker = ("--entity-type", "brokers", "--describe")
    assert "log.retention.ms=-1" in tool(CONFIGS, *broker, "--entity-name", "0", "--all")
    tool(CONFIGS, *broker, "--entity-default")


def test_java_tools_for_records(tool: Callable[..., str], cluster: EmbeddedCluster, made: str, tmp_path: Path) -> None:
    _produce(cluster, made, 10)
    offsets = tmp_path / "offsets.json"
    wanted = [{"topic": made, "partition": 0, "offset": 4}, {"topic": made, "partition": 1, "offset": -1}]
    offsets.write_text(json.dumps({"version": 1, "partitions": wanted}))
    told = tool(DELETE_RECORDS, "--offset-json-file", str(offsets))
    assert f"partition: {made}-0\tlow_watermark: 4" in told
    assert f"partition: {made}-1\tlow_watermark: 0" in told
    for time, ends in (("-2", (4, 0)), ("-1", (10, 0)), ("-4", (4, 0))):
        told = tool(OFFSETS, "--topic", made, "--time", time)
        assert told.split() == [f"{made}:0:{ends[0]}", f"{made}:1:{ends[1]}"]
    told = tool(LOG_DIRS, "--describe", "--topic-list", made)
    (line,) = [line for line in told.splitlines() if line.startswith("{")]
    (folder,) = json.loads(line)["brokers"][0]["logDirs"]
    sizes = {entry["partition"]: entry["size"] for entry in folder["partitions"]}
    assert folder["logDir"] == str(cluster.data_dir.absolute() / "broker-0")
    log = Path(folder["logDir"]) / f"{made}-0" / "00000000000000000000.log"
    assert sizes == {f"{made}-0": log.stat().st_size, f"{made}-1": 0}


def test_java_tools_for_one_copy(tool: Callable[..., str], made: str, tmp_path: Path) -> None:
    elected = tool(ELECTION, "--election-type", "PREFERRED", "--topic", made, "--partition", "0")
    assert "Valid replica already elected" in elected
    tool(ELECTION, "--election-type", "UNCLEAN", "--all-topic-partitions")
    told = tool(ELECTION, "--election-type", "PREFERRED", "--topic", f"{made}-missing", "--partition", "0", fails=True)
    assert "UnknownTopicOrPartition" in told
    file = tmp_path / "reassignment.json"
    partitions = [{"topic": made, "partition": number, "replicas": [0], "log_dirs": ["any"]} for number in (0, 1)]
    file.write_text(json.dumps({"version": 1, "partitions": partitions}))
    assert "Successfully started" in tool(REASSIGN, "--execute", "--reassignment-json-file", str(file))
    assert "is completed" in tool(REASSIGN, "--verify", "--reassignment-json-file", str(file))
    assert "No partition reassignments found" in tool(REASSIGN, "--list")
    assert "DESCRIBE_QUORUM" in tool(QUORUM, "describe", "--status", fails=True)
    assert "Unsupported" not in tool(METRICS, "--list")


def test_java_tools_for_the_broker(tool: Callable[..., str]) -> None:
    described = tool(CONFIGS, "--describe", "--entity-type", "brokers", "--entity-name", "0", "--all")
    assert re.search(r"num\.partitions=1 sensitive=false synonyms=\{DEFAULT_CONFIG:num\.partitions=1\}", described)
    assert "ssl.key.password=null sensitive=true" in described
    way = ("--entity-type", "broker-loggers", "--entity-name", "0")
    logger = "spark_klog.broker.housekeeping"
    tool(CONFIGS, "--alter", *way, "--add-config", f"{logger}=DEBUG")
    assert f"{logger}=DEBUG" in tool(CONFIGS, "--describe", *way)
    tool(CONFIGS, "--alter", *way, "--delete-config", logger)
    assert f"{logger}=INFO" in tool(CONFIGS, "--describe", *way)
    assert "Invalid broker logger" in tool(CONFIGS, "--alter", *way, "--add-config", "no.such.logger=DEBUG", fails=True)
    assert "LOUD" in tool(CONFIGS, "--alter", *way, "--add-config", f"{logger}=LOUD", fails=True)


def test_one_copy_by_kafka_python(python_admin: kafka_python.KafkaAdminClient, made: str) -> None:
    place = TopicPartition(made, 0)
    (elected,) = python_admin.elect_leaders(0, {made: [0]}).replica_election_results
    assert [entry.error_code for entry in elected.partition_result] == [84]  # ELECTION_NOT_NEEDED
    assert python_admin.alter_partition_reassignments({place: [0]}) == {place: None}
    assert python_admin.alter_partition_reassignments({place: [7]}) == {place: InvalidReplicationAssignmentError}
    assert not python_admin.list_partition_reassignments()
    with pytest.raises(UnsupportedVersionError):
        python_admin.describe_metadata_quorum()
    described = python_admin.describe_user_scram_credentials()
    assert not described


def test_only_lists_are_appended_to(confluent: AdminClient, made: str) -> None:
    for name in ("min.insync.replicas", "segment.bytes"):
        assert _error(confluent.incremental_alter_configs(_set(made, (name, "2", AlterConfigOpType.APPEND)))) == 40


def test_one_copy_by_confluent(confluent: AdminClient, made: str) -> None:
    places = [ConfluentPartition(made, 0), ConfluentPartition(made, 7)]
    found = confluent.elect_leaders(ElectionType.PREFERRED, places).result(_SECONDS)
    codes = {place.partition: error and error.name() for place, error in found.items()}
    assert codes == {0: "ELECTION_NOT_NEEDED", 7: "UNKNOWN_TOPIC_OR_PART"}
