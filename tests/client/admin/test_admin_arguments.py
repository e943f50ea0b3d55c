"""Settings and arguments that the admin client rejects before it sends a request; lost responses and deadlines."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spark_klog.client import Admin, NewTopic, Subtract
from spark_klog.client.admin.calls import admin_config
from spark_klog.errors import (
    AdminClosed,
    ConfigError,
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    KlogError,
    ProtocolError,
    RequestTimedOut,
)
from tests.support.brokers.faults import Fault, dropped, error, late, lost, no_topics, silent
from tests.support.brokers.kafka_python_wire import Message
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.servers.kafka import HOST

_NOT_CONTROLLER, _EXISTS = 41, 36
Change = Callable[[Admin], Any]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "bootstrap.servers is required: set HOST:PORT"),
        ({"default.api.timeout": "1"}, "did you mean default.api.timeout.ms"),
        ({"request.timeout.msec": "1"}, "did you mean request.timeout.ms"),
        ({"default.api.timeout.ms": "soon"}, "default.api.timeout.ms=soon: set a number"),
        ({"default.api.timeout.ms": "100"}, "default.api.timeout.ms=100 must be at least request.timeout.ms=30000"),
        ({"security.protocol": "SASL"}, "security.protocol"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, str], message: str) -> None:
    servers = {} if not settings else {"bootstrap.servers": "127.0.0.1:9"}
    with pytest.raises(ConfigError, match=message):
        Admin(servers | settings)


def test_settings(caplog: pytest.LogCaptureFixture) -> None:
    servers = {"bootstrap.servers": "127.0.0.1:9"}
    assert admin_config(servers)[1] == 60_000
    assert admin_config(servers | {"request.timeout.ms": "90000"})[1] == 90_000
    assert admin_config(servers | {"default.api.timeout.ms": 40_000})[1] == 40_000
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        admin_config(servers | {"linger.ms": "5", "acks": "all"})
    assert [record.getMessage() for record in caplog.records] == [
        "settings without effect on an admin client: acks, linger.ms"
    ]


WRONG: list[tuple[Change, type[Exception], str]] = [
    (lambda admin: admin.describe_topics("t"), TypeError, r"topics must be a list, not one str: write \['t'\]"),
    (lambda admin: admin.delete_topics({"t": 1}), TypeError, "topics must be a list, not dict"),
    (lambda admin: admin.delete_topics([7]), TypeError, "each of topics must be a str, not int"),
    (lambda admin: admin.describe_topic(["t"]), TypeError, "the name of a topic must be a str, not list"),
    (lambda admin: admin.delete_topic(""), ConfigError, "the name of a topic is empty"),
    (lambda admin: admin.create_topics(["t"]), TypeError, "each of topics must be a NewTopic, not str"),
    (lambda admin: admin.create_topics([NewTopic("t"), NewTopic("t", 2)]), ConfigError, "topic t is given twice"),
    (lambda admin: admin.create_topic("n", "3"), TypeError, "partitions of topic n must be an int, not str"),
    (lambda admin: admin.create_topic("n", 0), ConfigError, "partitions of topic n is 0: set 1 to 2147483647"),
    (
        lambda admin: admin.create_topic("n", 1, configs={"retention.ms": 1000}),
        TypeError,
        "retention.ms in configs of topic n must be a str, not int: write '1000'",
    ),
    (
        lambda admin: admin.create_topics([NewTopic("n", 1, assignments=[[1]])]),
        ConfigError,
        "assignments replace partitions and replication_factor",
    ),
    (lambda admin: admin.create_topics([NewTopic("n", assignments=[1])]), TypeError, "must be a list, not int"),
    (lambda admin: admin.create_partitions([("t", 1)]), TypeError, "counts must be a dict, not list"),
    (lambda admin: admin.describe_configs(["t"]), TypeError, r"a resource must be \(kind, name\)"),
    (lambda admin: admin.describe_configs([("topics", "t")]), ConfigError, "the kind must be one of topic, broker"),
    (lambda admin: admin.describe_configs([("broker", 1)]), TypeError, "write the node id as text, '1'"),
    (lambda admin: admin.alter_configs({("topic", "t"): {"a": 1}}), TypeError, "a must be a str, Append, Subtract"),
    (lambda admin: Subtract(["a"]), TypeError, "the value of Subtract must be a str, not list"),  # type: ignore[arg-type]
    (
        lambda admin: admin.list_transactions(states=["open"]),
        ConfigError,
        "^state is 'open': set one of Empty, Ongoing",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), WRONG)
def test_arguments_that_are_refused(call: Change, kind: type[Exception], message: str) -> None:
    with ScriptedCluster({"t": 1}) as brokers, Admin({"bootstrap.servers": brokers.bootstrap_servers}) as admin:
        asked = len(brokers.asked)
        with pytest.raises(kind, match=message):
            call(admin)
        assert len(brokers.asked) == asked


def _admin(brokers: ScriptedCluster, **settings: object) -> Admin:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    return Admin({"bootstrap.servers": brokers.bootstrap_servers, "retry.backoff.ms": 5, **given})


def test_a_closed_one_refuses_calls() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        with _admin(brokers) as admin:
            pass
        admin.close()
        with pytest.raises(AdminClosed):
            admin.list_topics()


def test_nobody_is_there() -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        servers = f"{HOST}:{unused.getsockname()[1]}"
        with pytest.raises(ConnectionFailed):
            Admin({"bootstrap.servers": servers, "socket.connection.setup.timeout.ms": 300})


def test_the_controller_moves() -> None:
    with ScriptedCluster({"t": 1}, nodes=2) as brokers, _admin(brokers) as admin:
        first = admin.cluster.controller()
        brokers.controller = 1 - first
        brokers.on("CreateTopics", error(_NOT_CONTROLLER))
        admin.create_topic("n", 2, replication_factor=1)
        assert [asked.node for asked in brokers.asked if asked.name == "CreateTopics"] == [first, 1 - first]


def test_a_check_that_fails_keeps_the_other_outcomes() -> None:
    """On the retry topic `a` exists, but the metadata that should confirm it do not show it yet."""

    def half(answer: Message) -> None:
        answer["topics"][0]["error_code"] = ErrorCode.REQUEST_TIMED_OUT
        answer["topics"][1]["error_code"] = ErrorCode.THROTTLING_QUOTA_EXCEEDED

    def then_lags(answer: Message) -> None:
        brokers._script["Metadata"] = [no_topics()]

    with ScriptedCluster({"t": 1, "a": 1}) as brokers, _admin(brokers) as admin:
        brokers.on("CreateTopics", Fault(half, is_applied=False), Fault(then_lags))
        made = admin.create_topics([NewTopic("a", 1, 1), NewTopic("b", 1, 1)])
        assert list(made.successes) == ["a", "b"], made


def test_one_late_answer_makes_no_topic_unknown() -> None:
    """Look-ups that far apart must say so: another broker may just have created it."""
    with ScriptedCluster({"t": 1}) as brokers, _admin(brokers) as admin:
        brokers.on("Metadata", no_topics(delay=1.5))
        assert admin.list_offsets({("t", 0): "latest"})["t", 0].offset == 0
        assert brokers.count("Metadata") > 1


def test_a_partition_beyond_the_last() -> None:
    with ScriptedCluster({"t": 2}) as brokers, _admin(brokers) as admin:
        failure = admin.list_offsets({("t", 7): "latest"})["t", 7]
        assert str(failure).endswith("UNKNOWN_TOPIC_OR_PARTITION (3): topic t has 2 partitions, numbered from 0")


def test_a_lost_answer_is_not_a_refusal() -> None:
    with ScriptedCluster({"t": 1}) as brokers, _admin(brokers) as admin:
        brokers.on("CreateTopics", lost())
        admin.create_topic("n", 2, replication_factor=1)
        brokers.on("CreatePartitions", lost())
        admin.create_partitions({"n": 4}).check()
        brokers.on("DeleteTopics", lost())
        admin.delete_topic("n")
        with pytest.raises(ProtocolError) as raised:
            admin.create_topic("t", 1, replication_factor=1)
        assert raised.value.code == _EXISTS


class _Groups(ScriptedCluster):
    """Brokers that also answer DeleteGroups."""

    def _on_DeleteGroups(self, node: int, asked: Message, is_applied: bool) -> Message:
        results = []
        for name in asked["groups_names"]:
            is_there = (self.offsets.pop(name, None) if is_applied else self.offsets.get(name)) is not None
            results.append({"group_id": name, "error_code": 0 if is_there else ErrorCode.GROUP_ID_NOT_FOUND})
        return {"results": results}


def test_a_connection_that_fails_is_not_a_lost_answer() -> None:
    """The request was not sent, so the broker's error on the next attempt is the outcome."""
    with _Groups({"t": 1}, nodes=2) as brokers:
        first = {"bootstrap.servers": f"{HOST}:{brokers.ports[0]}", "retry.backoff.ms": 5}
        for refused, code in (
            (lambda admin: admin.create_topic("t", 1, replication_factor=1), _EXISTS),
            (lambda admin: admin.delete_topic("none"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (lambda admin: admin.delete_group("none"), ErrorCode.GROUP_ID_NOT_FOUND),
        ):
            with Admin(first) as admin:
                brokers.on("ApiVersions", dropped())  # on the connection to the controller or coordinator
                with pytest.raises(ProtocolError) as raised:
                    refused(admin)
            assert raised.value.code == code
        brokers.offsets["g"] = {("t", 0): 1}
        with Admin(first) as admin:
            brokers.on("DeleteGroups", lost())
            admin.delete_group("g")
        assert brokers.count("DeleteGroups") == 3


class _Strange(ScriptedCluster):
    """Node 1 answers ListOffsets for another topic; the group `strange` has a member with a truncated assignment."""

    def _on_DescribeGroups(self, node: int, asked: Message, is_applied: bool) -> Message:
        answer = super()._on_DescribeGroups(node, asked, is_applied)
        member = dict.fromkeys(("member_id", "client_id", "client_host"), "m")
        for group in answer["groups"]:
            if group["group_id"] == "strange":
                group["members"] = [member | {"member_metadata": b"", "member_assignment": b"\x00"}]
        return answer

    def _on_ListOffsets(self, node: int, asked: Message, is_applied: bool) -> Message:
        answer = super()._on_ListOffsets(node, asked, is_applied)
        for topic in answer["topics"] if node == 1 else ():
            topic["name"] = "another"
        return answer


def test_an_answer_that_can_not_be_used_keeps_the_other_outcomes() -> None:
    with _Strange({"t": 2}, nodes=2) as brokers, _admin(brokers) as admin:
        found = admin.list_offsets({("t", 0): "latest", ("t", 1): "latest"})
        assert list(found.successes) == [("t", 0)]
        assert isinstance(found["t", 1], DecodeError)
        with pytest.raises(DecodeError, match="another"):
            admin.list_offsets({("t", 1): "latest"})
        described = admin.describe_groups(["sound", "strange"])
        assert list(described.successes) == ["sound"]
        assert isinstance(described["strange"], DecodeError)


def test_a_call_ends_within_default_api_timeout() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        with _admin(brokers, request_timeout_ms=800, default_api_timeout_ms=2000) as admin:
            brokers.always("CreateTopics", late(30))
            begin = time.monotonic()
            with pytest.raises(RequestTimedOut, match=r"default\.api\.timeout\.ms"):
                admin.create_topic("n", 1, replication_factor=1)
            assert 1.9 < time.monotonic() - begin < 20
            assert brokers.count("CreateTopics") >= 2


def test_an_attempt_without_time_does_not_hide_what_was_answered() -> None:
    """The fifth attempt has 1/16 of the time and times out: the outcome is the error before, and the call succeeds."""
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.on("CreateTopics", *[error(_NOT_CONTROLLER)] * 4)
        brokers.always("CreateTopics", silent())
        limits = {"request.timeout.ms": "4000", "default.api.timeout.ms": "4000"}
        slow = {"retry.backoff.ms": "10000", "retry.backoff.max.ms": "10000", **limits}
        with Admin({"bootstrap.servers": brokers.bootstrap_servers, **slow}) as admin:
            (found,) = admin.create_topics([NewTopic("new", 1, 1)]).values()
    assert isinstance(found, ProtocolError)
    assert found.code == ErrorCode.NOT_CONTROLLER


def test_the_wait_for_other_threads_is_part_of_the_time() -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        with _admin(brokers, request_timeout_ms=1000, default_api_timeout_ms=1000) as admin:
            brokers.always("CreateTopics", late(30))
            failures: list[KlogError] = []

            def create(number: int) -> None:
                try:
                    admin.create_topic(f"n-{number}", 1, replication_factor=1)
                except KlogError as failure:
                    failures.append(failure)

            threads = [threading.Thread(target=create, args=[number]) for number in range(4)]
            begin = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(failures) == 4
            assert time.monotonic() - begin < 10
