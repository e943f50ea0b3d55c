"""Error messages for illegal topic names, and for offsets that a consumer or a transaction can't commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_klog.client import Admin, Consumer, GroupMetadata, Producer
from spark_klog.errors import CommitFailed, ConfigError, ErrorCode, ProtocolError
from tests.support.clients.consumers import SECONDS, Server
from tests.support.servers.broker import KlogBroker

_RULE = "1 to 249 of a-z A-Z 0-9 . _ - are allowed"
_ILLEGAL = ("bad name!", "a/b", "..", "x" * 250)


@pytest.fixture(scope="module")
def server(module_server_dir: Path) -> Iterator[Server]:
    with KlogBroker(module_server_dir / "klog") as broker:
        yield Server(broker.bootstrap_servers, None)


@pytest.fixture
def producer(server: Server) -> Iterator[Producer]:
    settings = {"bootstrap.servers": server.servers, "transactional.id": "texts", "max.block.ms": 2000}
    with Producer(settings) as made:
        made.init_transactions()
        made.begin_transaction()
        yield made
        made.abort_transaction()


@pytest.mark.parametrize("name", _ILLEGAL)
def test_describing_a_topic_that_can_not_be(server: Server, name: str) -> None:
    with Admin({"bootstrap.servers": server.servers}) as admin, pytest.raises(ConfigError) as refused:
        admin.describe_topics([name])
    assert repr(name) in str(refused.value)
    assert _RULE in str(refused.value)


@pytest.mark.parametrize("name", _ILLEGAL)
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("subscribe", lambda consumer, name: consumer.subscribe([name])),
        ("assign", lambda consumer, name: consumer.assign([(name, 0)])),
        ("commit", lambda consumer, name: consumer.commit({(name, 0): 1})),
    ],
)
def test_reading_a_topic_that_can_not_be(what: str, call: Callable[[Consumer, str], None], name: str) -> None:
    with Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}) as consumer:
        with pytest.raises(ConfigError) as refused:
            call(consumer, name)
        assert str(refused.value).startswith(f"{what}: ")
        assert repr(name) in str(refused.value)
        assert _RULE in str(refused.value)
        consumer.subscribe([f"^{name}"])  # a pattern need not be a legal name


def test_offsets_of_a_topic_that_does_not_exist(producer: Producer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ProtocolError, match=r"missing-0.*check the topic's name") as failed:
        producer.send_offsets_to_transaction({("missing", 0): 1}, "g")
    assert failed.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    # of some ten attempts only the first is told, and that may have been refused by a coordinator that starts;
    # what lasts is told by the back-off's warnings
    assert len([text for text in caplog.messages if "trying again" in text and "missing-0" in text]) <= 1
    assert [text for text in caplog.messages if "still trying" in text and "missing-0" in text]


def test_offsets_of_a_member_of_an_earlier_generation(server: Server, producer: Producer) -> None:
    topic = server.topic()
    with pytest.raises(ProtocolError, match=rf"{topic}-0.*the group has rebalanced.*call group_metadata"):
        producer.send_offsets_to_transaction({(topic, 0): 1}, GroupMetadata(topic, 3, "gone", None))


def test_commits_beside_the_members_of_a_group(server: Server) -> None:
    """The advice to poll more often is only for members."""
    topic = server.topic()
    with server.consumer(group_id=topic) as member, server.consumer(group_id=topic) as other:
        member.subscribe([topic])
        deadline = time.monotonic() + SECONDS
        while not member.assignment():
            assert time.monotonic() < deadline
            member.poll(0.1)
        with pytest.raises(CommitFailed, match="the group has members, and only they can commit") as failed:
            other.commit({(topic, 0): 1})
        assert "poll more often" not in str(failed.value)
        found: list[object] = []
        other.commit_async({(topic, 0): 1}, lambda offsets, error: found.append(error))
        while not found:
            assert time.monotonic() < deadline
            other.poll(0.1)
        assert "the group has members" in str(found[0])
        with Admin({"bootstrap.servers": server.servers}) as admin:
            with pytest.raises(ProtocolError, match="the group has members"):
                admin.alter_group_offsets(topic, {(topic, 0): 1}).check()
