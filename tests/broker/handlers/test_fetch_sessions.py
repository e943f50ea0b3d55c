"""Incremental fetch sessions (KIP-227): the table of sessions, a model of a client, and a running broker."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from spark_klog.broker.fetches import FetchSession, FetchSessions, PartitionKey
from spark_klog.errors import ErrorCode
from spark_klog.protocol.apis import CREATE_TOPICS, DELETE_TOPICS, FETCH
from spark_klog.protocol.codec import decode_request, decode_request_header, decode_response
from spark_klog.wire.primitives import Reader
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.client import Record
from tests.support.clients.java import Java39, Java44
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST, free_port

NOW = 1_700_000_000_000
NO_ID = uuid.UUID(int=0)
NOT_FOUND, INVALID_EPOCH = ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH
MAX_INT32 = 2**31 - 1
EXAMPLES = int(os.environ.get("SPARK_KLOG_FUZZ_SECONDS", "3")) * 20


def _key(partition: int, topic: str = "t") -> PartitionKey:
    return PartitionKey(topic, NO_ID, partition)


def _wanted(*partitions: int) -> list[tuple[PartitionKey, dict[str, Any]]]:
    return [(_key(partition), {"partition": partition}) for partition in partitions]


def _answer(watermark: int = 0, start: int = 0, records: bytes = b"", code: int = 0) -> dict[str, Any]:
    return {"high_watermark": watermark, "log_start_offset": start, "records": records, "error_code": code}


def _made(sessions: FetchSessions, *partitions: int, now: float = 0.0) -> FetchSession:
    found = sessions.find(0, 0, _wanted(*partitions), [], now)
    assert isinstance(found, tuple)
    session, is_incremental = found
    assert session is not None
    assert not is_incremental
    return session


def test_epochs_follow_each_other() -> None:
    sessions = FetchSessions(10, 60)
    session = _made(sessions, 0)
    for epoch in (1, 2, 3):
        assert sessions.find(session.id, epoch, [], [], 0) == (session, True)
    for epoch in (3, 5, 1, MAX_INT32):
        assert sessions.find(session.id, epoch, [], [], 0) == INVALID_EPOCH
    assert sessions.find(session.id, 4, [], [], 0) == (session, True)
    session.next_epoch = MAX_INT32
    assert sessions.find(session.id, MAX_INT32, [], [], 0) == (session, True)
    assert sessions.find(session.id, 1, [], [], 0) == (session, True)  # 0 would be a new session


@pytest.mark.parametrize("session_id", [0, 1, -1, MAX_INT32])
def test_a_session_that_is_not_there(session_id: int) -> None:
    sessions = FetchSessions(10, 60)
    while session_id == _made(sessions, 0).id:
        pass
    assert sessions.find(session_id, 1, [], [], 0) == NOT_FOUND


def test_a_session_ends_when_the_client_says_so() -> None:
    sessions = FetchSessions(10, 60)
    session = _made(sessions, 0)
    assert sessions.find(session.id, -1, _wanted(0), [], 0) == (None, False)
    assert len(sessions) == 0
    assert sessions.find(session.id, 1, [], [], 0) == NOT_FOUND


def test_a_new_session_takes_the_place_of_the_old_one() -> None:
    sessions = FetchSessions(1, 60)
    first = _made(sessions, 0)
    found = sessions.find(first.id, 0, _wanted(1), [], 0)
    assert isinstance(found, tuple)
    assert found[0] is not None
    assert (len(sessions), found[0].id != first.id) == (1, True)


def test_eviction_is_of_the_one_that_was_silent_longest() -> None:
    sessions = FetchSessions(2, evict_after=60)
    first, second = _made(sessions, 0, now=0), _made(sessions, 0, now=10)
    assert sessions.find(0, 0, _wanted(0), [], 59.9) == (None, False)  # all are in use: an answer without a session
    assert sessions.find(first.id, 1, [], [], 65) == (first, True)
    third = _made(sessions, 0, now=70)
    assert len(sessions) == 2
    assert sessions.find(second.id, 1, [], [], 70) == NOT_FOUND
    assert sessions.find(first.id, 2, [], [], 70) == (first, True)
    assert sessions.find(third.id, 1, [], [], 70) == (third, True)


def test_no_slots_no_sessions() -> None:
    assert FetchSessions(0, 60).find(0, 0, _wanted(0), [], 0) == (None, False)


def test_sessions_are_bounded_by_what_they_hold() -> None:
    """A session of 50,000 unknown partitions takes 29 MB, also after its client has gone."""
    sessions = FetchSessions(1000, evict_after=60, max_bytes=100_000)
    first, second = _made(sessions, *range(75), now=0), _made(sessions, *range(75), now=10)
    assert sessions.find(0, 0, _wanted(*range(75)), [], 20) == (None, False)  # an answer without a session
    small = _made(sessions, 0, now=20)
    assert sessions.find(small.id, 1, _wanted(*range(100)), [], 20) == NOT_FOUND  # a session that grows too large ends
    assert sessions.find(first.id, 1, [], [_key(partition) for partition in range(70)], 20) == (first, True)
    assert sessions.find(first.id, 2, _wanted(*range(70)), [], 20) == (first, True)
    third = _made(sessions, *range(75), now=75)  # in place of the one that was silent longest
    assert sessions.find(second.id, 1, [], [], 75) == NOT_FOUND
    assert sessions.find(third.id, -1, [], [], 75) == (None, False)
    _made(sessions, *range(75), now=75)
    assert len(sessions) == 2
    assert sessions.find(0, 0, _wanted(*range(1000)), [], 1000) == (None, False)  # larger than all


@pytest.mark.parametrize("has_ids", [False, True])
def test_names_and_ids_are_not_mixed(has_ids: bool) -> None:
    sessions = FetchSessions(10, 60)
    found = sessions.find(0, 0, _wanted(0), [], 0, has_ids=has_ids)
    assert isinstance(found, tuple)
    assert found[0] is not None
    other = sessions.find(found[0].id, 1, [], [], 0, has_ids=not has_ids)
    assert other == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR


def test_what_a_client_is_told_of() -> None:
    session = _made(FetchSessions(10, 60), 0)
    for answer, is_told in (
        (_answer(5), True),
        (_answer(5), False),
        (_answer(6), True),
        (_answer(6, start=1), True),
        (_answer(6, start=1), False),
        (_answer(6, start=1, records=b"x"), True),
        (_answer(6, start=1, code=3), True),
        (_answer(6, start=1, code=3), True),
        (_answer(6, start=1), True),  # the error is over
        (_answer(6, start=1), False),
    ):
        assert session.note(_key(0), answer) == is_told, answer


def test_partitions_with_records_go_to_the_end() -> None:
    session = _made(FetchSessions(10, 60), 0, 1, 2)
    session.note(_key(0), _answer(5, records=b"x"))
    assert [key.partition for key, _ in session.partitions] == [1, 2, 0]
    session.update(_wanted(3, 1), [_key(2), _key(99)])
    assert [key.partition for key, _ in session.partitions] == [1, 0, 3]


STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "trim", "fail", "heal", "add", "forget", "fetch"]), st.integers(0, 3))
)


@given(STEPS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_client_that_keeps_what_it_is_told_knows_all(steps: list[tuple[str, int]]) -> None:
    """Its view equals a full fetch: partitions, watermarks, start offsets, errors; it gets no record twice."""
    logs = {partition: _answer() for partition in range(4)}
    positions = dict.fromkeys(range(4), 0)
    sessions = FetchSessions(1, 60)
    session = _made(sessions, 0, 1)
    named, added, forgotten = {0, 1}, set[int](), set[int]()
    known: dict[int, tuple[int, int, int]] = {}
    epoch = 0
    for action, partition in [("fetch", 0), *steps, ("fetch", 0)]:
        log = logs[partition]
        if action == "append":
            log["high_watermark"] += 1
        elif action == "trim":
            log["log_start_offset"] = log["high_watermark"]
        elif action in ("fail", "heal"):
            log["error_code"] = 3 if action == "fail" else 0
        elif action == "add" and partition not in named | forgotten:  # one change of a partition in a request
            added.add(partition)
            named.add(partition)
        elif action == "forget" and partition in named - added:
            named.discard(partition)
            forgotten.add(partition)
        elif action == "fetch":
            if epoch:
                found = sessions.find(session.id, epoch, _wanted(*added), [_key(item) for item in forgotten], 0)
                assert found == (session, True)
                for item in forgotten:
                    del known[item]
            added, forgotten = set(), set()
            assert {key.partition for key, _ in session.partitions} == named
            for key, _ in session.partitions:
                now = logs[key.partition]
                new = now["high_watermark"] - positions[key.partition] if not now["error_code"] else 0
                answer = now | {"records": b"r" * new}
                if session.note(key, answer) or not epoch:
                    known[key.partition] = now["high_watermark"], now["log_start_offset"], now["error_code"]
                    positions[key.partition] += new
            epoch += 1
            full = {
                item: (logs[item]["high_watermark"], logs[item]["log_start_offset"], logs[item]["error_code"])
                for item in named
            }
            assert known == full
            assert all(positions[item] == full[item][0] for item in named if not full[item][2])


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    with KlogBroker(module_server_dir) as running:
        yield running


class Fetcher:
    """A client that fetches with one version, by topic name or by id."""

    def __init__(self, port: int, version: int) -> None:
        self.client, self.version = RawClient(port), version

    def make(self, topic: str, partitions: int = 3) -> uuid.UUID:
        entry = {"name": topic, "num_partitions": partitions, "replication_factor": 1}
        (made,) = self.client.request(CREATE_TOPICS, 7, {"topics": [entry], "timeout_ms": 5000})["topics"]
        assert made["error_code"] == 0
        topic_id: uuid.UUID = made["topic_id"]
        return topic_id

    def topic(self, name: str, topic_id: uuid.UUID, **fields: Any) -> dict[str, Any]:
        return fields | ({"topic_id": topic_id} if self.version >= 13 else {"topic": name})

    def fetch(
        self, session: tuple[int, int], topics: list[Any], forgotten: list[Any] | None = None, max_wait_ms: int = 0
    ) -> dict[str, Any]:
        request = {
            "max_wait_ms": max_wait_ms,
            "min_bytes": 1,
            "session_id": session[0],
            "session_epoch": session[1],
            "topics": topics,
            "forgotten_topics_data": forgotten or [],
        }
        return self.client.request(FETCH, self.version, request)


def _partition(index: int, offset: int = 0) -> dict[str, Any]:
    return {"partition": index, "fetch_offset": offset, "partition_max_bytes": 100_000}


def _told(answer: dict[str, Any]) -> dict[int, tuple[int, int, bool]]:
    """By partition: error code, high watermark, whether there are records."""
    assert answer["error_code"] == 0
    return {
        entry["partition_index"]: (entry["error_code"], entry["high_watermark"], bool(len(entry["records"])))
        for topic in answer["responses"]
        for entry in topic["partitions"]
    }


@pytest.fixture
def make_fetcher(broker: KlogBroker) -> Iterator[Callable[[int], Fetcher]]:
    with ExitStack() as stack:

        def make(version: int) -> Fetcher:
            fetcher = Fetcher(broker.port, version)
            stack.enter_context(fetcher.client)
            return fetcher

        yield make


@pytest.mark.parametrize("version", range(7, 18))
def test_a_session_over_the_wire(make_fetcher: Callable[[int], Fetcher], topic: str, version: int) -> None:
    fetcher, producer = make_fetcher(version), make_fetcher(version).client
    topic_id = fetcher.make(topic)
    batch = bytes(make_batch([(None, b"v")], [NOW]))
    assert producer.produce(topic, batch, 8) == (0, 0)
    named = [fetcher.topic(topic, topic_id, partitions=[_partition(index) for index in (0, 1)])]
    made = fetcher.fetch((0, 0), named)
    session = made["session_id"]
    assert session > 0
    assert _told(made) == {0: (0, 1, True), 1: (0, 0, False)}
    moved = [fetcher.topic(topic, topic_id, partitions=[_partition(0, 1)])]
    assert _told(fetcher.fetch((session, 1), moved)) == {}
    assert producer.produce(topic, batch, 8) == (0, 1)
    answer = fetcher.fetch((session, 2), [fetcher.topic(topic, topic_id, partitions=[_partition(2)])])
    assert (answer["session_id"], _told(answer)) == (session, {0: (0, 2, True), 2: (0, 0, False)})
    answer = fetcher.fetch((session, 3), [], [fetcher.topic(topic, topic_id, partitions=[0])])
    assert _told(answer) == {}
    assert fetcher.fetch((session, 3), [])["error_code"] == INVALID_EPOCH
    assert fetcher.fetch((session % MAX_INT32 + 1, 1), [])["error_code"] == NOT_FOUND
    assert _told(fetcher.fetch((session, 4), [])) == {}
    ended = fetcher.fetch((session, -1), named)
    assert (ended["session_id"], set(_told(ended))) == (0, {0, 1})
    assert fetcher.fetch((session, 5), [])["error_code"] == NOT_FOUND


def test_a_topic_that_was_made_again_is_another_one(make_fetcher: Callable[[int], Fetcher], topic: str) -> None:
    fetcher = make_fetcher(17)
    topic_id = fetcher.make(topic)
    named = [fetcher.topic(topic, topic_id, partitions=[_partition(0)])]
    session = fetcher.fetch((0, 0), named)["session_id"]
    fetcher.client.request(DELETE_TOPICS, 5, {"topic_names": [topic], "timeout_ms": 5000})
    assert _told(fetcher.fetch((session, 1), [])) == {0: (ErrorCode.UNKNOWN_TOPIC_ID, -1, False)}
    new_id = fetcher.make(topic)
    assert new_id != topic_id
    assert _told(fetcher.fetch((session, 2), [])) == {0: (ErrorCode.UNKNOWN_TOPIC_ID, -1, False)}
    by_name = make_fetcher(12)
    assert _told(by_name.fetch((0, -1), [by_name.topic(topic, topic_id, partitions=[_partition(0)])]))[0][0] == 0


def test_one_connection_waits_while_another_goes_on(make_fetcher: Callable[[int], Fetcher], topic: str) -> None:
    first, second = make_fetcher(12), make_fetcher(12)
    topic_id = first.make(topic)
    producer = make_fetcher(12).client
    session = first.fetch((0, 0), [first.topic(topic, topic_id, partitions=[_partition(0)])])["session_id"]
    first.client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        first.fetch((session, 1), [], max_wait_ms=60_000)
    assert _told(second.fetch((session, 2), [], [second.topic(topic, topic_id, partitions=[0])])) == {}
    assert producer.produce(topic, bytes(make_batch([(None, b"v")], [NOW])), 8) == (0, 0)  # ends the wait
    first.client.socket.settimeout(10)
    _, answer = decode_response(FETCH, 12, first.client.receive_frame())
    assert answer["error_code"] == INVALID_EPOCH


def test_slots_run_out(server_dir: Path, topic: str) -> None:
    settings = [
        "max.incremental.fetch.session.cache.slots=1",
        "min.incremental.fetch.session.eviction.ms=2000",
    ]
    with KlogBroker(server_dir, *(word for text in settings for word in ("--set", text))) as broker:
        fetcher = Fetcher(broker.port, 12)
        named = [fetcher.topic(topic, fetcher.make(topic), partitions=[_partition(0)])]
        first = fetcher.fetch((0, 0), named)["session_id"]
        answer = fetcher.fetch((0, 0), named)
        assert (first > 0, answer["session_id"], set(_told(answer))) == (True, 0, {0})
        fetcher.fetch((0, -1), named, max_wait_ms=2200)
        assert fetcher.fetch((0, 0), named)["session_id"] > 0
        assert fetcher.fetch((first, 1), [])["error_code"] == NOT_FOUND
        fetcher.client.socket.close()


class Relay:
    """A relay between clients and a broker; it notes the session epoch and the size of each Fetch request."""

    def __init__(self) -> None:
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        #: Session epoch, and bytes of the request, of each fetch.
        self.fetches: list[tuple[int, int]] = []
        self._target = 0

    def start(self, target: int) -> None:
        self._target = target
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                broker = socket.create_connection((HOST, self._target))
                threading.Thread(target=self._requests, args=(client, broker), daemon=True).start()
                threading.Thread(target=_copy, args=(broker, client), daemon=True).start()

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as stream:
            while head := stream.read(4):
                frame = stream.read(int.from_bytes(head, "big"))
                reader = Reader(frame)
                key, version, _ = decode_request_header(reader)
                if key == FETCH.key:
                    self.fetches.append((decode_request(FETCH, version, reader)[1]["session_epoch"], len(frame)))
                broker.sendall(head + frame)
        with contextlib.suppress(OSError):
            broker.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    between = Relay()
    listeners = [
        *("--set", f"listeners=PLAINTEXT://{HOST}:{free_port()}"),
        *("--set", f"advertised.listeners=PLAINTEXT://{HOST}:{between.port}"),
    ]
    with KlogBroker(tmp_path_factory.mktemp("relay"), *listeners) as behind:
        between.start(int(behind.ready_line.rsplit(":", 1)[1]))
        yield between
    between.close()


@pytest.mark.parametrize("client_class", [Java44, pytest.param(Java39, marks=pytest.mark.test_all("version"))])
def test_java_consumers_use_sessions(relay: Relay, topic: str, client_class: type[Java39] | type[Java44]) -> None:
    relay.fetches.clear()
    client = client_class(f"{HOST}:{relay.port}")
    try:
        client.create(topic, 20)
        for partition in range(20):
            assert client.produce(topic, partition, "none", [Record(NOW, None, b"first")]) == [0]
        assert len(client.consume(topic, dict.fromkeys(range(20), 0), 20)) == 20
        for offset in range(1, 20):
            assert client.produce(topic, 3, "none", [Record(NOW, None, b"more")]) == [offset]
            seen = client.consume(topic, dict.fromkeys(range(20), 1), offset)
            assert [one.record.value for one in seen] == [b"more"] * offset
            whole = [size for epoch, size in relay.fetches if epoch == 0]
            changes = [size for epoch, size in relay.fetches if epoch > 0]
            # a consumer names all partitions once; it may close before its next fetch
            if changes and 4 * min(changes) < max(whole):
                return
    finally:
        client.close()
    pytest.fail(f"fetches of {whole} bytes without a session, of {changes} bytes within")
