"""Incremental fetch sessions, the client's side (KIP-227): requests after the first one contain only changes.

    session id  epoch   the request
    0 or N      0       all partitions; the broker opens a new session (and drops N), or answers with id 0: none
    N           E > 0   new, changed and forgotten partitions

Brokers before Fetch 7 have no sessions: each request is a full one. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    """A partition's fetch parameters: the offset, the size limit, and the leader's epoch (-1: any)."""

    offset: int
    max_bytes: int
    leader_epoch: int


class FetchSession:
    """The fetch session with one broker. Call `request` and `accept` in turn, `restart` if there is no answer."""

    def __init__(self) -> None:
        self._id = _NO_SESSION
        self._epoch = _INITIAL_EPOCH
        #: The current fetch parameters of each partition in the session.
        self.requested: dict[TopicPartition, FetchParameters] = {}

    def request(self, partitions: Mapping[TopicPartition, FetchParameters]) -> Message:
        """The session fields and partitions of a Fetch request, in the order of `partitions`."""
        is_full = self._epoch == _INITIAL_EPOCH
        changed = partitions
        if not is_full:
            changed = {key: item for key, item in partitions.items() if self.requested.get(key) != item}
        forgotten: dict[str, list[int]] = {}
        for topic, partition in () if is_full else self.requested.keys() - partitions.keys():
            forgotten.setdefault(topic, []).append(partition)
        topics: dict[str, list[Message]] = {}
        for (topic, partition), item in changed.items():
            entry = {
                "partition": partition,
                "current_leader_epoch": item.leader_epoch,
                "fetch_offset": item.offset,
                "partition_max_bytes": item.max_bytes,
            }
            topics.setdefault(topic, []).append(entry)
        self.requested = dict(partitions)
        return {
            "session_id": self._id,
            "session_epoch": self._epoch,
            "topics": [{"topic": topic, "partitions": entries} for topic, entries in topics.items()],
            "forgotten_topics_data": [{"topic": topic, "partitions": numbers} for topic, numbers in forgotten.items()],
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
        entries = list(entries_of(answer))
        found = {key for key, _ in entries}
        expected = self.requested.keys() if was_full else self.requested.keys() & found
        result = by_key(FETCH, answer, entries, expected)
        self._id = answer["session_id"]
        if self._id == _NO_SESSION:
            self._epoch = _INITIAL_EPOCH
        else:
            self._epoch = 1 if self._epoch == _MAX_EPOCH else self._epoch + 1
        return result

    def restart(self) -> None:
        """Start over with a full request, which also ends the broker's session if it still exists."""
        self._epoch = _INITIAL_EPOCH
        self.requested = {}
