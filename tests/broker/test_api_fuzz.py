"""Requests of every API that were valid and are bent: the process lives, others are served, the log has no trace.

SPARK_KLOG_FUZZ_SECONDS says how long; a frame that did harm is in the failure's text.
"""

from __future__ import annotations

import contextlib
import os
import random
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
from tests.support.batches import make_batch
from tests.support.broker import KlogBroker
from tests.support.raw_client import CLIENT_ID, RawClient

SECONDS = int(os.environ.get("SPARK_KLOG_FUZZ_SECONDS", "5"))
NOW = 1_700_000_000_000
MAY_WAIT = (apis.FETCH.key, apis.JOIN_GROUP.key, apis.SYNC_GROUP.key)
MORE_MEMORY = 60_000_000
TOPIC = "known"
_COUNTS = (0x7FFFFFFF, 0x7FFFFFFE, -1, -2, -0x80000000, 0x00FFFFFF, 0x10000)
_NUMBERS = (0, 1, -1, 2, -2, 5, 1000, 0x7F, 0x7FFF, 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF, -0x80, -0x8000, -0x80000000)
_BITS = {Primitive.INT8: 8, Primitive.INT16: 16, Primitive.INT32: 32, Primitive.INT64: 64}


class Maker:
    """Valid messages with values that are near the edge, from a seed."""

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
        if kind is Primitive.UUID:
            return choose((uuid.UUID(int=0), uuid.uuid4()))
        if kind is Primitive.STRING:
            return choose((TOPIC, TOPIC, "", "0", "unknown", "retention.ms", "é" * 100, "a/../b", "\0"))
        batch = bytes(make_batch([(b"k", b"v" * 50)], [NOW]))
        return choose((batch, batch, b"", batch[:-3], batch * 2, bytes(61)))


def _bent(frame: bytes, source: random.Random) -> bytes:
    """Of the body: bits flipped, the end cut off, bytes put in, a huge count written; the header stays."""
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
    # topics are made of many names: each is to be cheap
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
    """A client that behaves, and notes how long its longest answer took."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port, self.slowest, self.asked = port, 0.0, 0
        self.error: Exception | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            with RawClient(self.port, 30) as client:
                while not self._is_over.wait(0.05):
                    begin = time.monotonic()
                    client.request(apis.METADATA, 4, {"topics": []})
                    self.slowest = max(self.slowest, time.monotonic() - begin)
                    self.asked += 1
        except Exception as error:
            self.error = error

    def __enter__(self) -> Neighbour:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


def _ask(port: int, frames: list[bytes]) -> None:
    """All of them, over a new connection after each that the broker closes."""
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
    """For records or for other members, as long as the bent request says."""


def _receive_soon(client: RawClient) -> None:
    client.socket.settimeout(0.2)
    try:
        client.receive_frame()
    except TimeoutError:
        raise AnswerWaits from None


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 4 + 120)
def test_bent_requests_harm_nobody(broker: KlogBroker) -> None:
    with RawClient(broker.port) as client:
        entry = {"name": TOPIC, "num_partitions": 2, "replication_factor": 1}
        client.request(apis.CREATE_TOPICS, 2, {"topics": [entry], "timeout_ms": 1000})
        client.produce(TOPIC, bytes(make_batch([(b"k", b"v")], [NOW])), 8)
    served = [api for api in apis.BY_KEY.values() if "Sasl" not in api.name]
    # by a run of CI the same ones; a long run has all of these first
    sources = {api: _frames(api, 0) for api in served}
    _ask(broker.port, [next(frames) for frames in sources.values()])  # what is made once is there
    before, count = broker.rss_bytes(), 0
    deadline = time.monotonic() + 3 * SECONDS
    with Neighbour(broker.port) as neighbour:
        while time.monotonic() < deadline:
            for api in served:
                frames = [next(sources[api]) for _ in range(20)]
                _ask(broker.port, frames)
                count += len(frames)
                log = broker.log.read_text()
                if "Traceback" in log or "a request failed" in log:
                    trace = log[log.index("Traceback") :][:3000]
                    pytest.fail(f"{api.name}: {[frame.hex() for frame in frames]}\n{trace}")
    assert neighbour.error is None
    assert neighbour.asked > 10
    assert neighbour.slowest < 5
    assert count >= 20 * len(served)
    assert broker.rss_bytes() - before < MORE_MEMORY
