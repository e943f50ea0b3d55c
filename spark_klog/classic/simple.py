"""The low-level consumer of the documents: requests to one broker, with the offset in each request.

Source: 0.7 design and 0.10 implementation chapters, "Low-level API".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import by_key, check_code
from spark_klog.client.consumer.decoding import ConsumerRecord, RecordDecoder
from spark_klog.client.fetch.entries import FetchParameters, Larger, Limits, entries_of, read_entry, topics_to_fetch
from spark_klog.client.forks import Maker
from spark_klog.client.net.connection import Connection
from spark_klog.client.offsets import NO_OFFSET, partition_entries
from spark_klog.client.settings import check_settings, client_config
from spark_klog.errors import (
    ConfigError,
    ConnectionFailed,
    ConsumerClosed,
    DecodeError,
    KlogError,
    ProtocolError,
    RecordTooLarge,
    UnsupportedVersionError,
)
from spark_klog.protocol.apis import BY_KEY, FETCH, LIST_OFFSETS, METADATA
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.records import EARLIEST, FETCH_WITH_TOPIC_IDS, LATEST
from spark_klog.records.formats.batch import PREFIX, first_batch_size

#: Times of `get_offsets_before`: the first offset of a log, and its end.
EARLIEST_TIME, LATEST_TIME = EARLIEST, LATEST
_FETCH_SIZE = 1024 * 1024
_BUFFER_SIZE = 64 * 1024 * 1024
#: The first version of Metadata that tells the topics' ids (KIP-516).
_METADATA_WITH_IDS = 10
#: The last version of Fetch whose messages are of magic 0 or 1: others are converted.
_LAST_CONVERTED = 3
#: The last version of ListOffsets that returns several offsets before a time.
_SEVERAL_OFFSETS = 0
#: The first versions with isolation.level.
_WITH_ISOLATION = {FETCH: 4, LIST_OFFSETS: 2}
_MOST_AT_ONCE = 1 << 30
_BY_NAME = {api.name: api for api in BY_KEY.values()}
_T = TypeVar("_T")


class FetchRequest(NamedTuple):
    """What to fetch of one partition: up to about `fetch_size` bytes from `offset` on."""

    topic: str
    partition: int
    offset: int
    fetch_size: int = _FETCH_SIZE


class SimpleConsumer:
    """Fetch messages and look up offsets at one broker; keeps no positions.

        with SimpleConsumer("127.0.0.1", 9092) as consumer:
            for message in consumer.fetch("clicks", 0, offset=0):
                print(message.offset, message.key, message.value)

    `so_timeout_ms` bounds each request. A fetch grows up to `buffer_size` bytes if a message needs it. `settings` are
    further client settings by Kafka's names, for example of TLS and SASL; with isolation.level=read_committed aborted
    and undecided transactions are left out, which needs Kafka 0.11. The connection is made at the first request;
    a request whose connection broke is sent once more on a new one. Thread-safe: calls take turns.
    In a process forked since every call raises `ConsumerClosed`: make a new consumer there.

    Every method raises `ConnectionFailed`, `RequestTimedOut`, `UnsupportedVersionError`, and `ProtocolError` as the
    broker answers, for example NOT_LEADER_OR_FOLLOWER or OFFSET_OUT_OF_RANGE.
    """

    def __init__(
        self,
        host: str,
        port: int,
        so_timeout_ms: int = 30_000,
        buffer_size: int = _BUFFER_SIZE,
        client_id: str = "spark_klog",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if buffer_size < 1:
            raise ConfigError(f"buffer_size={buffer_size}: set the largest fetch in bytes, at least 1")
        check_settings("SimpleConsumer", settings or {}, "'isolation.level': 'read_committed'")
        shared = {"client.id": client_id, "request.timeout.ms": so_timeout_ms, "fetch.max.bytes": buffer_size}
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._config = client_config({**shared, **(settings or {}), "bootstrap.servers": address})
        self._host, self._port, self._buffer_size = host, port, buffer_size
        self._decoder = RecordDecoder(self._config.decompressed_max_bytes, _MOST_AT_ONCE)
        self._maker = Maker("consumer", ConsumerClosed)
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        fetch_size: int = _FETCH_SIZE,
        *,
        max_wait_ms: int = 0,
        min_bytes: int = 0,
        version: int | None = None,
    ) -> list[ConsumerRecord]:
        """The messages from `offset` on that about `fetch_size` bytes hold; [] at the end of the log.

        A partial message at the end is left out. If not even one message fits, the fetch grows to its size;
        `RecordTooLarge` if that is more than `buffer_size`. The broker waits up to `max_wait_ms` for `min_bytes`.
        `version` is that of Fetch, None for the highest one of both sides. `DecodeError` for corrupt messages.
        """
        request = FetchRequest(topic, partition, offset, fetch_size)
        (answer,) = self.multifetch([request], max_wait_ms=max_wait_ms, min_bytes=min_bytes, version=version)
        if isinstance(answer, KlogError):
            raise answer
        return answer

    def multifetch(
        self,
        requests: Sequence[FetchRequest],
        *,
        max_wait_ms: int = 0,
        min_bytes: int = 0,
        version: int | None = None,
    ) -> list[list[ConsumerRecord] | KlogError]:
        """Several fetches in one request; for each its messages, or its error. No partition may be there twice."""
        wanted = {(request.topic, request.partition): request for request in requests}
        if len(wanted) < len(requests):
            raise ConfigError("multifetch: a partition is given twice, fetch it again in another call")
        for request in requests:
            for name in ("partition", "offset", "fetch_size"):
                if not isinstance(getattr(request, name), int):
                    raise ConfigError(f"{name}={getattr(request, name)!r}: set a whole number")
            if not 0 < request.fetch_size <= self._buffer_size:
                raise ConfigError(f"fetch_size={request.fetch_size}: set 1 to buffer_size={self._buffer_size} bytes")
        wait = {"max_wait_ms": max_wait_ms, "min_bytes": min_bytes}
        answers: dict[TopicPartition, list[ConsumerRecord] | KlogError] = {}
        while wanted:
            answered = self._call(partial(self._fetch, wanted, wait, version))
            wanted = {}
            for key, result in answered.items():
                if isinstance(result, FetchRequest):
                    wanted[key] = result
                else:
                    answers[key] = result
        return [answers[request.topic, request.partition] for request in requests]

    def _fetch(
        self, wanted: Mapping[TopicPartition, FetchRequest], wait: Mapping[str, int], version: int | None
    ) -> dict[TopicPartition, list[ConsumerRecord] | KlogError | FetchRequest]:
        """The messages, the error, or the larger fetch that each partition needs."""
        connection = self._open()
        version = self._isolated(connection, FETCH, version)
        result: dict[TopicPartition, list[ConsumerRecord] | KlogError | FetchRequest] = {}
        hidden = []
        is_converted = version <= _LAST_CONVERTED < connection.version_of(FETCH)
        for key, entry in self._answers(connection, wanted, wait, version).items():
            if is_converted and _hides_messages(entry, wanted[key]):
                hidden.append(key)
                continue
            try:
                result[key] = self._messages(wanted[key], entry, is_shared=len(wanted) > 1)
            except KlogError as error:
                result[key] = error
        for key in hidden:  # after the loop: a request overwrites the bytes of the answer before it
            try:
                result[key] = self._look_behind(connection, wanted[key])
            except (ProtocolError, RecordTooLarge, DecodeError) as error:
                result[key] = error
        return result

    def _answers(
        self,
        connection: Connection,
        wanted: Mapping[TopicPartition, FetchRequest],
        wait: Mapping[str, int],
        version: int,
    ) -> Mapping[TopicPartition, Message]:
        """Send one request, and return each partition's part of the response."""
        ids = self._topic_ids(connection, {topic for topic, _ in wanted}) if version >= FETCH_WITH_TOPIC_IDS else {}
        asked = {
            key: FetchParameters(request.offset, request.fetch_size, topic_id=ids.get(key[0]))
            for key, request in wanted.items()
        }
        isolation, topics = self._config.isolation_level, topics_to_fetch(asked)
        request = {**wait, "max_bytes": self._buffer_size, "isolation_level": isolation, "topics": topics}
        answer = connection.request(FETCH, request, version=version)
        check_code(FETCH, answer["error_code"], f"fetch at {connection.address}")
        return entries_of(answer, asked)

    def _messages(
        self, request: FetchRequest, entry: Message, *, is_shared: bool = False
    ) -> list[ConsumerRecord] | FetchRequest:
        """The messages of an answer, or the fetch that is needed to get some: a larger or a later one."""
        key = request.topic, request.partition
        limits = Limits(request.fetch_size, self._buffer_size, is_shared, "buffer_size")
        result = read_entry(key, entry, request.offset, limits)
        if result is None:
            return []
        if isinstance(result, Larger):
            return request._replace(fetch_size=result.size)
        messages = [record for part, _ in self._decoder.parts(result) for record in part]
        if not messages and result.next_offset < entry["high_watermark"]:  # markers, or batches emptied by compaction
            return request._replace(offset=result.next_offset)
        return messages

    def _look_behind(self, connection: Connection, request: FetchRequest) -> list[ConsumerRecord] | FetchRequest:
        """Ask by a later version of Fetch, if `_hides_messages`; returns the larger or later fetch that has messages.

        That version gives the first batch whole, as it is stored. [] at the end of the log.
        """
        version = min(connection.version_of(FETCH), FETCH_WITH_TOPIC_IDS - 1)
        key = request.topic, request.partition
        entry = self._answers(connection, {key: request}, {"max_wait_ms": 0, "min_bytes": 0}, version)[key]
        answer = self._messages(request, entry)
        if not answer or isinstance(answer, FetchRequest):
            return answer
        size = first_batch_size(entry["records"]) or 0
        if size > self._buffer_size:
            raise RecordTooLarge(request.topic, request.partition, request.offset, size, 0, "buffer_size")
        return request._replace(fetch_size=size) if size > request.fetch_size else answer

    def get_offsets_before(
        self, topic: str, partition: int, timestamp: int, max_offsets: int = 1, *, version: int | None = None
    ) -> list[int]:
        """Offsets before a time (ms, `LATEST_TIME` or `EARLIEST_TIME`), the largest first.

        By ListOffsets 0, the default where the broker has it and without read_committed, these are the end of the log
        and the beginnings of the segments that are older. From version 1 on there is one offset: that of the first
        message of this time or later, or else the end of the log.
        """
        if max_offsets < 1:
            raise ConfigError(f"max_offsets={max_offsets}: ask for at least 1 offset")

        def ask() -> list[int]:
            connection = self._open()
            used = version
            if used is None and not self._config.isolation_level and connection.speaks(LIST_OFFSETS, _SEVERAL_OFFSETS):
                used = _SEVERAL_OFFSETS
            used = self._isolated(connection, LIST_OFFSETS, used)
            offsets = self._offsets(connection, (topic, partition), timestamp, max_offsets, used)
            return offsets or self._offsets(connection, (topic, partition), LATEST_TIME, 1, used)

        return self._call(ask)

    def _offsets(
        self, connection: Connection, key: TopicPartition, timestamp: int, most: int, version: int
    ) -> list[int]:
        partition = {"partition_index": key[1], "timestamp": timestamp, "max_num_offsets": most}
        topics = [{"name": key[0], "partitions": [partition]}]
        request = {"isolation_level": self._config.isolation_level, "topics": topics}
        answer = connection.request(LIST_OFFSETS, request, version=version)
        entry = by_key(LIST_OFFSETS, answer, partition_entries(answer), [key])[key]
        check_code(LIST_OFFSETS, entry["error_code"], f"offsets of {key[0]}-{key[1]}")
        if version <= _SEVERAL_OFFSETS:
            return list(entry["old_style_offsets"])
        return [] if entry["offset"] == NO_OFFSET else [entry["offset"]]

    def send(self, api: str, request: Message, *, version: int | None = None) -> Message:
        """Send any request by the name of its API, and return the response; both are dicts with the fields' names.

            consumer.send("Metadata", {"topics": [{"name": "clicks"}]}, version=1)

        Error codes in the response raise nothing. Record bytes are views that the next request overwrites.
        """
        if api not in _BY_NAME:
            raise ConfigError(f"unknown API {api!r}: set one of {', '.join(sorted(_BY_NAME))}")

        def ask() -> Message:
            connection = self._open()
            return connection.request(_BY_NAME[api], request, version=self._version(connection, _BY_NAME[api], version))

        return self._call(ask)

    def _topic_ids(self, connection: Connection, topics: set[str]) -> dict[str, UUID]:
        request = {"topics": [{"name": topic} for topic in topics], "allow_auto_topic_creation": False}
        version = self._version(connection, METADATA, max(_METADATA_WITH_IDS, connection.version_of(METADATA)))
        answer = connection.request(METADATA, request, version=version)
        metadata = by_key(METADATA, answer, ((entry["name"], entry) for entry in answer["topics"]), topics)
        for topic, entry in metadata.items():
            check_code(METADATA, entry["error_code"], f"topic {topic}")
        return {topic: entry["topic_id"] for topic, entry in metadata.items()}

    def _isolated(self, connection: Connection, api: Api, version: int | None) -> int:
        """Like `_version`; `UnsupportedVersionError` if that version has no isolation.level and one is set."""
        used = self._version(connection, api, version)
        if self._config.isolation_level and used < _WITH_ISOLATION[api]:
            raise UnsupportedVersionError(
                f"isolation.level=read_committed needs {api.name} {_WITH_ISOLATION[api]} or later, not {used}"
            )
        return used

    @staticmethod
    def _version(connection: Connection, api: Api, version: int | None) -> int:
        """The version to use; `UnsupportedVersionError` if it is given and a side does not have it."""
        if version is None:
            return connection.version_of(api)
        if not api.versions.first <= version <= api.versions.last:
            raise ConfigError(f"{api.name} {version}: set a version from {api.versions.first} to {api.versions.last}")
        if not connection.speaks(api, version):
            raise UnsupportedVersionError(f"broker {connection.address} does not support {api.name} {version}")
        return version

    def _open(self) -> Connection:
        if self._connection is None or not self._connection.is_usable():
            self._connection = Connection(self._host, self._port, self._config)
        self._connection.renew()
        self._connection.finish_opening()
        return self._connection

    def _call(self, ask: Callable[[], _T]) -> _T:
        """Ask when it is this thread's turn, and once more if a connection made before has broken."""
        self._maker.check()  # before the lock, which a thread of the parent may have held
        with self._lock:
            is_old = self._connection is not None
            try:
                return ask()
            except ConnectionFailed:
                if not is_old:
                    raise
                return ask()

    def close(self) -> None:
        """Close the connection; a later call makes a new one."""
        with self._lock if not self._maker.is_forked else nullcontext():
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def __enter__(self) -> SimpleConsumer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _hides_messages(entry: Message, request: FetchRequest) -> bool:
    """Whether a partition's answer of Fetch 0 to 3 has no message although the log goes on.

    By Fetch 0 to 2, Kafka before 0.11 cuts the first message off at the size of the fetch; later ones send no bytes
    instead. In place of batches without messages they send 12 bytes of a header, whose length is beyond the answer.
    """
    records = entry["records"]
    if entry["error_code"] or entry["high_watermark"] <= request.offset:
        return False
    if not records:
        return True
    if not PREFIX.size <= len(records) < request.fetch_size:
        return False
    length: int = PREFIX.unpack_from(records)[1]
    return PREFIX.size + length > len(records)
