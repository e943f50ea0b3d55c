"""Read topics as one `pyarrow.RecordBatchReader`, which pandas, Polars, DuckDB and pyarrow's own writers take as it is.

    with spark_klog.read("clicks", start="-1h", columns=["key", "value", "timestamp"]) as reader:
        for batch in reader:
            ...

pyarrow's reader of batches that Python makes can't be closed: its `close` does not reach the Python object. One that
reads Arrow's IPC stream format calls its file, so this one is such a reader: it copies each batch once, in memory.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from spark_klog.base.extras import require

require("spark_klog.read", "pyarrow")

import pyarrow as pa

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition, check_topic_name
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer.decoding import Deserializers
from spark_klog.client.fetch.entries import Fetched
from spark_klog.client.fetch.ranges import ShortRanges, by_leader, fetch_range, is_short
from spark_klog.client.offsets import NO_OFFSET, first_and_end, list_offsets
from spark_klog.client.places import (
    BeforeEndSpec,
    Offsets,
    OffsetSpec,
    Spec,
    TimeSpec,
    check_covers,
    parse_offsets,
    warning_of_future,
)
from spark_klog.client.serialization import split_settings
from spark_klog.client.settings import check_settings, named_cluster
from spark_klog.columns.decode import PartitionDecoder, Unreadable
from spark_klog.columns.schema import WITHOUT_HEADERS, subset, with_types
from spark_klog.errors import ConfigError, OffsetOutOfRange, ReaderClosed, StartAfterEnd
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from spark_klog.records.reading.reader import AbortedTransactions
from spark_klog.security.config import Settings

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ColumnDecoder

_log = logging.getLogger(__name__)
#: Of a broker on this machine, as for the commands.
_DEFAULT_SERVERS = "127.0.0.1:9092"
#: What ends a stream in Arrow's IPC format: the marker of a message, and its length 0.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_Ranges = dict[TopicPartition, tuple[int, int]]
Place = str | int | datetime | Mapping[str, Any]


def read(
    topics: str | Sequence[str],
    start: Place = "earliest",
    end: Place = "latest",
    *,
    columns: Sequence[str] | None = None,
    bootstrap_servers: str | Sequence[str] | None = None,
    cluster: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TopicReader:
    """Read topics, all partitions, from `start` up to `end`, as Arrow record batches.

    `start` and `end` are looked up now, so the read ends where the partitions end now, however long it takes:

        "earliest", "latest"                    the first record, the end
        "-1h"                                   a time before now (ms, s, m, h, d, w)
        "2026-11-21T10:00:00Z", a `datetime`    a time with its zone: from the first record at or after it on
        "-1000"                                 so many offsets before the end of each partition
        4711                                    this offset in each partition
        {"clicks": {"0": 23, "1": -2}}          offsets by partition (-2 earliest, -1 latest), also as JSON;
        {"clicks": "earliest"}                  or one of the two words for a topic as a whole

    Args:
        topics: A name, or several.
        columns: Some of key, value (binary), topic (string), partition (int32), offset (int64), timestamp (us, UTC),
            timestampType (int32) and headers (a list of key and value), in the order wanted; None: all but headers.
        bootstrap_servers: HOST:PORT, or several; by default those of `cluster` or `settings`, or else 127.0.0.1:9092.
        cluster: A cluster of clusters.toml, see `client.settings`.
        settings: Client settings by Kafka's names, such as isolation.level, security.protocol, request.timeout.ms.
            With key.deserializer, value.deserializer and schema.registry.url, as of a consumer, key and value are rows;
            several topics need one schema of the column, such as value.subject.

    The records of a partition come in the order of their offsets, one partition after the other. In memory are one
    fetch, of max.partition.fetch.bytes (8 MiB) or of several short partitions (16 MiB), and two batches, of 65,536 rows
    or 8 MiB.

    The connections are closed when the reader is exhausted, closed, released or has failed.

    Raises, now:
        ConfigError: Wrong arguments, an unknown column, a start after the end.
        OffsetOutOfRange: A partition does not have an offset that `start` or `end` names.
        ProtocolError: A topic does not exist, or this user may not read it.
        ConnectionFailed, AuthenticationError, RequestTimedOut: No broker of the cluster answers.
        SchemaError, RegistryError: There is no schema to read rows by, or the registry refuses.

    and, while it is read, whenever records do not come for request.timeout.ms (30 s): `ConnectionFailed`,
    `RequestTimedOut` or `ProtocolError`; `OffsetOutOfRange` if records were deleted meanwhile; `CorruptBatchError`;
    `RecordDeserializationError` for a record that is no row, after those before it.
    """
    schema = WITHOUT_HEADERS if columns is None else subset([columns] if isinstance(columns, str) else list(columns))
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names or not schema.names:
        raise ConfigError(f"name at least one {'column' if names else 'topic'} to read")
    for name in names:
        check_topic_name(name)
    starting, ending = _spec("start", start), _spec("end", end)
    client, serialization = split_settings(_settings(bootstrap_servers, cluster, settings), "deserializer")
    decoders: dict[str, ColumnDecoder] = {}
    if serialization is not None:
        if len(names) > 1:
            serialization.check_one_schema()
        decoders = Deserializers(serialization).decoders(names[0], schema.names)
        schema = with_types(schema, {column: decoder.type for column, decoder in decoders.items()})
    brokers = Cluster.connect(client)
    try:
        keys = [(topic, partition) for topic, numbers in brokers.partitions(names).items() for partition in numbers]
        topic_ids = dict(brokers.topic_ids)
        ranges = _ranges(brokers, keys, starting, ending)
    except BaseException:
        brokers.close()
        raise
    return TopicReader(_Stream(brokers, schema, ranges, topic_ids, decoders))


class TopicReader(pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]
    """A `pyarrow.RecordBatchReader` of topics, made by `read`."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__(stream)
        self._stream = stream

    def close(self) -> None:
        """Close the connections. Reading on is then an error: `ReaderClosed`."""
        self._stream.close()

    def __enter__(self) -> TopicReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Stream:
    """The file that pyarrow reads: batches in Arrow's IPC stream format, made as they are read."""

    def __init__(
        self,
        brokers: Cluster,
        schema: pa.Schema,
        ranges: _Ranges,
        topic_ids: Mapping[str, UUID],
        decoders: Mapping[str, ColumnDecoder],
    ) -> None:
        #: Also called when pyarrow has released the file, which may never have been read.
        self._release = weakref.finalize(self, brokers.close)
        self._release.atexit = False  # a forked process must not end the connections of its parent
        #: A thread that closes waits for one that reads.
        self._lock = threading.RLock()
        self._parts = _messages(schema, _batches(brokers, schema, ranges, topic_ids, decoders))
        self._part: pa.Buffer = pa.py_buffer(b"")
        self.closed = False

    def read_buffer(self, size: int) -> pa.Buffer:
        """Up to `size` bytes of a message, as a view; none at the end."""
        with self._lock:
            if self.closed:
                raise ReaderClosed("the reader of topics is closed, or has failed: read them anew")
            if not self._part.size:
                try:
                    self._part = next(self._parts, self._part)
                except BaseException:
                    self.close()
                    raise
            piece = self._part.slice(0, size)
            self._part = self._part.slice(piece.size)
            return piece

    def read(self, size: int) -> bytes:
        return bytes(self.read_buffer(size))

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._parts.close()
            self._release()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def _messages(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Generator[pa.Buffer, None, None]:
    yield schema.serialize()
    for batch in batches:
        yield batch.serialize()
    yield pa.py_buffer(_END_OF_STREAM)


def _batches(
    brokers: Cluster,
    schema: pa.Schema,
    ranges: _Ranges,
    topic_ids: Mapping[str, UUID],
    decoders: Mapping[str, ColumnDecoder],
) -> Iterator[pa.RecordBatch]:
    """The records of the ranges. Closes the connections at the end, or when it is closed."""
    decoder: PartitionDecoder | None = None
    with closing(brokers):
        for fetched in _fetches(brokers, ranges, topic_ids):
            key = fetched.topic, fetched.partition
            if decoder is None:
                limit = brokers.config.decompressed_max_bytes
                decoder = PartitionDecoder(*key, schema, limit, decoders=decoders)
            decoder.move_to(*key)
            aborted = AbortedTransactions(fetched.aborted) if brokers.config.isolation_level else None
            for part in decoder.decode(fetched.data, fetched.offset, ranges[key][1], aborted, fetched.damaged):
                assert not isinstance(part, Unreadable)  # the decoder raises errors
                yield part
    if decoder is not None:
        for part in decoder.finish():
            assert not isinstance(part, Unreadable)
            yield part


def _fetches(brokers: Cluster, ranges: _Ranges, topic_ids: Mapping[str, UUID]) -> Iterator[Fetched]:
    """The record batches of the ranges; short ones of a leader come with one request, and before all others."""
    left = dict(ranges)
    short = [key for key, (start, end) in ranges.items() if is_short(start, end)]
    if len(short) > 1:
        together = ShortRanges(brokers, topic_ids)
        for node, keys in by_leader(brokers, short).items():
            for answers in together.fetch(node, {key: ranges[key] for key in keys}):
                for key, fetched in answers.items():
                    del left[key]
                    yield fetched
    for (topic, partition), (start, end) in left.items():
        yield from fetch_range(brokers, topic, partition, start, end, topic_id=topic_ids.get(topic))


def _settings(
    bootstrap_servers: str | Sequence[str] | None, cluster: str | None, settings: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    if settings is not None:
        check_settings("read", settings)
    given = {
        "bootstrap_servers": bootstrap_servers,
        "cluster": cluster,
        "bootstrap.servers of the settings": (settings or {}).get("bootstrap.servers"),
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"give only one of {' and '.join(named)}")
    chosen: dict[str, Any] = Settings() if cluster is None else named_cluster(cluster)
    if bootstrap_servers is not None or not named:
        chosen["bootstrap.servers"] = _DEFAULT_SERVERS if bootstrap_servers is None else bootstrap_servers
    chosen.update(settings or {})
    return chosen


def _spec(name: str, place: Place) -> Spec | int:
    """Parse `start` or `end`; an offset for all partitions stays a number."""
    if isinstance(place, datetime):
        if place.tzinfo is None:
            raise ConfigError(f"{name}={place} names no time zone: datetime.now(timezone.utc) has one")
        return TimeSpec(max(0, round(place.timestamp() * 1000)))
    if isinstance(place, Mapping):
        topics = {topic: dict(value) if isinstance(value, Mapping) else value for topic, value in place.items()}
        place = json.dumps(topics, default=str)
    if isinstance(place, int) and not isinstance(place, bool):
        if place < 0:
            raise ConfigError(f"{name}={place} must be an offset; {name}='{place}' is that many before the end")
        return place
    if not isinstance(place, str):
        raise ConfigError(f"{name}={place!r} must be a text, an offset, a datetime or a dictionary of offsets")
    if place.strip().lower() == "group":
        raise ConfigError(
            f"{name}={place!r}: a read has no group; spark_klog.client.Consumer reads on from a group's offsets"
        )
    return parse_offsets(name, place, system_ms)


def _ranges(brokers: Cluster, keys: list[TopicPartition], starting: Spec | int, ending: Spec | int) -> _Ranges:
    """The offsets to read of each partition that has some; errors as of `read`."""
    for name, place in (("start", starting), ("end", ending)):
        if not isinstance(place, int):
            check_covers(name, place, keys)
    first, last = first_and_end(brokers, keys)
    starts, ends = (_offsets(brokers, place, first, last) for place in (starting, ending))
    if warning := warning_of_future("start", starting, starts, last):
        _log.warning("%s", warning)
    is_given = isinstance(starting, OffsetSpec | int) and isinstance(ending, OffsetSpec | int)
    ranges = {}
    for topic, partition in keys:
        key = topic, partition
        start, end = starts[key], ends[key]
        if not first[key] <= start <= last[key] or not first[key] <= end <= last[key]:
            raise OffsetOutOfRange(topic, partition, (start, end), (first[key], last[key]))
        if start > end and (is_given or type(starting) is type(ending)):
            raise StartAfterEnd(f"start lies after end: {topic}-{partition} from {start} to {end}")
        if start < end:
            ranges[key] = start, end
    return ranges


def _offsets(brokers: Cluster, place: Spec | int, first: Offsets, last: Offsets) -> Offsets:
    """The offset of a place in each partition, which has the offsets from `first` up to `last`."""
    if isinstance(place, int):
        return dict.fromkeys(first, place)
    if isinstance(place, BeforeEndSpec):
        return {key: max(first[key], last[key] - place.count) for key in first}
    assert isinstance(place, OffsetSpec | TimeSpec)
    values = place.values(first)
    if isinstance(place, OffsetSpec):
        words = {EARLIEST: first, LATEST: last}
        return {key: words[value][key] if value in words else value for key, value in values.items()}
    times = list_offsets(brokers, values)
    # a record that was written after the look-up of the ends is none of this read's
    return {key: last[key] if times[key] == NO_OFFSET else min(times[key], last[key]) for key in first}
