"""Checks of responses: that they match the request, and what to do about each error code.

Kafka's protocol guide lists the codes and which of them can be retried; `ErrorCode.remedy` says that. `_BY_API`
has the exceptions for single APIs, as in Kafka's own clients.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import TypeVar

from spark_klog.errors import DecodeError, ErrorCode, ProtocolError, Remedy, TransactionAbortable
from spark_klog.protocol.apis import (
    CREATE_PARTITIONS,
    DELETE_GROUPS,
    DELETE_TOPICS,
    ELECT_LEADERS,
    FETCH,
    INIT_PRODUCER_ID,
    METADATA,
    OFFSET_COMMIT,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_K = TypeVar("_K", bound=Hashable)
_ABORTABLE = "abort the transaction and repeat it, the same producer can"

_BY_API: dict[int, dict[ErrorCode, Remedy]] = {
    FETCH.key: {
        # the broker can't read its own log; a retry would read the same bytes
        ErrorCode.CORRUPT_MESSAGE: Remedy.FAIL,
        ErrorCode.UNKNOWN_SERVER_ERROR: Remedy.RETRY,
        # a range asks the leader for its offsets before it is tried again
        ErrorCode.OFFSET_OUT_OF_RANGE: Remedy.REFRESH,
    },
    # the controller answers: a topic that it does not know does not exist
    DELETE_TOPICS.key: {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: Remedy.FAIL},
    CREATE_PARTITIONS.key: {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: Remedy.FAIL},
    # the answer to a heartbeat, with the member's new epoch, is on its way (KIP-848)
    OFFSET_COMMIT.key: {ErrorCode.STALE_MEMBER_EPOCH: Remedy.RETRY},
    # the controller has tried: a replica that is down is down for long
    ELECT_LEADERS.key: {
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: Remedy.FAIL,
        ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: Remedy.FAIL,
    },
}


_REBALANCED = (
    "the group has rebalanced since group_metadata was called, other members may read these partitions: abort the "
    "transaction, poll, and call group_metadata for each transaction"
)
#: What the user can do about an error, by API.
_ADVICE: dict[int, dict[ErrorCode, str]] = {
    METADATA.key: {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "the cluster has none of that name, check it or create the topic",
        ErrorCode.INVALID_TOPIC_EXCEPTION: "no topic can have that name, 1 to 249 of a-z A-Z 0-9 . _ - are allowed",
    },
    INIT_PRODUCER_ID.key: {
        ErrorCode.INVALID_TRANSACTION_TIMEOUT: "transaction.timeout.ms is larger than the broker's "
        "transaction.max.timeout.ms (15 minutes by default): lower the one or raise the other",
    },
    PRODUCE.key: {
        ErrorCode.MESSAGE_TOO_LARGE: "the record, or a batch that a mirror copies, is larger than the topic's "
        "max.message.bytes: raise that",
        ErrorCode.INVALID_TIMESTAMP: "the topic's settings message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms (message.timestamp.difference.max.ms before Kafka 3.6) do not allow the "
        "records' times: raise them, or leave the times out (in Spark drop the column timestamp)",
    },
    OFFSET_COMMIT.key: {ErrorCode.STALE_MEMBER_EPOCH: "the member is in a new epoch, which its next heartbeat tells"},
    DELETE_GROUPS.key: {
        ErrorCode.NON_EMPTY_GROUP: "the group has members, stop them first; klog groups describe names them",
        ErrorCode.GROUP_ID_NOT_FOUND: "there is no such group, klog groups list shows all",
    },
    TXN_OFFSET_COMMIT.key: {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "the cluster has no such partition, check the topic's name and number",
        ErrorCode.ILLEGAL_GENERATION: _REBALANCED,
        ErrorCode.UNKNOWN_MEMBER_ID: _REBALANCED,
        ErrorCode.REBALANCE_IN_PROGRESS: _REBALANCED,
    },
}


def answer_error(api: Api, code: int, what: str) -> ProtocolError:
    """The error for a code in an API's response, with its remedy and advice."""
    if code == ErrorCode.TRANSACTION_ABORTABLE:
        return TransactionAbortable(code, what, advice=_ABORTABLE)
    error = ProtocolError(code, what)
    remedy = _BY_API.get(api.key, {}).get(error.code)
    advice = _ADVICE.get(api.key, {}).get(error.code, "")
    return ProtocolError(code, what, remedy, advice) if remedy is not None or advice else error


def check_code(api: Api, code: int, what: str) -> None:
    """Raise `ProtocolError` unless `code` is NONE."""
    if code:
        raise answer_error(api, code, what)


def by_key(
    api: Api, answer: Message, entries: Iterable[tuple[_K, Message]], wanted: Collection[_K]
) -> dict[_K, Message]:
    """The entries of a response by key, exactly one for each key in `wanted`.

    A broker whose quota is used up may respond with no entries and a throttle time: this raises the retriable
    `ProtocolError` THROTTLING_QUOTA_EXCEEDED. Any other difference raises `DecodeError`.
    """
    matched: dict[_K, Message] = {}
    asked = frozenset(wanted)
    for key, entry in entries:
        if key in matched or key not in asked:
            difference = "twice" if key in matched else "not asked for"
            raise DecodeError(f"{api.name} response with {_shown(key)}, {difference}")
        matched[key] = entry
    if len(matched) < len(asked):
        missing = [key for key in wanted if key not in matched]
        if not matched and answer.get("throttle_time_ms", 0) > 0:
            raise answer_error(api, ErrorCode.THROTTLING_QUOTA_EXCEEDED, f"{api.name} of {_shown(missing[0])}")
        raise DecodeError(f"{api.name} response without {_shown(missing[0])}")
    return matched


def worst(failures: Collection[Exception]) -> Exception:
    """The first failure that can't be retried, or else the first failure."""
    final = [error for error in failures if isinstance(error, ProtocolError) and not error.retriable]
    return next(iter([*final, *failures]))


def _shown(key: Hashable) -> str:
    return "-".join(map(str, key)) if isinstance(key, tuple) else repr(key)
