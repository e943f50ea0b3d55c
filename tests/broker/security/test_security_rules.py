"""What users may do with topics, shown by third-party clients and hand-made requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import (
    CREATE_TOPICS,
    DELETE_TOPICS,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.tools import ToolFailed, kcat
from tests.support.servers.certificates import make_certificates
from tests.support.servers.secure_broker import PASSWORDS, SecureBroker, add_user

NOW = 1_700_000_000_000
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
BATCH = bytes(make_batch([(None, b"v")], [NOW]))
#: alice is an admin; the text continues bob's section, the last one in the file.
RULES = """read = clicks*, exact
write = clicks-in*, exact

[user ANONYMOUS]
read = public

[user carol]
"""
TOPICS = ("clicks", "clicks-in-1", "exact", "exactly", "public", "secret")


@pytest.fixture(scope="module")
def broker(module_server_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    broker = SecureBroker(module_server_dir, certificates)
    text = broker.users.read_text().replace("[user alice]", "[user alice]\nadmin = true")
    broker.users.write_text(text.rstrip("\n") + "\n" + RULES)
    add_user(broker.users, "carol", "carols-secret")
    with broker:
        with _as(broker, "alice") as admin:
            for topic in TOPICS:
                entry = {"name": topic, "num_partitions": 1, "replication_factor": 1}
                assert admin.request(CREATE_TOPICS, 2, {"topics": [entry]})["topics"][0]["error_code"] == 0
                assert admin.produce(topic, BATCH, 8) == (0, 0)
        yield broker


def _as(broker: SecureBroker, user: str | None) -> RawClient:
    """A connection of the user; None connects to the plaintext listener."""
    if user is None:
        return RawClient(broker.port)
    client = RawClient(broker.ports["SASL_PLAINTEXT"])
    password = PASSWORDS.get(user, "carols-secret")
    client.request(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})
    token = f"\0{user}\0{password}".encode()
    assert client.request(SASL_AUTHENTICATE, 1, {"auth_bytes": token})["error_code"] == 0
    return client


@pytest.mark.parametrize(
    ("user", "readable", "writable"),
    [
        ("alice", {*TOPICS}, {*TOPICS}),
        ("bob", {"clicks", "clicks-in-1", "exact"}, {"clicks-in-1", "exact"}),
        ("carol", set(), set()),
        (None, {"public"}, set()),
    ],
)
def test_reading_and_writing(broker: SecureBroker, user: str | None, readable: set[str], writable: set[str]) -> None:
    def code(allowed: bool) -> int:
        return ErrorCode.NONE if allowed else DENIED

    seen = readable | writable
    with _as(broker, user) as client:
        listed = {entry["name"] for entry in client.request(METADATA, 4, {"topics": None})["topics"]}
        assert listed - {"__consumer_offsets"} == seen
        for topic in TOPICS:
            assert client.produce(topic, BATCH, 8)[0] == code(topic in writable), topic
            assert client.fetch(topic, 0, 11)[0] == code(topic in readable), topic
            partitions: list[dict[str, Any]] = [{"partition_index": 0, "timestamp": -1}]
            (found,) = client.request(LIST_OFFSETS, 1, {"topics": [{"name": topic, "partitions": partitions}]})[
                "topics"
            ]
            assert found["partitions"][0]["error_code"] == code(topic in seen), topic
            (found,) = client.request(METADATA, 4, {"topics": [{"name": topic}]})["topics"]
            assert (found["error_code"], bool(found["partitions"])) == (code(topic in seen), topic in seen)
            partitions = [{"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}]
            commit = {"group_id": "g", "topics": [{"name": topic, "partitions": partitions}]}
            (found,) = client.request(OFFSET_COMMIT, 2, commit)["topics"]
            assert found["partitions"][0]["error_code"] == code(topic in readable), topic
            fetch = {"group_id": "g", "topics": [{"name": topic, "partition_indexes": [0]}]}
            (found,) = client.request(OFFSET_FETCH, 1, fetch)["topics"]
            assert found["partitions"][0]["error_code"] == code(topic in seen), topic
        everything = client.request(OFFSET_FETCH, 2, {"group_id": "g", "topics": None})["topics"]
        assert {entry["name"] for entry in everything} <= seen


def test_a_topic_id_tells_nothing(broker: SecureBroker) -> None:
    with _as(broker, "alice") as admin, _as(broker, "bob") as bob:
        (found,) = admin.request(METADATA, 12, {"topics": [{"name": "secret"}]})["topics"]
        asked = {"topics": [{"name": None, "topic_id": found["topic_id"]}]}
        (told,) = bob.request(METADATA, 12, asked)["topics"]
        assert (told["error_code"], told["name"], told["partitions"]) == (ErrorCode.UNKNOWN_TOPIC_ID, None, [])


def test_topics_are_changed_by_admins_only(broker: SecureBroker) -> None:
    for user in ("bob", None):
        with _as(broker, user) as client:
            entry = {"name": "clicks-in-new", "num_partitions": 1, "replication_factor": 1}
            assert client.request(CREATE_TOPICS, 2, {"topics": [entry]})["topics"][0]["error_code"] == DENIED
            (answer,) = client.request(DELETE_TOPICS, 1, {"topic_names": ["exact"]})["responses"]
            assert answer["error_code"] == DENIED
    admin = AdminClient(broker.client("SASL_SSL", "SCRAM-SHA-256", "alice"))
    admin.create_topics([NewTopic("by-alice", 1, 1)])["by-alice"].result(10)
    admin.delete_topics(["by-alice"])["by-alice"].result(10)
    bob = AdminClient(broker.client("SASL_SSL", "SCRAM-SHA-256", "bob"))
    refused = bob.create_topics([NewTopic("by-bob", 1, 1)])["by-bob"]
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        refused.result(10)


def test_topics_are_made_by_who_may_write_them(broker: SecureBroker) -> None:
    with _as(broker, "bob") as client:
        for topic, code in (("clicks-in-2", 0), ("clicks-out", DENIED), ("hidden", DENIED)):
            (found,) = client.request(METADATA, 4, {"topics": [{"name": topic}]})["topics"]
            assert found["error_code"] == code, topic
    with _as(broker, "alice") as admin:
        listed = {entry["name"] for entry in admin.request(METADATA, 4, {"topics": None})["topics"]}
        assert "clicks-in-2" in listed
        assert not listed & {"clicks-out", "hidden"}


def test_kcat_is_told(broker: SecureBroker) -> None:
    way = broker.kcat("SASL_SSL", "SCRAM-SHA-512", user="bob")
    kcat("-P", *way, "-t", "exact", stdin=b"by bob\n")
    assert kcat("-C", *way, "-t", "exact", "-o", "-1", "-e", "-q") == b"by bob\n"
    for arguments in (("-P", "-t", "secret"), ("-C", "-t", "secret", "-e")):
        with pytest.raises(ToolFailed, match="uthorization failed"):
            kcat(*arguments, *way, "-X", "message.timeout.ms=5000", stdin=b"x\n")


def test_rules_that_change_hold_for_open_connections(broker: SecureBroker) -> None:
    before = broker.users.read_text()
    with _as(broker, "carol") as client:
        assert client.fetch("exact", 0, 11)[0] == DENIED
        assert "[user carol]\n" in before
        try:
            broker.users.write_text(before.replace("[user carol]\n", "[user carol]\nread = exact\n"))
            deadline = time.monotonic() + 60
            while client.fetch("exact", 0, 11)[0] and time.monotonic() < deadline:
                time.sleep(0.1)
            assert client.fetch("exact", 0, 11)[0] == 0
            broker.users.write_text("[user carol]\nreed = exact\n")  # a bad file: the users read before stay in force
            assert "unknown 'reed'" in _poll_log(broker, client, "the users read before stay in force")
            assert client.fetch("exact", 0, 11)[0] == 0
        finally:
            broker.users.write_text(before)


def _poll_log(broker: SecureBroker, client: RawClient, text: str) -> str:
    """Fetch until the line is logged: the broker looks at the users file only on a request."""
    deadline = time.monotonic() + 60
    while True:
        client.fetch("exact", 0, 11)
        try:
            return broker.wait_for_log(text, seconds=0.2)
        except TimeoutError:
            assert time.monotonic() < deadline
