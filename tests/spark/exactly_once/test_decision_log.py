"""The decision log in a topic: only one driver gets each number, whatever is read, compacted or sent late.

Against our broker and Kafka; and the rule alone, by records in any order.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spark_klog.client import Admin, Consumer, ConsumerRecord, Producer
from spark_klog.client.net.connection import Connection
from spark_klog.errors import ConfigError, DecodeError, KlogError, ProtocolError
from spark_klog.protocol.schema import Api
from spark_klog.spark.write.decisions import decision_log, log_states
from spark_klog.spark.write.decisions.decision_log import DecisionLog
from spark_klog.spark.write.decisions.entries import Identity, LiveEntries, encode_entry, record_key
from spark_klog.spark.write.exactly_once import Claim, Decision, Ended, Entry, Log, Superseded, Transaction
from tests.support.servers.kafka import NEWEST
from tests.support.servers.shared_kafka import SharedKafkas
from tests.support.waiting import wait_until

from .support import OURS_AND_KAFKA, brokers_of

KEY = "stream/s3a://bucket/a"
ONE = Transaction("klog-a-0", 7, 2, 0)
_SECONDS = 60.0
#: The least that Kafka 4 takes.
SEGMENT = 1024 * 1024


@pytest.fixture(scope="module", params=OURS_AND_KAFKA)
def servers(request: pytest.FixtureRequest, module_server_dir: Path, shared_kafkas: SharedKafkas) -> Iterator[str]:
    with brokers_of(request.param, module_server_dir, shared_kafkas, {"log.cleaner.backoff.ms": "250"}) as servers:
        yield servers


class Driver:
    """A process of its own as far as the log is concerned: it has a session, and no cache but its own."""

    def __init__(self, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self._sessions, self._monkeypatch = decision_log._Sessions(), monkeypatch
        self.log = DecisionLog({"bootstrap.servers": servers}, topic, KEY, Identity(), **more)

    def read(self, **more: bool) -> Log:
        self._monkeypatch.setattr(decision_log, "_SESSIONS", self._sessions)
        return self.log.read(**more)

    def append(self, number: int, entry: Entry) -> bool:
        self._monkeypatch.setattr(decision_log, "_SESSIONS", self._sessions)
        return self.log.append(number, entry)


def records_of(servers: str, topic: str) -> list[ConsumerRecord]:
    found = []
    with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([(topic, 0, 0)])
        while records := consumer.poll(0.5):
            found += records
    return found


@pytest.mark.parametrize("servers", ["ours", pytest.param(NEWEST, marks=pytest.mark.peer)], indirect=True)
def test_entries(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Driver(servers, topic, monkeypatch)
    assert log.read() == Log()
    decision = Decision(3, (ONE, ONE), "5eed")
    assert [log.append(number, entry) for number, entry in enumerate([Claim(), decision, Ended()])] == [True] * 3
    other = Driver(servers, topic, monkeypatch)
    assert other.read(may_lag=True) == other.read() == log.read() == Log((decision, Ended()), 1)
    assert other.log.identity == log.log.identity
    assert not log.append(2, Claim())
    assert other.append(3, Claim())
    assert not log.append(3, Claim())
    assert log.read() == Log((decision, Ended(), Claim()), 1)


@pytest.mark.parametrize("servers", ["ours", pytest.param(NEWEST, marks=pytest.mark.peer)], indirect=True)
def test_a_driver_that_was_overtaken(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Driver(servers, topic, monkeypatch) for _ in range(2))
    assert old.read(may_lag=True) == new.read(may_lag=True) == Log()
    assert old.append(0, Claim())
    assert not new.append(0, Claim())
    assert new.append(new.read().end, Claim())
    for entry in (Decision(0, (ONE,)), Ended(), Claim()):
        assert not old.append(1, entry)
    assert new.append(2, Decision(0, ()))
    assert not old.append(1, Decision(1, ()))
    assert old.read() == new.read() == Log((Decision(0, ()),), 2)
    with pytest.raises(Superseded):
        Driver(servers, topic, monkeypatch, is_claimed=True).read()


def test_logs_of_one_topic(servers: str, topic: str) -> None:
    """Keys may begin with another log's key, or look like a record's."""
    keys = ["a", "a/0", "a/0/x", "", "/", "a/", "é"]
    logs = {key: DecisionLog({"bootstrap.servers": servers}, topic, key, Identity()) for key in keys}
    for batch, log in enumerate(logs.values()):
        assert log.append(log.read(may_lag=True).end, Decision(batch, ()))
    for batch, log in enumerate(logs.values()):
        assert log.read() == Log((Decision(batch, ()),), 0)
        assert DecisionLog({"bootstrap.servers": servers, "client.id": "x"}, topic, keys[batch], Identity()).read()


def test_the_topic(servers: str, topic: str) -> None:
    DecisionLog({"bootstrap.servers": servers}, topic, KEY, Identity()).read()
    with Admin({"bootstrap.servers": servers}) as admin:
        assert len(admin.describe_topic(topic).partitions) == 1
        (settings,) = admin.describe_configs([("topic", topic)]).check().values()
        assert settings["cleanup.policy"].value == "compact"
        assert settings["unclean.leader.election.enable"].value == "false"
        assert settings["min.insync.replicas"].value == "1"
        admin.create_topic(f"{topic}-deleted", 1)
    log = DecisionLog({"bootstrap.servers": servers}, f"{topic}-deleted", KEY, Identity())
    with pytest.raises(ConfigError, match=r"has cleanup\.policy=delete: decisions would be lost"):
        log.read()


def test_a_topic_that_gets_partitions(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log stays in the first one."""
    log = Driver(servers, topic, monkeypatch)
    assert log.append(0, Claim())
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_partitions({topic: 3}).check()
    other = Driver(servers, topic, monkeypatch)
    assert other.read() == log.read() == Log((Claim(),))
    assert other.append(1, Decision(0, ()))


@pytest.mark.parametrize(
    ("replicas", "settings", "possible", "risks"),
    [
        (3, {"unclean.leader.election.enable": "false", "min.insync.replicas": "2"}, 3, []),
        (1, {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}, 1, []),
        (2, {"unclean.leader.election.enable": "false", "min.insync.replicas": "1"}, 2, []),
        (1, {}, 3, ["1 of 3 replicas"]),
        (
            3,
            {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"},
            3,
            ["unclean.leader.election.enable=true", "min.insync.replicas=1"],
        ),
    ],
)
def test_risks(replicas: int, settings: dict[str, str | None], possible: int, risks: list[str]) -> None:
    assert decision_log._risks(replicas, settings, possible) == risks


def test_a_warning_of_risks(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, decision_log.__name__)
    Driver(servers, topic, monkeypatch).read()
    Driver(servers, topic, monkeypatch).read()
    assert not caplog.text
    monkeypatch.setattr(decision_log, "replicas_for", lambda _: 3)
    Driver(servers, topic, monkeypatch).read()
    assert f"topic {topic}, which keeps decisions" in caplog.text
    assert "it has 1 of 3 replicas" in caplog.text


def answer_late(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Have the leader tell an end of 1 for so many `times`; return what was told."""
    told: list[int] = []
    real = decision_log.list_offsets

    def list_offsets(*arguments: Any) -> dict[tuple[str, int], int]:
        ends = real(*arguments)
        if len(told) < times:
            ends = dict.fromkeys(ends, 1)
        told.extend(ends.values())
        return ends

    monkeypatch.setattr(decision_log, "list_offsets", list_offsets)
    return told


def test_a_leader_that_does_not_know_the_end_yet(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Driver(servers, topic, monkeypatch)
    for number in range(3):
        assert log.append(number, Claim())
    told = answer_late(monkeypatch, 2)
    assert log.read(may_lag=True).end == 3
    assert told == [1, 1, 3]


def test_records_that_are_lost(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end stays before what was read."""
    log = Driver(servers, topic, monkeypatch)
    log.log = DecisionLog({"bootstrap.servers": servers, "request.timeout.ms": "3000"}, topic, KEY, Identity())
    for number in range(3):
        assert log.append(number, Claim())
    told = answer_late(monkeypatch, 1000)
    with pytest.raises(ConfigError, match="deleted and created again while queries used it, or has lost records"):
        log.read(may_lag=True)
    assert len(told) > 2


def test_a_claimed_log_in_a_topic_that_was_created_again(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the run appends nothing, whether another run has begun a log there or not."""
    old = Driver(servers, topic, monkeypatch)
    for number in range(3):
        assert old.append(number, Claim())
    create_again(servers, topic)
    claimed = Driver(servers, topic, monkeypatch, is_claimed=True)
    claimed.log.identity = old.log.identity
    with pytest.raises(ConfigError, match="deleted and created again"):
        claimed.append(3, Decision(0, ()))
    new = Driver(servers, topic, monkeypatch)
    for number, entry in enumerate((Claim(), Decision(0, ()), Ended())):
        assert new.append(number, entry)
    assert not claimed.append(3, Decision(0, ()))
    assert new.read() == Log((Decision(0, ()), Ended()), 1)
    with pytest.raises(KlogError, match=r"deleted and created again|UNKNOWN_TOPIC"):  # it has read the first topic
        old.append(3, Decision(0, ()))
    assert new.read() == Log((Decision(0, ()), Ended()), 1)


@pytest.mark.parametrize("lags", [0, 1])
def test_a_claim_that_is_read_late(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, lags: int) -> None:
    """A process that has read less of its run's log looks again, and writes for that only if the leader lags."""
    old = Driver(servers, topic, monkeypatch)
    assert old.append(0, Claim())
    claimed = Driver(servers, topic, monkeypatch, is_claimed=True)
    claimed.log.identity = old.log.identity
    assert claimed.read(may_lag=True).end == 1
    assert old.append(1, Claim())
    asked: list[str] = []
    with monkeypatch.context() as patch:
        count_requests(patch, asked)
        answer_late(patch, lags)
        assert claimed.append(2, Decision(0, ()))
    assert asked.count("Produce") == 1 + lags
    assert old.read().entries == (Decision(0, ()),)


def test_another_prefix(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Driver(servers, topic, monkeypatch).append(0, Claim())
    other = DecisionLog({"bootstrap.servers": servers, "client.id": "x"}, topic, KEY, Identity("team-a."))
    with pytest.raises(ConfigError, match=r"Prefix is team-a\., but .* has written with klog- until now"):
        other.read()


def test_old_entries_get_tombstones(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a log that has gone on for long, the records without a tombstone are those of the last micro-batches."""
    log, zombie = Driver(servers, topic, monkeypatch), Driver(servers, topic, monkeypatch)
    assert zombie.append(0, Claim())
    for batch in range(20):
        number = log.read(may_lag=True).end
        assert log.append(number, Claim())
        if batch == 5:
            assert not zombie.append(1, Decision(7, ()))
        assert log.append(number + 1, Decision(batch, (ONE,)))
        assert log.append(number + 2, Ended())
    latest = {record.key: record.value for record in records_of(servers, topic)}
    assert sum(value is not None for value in latest.values()) <= 6
    assert log.read() == Driver(servers, topic, monkeypatch).read() == Log((Decision(19, (ONE,)), Ended()), 59)


def test_a_write_that_is_done_leaves_its_decision(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else that stays for good; its decision counts for whoever reads only what is left."""
    log = Driver(servers, topic, monkeypatch)
    for number, entry in enumerate((Claim(), Claim(), Decision(0, (ONE,)), Ended())):
        assert log.append(number, entry)
    latest = {record.key or b"": record.value for record in records_of(servers, topic)}
    left = LiveEntries(KEY)
    for key, value in latest.items():
        left.add(key, value, topic)
    assert sum(value is not None for value in latest.values()) == 2
    assert left.log(topic) == log.read() == Log((Decision(0, (ONE,)), Ended()), 2)


@pytest.mark.parametrize("servers", ["ours"], indirect=True)
def test_only_logs_with_an_open_transaction_are_kept(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings, kept = {"bootstrap.servers": servers}, []

    class Counted(LiveEntries):
        def __post_init__(self) -> None:
            super().__post_init__()
            kept.append(self.log_key)

    monkeypatch.setattr(log_states, "LiveEntries", Counted)
    logs = {key: DecisionLog(settings, topic, key, Identity()) for key in ("write/a", "write/b", "write/a/b")}
    for log in logs.values():
        for number, entry in enumerate((Claim(), Decision(0, (ONE,)), Ended(), Claim())):
            assert log.append(number, entry)
    with Producer(settings) as producer:  # by others
        for key, value in ((b"write/a/9/x", b"{"), (b"write/a/" + b"9" * 5000 + b"/x", b"{}"), (b"write/c/0/x", b"[")):
            producer.send(topic, value, key, partition=0)
    owner = logs["write/a/b"]
    wanted = log_states.owning_one_of([f"{owner.identity.id_prefix}{uuid.uuid4()}", "orders-1"])
    with Admin(settings) as admin, admin.exclusive() as cluster:
        (found,) = log_states.logs_in_topic(cluster, topic, wanted)
        assert (found.query, found.identity, found.log) == ("write/a/b", owner.identity, owner.read())
        assert kept == ["write/a/b"]
        assert log_states.logs_in_topic(cluster, topic, lambda name, _: name == "write/a") == []
        assert "write/a" in kept
        assert "is not an entry of a decision log" in caplog.text


def count_requests(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    send = Connection.send

    def counted(self: Connection, api: Api, *arguments: Any, **more: Any) -> Any:
        asked.append(api.name)
        return send(self, api, *arguments, **more)

    monkeypatch.setattr(Connection, "send", counted)


def test_requests_of_a_micro_batch(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in the topic, each append is one request, as is the read before it; a decision looks at the topic's id."""
    log = DecisionLog({"bootstrap.servers": servers}, topic, KEY, Identity())
    assert log.append(0, Claim())
    asked: list[str] = []
    count_requests(monkeypatch, asked)
    number = log.read(may_lag=True).end
    for place, entry in enumerate((Claim(), Decision(0, (ONE,)), Ended())):
        assert log.append(number + place, entry)
    assert asked == ["ListOffsets", "Produce", "Metadata", "Produce", "Produce"]
    assert DecisionLog({"bootstrap.servers": servers}, topic, "another", Identity()).append(0, Claim())
    asked.clear()
    assert log.append(number + 3, Claim())
    assert asked == ["Produce", "Fetch"]


def test_a_large_decision(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 tasks."""
    ids = [Transaction(f"klog-{uuid.UUID(int=0)}-{uuid.uuid4()}", 1000 + task, 0, task) for task in range(20_000)]
    assert Driver(servers, topic, monkeypatch).append(0, Decision(0, tuple(ids)))
    assert Driver(servers, topic, monkeypatch).read() == Log((Decision(0, tuple(ids)),))


def create_again(servers: str, topic: str) -> None:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_topic(topic)

        def is_made() -> bool:
            try:
                admin.create_topic(topic, 1, configs={"cleanup.policy": "compact"})
            except ProtocolError:  # Kafka may still be deleting the old one
                return False
            return True

        wait_until(is_made, "the topic", _SECONDS)


def test_a_topic_that_is_created_again(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Driver(servers, topic, monkeypatch)
    for number in range(3):
        assert log.append(number, Claim())
    create_again(servers, topic)
    with pytest.raises(KlogError, match=r"deleted and created again|UNKNOWN_TOPIC"):
        log.append(3, Claim())
    with suppress(DecodeError):  # the topic may have that entry, and none before it
        assert log.read() == Log()
    decision = Decision(4, ())
    assert log.append(log.log.end(), decision)
    assert log.read().entries == (decision,)


def test_threads_take_turns(servers: str, topic: str) -> None:
    """Of the queries of one driver; each number has one winner."""
    won: list[int] = []

    def run() -> None:
        log = DecisionLog({"bootstrap.servers": servers}, topic, KEY, Identity())
        for _ in range(10):
            number = log.read(may_lag=True).end
            if log.append(number, Claim()):
                won.append(number)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(set(won))
    assert DecisionLog({"bootstrap.servers": servers}, topic, KEY, Identity()).read().end == max(won) + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process(servers: str, topic: str) -> None:
    """As pyspark.daemon's: it makes connections of its own."""
    log = DecisionLog({"bootstrap.servers": servers}, topic, KEY, Identity())
    assert log.append(0, Claim())
    child = os.fork()
    if not child:
        os._exit(0 if log.append(1, Claim()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not log.append(1, Claim())
    assert log.append(2, Claim())


def test_an_append_whose_answer_is_lost(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it counts is open; the next read says."""
    log = Driver(servers, topic, monkeypatch)
    assert log.append(0, Claim())
    real = Producer.flush

    def flush(self: Producer, timeout: float | None = None) -> None:
        real(self, timeout)
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(Producer, "flush", flush)
        with pytest.raises(ConnectionResetError):
            log.append(1, Decision(0, ()))
    assert log.read() == Log((Decision(0, ()),), 1)


@pytest.mark.test_all("long")
def test_compaction(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New drivers read on, old ones that read before it are told that they are late."""
    small = {"cleanup.policy": "compact", "segment.bytes": str(SEGMENT), "min.cleanable.dirty.ratio": "0.01"}
    small |= {"delete.retention.ms": "0", "max.message.bytes": str(SEGMENT)}
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topic(topic, 1, configs=small)
    log, zombie, void = (Driver(servers, topic, monkeypatch) for _ in range(3))
    assert zombie.append(0, Claim())
    assert void.read() == Log((Claim(),))
    transactions = tuple(Transaction(f"klog-{uuid.uuid4()}", task, 0, task) for task in range(2000))
    for batch in range(SEGMENT * 4 // 60_000):  # compressed
        number = log.read(may_lag=True).end
        assert log.append(number, Claim())
        assert log.append(number + 1, Decision(batch, transactions))
        assert log.append(number + 2, Ended())
        if batch == 5:
            assert not void.append(number, Decision(7, ()))
    wait_until(lambda: records_of(servers, topic)[0].offset > 100, "compaction", _SECONDS)
    expected = Log((Decision(batch, transactions), Ended()), number + 1)
    assert log.read() == Driver(servers, topic, monkeypatch).read() == expected
    assert not zombie.append(1, Decision(0, ()))
    assert zombie.read() == expected
    late = Driver(servers, topic, monkeypatch, is_claimed=True)
    with pytest.raises(Superseded):
        late.read()


# ----- the rule alone


def taken_in(*records: tuple[int, Entry | None, str], key: str = KEY) -> LiveEntries:
    live, identity = LiveEntries(key), Identity()
    for number, entry, id_ in records:
        value = None if entry is None else encode_entry(identity, entry)
        live.add(record_key(KEY, number, id_), value, "t-0 at offset 7")
    return live


def test_void_entries() -> None:
    one, two = Decision(1, ()), Decision(2, ())
    live = taken_in(
        (0, Claim(), "a"), (0, one, "b"), (1, one, "a"), (1, Ended(), "b"), (0, two, "b"), (2, Ended(), "a")
    )
    assert live.log("t") == Log((one, Ended()), 1)
    assert list(live.obsolete) == [record_key(KEY, 0, "a"), record_key(KEY, 0, "b")]


def test_what_compaction_leaves() -> None:
    """Void entries before the last decision look as if they counted; the decision counts nevertheless."""
    two = Decision(2, ())
    live = taken_in(
        (1, Decision(7, ()), "void"), (5, Claim(), "void"), (6, None, "x"), (9, two, "a"), (8, Ended(), "b")
    )
    assert live.log("t") == Log((two,), 9)


def test_entries_that_are_missing() -> None:
    for records in ([(1, Claim(), "a")], [(4, Decision(0, ()), "a"), (6, Claim(), "b")]):
        live = taken_in(*records)
        assert live.is_incomplete
        with pytest.raises(DecodeError, match=r"topic t: entry \d of the decision log .* is missing"):
            live.log("t")
    assert not taken_in((1, Claim(), "a"), (3, Decision(0, ()), "a")).is_incomplete


def test_other_records() -> None:
    live = taken_in((0, Claim(), "a"), key="stream/s3a://bucket")
    huge = f"{live.log_key}/{'9' * 5000}/a".encode()
    for key in (None, b"", b"x", KEY.encode(), f"{KEY}/".encode(), f"{KEY}/1".encode(), f"{KEY}/x/y".encode(), huge):
        live.add(key, b"{}", "t-0")
    assert live.log("t") == Log()
    entry = json.loads(encode_entry(Identity(), Decision(0, ())))
    number = json.dumps(entry | {"batch": "9" * 5000}).encode()
    for value in (b"{}", b"[" * 100_000, json.dumps(entry | {"batch": math.inf}).encode(), number):
        with pytest.raises(DecodeError, match="t-0 at offset 7 is not an entry of a decision log"):
            live.add(record_key(live.log_key, 0, "a"), value, "t-0 at offset 7")
