"""Mutated requests, requests that cost more than their size, longest values, and valid requests with hostile values.

The broker survives, serves others, and logs no stack trace; after the last test's requests the next start serves all
that was acknowledged. SPARK_KLOG_FUZZ_SECONDS sets the duration, SPARK_KLOG_FUZZ_SEED repeats a sequence,
SPARK_KLOG_ANSWER_MS limits how long others wait for an answer, SPARK_KLOG_LOOP_MS how long the broker's event loop
computes until then. The text of a failure has the frame or the seed that did harm.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.protocol import apis
from spark_klog.protocol.codec import encode_request
from spark_klog.protocol.schema import Api, Array, Primitive, Struct, Type
from tests.support.brokers.batches import make_batch
from tests.support.brokers.costly_requests import arrays, costly_frame
from tests.support.brokers.hostile_steps import HostileClient, check_served, lying
from tests.support.brokers.longest_values import Requests
from tests.support.brokers.raw_client import CLIENT_ID, RawClient
from tests.support.clients.klog import klog
from tests.support.runs import figures
from tests.support.servers.broker import KlogBroker
from tests.support.servers.kafka import HOST

SECONDS = int(os.environ.get("SPARK_KLOG_FUZZ_SECONDS", "1"))
NOW = 1_700_000_000_000
MAY_WAIT = (apis.FETCH.key, apis.JOIN_GROUP.key, apis.SYNC_GROUP.key)
MORE_MEMORY = 60_000_000
#: Longest wait (ms) of a well-behaved client for an answer; other work on the machine counts, too.
ANSWER_MS = int(os.environ.get("SPARK_KLOG_ANSWER_MS", "20000"))
#: Longest CPU time (ms) of the event loop's thread until that answer; 0: not measured. Other work does not count.
LOOP_MS = int(os.environ.get("SPARK_KLOG_LOOP_MS", "0"))
#: Steps between two checks.
STEPS = 25
#: Bytes of a request that has as many elements as fit.
COSTLY = 500_000
TOPIC = "known"
_COUNTS = (0x7FFFFFFF, 0x7FFFFFFE, -1, -2, -0x80000000, 0x00FFFFFF, 0x10000)
_NUMBERS = (0, 1, -1, 2, -2, 5, 1000, 0x7F, 0x7FFF, 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF, -0x80, -0x8000, -0x80000000)
_BITS = {Primitive.INT8: 8, Primitive.INT16: 16, Primitive.INT32: 32, Primitive.INT64: 64}


class Maker:
    """Valid messages with values near the limits, from a seed."""

    def __init__(self, seed: object, version: int) -> None:
        self.random = random.Random(repr(seed))
        self.version = version

    def message(self, struct_: Struct) -> dict[str, Any]:
        message = {}
        for field in struct_.fields:
            if self.version not in field.versions:
                continue
            nullable = field.nullable is not None and self.version in field.nullable
            if field.name in ("timeout_ms", "max_wait_ms"):
                message[field.name] = 0
            elif field.name == "session_timeout_ms":
                message[field.name] = self.random.choice((6_000, 30_000, 0))  # the bounds are 6 s and half an hour
            elif nullable and self.random.random() < 0.2:
                message[field.name] = None
            else:
                message[field.name] = self.value(field.type)
        return message

    def value(self, kind: Type) -> Any:
        choose = self.random.choice
        if isinstance(kind, Struct):
            return self.message(kind)
        if isinstance(kind, Array):
            return [self.value(kind.element) for _ in range(choose((0, 1, 1, 2)))]
        if kind in _BITS:
            limit = 1 << (_BITS[kind] - 1)
            return choose([number for number in _NUMBERS if -limit <= number < limit])
        if kind is Primitive.BOOLEAN:
            return choose((False, True))
        if kind is Primitive.FLOAT64:
            return choose((0.0, -1.5, float("inf"), float("nan")))
        if kind is Primitive.UUID:
            return choose((uuid.UUID(int=0), uuid.uuid4()))
        if kind is Primitive.STRING:
            return choose((TOPIC, TOPIC, "", "0", "unknown", "retention.ms", "é" * 100, "a/../b", "\0"))
        batch = bytes(make_batch([(b"k", b"v" * 50)], [NOW]))
        return choose((batch, batch, b"", batch[:-3], batch * 2, bytes(61), lying(batch, self.random)))


def _bent(frame: bytes, source: random.Random) -> bytes:
    """Mutate the body: flip bits, cut the end off, insert bytes, write a huge count; the header stays."""
    head = 10 + len(CLIENT_ID)
    body = bytearray(frame[head:])
    for _ in range(source.choice((0, 1, 1, 2, 4))):
        place = source.randrange(len(body) + 1)
        action = source.randrange(5)
        if action == 0 and place < len(body):
            body[place] ^= 1 << source.randrange(8)
        elif action == 1:
            del body[place:]
        elif action == 2:
            body[place:place] = source.randbytes(source.randrange(1, 9))
        elif action == 3:
            body[place : place + 4] = struct.pack(">i", source.choice(_COUNTS))
        else:
            body[place : place + 1] = b"\xff\xff\xff\xff\x07"  # a varint of nearly 2^31
    return frame[:head] + bytes(body)


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[KlogBroker]:
    # requests create topics of many names: keep each cheap
    settings = ["num.partitions=1", "offsets.topic.num.partitions=1", "auto.create.topics.enable=false"]
    with KlogBroker(module_server_dir, *(word for text in settings for word in ("--set", text))) as running:
        yield running


def _frames(api: Api, seed: int) -> Iterator[bytes]:
    for number in range(1 << 30):
        source = random.Random(f"{api.name} {seed} {number}")
        version = source.randint(api.versions.first, api.versions.last)
        message = Maker((api.name, seed, number), version).message(api.request)
        for entry in message.get("topics") or () if api is apis.CREATE_TOPICS else ():
            entry["num_partitions"] = min(entry["num_partitions"], 3)
        yield _bent(encode_request(api, version, 7, CLIENT_ID, message).to_bytes(), source)


class Neighbour(threading.Thread):
    """A well-behaved client that notes its longest wait for an answer, and the event loop's CPU time meanwhile."""

    def __init__(self, broker: KlogBroker) -> None:
        super().__init__()
        self.port, self.slowest, self.asked = broker.port, 0.0, 0
        self.most_computed = 0.0
        #: What the broker was doing in the slowest round.
        self.doing = self.slowest_doing = ""
        #: The first number is the CPU time (ns) of the main thread, which runs the event loop.
        self._times = Path(f"/proc/{broker.pid}/task/{broker.pid}/schedstat")
        self.error: Exception | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            with RawClient(self.port, 30) as client:
                while not self._is_over.wait(0.05):
                    begin, before = time.monotonic(), self._computed()
                    client.request(apis.METADATA, 4, {"topics": []})
                    if time.monotonic() - begin > self.slowest:
                        self.slowest, self.slowest_doing = time.monotonic() - begin, self.doing
                    self.most_computed = max(self.most_computed, self._computed() - before)
                    self.asked += 1
        except Exception as error:
            self.error = error

    def _computed(self) -> float:
        return int(self._times.read_text().split()[0]) / 1e9 if LOOP_MS else 0.0

    def __enter__(self) -> Neighbour:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


def _ask(port: int, frames: list[bytes]) -> None:
    """Send all frames; connect again after each one for which the broker closes the connection."""
    waiting = list(reversed(frames))
    while waiting:
        with RawClient(port, 20) as client, contextlib.suppress(ConnectionError, AnswerWaits):
            while waiting:
                frame = waiting.pop()
                client.send_frame(frame)
                (key,) = struct.unpack_from(">h", frame)
                if key in MAY_WAIT:
                    _receive_soon(client)
                elif key != apis.PRODUCE.key:  # with acks 0 it has no answer
                    client.receive_frame()


class AnswerWaits(Exception):
    """The answer waits for records or for other members, as long as the mutated request says."""


def _receive_soon(client: RawClient) -> None:
    client.socket.settimeout(0.2)
    try:
        client.receive_frame()
    except TimeoutError:
        raise AnswerWaits from None


@pytest.mark.timeout(SECONDS * 4 + 120)
def test_bent_requests_harm_nobody(broker: KlogBroker) -> None:
    with RawClient(broker.port) as client:
        entry = {"name": TOPIC, "num_partitions": 2, "replication_factor": 1}
        client.request(apis.CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 1000})
        client.produce(TOPIC, bytes(make_batch([(b"k", b"v")], [NOW])), 8)
    served = [api for api in apis.BY_KEY.values() if "Sasl" not in api.name]
    # CI always sends the same frames; a long run sends these first
    sources = {api: _frames(api, 0) for api in served}
    _ask(broker.port, [next(frames) for frames in sources.values()])  # creates what is created only once
    before, count = broker.rss_bytes(), 0
    deadline = time.monotonic() + 3 * SECONDS
    with Neighbour(broker) as neighbour:
        while time.monotonic() < deadline:
            for api in served:
                frames = [next(sources[api]) for _ in range(20)]
                _ask(broker.port, frames)
                count += len(frames)
                log = broker.log.read_text()
                if "Traceback" in log or "a request failed" in log:
                    trace = log[max(0, log.find("Traceback")) :][:3000]
                    pytest.fail(f"{api.name}: {[frame.hex() for frame in frames]}\n{trace}")
    assert neighbour.error is None
    assert neighbour.asked > 10
    assert neighbour.slowest * 1000 < ANSWER_MS
    assert count >= 20 * len(served)
    figures.count("inputs", count)
    figures.count("seconds", 3 * SECONDS)
    assert broker.rss_bytes() - before < MORE_MEMORY


def _peak_bytes(broker: KlogBroker) -> int:
    status = Path(f"/proc/{broker.pid}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _answer_bytes(client: RawClient, limit: int) -> int:
    """The size of an answer, which is read to its end if it is below `limit`; 0 if there is no answer."""
    try:
        (left,) = struct.unpack(">i", client.receive_exactly(4))
    except (ConnectionError, TimeoutError):
        return 0
    size = int(left)
    while left and size < limit:
        left -= len(client.receive_exactly(min(left, 1 << 16)))
    return size


@pytest.mark.timeout(SECONDS * 2 + 300)
def test_no_request_costs_many_times_its_size(broker: KlogBroker) -> None:
    """CI sends one array of each API, a long run all arrays of all versions."""
    source = random.Random(0)
    with RawClient(broker.port) as client:
        entry = {"name": TOPIC[:1], "num_partitions": 10, "replication_factor": 1}
        client.request(apis.CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 1000})
        (found,) = client.request(apis.METADATA, 12, {"topics": [{"name": TOPIC[:1]}]})["topics"]
    served = [api for api in apis.BY_KEY.values() if "Sasl" not in api.name]
    frames = [
        (api, version, path)
        for api in served
        for version in range(api.versions.first, api.versions.last + 1)
        for path in arrays(api.request, version)
    ]
    source.shuffle(frames)
    if SECONDS <= 5:
        frames = list({api.name: (api, version, path) for api, version, path in frames}.values())
    assert len({api.name for api, _, _ in frames}) > 20
    costs: dict[tuple[str, int, tuple[str, ...], str], int] = {}
    for api, version, path in frames:
        for name in (TOPIC[:1], "")[: 1 if SECONDS <= 5 else 2]:
            frame = costly_frame(api, version, path, COSTLY, name, found["topic_id"])
            Path(f"/proc/{broker.pid}/clear_refs").write_text("5")  # resets the peak to the current size
            before = _peak_bytes(broker)
            with RawClient(broker.port, 1) as client:  # a second is enough to see what it costs
                client.send_frame(frame)
                _answer_bytes(client, 8 * COSTLY)
            costs[api.name, version, path, name] = _peak_bytes(broker) - before
            assert costs[api.name, version, path, name] < MORE_MEMORY, (api.name, version, path, name, len(frame))
    figures.count("inputs", len(costs))
    assert "a request failed" not in broker.log.read_text()


def _check_commands(broker: KlogBroker) -> None:
    """Check that the commands of an operator answer, and show the topic and the group that nobody harms."""
    commands = [["topics", "list"], ["topics", "describe", CARED], ["topics", "offsets", CARED], ["groups", "list"]]
    commands += [["groups", "describe", CARED], ["groups", "lag", CARED]]
    for command in commands:
        done = klog(*command, "--bootstrap-server", broker.bootstrap_servers)
        assert (done.returncode, CARED in done.stdout) == (0, True), done
    done = klog("offsets", "show", "--group", CARED, "--from", f"kafka://{broker.bootstrap_servers}")
    assert (done.returncode, CARED in done.stdout) == (0, True), done


def _commit(client: RawClient, group: str, topic: str) -> int:
    entry = {"partition_index": 0, "committed_offset": 0, "committed_metadata": ""}
    topics = [{"name": topic, "partitions": [entry]}]
    request = {"group_id": group, "generation_id_or_member_epoch": -1, "topics": topics}
    answer = client.request(apis.OFFSET_COMMIT, 6, request)
    return int(answer["topics"][0]["partitions"][0]["error_code"])


@pytest.mark.timeout(SECONDS * 4 + 300)
def test_each_field_with_its_longest_values(server_dir: Path) -> None:
    """CI sends a slice, a long run all fields of all versions."""
    settings = ["group.initial.rebalance.delay.ms=0", "auto.create.topics.enable=false", "num.partitions=1"]
    settings += ["offsets.retention.check.interval.ms=500"]
    served = [api for api in apis.BY_KEY.values() if "Sasl" not in api.name]
    source = random.Random(0)
    cases = [(api, version) for api in served for version in range(api.versions.first, api.versions.last + 1)]
    source.shuffle(cases)
    if SECONDS <= 5:
        cases = list({api.name: (api, version) for api, version in cases}.values())
    batch = bytes(make_batch([(b"k", b"v" * 1000)], [NOW]))
    count, deadline = 0, time.monotonic() + 3 * SECONDS
    with KlogBroker(server_dir, *(word for text in settings for word in ("--set", text))) as broker:
        with RawClient(broker.port, 60) as client:
            for name in (CARED, TOPIC):
                _create(client, name)
            while _commit(client, CARED, CARED):
                assert time.monotonic() < deadline + 60
        before = broker.rss_bytes()
        for number, (api, version) in enumerate(cases):
            with RawClient(broker.port, 60) as client:
                topic_id = _create(client, TOPIC)
                _commit(client, TOPIC, TOPIC)
                client.produce(TOPIC, batch, 8)
            requests = Requests(api, version, TOPIC, topic_id, batch)
            frames = [("plain", requests.plain()), *requests.frames()]
            if SECONDS <= 5:
                frames = [frames[0], *source.sample(frames[1:], min(len(frames) - 1, 5))]
            with Neighbour(broker) as neighbour:
                for label, frame in frames:
                    neighbour.doing = label
                    _check_cost(broker, label, frame)
                    count += 1
                neighbour.doing = f"{api.name} v{version}, whose answers nobody reads"
                _check_unread(broker, neighbour.doing, requests.repeated())
            assert neighbour.error is None
            assert neighbour.slowest * 1000 < ANSWER_MS, (neighbour.slowest, neighbour.slowest_doing)
            assert neighbour.most_computed * 1000 <= LOOP_MS, (neighbour.most_computed, neighbour.slowest_doing)
            _check_log(broker)
            if SECONDS > 5 or number % 20 == 0:
                _check_commands(broker)
            if time.monotonic() > deadline and count > 40:
                break
        figures.count("inputs", count)
        assert broker.rss_bytes() - before < 2 * MORE_MEMORY
        for _ in range(2):
            _check_commands(broker)
            assert broker.stop() == 0
            broker.start()
        _check_log(broker)
    assert count > 40


def _create(client: RawClient, name: str) -> uuid.UUID:
    """Create the topic if it is not there; return its id."""
    entry = {"name": name, "num_partitions": 1, "replication_factor": 1}
    deadline = time.monotonic() + 60
    while client.request(apis.CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 10_000})["topics"][0]["error_code"]:
        (found,) = client.request(apis.METADATA, 12, {"topics": [{"name": name}]})["topics"]
        if not found["error_code"]:
            break
        assert time.monotonic() < deadline, found
    (found,) = client.request(apis.METADATA, 12, {"topics": [{"name": name}]})["topics"]
    topic_id: uuid.UUID = found["topic_id"]
    return topic_id


def _check_cost(broker: KlogBroker, label: str, frame: bytes) -> None:
    """Send the request; the broker's memory must not grow by much more than the request has."""
    Path(f"/proc/{broker.pid}/clear_refs").write_text("5")  # resets the peak to the current size
    before = _peak_bytes(broker)
    with RawClient(broker.port, 1) as client, contextlib.suppress(OSError):
        client.send_frame(frame)
        _answer_bytes(client, 100_000_000)
    assert _peak_bytes(broker) - before < MORE_MEMORY + 3 * len(frame), label


def _check_unread(broker: KlogBroker, label: str, frames: list[bytes]) -> None:
    """Send the requests from many clients, none of which reads an answer."""
    before = broker.rss_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(20 if frames else 0):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((HOST, broker.port))
            client.settimeout(0.5)
            with contextlib.suppress(OSError):
                for frame in frames * 2:
                    client.sendall(struct.pack(">i", len(frame)) + frame)
        with RawClient(broker.port, 60) as client:
            for _ in range(3):
                client.request(apis.METADATA, 4, {"topics": []})
        # requests that wait count for the broker's limit of 256 MiB
        assert broker.rss_bytes() - before < MORE_MEMORY + 20 * 2 * sum(map(len, frames)), label


CARED = "cared-for"


def _now_batch() -> bytes:
    return bytes(make_batch([(b"k", b"v")], [time.time_ns() // 1_000_000 - 60_000]))


def _check_care(client: RawClient) -> None:
    """Check that housekeeping goes on: retention soon deletes the old records that this topic just got."""
    for _ in range(2):
        code, offset = client.produce(CARED, _now_batch(), 8)
        assert code == 0
    places = [{"partition_index": 0, "timestamp": -2}]
    request = {"replica_id": -1, "topics": [{"name": CARED, "partitions": places}]}
    deadline = time.monotonic() + 60
    while client.request(apis.LIST_OFFSETS, 1, request)["topics"][0]["partitions"][0]["offset"] < offset:
        assert time.monotonic() < deadline, "retention has ended"
        time.sleep(0.02)


def _check_log(broker: KlogBroker) -> None:
    log = broker.log.read_text()
    for trouble in ("Traceback", "a request failed", "ended, restart the broker"):
        assert trouble not in log, log[log.index(trouble) - 300 :][:3000]


def _any_requests(port: int, source: random.Random) -> None:
    """Send a valid request of any API, with hostile values or with more elements than a real client sends."""
    api = source.choice([api for api in apis.BY_KEY.values() if "Sasl" not in api.name])
    version = source.randint(api.versions.first, api.versions.last)
    paths = list(arrays(api.request, version))
    if paths and source.random() < 0.1:
        frame = costly_frame(api, version, source.choice(paths), 50_000, TOPIC, uuid.UUID(int=0))
    else:
        message = Maker((source.random(),), version).message(api.request)
        for entry in message.get("topics") or () if api is apis.CREATE_TOPICS else ():
            entry["num_partitions"] = min(entry["num_partitions"], 3)
        frame = encode_request(api, version, 7, CLIENT_ID, message).to_bytes()
    with RawClient(port, 0.5) as client, contextlib.suppress(ConnectionError, TimeoutError):
        client.send_frame(frame)
        client.receive_frame()


@pytest.mark.timeout(SECONDS * 4 + 300)
def test_valid_requests_of_hostile_values_one_after_the_other(server_dir: Path) -> None:
    """Others get answers, all logs are cared for, a stop is clean, and a restart serves all that was acknowledged."""
    settings = ["log.retention.check.interval.ms=100", "log.segment.delete.delay.ms=100", "num.partitions=1"]
    settings += ["group.initial.rebalance.delay.ms=0", "auto.create.topics.enable=false", "log.cleaner.backoff.ms=100"]
    broker = KlogBroker(server_dir, *(word for text in settings for word in ("--set", text)))
    seed = os.environ.get("SPARK_KLOG_FUZZ_SEED", "0" if SECONDS <= 5 else str(time.time_ns()))
    hostile, source = HostileClient(seed), random.Random(seed)
    deadline = time.monotonic() + SECONDS
    is_over = False
    with broker:
        with RawClient(broker.port) as client:
            configs = [{"name": "internal.segment.bytes", "value": "1"}, {"name": "retention.ms", "value": "1000"}]
            for name in (CARED, TOPIC):
                entry = {"name": name, "num_partitions": 1, "replication_factor": 1}
                entry |= {"configs": configs if name == CARED else []}
                made = client.request(apis.CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 1000})
                assert made["topics"][0]["error_code"] == 0
        try:
            while not is_over:
                is_over = time.monotonic() > deadline
                before = broker.rss_bytes()
                with Neighbour(broker) as neighbour:
                    for _ in range(source.choice((1, 2, 4))):
                        _hostile_steps(broker, hostile, source)
                assert neighbour.error is None
                assert neighbour.slowest * 1000 < ANSWER_MS
                assert neighbour.most_computed * 1000 <= LOOP_MS
                assert broker.rss_bytes() - before < MORE_MEMORY
                _check_log(broker)
                check_served(broker, hostile.acknowledged)
                if source.random() < 0.5 and not is_over:
                    broker.kill()
                else:
                    assert broker.stop() == 0
                    assert (broker.data_dir / ".kafka_cleanshutdown").exists()
                broker.start()
                check_served(broker, hostile.acknowledged)
        except BaseException as error:
            error.args = (f"SPARK_KLOG_FUZZ_SEED={seed}, step {hostile.number}, after {hostile.trace}", *error.args)
            raise
    figures.count("inputs", hostile.number)
    figures.count("seconds", SECONDS)
    assert hostile.number >= STEPS
    assert hostile.acknowledged.batches


def _hostile_steps(broker: KlogBroker, hostile: HostileClient, source: random.Random) -> None:
    left = STEPS
    while left:
        with RawClient(broker.port, 60) as client, contextlib.suppress(ConnectionError):
            while left:
                left -= 1
                hostile.step(client)
                if source.random() < 0.3:
                    _any_requests(broker.port, source)
    with RawClient(broker.port, 60) as client:
        _check_care(client)
