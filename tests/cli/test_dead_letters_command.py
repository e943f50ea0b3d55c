"""`klog dead-letters`: letters of ours and of Kafka Connect, replays of some and of all, kills of a replay."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from spark_klog.client import Admin, Consumer, ConsumerRecord, Producer
from spark_klog.client.dead_letters import CORRUPT_BATCH, DeadLetter
from spark_klog.client.letter_topics import Choice, LetterTopic, Progress
from spark_klog.client.offsets import Committed
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, KlogError
from tests.support.clients.klog import klog, klog_lines, klog_refusal
from tests.support.clients.topics import make_topic
from tests.support.runs.soak import in_soak

_SECONDS = 60.0
#: As Connect writes them, in its order, with an exception of Java.
_CONNECT = {
    "__connect.errors.topic": "",
    "__connect.errors.partition": "1",
    "__connect.errors.offset": "41",
    "__connect.errors.connector.name": "jdbc-sink",
    "__connect.errors.task.id": "0",
    "__connect.errors.stage": "VALUE_CONVERTER",
    "__connect.errors.class.name": "io.confluent.connect.avro.AvroConverter",
    "__connect.errors.exception.class.name": "org.apache.kafka.connect.errors.DataException",
    "__connect.errors.exception.message": "Failed to deserialize data for topic to Avro:",
    "__connect.errors.exception.stacktrace": "org.apache.kafka...\n\tat io.confluent",
}
_OWN = (("traceparent", b"00-1-2-01"), ("empty", None))


@pytest.fixture
def letters(cluster: EmbeddedCluster, topic: str) -> str:
    """A topic of dead letters of the topics TOPIC and TOPIC-b, which have two partitions."""
    for name in (topic, f"{topic}-b", f"{topic}-dlq"):
        make_topic(cluster.bootstrap_servers, name, 2)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for number in range(6):
            source = topic if number % 2 else f"{topic}-b"
            error = "KeyError" if number < 4 else "ValueError"
            said = DeadLetter(
                source, 1, number, "g", error=error, reason="no\nsuch row", time=1_700_000_000_000, attempts=2
            )
            value = b"%d\xff" % number
            producer.send(f"{topic}-dlq", value, b"k", 0, 1000 + number, (*_OWN, *said.headers))
        connect = _CONNECT | {"__connect.errors.topic": topic}
        headers = tuple((name, value.encode()) for name, value in connect.items())
        producer.send(f"{topic}-dlq", None, None, 1, 7, (*_OWN, *headers))
        producer.send(f"{topic}-dlq", b"no letter", None, 1)
        batch = DeadLetter(topic, 0, 5, "q", error=CORRUPT_BATCH, reason="crc").headers
        producer.send(f"{topic}-dlq", b"batch", None, 1, None, batch)
    return f"{topic}-dlq"


def _records(cluster: EmbeddedCluster, *topics: str) -> list[ConsumerRecord]:
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "isolation.level": "read_committed"}
    got: list[ConsumerRecord] = []
    with Consumer(settings) as consumer:
        consumer.assign([(topic, number, -2) for topic in topics for number in (0, 1)])
        until = time.monotonic() + _SECONDS
        calls = 0
        while calls < 3:  # the last ones find nothing
            assert time.monotonic() < until
            part = consumer.poll(0.5)
            calls = 0 if part else calls + 1
            got += part
    return sorted(got, key=lambda record: record.timestamp)


def test_letters_are_shown(cluster: EmbeddedCluster, topic: str, letters: str) -> None:
    where = ("dead-letters", "show", letters, "-b", cluster.bootstrap_servers)
    lines = klog_lines(*where)
    assert len(lines) == 9
    first = lines[0]
    assert first == {
        "topic": letters,
        "partition": 0,
        "offset": 0,
        "time": "2023-11-14T22:13:20.000+00:00",
        "reader": "g",
        "stage": "TASK_PUT",
        "error": "KeyError",
        "reason": "no\nsuch row",
        "attempts": 2,
        "isReplayed": False,
        "from": f"{topic}-b-1@0",
        "sourceTopic": f"{topic}-b",
        "sourcePartition": 1,
        "sourceOffset": 0,
        "key": "k",
        "value": "0\\xff",
        "trace": None,
    }
    (connect,) = klog_lines(*where, "--reason", "DataException: Failed")
    assert (connect["reader"], connect["sourceOffset"], connect["attempts"], connect["value"]) == (
        "jdbc-sink",
        41,
        None,
        None,
    )
    assert connect["trace"].startswith("org.apache.kafka...")
    assert len(klog_lines(*where, "--from-topic", f"{topic}-b", "--limit", "2")) == 2
    table = klog(*where).stdout
    assert len(table.splitlines()) == 10
    assert r"no\nsuch row" in table
    assert "not a regular expression" in klog_refusal(*where, "--reason", "(", code=2)
    assert "UNKNOWN_TOPIC" in klog_refusal("dead-letters", "show", f"{topic}-x", "-b", cluster.bootstrap_servers)


def test_a_time_that_is_none(cluster: EmbeddedCluster, topic: str) -> None:
    """Whoever may write to the topic decides what its headers say."""
    make_topic(cluster.bootstrap_servers, topic, 1)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for time_ms in (10**18, -(10**18), 1):
            producer.send(topic, b"v", headers=DeadLetter("t", 0, 0, time=time_ms).headers)
    lines = klog_lines("dead-letters", "show", topic, "-b", cluster.bootstrap_servers)
    assert [line["time"] for line in lines] == [None, None, "1970-01-01T00:00:00.001+00:00"]


def test_letters_are_replayed_once(cluster: EmbeddedCluster, topic: str, letters: str) -> None:
    where = ("dead-letters", "replay", letters, "-b", cluster.bootstrap_servers)
    assert klog_lines(*where, "--reason", "^ValueError") == [{"topic": letters, "records": 2, "others": 0}]
    assert klog(*where, "--reason", "^ValueError").returncode == 3
    assert klog_lines(*where, "--from-topic", f"{topic}-b") == [{"topic": letters, "records": 2, "others": 0}]
    shown = klog_lines("dead-letters", "show", letters, "-b", cluster.bootstrap_servers)
    assert [line["isReplayed"] for line in shown[:6]] == [True, False, True, False, True, True]
    done = klog(*where)
    assert (done.returncode, done.stdout) == (4, "sent 3 records; 2 can't be sent\n")
    assert klog(*where).returncode == 3
    sent = _records(cluster, topic, f"{topic}-b")
    connect, *ours = sent
    assert (connect.topic, connect.partition, connect.key, connect.value, connect.headers) == (
        topic,
        1,
        None,
        None,
        _OWN,
    )
    assert [(each.value, each.key, each.partition, each.headers) for each in ours] == [
        (b"%d\xff" % number, b"k", 1, _OWN) for number in range(6)
    ]
    assert [each.topic for each in ours] == [f"{topic}-b", topic] * 3


def test_letters_of_any_size_and_time(cluster: EmbeddedCluster, topic: str) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "max.request.size": str(8 << 20)}
    value = os.urandom(2 << 20)
    with Admin(settings) as admin, Producer(settings) as producer:
        for name in (topic, f"{topic}-dlq"):
            admin.create_topic(name, 1, configs={"max.message.bytes": str(4 << 20)})
        producer.send(f"{topic}-dlq", value, headers=DeadLetter(topic, 0, 0, time=9_999_999_999_999_999).headers)
    where = (f"{topic}-dlq", "-b", cluster.bootstrap_servers)
    (line,) = klog_lines("dead-letters", "show", *where)
    assert (line["time"], line["sourceOffset"]) == (None, 0)
    assert klog_lines("dead-letters", "replay", *where) == [{"topic": f"{topic}-dlq", "records": 1, "others": 0}]
    with Consumer(settings | {"fetch.max.bytes": str(8 << 20)}) as consumer:
        consumer.assign([(topic, 0, -2)])
        deadline = time.monotonic() + _SECONDS
        while not (records := consumer.poll(0.5)):
            assert time.monotonic() < deadline
    assert [record.value for record in records] == [value]


def test_letters_of_a_topic_that_is_gone(cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        producer.send(topic, b"0", headers=DeadLetter(f"{topic}-gone", 0, 0).headers)
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "request.timeout.ms": "3000"}
    for _ in range(2):
        with pytest.raises(KlogError, match=f"{topic}-gone"):
            LetterTopic(settings, topic).replay()
    make_topic(cluster.bootstrap_servers, f"{topic}-gone", 1)
    assert LetterTopic(settings, topic).replay() == (1, 0)


def test_the_progress_of_choices() -> None:
    letter = DeadLetter("t", 0, 0, error="E", reason="why")
    progress = Progress(None, "group g")
    assert progress.start(Choice("E")) == 0
    progress.advance(Choice("E"), 5)
    again = Progress(progress.committed, "group g")
    assert (again.start(Choice("E")), again.start(Choice())) == (5, 0)
    assert again.has(letter, 4)
    assert not again.has(letter, 5)
    assert not again.has(DeadLetter("t", 0, 0, error="F"), 4)
    again.advance(Choice(), 5)
    assert again.committed == Committed(5)
    for number in range(200):
        again.advance(Choice(f"number {number}"), 6)
    with pytest.raises(ConfigError, match="replay all"):
        assert again.committed
    with pytest.raises(KlogError, match="group g"):
        Progress(Committed(5, metadata="mine"), "group g")
    with pytest.raises(KlogError, match="version 2"):
        Progress(Committed(5, metadata='{"version": 2, "replayed": []}'), "group g")


_KILLED = """
import sys
from spark_klog.client import letter_topics
from spark_klog.client.producer import transactions
from tests.support.checker.interrupts import LinesRun
letter_topics._OFFSETS = 2
servers, topic, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

with LinesRun(last, letter_topics, transactions) as lines:
    letter_topics.LetterTopic({"bootstrap.servers": servers}, topic).replay(letter_topics.Choice(*sys.argv[4:]))
print(lines.seen)
"""


def _kill_at(cluster: EmbeddedCluster, topic: str, line: int, *choice: str) -> int:
    command = [sys.executable, "-c", _KILLED, cluster.bootstrap_servers, topic, str(line), *choice]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == (0 if done.stdout else 9)
    return int(done.stdout or 0)


@pytest.mark.parametrize("parts", [3, pytest.param(150, marks=in_soak)])
def test_a_replay_that_is_killed_sends_nothing_twice(
    cluster: EmbeddedCluster, topic: str, letters: str, parts: int
) -> None:
    for part in range(parts):
        if _kill_at(cluster, letters, 40 + 700 * part // parts, *(["Value"] if part % 2 else [])):
            break
    _kill_at(cluster, letters, 0)
    assert [each.timestamp for each in _records(cluster, topic, f"{topic}-b")] == [7, *range(1000, 1006)]
