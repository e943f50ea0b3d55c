"""Incremental fetch sessions, the client's side (KIP-227): requests after the first one contain only changes.

    session id  epoch   the request
    0 or N      0       all partitions; the broker opens a new session (and drops N), or answers with id 0: none
    N           E > 0   new, changed and forgotten partitions

Brokers before Fetch 7 have no sessions: each request is a full one. From Fetch 13 on topics are named by id (KIP-516),
all of a session or none. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from uuid import UUID

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.fetcher import entries_of
from spark_klog.errors import ErrorCode, ProtocolError
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message

_NO_SESSION, _INITIAL_EPOCH, _MAX_EPOCH = 0, 0, 0x7FFFFFFF
#: The errors of a broker that has dropped the session.
LOST_SESSION = (
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
    ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
)


class FetchParameters(NamedTuple):
    """A partition's fetch parameters.

    The offset, the size limit, the leader's epoch (-1: any), and the topic's id (None: it is named).
    """

    offset: int
    max_bytes: int
    leader_epoch: int
    topic_id: UUID | None = None


class FetchSession:
    """The fetch session with one broker. Call `request` and `accept` in turn, `restart` if there is no answer."""

    def __init__(self) -> None:
        self._id = _NO_SESSION
        self._epoch = _INITIAL_EPOCH
        #: Whether the last request names topics by id.
        self.has_ids = False
        #: The current fetch parameters of each partition in the session.
        self.requested: dict[TopicPartition, FetchParameters] = {}

    def request(self, partitions: Mapping[TopicPartition, FetchParameters]) -> Message:
        """The session fields and partitions of a Fetch request, in the order of `partitions`.

        Topics are named by id if all have one.
        """
        has_ids = all(item.topic_id is not None for item in partitions.values())
        if has_ids != self.has_ids:
            self.restart()
            self.has_ids = has_ids
        if not has_ids:
            partitions = {key: item._replace(topic_id=None) for key, item in partitions.items()}
        is_full = self._epoch == _INITIAL_EPOCH
        changed = partitions
        if not is_full:
            changed = {key: item for key, item in partitions.items() if self.requested.get(key) != item}
        forgotten: dict[tuple[str, UUID | None], list[int]] = {}
        for key in () if is_full else self.requested:
            topic_id = self.requested[key].topic_id
            if key not in partitions or partitions[key].topic_id != topic_id:
                forgotten.setdefault((key[0], topic_id), []).append(key[1])
        topics: dict[tuple[str, UUID | None], list[Message]] = {}
        for (topic, partition), item in changed.items():
            entry = {
                "partition": partition,
                "current_leader_epoch": item.leader_epoch,
                "fetch_offset": item.offset,
                "partition_max_bytes": item.max_bytes,
            }
            topics.setdefault((topic, item.topic_id), []).append(entry)
        self.requested = dict(partitions)
        return {
            "session_id": self._id,
            "session_epoch": self._epoch,
            "topics": [
                {"topic": topic, "topic_id": topic_id, "partitions": entries}
                for (topic, topic_id), entries in topics.items()
            ],
            "forgotten_topics_data": [
                {"topic": topic, "topic_id": topic_id, "partitions": numbers}
                for (topic, topic_id), numbers in forgotten.items()
            ],
        }

    def accept(self, answer: Message, what: str) -> dict[TopicPartition, Message]:
        """The answer's entries by partition; in an incremental session only those with news.

        `ProtocolError` for the answer's top-level error code, `DecodeError` if it does not match the request. After an
        error call `restart`.
        """
        try:
            check_code(FETCH, answer["error_code"], what)
        except ProtocolError as error:
            if error.code in LOST_SESSION:
                self._id = _NO_SESSION
            raise
        was_full = self._epoch == _INITIAL_EPOCH
        entries = list(self._entries(answer))
        found = {key for key, _ in entries}
        expected = self.requested.keys() if was_full else self.requested.keys() & found
        result = by_key(FETCH, answer, entries, expected)
        self._id = answer["session_id"]
        if self._id == _NO_SESSION:
            self._epoch = _INITIAL_EPOCH
        else:
            self._epoch = 1 if self._epoch == _MAX_EPOCH else self._epoch + 1
        return result

    def _entries(self, answer: Message) -> Iterator[tuple[TopicPartition, Message]]:
        if not self.has_ids:
            return entries_of(answer)
        names = {item.topic_id: topic for (topic, _), item in self.requested.items()}
        return (
            ((names.get(topic_id, str(topic_id)), partition), entry)
            for (topic_id, partition), entry in entries_of(answer, "topic_id")
        )

    def restart(self) -> None:
        """Start over with a full request, which also ends the broker's session if it still exists."""
        self._epoch = _INITIAL_EPOCH
        self.requested = {}
