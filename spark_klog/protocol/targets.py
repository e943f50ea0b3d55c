"""Targets of a request of any API, and error responses for them, derived from the tables.

A target is (topic, partition); the topic is None if the request names none, the partition if the topic has none. An
array with error codes in the response corresponds to the request's array of the same name, or to its last array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import INT32, STRING, Api, Array, Field, Struct

Target = tuple[str | None, int | None]
Chosen = Callable[[str | None, int | None], bool]
TopicNames = Mapping[UUID, str]

_NOTHING = Struct(())
#: The target of a null array, which means all topics.
EVERYTHING: Target = (None, None)
_TOPIC = ("topic", "name")
_PARTITION = ("partition_index", "partition", "index")
#: Names of the user whose credentials are altered, in responses and requests.
_USER = ("user", "name")
#: The second one is AddPartitionsToTxn's.
_CODE_NAMES = ("error_code", "partition_error_code")
#: Fields that identify an entry of a response.
_IDENTITY = frozenset(
    {
        *_TOPIC,
        *_PARTITION,
        *("topic_id", "group_id", "key", "member_id", "group_instance_id"),
        *("transactional_id", "resource_type", "resource_name", "user"),
    }
)
#: Codes about a group, a session or the request: they go to the outermost error code of the response.
_WHOLE_RESPONSE_CODES = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.INVALID_GROUP_ID,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.REBALANCE_IN_PROGRESS,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.GROUP_ID_NOT_FOUND,
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
        ErrorCode.STALE_MEMBER_EPOCH,
    }
)


def targets(api: Api, version: int, request: Message, names: TopicNames) -> list[Target]:
    """The targets of a request; `EVERYTHING` if it asks for all topics."""
    return list(_targets(api.request, version, request, names))


def narrow(api: Api, version: int, request: Message, names: TopicNames, chosen: Chosen) -> Message:
    """The request with only the chosen topics and partitions in it."""
    return _narrow(api.request, version, request, names, chosen)


def error_response(api: Api, version: int, request: Message) -> Message:
    """A response with an entry for each of the request's, without codes yet: see `set_error`."""
    return _mirror(api.request, api.response, version, request)


def set_error(api: Api, version: int, answer: Message, code: int, names: TopicNames, chosen: Chosen) -> Message:
    """The response with the code in each chosen entry, which then has no other fields than its identity.

    The code goes to the innermost entry (a partition, if the API has partitions); to the whole response if the code is
    about that, or if no entry has an error code.
    """
    answer, placed = _set_error(api.request, api.response, version, answer, code, names, chosen)
    if not placed and _code_name(api.response, version):
        answer = _blank(api.response, version, answer, code)
    return answer


def merge(api: Api, version: int, answer: Message, other: Message) -> Message:
    """Merge two responses whose entries have different targets."""
    return _merge(api.request, api.response, version, answer, other)


def _fields(struct: Struct, version: int) -> dict[str, Field]:
    return {field.name: field for field in struct.fields if version in field.versions}


def _code_name(struct: Struct, version: int) -> str | None:
    return next((name for name in _CODE_NAMES if name in _fields(struct, version)), None)


def _arrays(struct: Struct, version: int) -> list[tuple[Field, Array, Struct]]:
    """The arrays of a request or response, without those of topics that a fetch session forgets.

    The last one of each is the element, without fields if it is no struct.
    """
    return [
        (field, field.type, field.type.element if isinstance(field.type.element, Struct) else _NOTHING)
        for field in _fields(struct, version).values()
        if isinstance(field.type, Array) and field.tag is None and not field.name.startswith("forgotten")
    ]


def _has_codes(struct: Struct, version: int) -> bool:
    return bool(_code_name(struct, version)) or any(
        _has_codes(element, version) for _, _, element in _arrays(struct, version)
    )


def _pairs(request: Struct, response: Struct, version: int) -> list[tuple[Field, Array, Struct, Field, Struct]]:
    """(array of the request, its type and element, corresponding array of the response, its element)."""
    requested = _arrays(request, version)
    answered = [(field, element) for field, _, element in _arrays(response, version) if _has_codes(element, version)]
    result = []
    for field, element in answered:
        same = [entry for entry in requested if entry[0].name == field.name]
        if not same and len(answered) == 1:
            same = requested[-1:]  # AlterUserScramCredentials has two: the last one sets credentials
        if same:
            result.append((*same[0], field, element))
    return result


def _is_of_topics(field: Field, kind: Array) -> bool:
    if "topic" not in field.name:
        return False
    if isinstance(kind.element, Struct):
        return any(inner.name in _TOPIC or inner.name == "topic_id" for inner in kind.element.fields)
    return kind.element is STRING


def _is_of_partitions(field: Field, kind: Array) -> bool:
    if "partition" not in field.name:
        return False
    if isinstance(kind.element, Struct):
        return any(inner.name in _PARTITION for inner in kind.element.fields)
    return kind.element is INT32


def _first(entry: Message, among: tuple[str, ...]) -> Any:
    return next((entry[name] for name in among if entry.get(name) not in (None, "")), None)


def _topic(entry: Any, names: TopicNames) -> str | None:
    if isinstance(entry, str):
        return entry
    topic_id = entry.get("topic_id")
    topic: str | None = _first(entry, _TOPIC) or (names.get(topic_id) if topic_id is not None else None)
    return topic


def _partition(entry: Any) -> int | None:
    partition: int | None = entry if isinstance(entry, int) else _first(entry, _PARTITION)
    return partition


def _within(field: Field, kind: Array, entry: Any, names: TopicNames, target: Target) -> Target:
    """The target of an array's entry, given that of the struct with the array."""
    if _is_of_topics(field, kind):
        return _topic(entry, names), None
    if target[0] is not None and _is_of_partitions(field, kind):
        return target[0], _partition(entry)
    return target


def _targets(
    struct: Struct, version: int, message: Message, names: TopicNames, target: Target = EVERYTHING
) -> Iterator[Target]:
    for field, kind, element in _arrays(struct, version):
        values = message.get(field.name)
        if values is None and _is_of_topics(field, kind):
            yield EVERYTHING
        for entry in values or ():
            here = _within(field, kind, entry, names, target)
            inner = list(_targets(element, version, entry, names, here)) if element.fields else []
            if inner:
                yield from inner
            elif here != target:
                yield here


def _narrow(
    struct: Struct, version: int, message: Message, names: TopicNames, chosen: Chosen, target: Target = EVERYTHING
) -> Message:
    result = dict(message)
    for field, kind, element in _arrays(struct, version):
        kept = []
        for entry in message.get(field.name) or ():
            here = _within(field, kind, entry, names, target)
            inner = list(_targets(element, version, entry, names, here)) if element.fields else []
            if any(chosen(*place) for place in inner):
                kept.append(_narrow(element, version, entry, names, chosen, here))
            elif not inner and (here == target or chosen(*here)):
                kept.append(entry)
        if message.get(field.name) is not None:
            result[field.name] = kept
    return result


def _mirror(request: Struct, response: Struct, version: int, message: Message) -> Message:
    result: Message = {}
    # Entries without identity (log directories) have a code, but an outer code is better if there is one.
    has_own = bool(_code_name(response, version))
    for requested, _, inner, field, element in _pairs(request, response, version):
        entries = []
        for entry in message.get(requested.name) or ():
            mirrored = _identity(entry, element, version)
            if not mirrored and has_own:
                continue
            entries.append(mirrored | _mirror(inner, element, version, entry))
        result[field.name] = entries
    return result


def _identity(entry: Any, element: Struct, version: int) -> Message:
    """The identity of the response's entry, taken from the request's."""
    fields = _fields(element, version)
    if not isinstance(entry, dict):
        kind = STRING if isinstance(entry, str) else INT32
        name = next((name for name, field in fields.items() if field.type is kind and name != "error_message"), None)
        return {} if name is None else {name: entry}
    result = {}
    for name in fields.keys() & _IDENTITY:
        alike = next((group for group in (_TOPIC, _PARTITION, _USER) if name in group), (name,))
        value = entry[name] if name in entry else _first(entry, alike)
        if value is not None:
            result[name] = value
    return result


def _blank(struct: Struct, version: int, entry: Message, code: int) -> Message:
    fields = _fields(struct, version)
    result: Message = {name: value for name, value in entry.items() if name in _IDENTITY and name in fields}
    name = _code_name(struct, version)
    assert name is not None
    result[name] = code
    if "error_message" in fields:
        result["error_message"] = "injected fault"
    return result


def _set_error(
    request: Struct,
    response: Struct,
    version: int,
    answer: Message,
    code: int,
    names: TopicNames,
    chosen: Chosen,
    target: Target = EVERYTHING,
) -> tuple[Message, bool]:
    """(the response with the code, whether any entry has it)."""
    has_own = bool(_code_name(response, version))
    if has_own and code in _WHOLE_RESPONSE_CODES and chosen(*target):
        return _blank(response, version, answer, code), True
    result, placed, is_inner = dict(answer), False, False
    for requested, kind, inner, field, element in _pairs(request, response, version):
        entries = []
        for entry in answer.get(field.name) or ():
            here = _within(requested, kind, entry, names, target)
            changed, done = _set_error(inner, element, version, entry, code, names, chosen, here)
            entries.append(changed)
            placed, is_inner = placed or done, True
        if is_inner:
            result[field.name] = entries
    if placed or is_inner or not has_own or not chosen(*target):
        return result, placed
    return _blank(response, version, answer, code), True


def _merge(request: Struct, response: Struct, version: int, answer: Message, other: Message) -> Message:
    result = dict(answer)
    for _, _, inner, field, element in _pairs(request, response, version):
        entries = list(answer.get(field.name) or ())
        for entry in other.get(field.name) or ():
            same = [at for at, there in enumerate(entries) if _is_same(there, entry)]
            if same:
                entries[same[0]] = _merge(inner, element, version, entries[same[0]], entry)
            else:
                entries.append(entry)
        result[field.name] = entries
    return result


def _is_same(entry: Message, other: Message) -> bool:
    return all(entry.get(name) == other[name] for name in other.keys() & _IDENTITY)
