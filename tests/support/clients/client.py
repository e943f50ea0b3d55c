"""What the matrix asks of a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SECONDS = 30
NO_TIMESTAMP = -1
SESSION_MS = 10_000


class Record(NamedTuple):
    """`timestamp` is in milliseconds, `NO_TIMESTAMP` where there is none."""

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
    """A member of a group, that subscribes to one topic and commits when it is told to."""

    @abstractmethod
    def poll(self, seconds: float) -> tuple[set[int], list[tuple[int, int]]]:
        """What comes in that time: (the partitions that it has at the end, (partition, offset) of each record)."""

    @abstractmethod
    def commit(self) -> None:
        """Commit what `poll` has returned; that is durable when this returns."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the group without another commit, and end."""


def as_magic(record: Record, magic: int) -> Record:
    """What the format keeps: headers came with magic 2 (KIP-82), timestamps with magic 1 (KIP-32)."""
    if magic < 2:
        record = record._replace(headers=())
    return record if magic else record._replace(timestamp=NO_TIMESTAMP)


class Client(ABC):
    """One client, of which `servers` is the bootstrap; the class attributes are its row of the table."""

    name: ClassVar[str]
    #: Those that it writes.
    codecs: ClassVar[tuple[str, ...]] = CODECS
    #: The format that it writes and reads.
    magic: ClassVar[int] = 2
    #: Whether it has an admin client that creates topics; without one it has the broker do so.
    has_admin: ClassVar[bool] = True
    #: Whether the caller gives the timestamps of records.
    sets_timestamps: ClassVar[bool] = True
    #: Whether it finds offsets by time.
    finds_times: ClassVar[bool] = True
    #: Whether it joins groups.
    has_groups: ClassVar[bool] = True
    #: Whether a member that leaves commits what it has read, asked or not.
    commits_when_leaving: ClassVar[bool] = False
    #: Whether it writes header values that are null; else they are empty.
    has_null_headers: ClassVar[bool] = True

    def __init__(self, servers: str) -> None:
        self.servers = servers

    @abstractmethod
    def create(self, topic: str, partitions: int) -> None:
        """Create a topic; without an admin client it has the number of partitions that is the broker's default."""

    @abstractmethod
    def produce(self, topic: str, partition: int, codec: str, records: Sequence[Record]) -> list[int] | None:
        """Produce with acks=all, idempotent where that is the default.

        The offsets acknowledged, None where the client does not tell.
        """

    @abstractmethod
    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Seen]:
        """`count` records, fewer after `SECONDS`, of the partitions assigned, each from an offset on; no group."""

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        """The first offset whose timestamp is not less; -1 or, as some clients have it, the end where none is."""
        raise NotImplementedError(f"{self.name} does not look up times")

    def member(self, topic: str, group: str, session_ms: int = SESSION_MS) -> Member:
        """A new member, which reads from the beginning where nothing is committed."""
        raise NotImplementedError(f"{self.name} joins no groups")

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End its connections and processes."""

    def carries(self, record: Record) -> Record:
        """A record as this client writes it."""
        if not self.has_null_headers:
            record = record._replace(headers=tuple((name, value or b"") for name, value in record.headers))
        return as_magic(record, self.magic)
