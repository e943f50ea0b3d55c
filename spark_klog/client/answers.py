"""What a client makes of responses: whether they are what was asked for, and of each error code what to do.

Kafka's protocol guide lists the codes and says which can be retried; `errors.REMEDIES` holds that. `_BY_API` is where
an API differs, as Kafka's own clients handle it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import TypeVar

from spark_klog.errors import DecodeError, ErrorCode, ProtocolError, Remedy
from spark_klog.protocol.apis import CREATE_PARTITIONS, DELETE_TOPICS, FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_K = TypeVar("_K", bound=Hashable)

_BY_API: dict[int, dict[ErrorCode, Remedy]] = {
    FETCH.key: {
        # the broker can't read its own log; another attempt would read the same bytes
        ErrorCode.CORRUPT_MESSAGE: Remedy.FAIL,
        ErrorCode.UNKNOWN_SERVER_ERROR: Remedy.RETRY,
        # unless the leader, asked for its offsets, does not have the one wanted
        ErrorCode.OFFSET_OUT_OF_RANGE: Remedy.REFRESH,
    },
    # the controller is asked: what it does not know does not exist
    DELETE_TOPICS.key: {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: Remedy.FAIL},
    CREATE_PARTITIONS.key: {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: Remedy.FAIL},
}


def answer_error(api: Api, code: int, what: str) -> ProtocolError:
    """The error for a code in the response to an API's request, with what to do about it."""
    error = ProtocolError(code, what)
    remedy = _BY_API.get(api.key, {}).get(error.code)
    return error if remedy is None else ProtocolError(code, what, remedy)


def check_code(api: Api, code: int, what: str) -> None:
    """Raise `ProtocolError` unless `code` is NONE."""
    if code:
        raise answer_error(api, code, what)


def by_key(
    api: Api, answer: Message, entries: Iterable[tuple[_K, Message]], wanted: Collection[_K]
) -> dict[_K, Message]:
    """The entries of a response, exactly one for each key that was asked for.

    A broker whose quota is used up may answer with none of them and a time to wait: that is the retriable
    `ProtocolError` THROTTLING_QUOTA_EXCEEDED. `DecodeError` for any other difference.
    """
    found: dict[_K, Message] = {}
    asked = frozenset(wanted)
    for key, entry in entries:
        if key in found or key not in asked:
            difference = "twice" if key in found else "not asked for"
            raise DecodeError(f"{api.name} response with {_shown(key)}, {difference}")
        found[key] = entry
    if missing := [key for key in wanted if key not in found]:
        if not found and answer.get("throttle_time_ms", 0) > 0:
            raise answer_error(api, ErrorCode.THROTTLING_QUOTA_EXCEEDED, f"{api.name} of {_shown(missing[0])}")
        raise DecodeError(f"{api.name} response without {_shown(missing[0])}")
    return found


def worst(failures: Collection[Exception]) -> Exception:
    """The first failure that another attempt would not mend, or else the first."""
    final = [error for error in failures if isinstance(error, ProtocolError) and not error.retriable]
    return next(iter([*final, *failures]))


def _shown(key: Hashable) -> str:
    return "-".join(map(str, key)) if isinstance(key, tuple) else repr(key)
