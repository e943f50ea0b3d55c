"""The interface of the clients that the client matrix tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SECONDS = 30
NO_TIMESTAMP = -1
SESSION_MS = 10_000


class Record(NamedTuple):
    """A record; `timestamp` is in ms, or `NO_TIMESTAMP`."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Seen(NamedTuple):
    """A record as a client consumed it."""

    partition: int
    offset: int
    record: Record


class Member(ABC):
    """A group member that subscribes to one topic and commits when `commit` is called."""

    @abstractmethod
    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        """Poll for this time; return the partitions owned at the end, and (partition, offset) of each record."""

    @abstractmethod
    def commit(self) -> None:
        """Commit what `poll` has returned; the commit is durable when this returns."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the group without another commit, and close."""


def as_magic(record: Record, magic: int) -> Record:
    """The record as this format stores it: headers need magic 2 (KIP-82), timestamps magic 1 (KIP-32)."""
    if magic < 2:
        record = record._replace(headers=())
    return record if magic else record._replace(timestamp=NO_TIMESTAMP)


class Client(ABC):
    """One client; `servers` are its bootstrap servers, the class attributes describe what it supports."""

    name: ClassVar[str]
    #: The codecs that it can write.
    codecs: ClassVar[tuple[str, ...]] = CODECS
    #: The record format that it writes and reads.
    magic: ClassVar[int] = 2
    #: Whether it has an admin client to create topics; otherwise the broker auto-creates them.
    has_admin: ClassVar[bool] = True
    #: Whether the caller can set the timestamps of records.
    sets_timestamps: ClassVar[bool] = True
    #: Whether it can look up offsets by time.
    finds_times: ClassVar[bool] = True
    #: Whether it supports groups.
    has_groups: ClassVar[bool] = True
    #: Whether a member that leaves commits what it has read without `commit`.
    commits_when_leaving: ClassVar[bool] = False
    #: Whether it also has the consumer protocol of groups (KIP-848).
    has_consumer_protocol: ClassVar[bool] = False
    #: Whether it can write null header values; otherwise it writes empty ones.
    has_null_headers: ClassVar[bool] = True

    def __init__(self, servers: str) -> None:
        self.servers = servers

    @abstractmethod
    def create(self, topic: str, partitions: int) -> None:
        """Create a topic; without an admin client it gets the broker's default number of partitions."""

    @abstractmethod
    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int] | None:
        """Produce with acks=all, idempotent if that is the client's default.

        Returns the acknowledged offsets, or None if the client does not expose them.
        """

    @abstractmethod
    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        """Read `count` records of partitions from the offsets `starts`, without a group; fewer after `SECONDS`."""

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        """The first offset with this timestamp or a later one; if there is none -1, or the end (some clients)."""
        raise NotImplementedError(f"{self.name} does not look up times")

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> Member:
        """Join a group; the member reads from the beginning if nothing is committed."""
        raise NotImplementedError(f"{self.name} joins no groups")

    def consumer_member(self, topic: str, group: str) -> Member:
        """As `member`, by the consumer protocol (KIP-848), whose session timeout the broker has."""
        raise NotImplementedError(f"{self.name} has no consumer protocol")

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Close its connections and processes."""

    def carries(self, record: Record) -> Record:
        """The record as this client writes it."""
        if not self.has_null_headers:
            record = record._replace(headers=tuple((name, value or b"") for name, value in record.headers))
        return as_magic(record, self.magic)
