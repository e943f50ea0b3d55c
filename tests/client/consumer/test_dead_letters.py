"""Dead letters and retries of consumers: their form, the transaction with the offset, records that wait."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spark_klog.base.names import check_topic_name
from spark_klog.client import Admin, Consumer, ConsumerRecord, Producer
from spark_klog.client.consumer.assignment import Assignment
from spark_klog.client.consumer.dead_letters import DeadLetters
from spark_klog.client.consumer.decoding import RecordDecoder
from spark_klog.client.consumer.fetches import Fetches
from spark_klog.client.consumer.settings import consumer_config
from spark_klog.client.dead_letters import DeadLetter, split, told
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.letter_topics import GROUP
from spark_klog.client.offsets import Committed
from spark_klog.client.producer.transactions import State, Transactions
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import (
    BufferExhausted,
    CommitFailed,
    ConfigError,
    ProtocolError,
    RecordDeserializationError,
    RequestTimedOut,
)
from tests.support.clients.topics import make_topic
from tests.support.runs.soak import in_soak
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import free_port

_SECONDS = 60.0
_HEADERS = (("traceparent", b"00-ab-cd-01"), ("empty", None), ("\u20ac", b"\xff\x00"), ("traceparent", b"again"))


def _settings(cluster: EmbeddedCluster, topic: str, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.bootstrap_servers,
        "group.id": f"g-{topic}",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "dead.letter.topic": f"{topic}-dlq",
        **{name.replace("_", "."): value for name, value in more.items()},
    }


@contextmanager
def _reader(cluster: EmbeddedCluster, topic: str, **more: Any) -> Iterator[Consumer]:
    with Consumer(_settings(cluster, topic, **more)) as consumer:
        consumer.subscribe([topic])
        yield consumer


def _poll(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    got: list[ConsumerRecord] = []
    deadline = time.monotonic() + _SECONDS
    while len(got) < count:
        assert time.monotonic() < deadline, got
        got += consumer.poll(0.2)
    return got


def _letters(cluster: EmbeddedCluster, topic: str) -> list[ConsumerRecord]:
    """All committed records of a topic."""
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "isolation.level": "read_committed"}
    got: list[ConsumerRecord] = []
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin, Consumer(settings) as consumer:
        partitions = [(topic, each.partition) for each in admin.describe_topic(topic).partitions]
        consumer.assign([(*key, 0) for key in partitions])
        ends = {key: offsets[-1] for key, offsets in _ends(admin, partitions).items()}
        deadline = time.monotonic() + _SECONDS
        while any(consumer.position(*key) < end for key, end in ends.items()):
            assert time.monotonic() < deadline
            got += consumer.poll(0.2)
    return got


def _texts(consumer: Consumer, *, as_arrow: bool) -> list[str]:
    """The values of a poll."""
    if as_arrow:
        batch = consumer.poll_arrow(0.2)
        return [] if batch is None else batch["value"].to_pylist()
    return [record.value for record in consumer.poll(0.2)]


def _ends(admin: Admin, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, ...]]:
    from spark_klog.client.offsets import list_offsets
    from spark_klog.protocol.tables.records import LATEST, READ_COMMITTED

    return {
        key: (end,)
        for key, end in list_offsets(admin.cluster, dict.fromkeys(partitions, LATEST), READ_COMMITTED).items()
    }


def _producer_settings(cluster: EmbeddedCluster, **more: Any) -> dict[str, Any]:
    settings = {name.replace("_", "."): str(value) for name, value in more.items()}
    return {"bootstrap.servers": cluster.bootstrap_servers, "buffer.memory": str(64 << 20), **settings}


def _send(cluster: EmbeddedCluster, topic: str, *values: bytes | None, headers: Any = (), **more: Any) -> None:
    with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
        for value in values:
            producer.send(topic, value, headers=headers, **more)


@pytest.fixture
def topic(cluster: EmbeddedCluster, topic: str) -> str:
    make_topic(cluster.bootstrap_servers, topic, 1)
    make_topic(cluster.bootstrap_servers, f"{topic}-dlq", 1)
    return topic


def test_a_letter_is_the_record_as_it_was(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, b"\x00\xffvalue", key=b"\xfekey", headers=_HEADERS, timestamp=1234567)
    _send(cluster, topic, None, timestamp=-1)
    with _reader(cluster, topic) as consumer:
        first, second = _poll(consumer, 2)
        try:
            raise ValueError("no such row")
        except ValueError as error:
            consumer.dead_letter(first, error)
        consumer.dead_letter(second, "it is empty")
        assert _letters(cluster, f"{topic}-dlq") == []
        consumer.commit()
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 2
    letters = _letters(cluster, f"{topic}-dlq")
    assert [(each.key, each.value, each.timestamp) for each in letters] == [
        (b"\xfekey", b"\x00\xffvalue", 1234567),
        (None, None, -1),
    ]
    assert letters[0].headers[: len(_HEADERS)] == _HEADERS
    block = dict(letters[0].headers[len(_HEADERS) :])
    assert list(block) == [
        "__connect.errors.topic",
        "__connect.errors.partition",
        "__connect.errors.offset",
        "__connect.errors.connector.name",
        "__connect.errors.task.id",
        "__connect.errors.stage",
        "__connect.errors.class.name",
        "__connect.errors.exception.class.name",
        "__connect.errors.exception.message",
        "__connect.errors.exception.stacktrace",
        "__klog.errors.time",
        "__klog.errors.attempts",
    ]
    assert block["__connect.errors.topic"] == topic.encode()
    assert block["__connect.errors.connector.name"] == f"g-{topic}".encode()
    assert block["__connect.errors.stage"] == b"TASK_PUT"
    assert block["__connect.errors.exception.class.name"] == b"ValueError"
    assert block["__connect.errors.exception.message"] == b"no such row"
    assert b"test_a_letter_is_the_record_as_it_was" in (block["__connect.errors.exception.stacktrace"] or b"")
    letter, own = split(letters[1].headers)
    assert own == ()
    assert letter is not None
    assert (letter.topic, letter.partition, letter.offset, letter.reason) == (topic, 0, 1, "it is empty")
    assert (letter.error, letter.trace, letter.attempts) == ("", "", 1)
    assert abs(letter.time - 1000 * time.time()) < 600_000


def test_headers_of_connect_and_of_others() -> None:
    connect = DeadLetter("t", 3, 4, "sink", "1", "VALUE_CONVERTER", "org.X", "java.lang.E", "why", "at X")
    own = (("a", b"1"), *DeadLetter("first", 0, 1).headers, ("b", None))
    assert split((*own, *connect.headers, ("added", b"later"))) == (connect, (*own, ("added", b"later")))
    assert split(()) == (None, ())
    for rubbish in (b"x", b"", b"\xff", None, b"9" * 30):
        headers = (("__connect.errors.topic", b"t"), ("__connect.errors.partition", rubbish))
        assert split(headers) == (None, headers)


def test_letters_show_no_secrets_and_stay_short() -> None:
    text = " and ".join(["hunter" + "22", "postgres://me:" + "pw1@host/db", "password=" + "pw2", "x" * 10_000])
    try:
        raise ValueError(text)
    except ValueError as error:
        kind, reason, trace = told(error, ["hunter" + "22", ""])
    assert kind == "ValueError"
    assert trace.endswith("x" * 100 + "\n")
    assert len(reason) + len(trace) < 8000
    assert reason == told(text, ["hunter" + "22"])[1]
    for secret in ("hunter" + "22", "pw1", "pw2"):
        assert secret not in reason + trace
    assert "host/db" in reason


def test_a_letter_goes_with_the_commit_of_its_offset(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, *(b"%d" % number for number in range(4)))
    with _reader(cluster, topic) as consumer:
        records = _poll(consumer, 4)
        for record in records:
            consumer.dead_letter(record, "first")
        consumer.dead_letter(records[0], "second")
        consumer.commit({(topic, 0): 2})
        assert [each.value for each in _letters(cluster, f"{topic}-dlq")] == [b"0", b"1"]
        consumer.seek(topic, 0, 3)
        _poll(consumer, 1)
        told: list[Any] = []
        consumer.commit_async({(topic, 0): 3}, lambda *outcome: told.append(outcome))
        deadline = time.monotonic() + _SECONDS
        while not told:  # on a loop it goes on meanwhile
            assert time.monotonic() < deadline
            assert consumer.poll(0.01) == []
        assert len(told) == 1
        assert told[0][1] is None
    with _reader(cluster, topic) as consumer:
        assert [record.value for record in _poll(consumer, 1)] == [b"3"]
        consumer.commit()
    letters = _letters(cluster, f"{topic}-dlq")
    assert [each.value for each in letters] == [b"0", b"1", b"2"]
    assert dict(letters[0].headers)["__connect.errors.exception.message"] == b"second"


def test_auto_commit_and_close_write_letters(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, b"0", b"1")
    with _reader(cluster, topic, enable_auto_commit=True, group_protocol="consumer") as consumer:
        for record in _poll(consumer, 2):
            consumer.dead_letter(record, "no")
    assert [each.value for each in _letters(cluster, f"{topic}-dlq")] == [b"0", b"1"]


@pytest.mark.parametrize("as_arrow", [False, True])
def test_records_that_do_not_deserialize(cluster: EmbeddedCluster, driver: str, topic: str, as_arrow: bool) -> None:
    values = [b"\xff", b"1", b"2", b"\xfe", b"\xfd", b"5", b"\xfc"]
    _send(cluster, topic, *values, timestamp=77, headers=_HEADERS)
    asked = {"value.deserializer": "string", "dead.letter.deserialization.errors": True, "max.poll.records": 2}
    with Consumer(_settings(cluster, topic) | asked) as consumer:
        consumer.subscribe([topic])
        got: list[str] = []
        deadline = time.monotonic() + _SECONDS
        while not consumer.assignment() or consumer.position(topic, 0) < len(values):
            assert time.monotonic() < deadline
            got += _texts(consumer, as_arrow=as_arrow)
        assert got == ["1", "2", "5"]
        consumer.commit({(topic, 0): 3})
        assert [each.value for each in _letters(cluster, f"{topic}-dlq")] == [b"\xff"]
        consumer.commit()
    letters = _letters(cluster, f"{topic}-dlq")
    assert [(each.value, each.timestamp) for each in letters] == [(each, 77) for each in values if each > b"\x80"]
    letter, own = split(letters[-1].headers)
    assert own == _HEADERS
    assert letter is not None
    assert (letter.offset, letter.stage) == (6, "VALUE_CONVERTER")
    assert "decode" in letter.reason


def test_a_record_that_was_deserialized_is_written_as_it_was(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, b"5", b"\xff", key=b"k")
    with Consumer(_settings(cluster, topic) | {"value.deserializer": int, "key.deserializer": "string"}) as consumer:
        consumer.subscribe([topic])
        (record,) = _poll(consumer, 1)
        assert (record.key, record.value) == ("k", 5)
        consumer.dead_letter(record, "odd")
        with pytest.raises(TypeError, match="as it is"):
            consumer.dead_letter(record._replace(value=6), "odd")
        with pytest.raises(RecordDeserializationError) as failure:
            _poll(consumer, 1)
        consumer.dead_letter(failure.value, failure.value)
        consumer.seek(topic, 0, 2)
        consumer.commit()
    assert [(each.key, each.value) for each in _letters(cluster, f"{topic}-dlq")] == [(b"k", b"5"), (b"k", b"\xff")]


@pytest.mark.parametrize("as_arrow", [False, True])
def test_many_records_that_do_not_deserialize(cluster: EmbeddedCluster, topic: str, as_arrow: bool) -> None:
    """A fetch of nothing else, whose letters take more than buffer.memory, in several Arrow batches."""
    value, count = b"\xff" * 500_000, 24
    sizes = {"compression_type": "gzip", "linger_ms": 5000, "batch_size": 32 << 20, "max_request_size": 32 << 20}
    with Producer(_producer_settings(cluster, **sizes)) as producer:
        for _ in range(count):
            producer.send(topic, value)
        producer.flush()
        producer.send(topic, b"good")
    asked = {"value.deserializer": "string", "dead.letter.deserialization.errors": True, "buffer.memory": 2_000_000}
    got: list[str] = []
    with Consumer(_settings(cluster, topic) | asked) as consumer:
        consumer.subscribe([topic])
        deadline = time.monotonic() + _SECONDS
        while not got:
            assert time.monotonic() < deadline
            got += _texts(consumer, as_arrow=as_arrow)
            consumer.commit()
    assert got == ["good"]
    offsets = [
        letter.offset for letter, _ in (split(each.headers) for each in _letters(cluster, f"{topic}-dlq")) if letter
    ]
    assert offsets == list(range(count))


def test_letters_that_nobody_commits_are_bounded(cluster: EmbeddedCluster, topic: str) -> None:
    _send(cluster, topic, *[b"\xff" * 1000] * 200)
    asked = {"value.deserializer": "string", "dead.letter.deserialization.errors": True, "buffer.memory": 50_000}
    with Consumer(_settings(cluster, topic) | asked) as consumer:
        consumer.subscribe([topic])
        with pytest.raises(BufferExhausted, match="commit"):
            _poll(consumer, 1)
        assert 0 < consumer.position(topic, 0) < 100
        consumer.commit()
        with pytest.raises(BufferExhausted, match="commit"):
            _poll(consumer, 1)


def test_a_reason_that_is_not_unicode(cluster: EmbeddedCluster, topic: str) -> None:
    _send(cluster, topic, b'"\\ud800"')
    with _reader(cluster, topic) as consumer:
        (record,) = _poll(consumer, 1)
        consumer.dead_letter(record, ValueError(f"no user {json.loads(record.value)}"))
        consumer.commit()
    (letter,) = _letters(cluster, f"{topic}-dlq")
    said, _ = split(letter.headers)
    assert said is not None
    assert said.reason == r"no user \ud800"


def test_letters_of_records_before_a_new_position_stay(cluster: EmbeddedCluster, topic: str) -> None:
    _send(cluster, topic, *(b"%d" % number for number in range(6)))
    with Consumer(_settings(cluster, topic)) as consumer:
        consumer.assign([(topic, 0)])
        records = _poll(consumer, 6)
        consumer.dead_letter(records[0], "no")
        consumer.dead_letter(records[4], "no")
        consumer.assign([(topic, 0, 3)])  # record 4 is read again
        consumer.commit()
        (record, *_) = _poll(consumer, 3)
        consumer.dead_letter(record, "no")
        consumer.seek(topic, 0, -1)
        assert consumer.position(topic, 0) == 6
        consumer.commit()
    assert [each.value for each in _letters(cluster, f"{topic}-dlq")] == [b"0", b"3"]


@pytest.mark.parametrize("metadata", ["", "mine"])
def test_a_commit_whose_answer_is_lost(
    cluster: EmbeddedCluster, topic: str, metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _send(cluster, topic, b"0")
    commit = Transactions.commit

    def unanswered(transactions: Transactions) -> Any:
        yield from commit(transactions)
        transactions.state = State.COMMITTING
        raise RequestTimedOut("no answer")

    with _reader(cluster, topic) as consumer:
        (record,) = _poll(consumer, 1)
        consumer.commit({(topic, 0): Committed(0, metadata="before")})
        consumer.dead_letter(record, "no")
        offsets = {(topic, 0): Committed(1, metadata=metadata)}
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "commit", unanswered)
            with pytest.raises(RequestTimedOut):
                consumer.commit(offsets)
        consumer.commit(offsets)
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 1
    assert [each.value for each in _letters(cluster, f"{topic}-dlq")] == [b"0"]


def _retry_settings(cluster: EmbeddedCluster, topic: str, *delays: int, **more: Any) -> dict[str, Any]:
    names = [f"{topic}-retry-{number}" for number in range(len(delays))]
    for name in names:
        make_topic(cluster.bootstrap_servers, name, 1)
    return {"retry_topics": ",".join(names), "retry_delays_ms": ",".join(map(str, delays)), **more}


def test_retries_and_then_a_letter(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, b"bad", b"good", key=b"k", headers=_HEADERS)
    retries = _retry_settings(cluster, topic, 300, 600)
    with _reader(cluster, topic, **retries) as consumer:
        tried: list[tuple[str, float]] = []
        went: list[str] = []
        while len(went) < 3:
            for record in _poll(consumer, 1):
                if record.value == b"bad":
                    tried.append((record.topic, time.monotonic()))
                    went.append(consumer.retry(record, ValueError("again")))
            consumer.commit()
    assert [name for name, _ in tried] == [topic, f"{topic}-retry-0", f"{topic}-retry-1"]
    assert went == [f"{topic}-retry-0", f"{topic}-retry-1", f"{topic}-dlq"]
    times = [at for _, at in tried]
    assert times[1] - times[0] > 0.29
    assert times[2] - times[1] > 0.59
    (letter,) = _letters(cluster, f"{topic}-dlq")
    told, own = split(letter.headers)
    assert (letter.key, letter.value, own) == (b"k", b"bad", _HEADERS)
    assert told is not None
    assert (told.topic, told.offset, told.attempts, told.due) == (topic, 0, 3, -1)


def test_a_waiting_record_holds_back_its_partition_alone(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, b"slow", b"quick")
    retries = _retry_settings(cluster, topic, 0, 3_600_000, retry_attempts=5, session_timeout_ms=6000)
    with _reader(cluster, topic, **retries) as consumer:
        slow, quick = _poll(consumer, 2)
        assert consumer.retry(slow, after=3000) == f"{topic}-retry-1"
        assert consumer.retry(quick, after=0) == f"{topic}-retry-0"
        consumer.commit()
        (record,) = _poll(consumer, 1)
        assert (record.topic, record.value) == (f"{topic}-retry-0", b"quick")
        _send(cluster, topic, b"more")
        (record,) = _poll(consumer, 1)
        assert record.value == b"more"
        assert consumer.position(f"{topic}-retry-1", 0) == 0


def test_a_time_far_away_waits_for_the_delay_of_the_topic(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    retries = _retry_settings(cluster, topic, 200)
    forged = DeadLetter(topic, 0, 0, due=1 << 60, attempts=1).headers
    _send(cluster, f"{topic}-retry-0", b"forged", headers=forged)
    _send(cluster, f"{topic}-retry-0", b"no letter")
    with _reader(cluster, topic, **retries) as consumer:
        assert [record.value for record in _poll(consumer, 2)] == [b"forged", b"no letter"]


def test_what_waits_is_fetched_once(
    cluster: EmbeddedCluster, driver: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a retry topic that are due one after the other; a seek among them."""
    retries, now, due = _retry_settings(cluster, topic, 60_000), 1000 * time.time(), range(0, 1500, 50)
    for each in due:
        headers = DeadLetter(topic, 0, 0, due=int(now) + each, attempts=1).headers
        _send(cluster, f"{topic}-retry-0", b"%d" % each, headers=headers)
    fetched: list[int] = []
    chunk = Fetches._chunk

    def counted(fetches: Fetches, state: Any, *arguments: Any, **named: Any) -> Any:
        records = chunk(fetches, state, *arguments, **named)
        if records is not None and len(records) and state.topic != topic:
            fetched.append(records.offset)
        return records

    monkeypatch.setattr(Fetches, "_chunk", counted)
    with _reader(cluster, topic, **retries) as consumer:
        got: list[int] = []
        deadline = time.monotonic() + _SECONDS
        while len(got) < len(due):
            got += [int(record.value or b"") for record in consumer.poll(_SECONDS / 2)]  # it ends when one is due
            assert time.monotonic() < deadline, got
        assert got == list(due)
        consumer.seek(f"{topic}-retry-0", 0, 3)
        assert [int(record.value or b"") for record in _poll(consumer, len(due) - 3)] == list(due[3:])
    assert len(fetched) < len(due) / 2, fetched


def test_members_have_transactional_ids_of_their_own() -> None:
    """By groups and instances whose texts would be the same one after the other; none is that of a topic's replays."""
    names = [
        DeadLetters(consumer_config(_named(group, instance)), Assignment(), ())._client.transactional_id
        for group, instance in (("a.b", "c"), ("a", "b.c"), ("a/b", "c"), ("a", "b/c"), ("a", None))
    ]
    assert len({*names}) == len(names)
    for name in names:
        with pytest.raises(ConfigError):
            check_topic_name((name or "").removeprefix(GROUP))


def _named(group: str, instance: str | None) -> dict[str, str]:
    settings = {"bootstrap.servers": "h:1", "group.id": group, "dead.letter.topic": "dlq"}
    return settings if instance is None else settings | {"group.instance.id": instance}


def test_letters_of_lost_partitions_are_not_written(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    failures: list[Any] = []
    _send(cluster, topic, b"0")
    with _reader(cluster, topic) as consumer:
        (record,) = _poll(consumer, 1)
        consumer.dead_letter(record, "no")
        consumer.unsubscribe()
        with pytest.raises(CommitFailed, match="not assigned"):
            consumer.dead_letter(record, "no")
        with pytest.raises(CommitFailed, match=f"{topic}-0 had letters"):
            consumer.commit({(topic, 0): 1})
        consumer.commit_async({(topic, 0): 1}, lambda _, error: failures.append(error))
        consumer.subscribe([topic])
        (record,) = _poll(consumer, 1)
        assert [type(error) for error in failures] == [CommitFailed]
        consumer.commit()
    assert _letters(cluster, f"{topic}-dlq") == []


def test_a_commit_from_before_a_rebalance_loses_no_letter(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    """The partition has come back, and its records are read again: offsets behind them are from before."""
    _send(cluster, topic, *[b"%d" % number for number in range(4)])
    with _reader(cluster, topic, max_poll_records=1) as consumer:
        consumer.dead_letter(_poll(consumer, 3)[2], "no")
        consumer.unsubscribe()
        consumer.subscribe([topic])
        (record,) = _poll(consumer, 1)
        assert record.offset == 0
        with pytest.raises(CommitFailed, match=f"{topic}-0 had letters"):
            consumer.commit({(topic, 0): 3})
        consumer.commit()
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 1
        consumer.dead_letter(_poll(consumer, 2)[1], "again")
        consumer.commit({(topic, 0): 3})
    (letter,) = _letters(cluster, f"{topic}-dlq")
    assert dict(letter.headers)["__connect.errors.exception.message"] == b"again"


def test_a_chunk_of_a_retry_topic_begins_in_the_thread() -> None:
    """Also after a chunk of which a seek has dropped the records that were decoded already."""
    retries = {"dead.letter.topic": "dlq", "retry.topics": "later", "retry.delays.ms": "1"}
    config = consumer_config(_named("g", None) | retries)
    decoder = RecordDecoder(1, 1)
    decoder.is_ahead = True
    DeadLetters(config, Assignment(), ()).due_parts(decoder.slices)(Fetched("t", 0, 0, 1, memoryview(b""), [], {}))
    assert not decoder.is_ahead


def test_a_replaced_member_writes_neither_letters_nor_offsets(
    cluster: EmbeddedCluster, driver: str, topic: str
) -> None:
    _send(cluster, topic, b"0")
    with _reader(cluster, topic, session_timeout_ms=6000, max_poll_interval_ms=6000) as late:
        (record,) = _poll(late, 1)
        late.dead_letter(record, "late")
        with _reader(cluster, topic) as other:
            (record,) = _poll(other, 1)  # once the group has given up the first one
            other.dead_letter(record, "other")
            other.commit()
            with pytest.raises(CommitFailed):
                late.commit()
    (letter,) = _letters(cluster, f"{topic}-dlq")
    assert dict(letter.headers)["__connect.errors.exception.message"] == b"other"


def test_topics_that_take_no_letters(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    _send(cluster, topic, b"x" * 3000)
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(f"{topic}-small", 1, configs={"max.message.bytes": "2000"})
        with _reader(cluster, topic, dead_letter_topic=f"{topic}-small") as consumer:
            (record,) = _poll(consumer, 1)
            consumer.dead_letter(record, "no")
            with pytest.raises(ProtocolError, match=f"{topic}-small.*max.message.bytes"):
                consumer.commit()
            assert consumer.committed([(topic, 0)]) == {}
            admin.alter_configs({("topic", f"{topic}-small"): {"max.message.bytes": "100000"}})
            consumer.commit()
            assert consumer.committed([(topic, 0)])[topic, 0].offset == 1
    assert len(_letters(cluster, f"{topic}-small")) == 1


def test_letters_that_can_not_be_written_end_a_consumer_that_commits_by_itself(
    cluster: EmbeddedCluster, driver: str, topic: str
) -> None:
    _send(cluster, topic, b"x" * 3000)
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.create_topic(f"{topic}-small", 1, configs={"max.message.bytes": "2000"})
    own = {"enable_auto_commit": True, "auto_commit_interval_ms": 100}
    with _reader(cluster, topic, dead_letter_topic=f"{topic}-small", **own) as consumer:
        (record,) = _poll(consumer, 1)
        consumer.dead_letter(record, "no")
        with pytest.raises(ProtocolError, match=r"max\.message\.bytes"):
            _poll(consumer, 1)
        # a slow machine may have committed the beginning before the record came
        assert all(entry.offset == 0 for entry in consumer.committed([(topic, 0)]).values())


def test_a_commit_of_letters_waits_for_a_broker_also_after_unsubscribe(tmp_path: Path) -> None:
    """Which gives up soon itself if no broker can be reached."""
    with KlogBroker(tmp_path) as broker:
        servers = {"bootstrap.servers": broker.bootstrap_servers}
        with Producer(servers) as producer:
            producer.send("t", b"0")
        settings = {"group.id": "g", "auto.offset.reset": "earliest", "dead.letter.topic": "t-dlq"}
        with Consumer({**servers, **settings, "enable.auto.commit": False}) as consumer:
            consumer.subscribe(["t"])
            _poll(consumer, 1)
            consumer.unsubscribe()
            consumer.subscribe(["t"])
            consumer.dead_letter(_poll(consumer, 1)[0], "no")
            broker.kill()
            starting = threading.Timer(2.0, broker.start)
            starting.start()
            try:
                consumer.commit()
            finally:
                starting.join()
            assert consumer.committed([("t", 0)])["t", 0].offset == 1


def test_own_transactions(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    """The producer's serializers are for what the program sends, not for letters."""
    _send(cluster, topic, b"\xff0", key=b"k\xff")
    own = {"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": topic}
    serializers = {"value.serializer": lambda value: json.dumps(value).encode(), "key.serializer": "string"}
    with _reader(cluster, topic) as consumer, Producer({**own, **serializers}) as producer:
        producer.init_transactions()
        (record,) = _poll(consumer, 1)
        for commits in (False, True):
            producer.begin_transaction()
            consumer.dead_letter(record, "no", producer=producer)
            producer.send_offsets_to_transaction({(topic, 0): 1}, consumer.group_metadata())
            producer.commit_transaction() if commits else producer.abort_transaction()
    assert [(each.key, each.value) for each in _letters(cluster, f"{topic}-dlq")] == [(b"k\xff", b"\xff0")]


def test_a_letter_needs_no_schema(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    """The registry is not asked about the letters' topic, by a producer that writes rows by schemas of it."""
    _send(cluster, topic, b"\xff0")
    rows = {"value.serializer": "avro", "schema.registry.url": f"http://127.0.0.1:{free_port()}"}
    with _reader(cluster, topic) as consumer:
        (record,) = _poll(consumer, 1)
        with Producer({"bootstrap.servers": cluster.bootstrap_servers, **rows}) as producer:
            consumer.dead_letter(record, "no", producer=producer)
            producer.flush()
    assert [each.value for each in _letters(cluster, f"{topic}-dlq")] == [b"\xff0"]


def test_a_thread_that_deserializes_adds_letters_meanwhile() -> None:
    """A consumer on an event loop deserializes in a thread, beside the loop's calls."""
    settings = {"bootstrap.servers": "localhost:1", "group.id": "g", "dead.letter.topic": "dlq"}
    with Consumer(settings) as consumer:
        consumer.assign([("t", 0)])
        letters, key = consumer._letters, ("t", 0)
        assert letters is not None
        state = consumer._assignment.partitions[key]

        def deserialize() -> None:
            for offset in range(3000):
                letters.undecodable(RecordDeserializationError(*key, offset, "value", "bad", None, b"v", (), 0))

        thread = threading.Thread(target=deserialize)
        thread.start()
        while thread.is_alive():
            letters.due({key: Committed(0)})
            letters.forget(state, 3000)
            letters.add(ConsumerRecord(*key, 5000, 0, 0, None, b"w", ()), "why")
        thread.join()
        assert len(letters.due({key: Committed(4000)})) == 3000
        letters.forget(state, 0)
        assert letters._size == 0


def test_what_is_refused(cluster: EmbeddedCluster, driver: str, topic: str) -> None:
    base = _settings(cluster, topic)
    for wrong, match in (
        ({"group.id": None}, "group.id"),
        ({"dead.letter.topic": "no/topic"}, "no/topic"),
        ({"retry.topics": "a,b", "retry.delays.ms": "1"}, "one for each"),
        ({"retry.topics": "a,b", "retry.delays.ms": "2,1"}, "none less"),
        ({"retry.topics": f"{topic}-dlq", "retry.delays.ms": "2"}, "both"),
        ({"retry.attempts": 3}, "retry.topics"),
        ({"retry.topics": "a", "retry.delays.ms": "2", "isolation.level": "read_uncommitted"}, "read_committed"),
        ({"dead.letter.topic": None, "retry.topics": "a", "retry.delays.ms": "2"}, "dead.letter.topic"),
    ):
        with pytest.raises(ConfigError, match=match):
            Consumer({name: value for name, value in (base | wrong).items() if value is not None})
    _send(cluster, topic, b"0" * 600, b"1" * 600)
    with _reader(cluster, topic, buffer_memory=1000) as consumer:
        first, second = _poll(consumer, 2)
        with pytest.raises(ConfigError, match=r"retry\.topics"):
            consumer.retry(first)
        with pytest.raises(TypeError, match="reason"):
            consumer.dead_letter(first, 5)  # type: ignore[arg-type]
        consumer.dead_letter(first, "no")
        with pytest.raises(BufferExhausted, match="commit"):
            consumer.dead_letter(second, "no")
        with pytest.raises(ConfigError, match="letters of letters"):
            consumer.dead_letter(first._replace(topic=f"{topic}-dlq"), "no")
        consumer.commit({(topic, 0): 1})
        consumer.dead_letter(second, "no")
    with Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g"}) as plain:
        with pytest.raises(ConfigError, match=r"dead\.letter\.topic"):
            plain.dead_letter(first, "no")


_KILLED = """
import json, sys
from spark_klog.client import Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer import dead_letters
from spark_klog.client.offsets import offset_range
from spark_klog.client.producer import transactions
from tests.support.checker.interrupts import LinesRun
settings, topic, last = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])

with Consumer(settings) as consumer, Cluster.connect({"bootstrap.servers": settings["bootstrap.servers"]}) as cluster:
    consumer.subscribe([topic])
    with LinesRun(last, dead_letters, transactions) as lines:
        while True:
            for record in consumer.poll(0.2):
                if record.topic == topic:
                    consumer.retry(record, "odd")
                else:
                    consumer.dead_letter(record, ValueError("odd"))
            consumer.commit()
            known = sorted(consumer.assignment())
            # the markers of transactions have offsets, too: what is left to read is what the broker says
            if len(known) == 2 and all(offset_range(cluster, *key)[1] <= consumer.position(*key) for key in known):
                break
    print(lines.seen, flush=True)
"""


def _kill_at(cluster: EmbeddedCluster, topic: str, line: int, **retries: Any) -> int:
    """Run the consumer up to its so manieth line; how many it has run, or 0 if it was killed."""
    settings = _settings(cluster, topic, **retries, max_poll_records=2, group_instance_id="one")
    command = [sys.executable, "-c", _KILLED, json.dumps(settings), topic, str(line)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * _SECONDS, check=False)
    assert done.returncode == (9 if not done.stdout else 0)
    return int(done.stdout or 0)


@pytest.mark.parametrize("parts", [4, pytest.param(200, marks=in_soak)])
def test_kills_at_any_line_neither_lose_nor_double(cluster: EmbeddedCluster, topic: str, parts: int) -> None:
    values = [b"%d" % number for number in range(6)]
    _send(cluster, topic, *values)
    retries = _retry_settings(cluster, topic, 0)
    lines = 1200
    for part in range(parts):
        if _kill_at(cluster, topic, 60 + lines * part // parts // (1 if parts < 10 else 2), **retries):
            break
    _kill_at(cluster, topic, 0, **retries)
    for name in (f"{topic}-retry-0", f"{topic}-dlq"):
        assert sorted(each.value for each in _letters(cluster, name)) == values
