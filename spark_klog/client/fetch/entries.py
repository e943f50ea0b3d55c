"""A partition in Fetch requests and answers: every reader of the client asks and understands the broker by this module.

What an entry of an answer says (`read_entry`):

    an error code                          `ProtocolError`
    no bytes                               None: the log's end, or no room in the answer
    whole batches                          `Fetched`, up to the last intact one
    whole batches, all of them corrupt     `Fetched` with `is_corrupt`: where they end is a guess
    the beginning of a batch               `Larger`: before version 3 a batch is cut off at the size asked for
    ... that is too large to ask for       `RecordTooLarge`
    no batch, or earlier records only      `DecodeError`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error, by_key, check_code
from spark_klog.client.cluster import Cluster
from spark_klog.client.net.connection import Connection
from spark_klog.errors import CorruptBatchError, DecodeError, ErrorCode, FrameTooLarge, RecordTooLarge
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import FETCH_WITH_TOPIC_IDS
from spark_klog.records.formats.batch import first_batch_size, next_offset_after, whole_batch_size
from spark_klog.records.reading.offset_order import NO_END, End, OffsetOrder

#: Brokers before 0.10.1 return no more bytes than requested; this many include a message's size field.
LEAST_BYTES = 12


class FetchParameters(NamedTuple):
    """What to fetch of a partition: the leader's epoch is -1 for any, the topic's id None if the topic is named."""

    offset: int
    max_bytes: int
    leader_epoch: int = -1
    topic_id: UUID | None = None


def topics_to_fetch(partitions: Mapping[TopicPartition, FetchParameters]) -> list[Message]:
    """The topics of a Fetch request, in the order of `partitions`."""
    topics: dict[tuple[str, UUID | None], list[Message]] = {}
    for (topic, partition), wanted in partitions.items():
        entry = {
            "partition": partition,
            "current_leader_epoch": wanted.leader_epoch,
            "fetch_offset": wanted.offset,
            "partition_max_bytes": wanted.max_bytes,
        }
        topics.setdefault((topic, wanted.topic_id), []).append(entry)
    return [
        {"topic": topic, "topic_id": topic_id, "partitions": entries} for (topic, topic_id), entries in topics.items()
    ]


class FetchInFlight:
    """A Fetch without a session, which was sent when this is made; `entries` or `forget` ends it.

    Topics are named by id if `wanted` has all ids and the broker takes them (KIP-516). Raises what `Connection` raises.
    """

    def __init__(
        self,
        cluster: Cluster,
        connection: Connection,
        wanted: Mapping[TopicPartition, FetchParameters],
        *,
        max_wait_ms: int = 500,
        isolation_level: int | None = None,
    ) -> None:
        """`isolation_level` is by default that of the settings."""
        config = cluster.config
        is_by_id = all(asked.topic_id for asked in wanted.values()) and connection.speaks(FETCH, FETCH_WITH_TOPIC_IDS)
        self.connection, self._cluster = connection, cluster
        self._wanted = wanted if is_by_id else without_ids(wanted)
        request = {
            "max_wait_ms": max_wait_ms,
            "min_bytes": 1,
            "max_bytes": max(config.fetch_max_bytes, *[asked.max_bytes for asked in wanted.values()]),
            "isolation_level": config.isolation_level if isolation_level is None else isolation_level,
            "topics": topics_to_fetch(self._wanted),
        }
        version = FETCH_WITH_TOPIC_IDS if is_by_id else None
        handle = connection.send(FETCH, request, version=version, deadline=cluster.deadline())
        assert handle is not None  # a fetch is answered
        self._handle = handle

    def entries(self) -> dict[TopicPartition, Message]:
        """Wait for the answer; its entries as of `entries_of`. `ProtocolError` for the error code of all of it."""
        answer = self.connection.receive(self._handle, self._cluster.deadline())
        check_code(FETCH, answer["error_code"], f"fetch from broker {self.connection.address}")
        return entries_of(answer, self._wanted)

    def forget(self) -> None:
        self.connection.forget(self._handle)


def without_ids(wanted: Mapping[TopicPartition, FetchParameters]) -> dict[TopicPartition, FetchParameters]:
    """The same partitions, of topics that are named."""
    return {key: asked._replace(topic_id=None) for key, asked in wanted.items()}


def entries_of(
    answer: Message, wanted: Mapping[TopicPartition, FetchParameters], *, is_incremental: bool = False
) -> dict[TopicPartition, Message]:
    """The entries of an answer by partition: one for each `wanted`, in an incremental session only those with news.

    `DecodeError` if the answer does not match; a retriable `ProtocolError` if it has no entry at all, as that of a
    busy broker.
    """
    names = {span.topic_id: key[0] for key, span in wanted.items() if span.topic_id is not None}
    entries = []
    for topic in answer["responses"]:
        name = names.get(topic["topic_id"], str(topic["topic_id"])) if names else topic["topic"]
        for entry in topic["partitions"]:
            entries.append(((name, entry["partition_index"]), entry))
    named, asked = dict(entries), set(wanted)
    if is_incremental:
        asked &= named.keys()
    elif not entries and asked and not answer.get("throttle_time_ms"):
        what = f"fetch of {len(asked)} partitions, whose answer has none"
        raise answer_error(FETCH, ErrorCode.UNKNOWN_SERVER_ERROR, what)
    if len(named) < len(entries) or named.keys() != asked:
        return by_key(FETCH, answer, entries, asked if is_incremental else wanted)  # it names the difference
    return named


@dataclass(slots=True, eq=False)
class Fetched:
    """A chunk: whole record batches with the records of [offset, next_offset), perhaps more; if corrupt all bytes.

    `data` is a view of a reused buffer: it is valid until the next fetch of any reader of the same cluster.
    """

    topic: str
    partition: int
    offset: int
    next_offset: int
    data: memoryview
    #: The aborted transactions; none without read_committed.
    aborted: list[tuple[int, int]]
    #: Errors of batches whose offsets are wrong, by position in `data`.
    damaged: Mapping[int, DecodeError]
    leader_epoch: int = -1
    #: Whether no batch is intact: `next_offset` is then a guess.
    is_corrupt: bool = False
    #: The run of a consumer's partition when they were fetched, see `Assigned`.
    run: int = -1

    def __len__(self) -> int:
        """Bytes of the batches."""
        return len(self.data)

    def named(self, error: DecodeError) -> DecodeError:
        """The decoding error with the partition's name and offset."""
        kind = CorruptBatchError if isinstance(error, CorruptBatchError) else DecodeError
        return kind(f"{self.topic}-{self.partition} after offset {self.offset - 1}: {error}")


class Larger(NamedTuple):
    """The first batch is cut off: ask for `size` bytes of the partition."""

    size: int


class Limits(NamedTuple):
    """Bytes that were asked of the partition, and that may be; `setting` is what to raise if they are too few.

    With `is_shared` the answer has other partitions, which may have used up its size.
    """

    asked: int
    most: int
    is_shared: bool = False
    setting: str = "fetch.max.bytes and max.partition.fetch.bytes"


def read_entry(
    key: TopicPartition, entry: Message, offset: int, limits: Limits, end: int = 0
) -> Fetched | Larger | None:
    """What a partition's entry says, asked for from `offset` on: see the module.

    `end` is an offset that the log is known to reach: the high watermark of a new leader may lag behind.
    """
    name = f"{key[0]}-{key[1]} at offset {offset}"
    if code := entry["error_code"]:
        raise answer_error(FETCH, code, f"fetch of {name}")
    records, high_watermark = entry["records"], entry["high_watermark"]
    if not records:
        return None
    log_end = NO_END if high_watermark <= offset else max(high_watermark, end)
    try:
        order = OffsetOrder(records, offset, log_end)
        until = order.end()
        is_corrupt = until is None and whole_batch_size(records) is not None
        if is_corrupt:
            until = End(_guessed_end(records, order, offset, log_end), len(records))
        if until is None or until.offset <= offset:
            for damage in order.damaged.values():
                raise damage
            size = first_batch_size(records) or 0
            if 0 < size <= len(records):
                raise DecodeError(f"{len(records)} bytes fetched hold only records before it")
            needed = size or LEAST_BYTES
            if needed <= limits.asked and limits.is_shared:
                return Larger(limits.asked)
            if not limits.asked < needed <= limits.most:
                raise RecordTooLarge(*key, offset, size, len(records), limits.setting)
            return Larger(needed)
    except DecodeError as error:
        raise DecodeError(f"{name}: {error}") from None
    aborted = [(txn["producer_id"], txn["first_offset"]) for txn in entry["aborted_transactions"] or ()]
    data, epoch = records[: until.position], order.last_leader_epoch
    return Fetched(*key, offset, until.offset, data, aborted, order.damaged, epoch, is_corrupt)


def _guessed_end(records: memoryview, order: OffsetOrder, offset: int, log_end: int) -> int:
    """Where corrupt batches end: the next offset in their headers may be wrong, so the least of all claims is used."""
    try:
        claims = [log_end, next_offset_after(records, offset)]
    except DecodeError:
        return offset + 1
    if not order.has_messages:
        claims.append(offset + order.length)
    return max(offset + 1, min(claims))


def too_large(key: TopicPartition, offset: int, error: FrameTooLarge) -> RecordTooLarge:
    """The error for a fetch of one partition whose response is too large: brokers send a first batch of any size."""
    return RecordTooLarge(*key, offset, error.size, 0, f"fetch.max.bytes to at least {-(-error.size // 2)}")
