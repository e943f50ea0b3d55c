"""What a message of any API is about, and answers that are errors: read from the tables, so for every API alike.

A place is (topic, partition); its parts are None if the request names no topic, or a topic without partitions. An
array of the answer that holds error codes mirrors the array of the request with its name, or the request's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import UUID

from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import INT32, STRING, Api, Array, Field, Struct

Place = tuple[str | None, int | None]
Chosen = Callable[[str | None, int | None], bool]
TopicNames = Mapping[UUID, str]

_NOTHING = Struct(())
#: An array that is null asks for all there is.
EVERYTHING: Place = (None, None)
_TOPIC = ("topic", "name")
_PARTITION = ("partition_index", "partition", "index")
#: How answers and requests call the user whose credentials are altered.
_USER = ("user", "name")
#: The second one is AddPartitionsToTxn's.
_CODE_NAMES = ("error_code", "partition_error_code")
#: What tells an entry of an answer from the others.
_IDENTITY = frozenset(
    {
        *_TOPIC,
        *_PARTITION,
        *("topic_id", "group_id", "key", "member_id", "group_instance_id"),
        *("transactional_id", "resource_type", "resource_name", "user"),
    }
)
#: Codes that concern a group, a session or the request: they stand outermost, where the answer has a place for them.
_OF_THE_WHOLE = frozenset(
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


def places(api: Api, version: int, request: Message, names: TopicNames) -> list[Place]:
    """What a request asks for, `EVERYTHING` among it where it asks for all topics."""
    return list(_places(api.request, version, request, names))


def narrow(api: Api, version: int, request: Message, names: TopicNames, chosen: Chosen) -> Message:
    """The request with only the chosen topics and partitions in it."""
    return _narrow(api.request, version, request, names, chosen)


def error_answer(api: Api, version: int, request: Message) -> Message:
    """An answer that has an entry for each of the request's, and no codes yet: see `place_error`."""
    return _mirror(api.request, api.response, version, request)


def place_error(api: Api, version: int, answer: Message, code: int, names: TopicNames, chosen: Chosen) -> Message:
    """The answer with the code in each chosen entry, which then holds nothing else but what names it.

    The code stands innermost (of a partition where the API has partitions), or for the whole answer where it concerns
    that, or the answer has no entry to bear it.
    """
    answer, placed = _place(api.request, api.response, version, answer, code, names, chosen)
    if not placed and _code_name(api.response, version):
        answer = _blank(api.response, version, answer, code)
    return answer


def merge(api: Api, version: int, answer: Message, other: Message) -> Message:
    """One answer of two, whose entries are of different places."""
    return _merge(api.request, api.response, version, answer, other)


def _fields(struct: Struct, version: int) -> dict[str, Field]:
    return {field.name: field for field in struct.fields if version in field.versions}


def _code_name(struct: Struct, version: int) -> str | None:
    """How the struct's error code is called."""
    return next((name for name in _CODE_NAMES if name in _fields(struct, version)), None)


def _arrays(struct: Struct, version: int) -> list[tuple[Field, Array]]:
    """The request's arrays; what a fetcher forgets it does not ask for."""
    return [
        (field, field.type)
        for field in _fields(struct, version).values()
        if isinstance(field.type, Array) and field.tag is None and not field.name.startswith("forgotten")
    ]


def _has_codes(array: Array, version: int) -> bool:
    if not isinstance(array.element, Struct):
        return False
    fields = _fields(array.element, version).values()
    return bool(_code_name(array.element, version)) or any(
        isinstance(field.type, Array) and _has_codes(field.type, version) for field in fields
    )


def _pairs(request: Struct, response: Struct, version: int) -> list[tuple[Field, Array, Field, Struct]]:
    """(array of the request, its type, array of the answer that mirrors it, the answer's element)."""
    asked = _arrays(request, version)
    answered = [(field, kind) for field, kind in _arrays(response, version) if _has_codes(kind, version)]
    result = []
    for field, kind in answered:
        same = [entry for entry in asked if entry[0].name == field.name]
        if not same and len(answered) == 1:
            same = asked[-1:]  # of AlterUserScramCredentials' two, the credentials that are set
        if same and isinstance(kind.element, Struct):
            result.append((*same[0], field, kind.element))
    return result


def _is_of_topics(field: Field, kind: Array) -> bool:
    if "topic" not in field.name:
        return False
    if isinstance(kind.element, Struct):
        return any(item.name in _TOPIC or item.name == "topic_id" for item in kind.element.fields)
    return kind.element is STRING


def _is_of_partitions(field: Field, kind: Array) -> bool:
    if "partition" not in field.name:
        return False
    if isinstance(kind.element, Struct):
        return any(item.name in _PARTITION for item in kind.element.fields)
    return kind.element is INT32


def _first(entry: Message, among: tuple[str, ...]) -> Any:
    return next((entry[name] for name in among if entry.get(name) not in (None, "")), None)


def _topic(entry: Any, names: TopicNames) -> str | None:
    if isinstance(entry, str):
        return entry
    topic_id = entry.get("topic_id")
    found: str | None = _first(entry, _TOPIC) or (names.get(topic_id) if topic_id is not None else None)
    return found


def _partition(entry: Any) -> int | None:
    found: int | None = entry if isinstance(entry, int) else _first(entry, _PARTITION)
    return found


def _within(field: Field, kind: Array, entry: Any, names: TopicNames, place: Place) -> Place:
    """The place of an array's entry, whose array stands at `place`."""
    if _is_of_topics(field, kind):
        return _topic(entry, names), None
    if place[0] is not None and _is_of_partitions(field, kind):
        return place[0], _partition(entry)
    return place


def _places(
    struct: Struct, version: int, message: Message, names: TopicNames, place: Place = EVERYTHING
) -> Iterator[Place]:
    for field, kind in _arrays(struct, version):
        values = message.get(field.name)
        if values is None and _is_of_topics(field, kind):
            yield EVERYTHING
        for entry in values or ():
            here = _within(field, kind, entry, names, place)
            inner = []
            if isinstance(kind.element, Struct):
                inner = list(_places(kind.element, version, entry, names, here))
            if inner:
                yield from inner
            elif here != place:
                yield here


def _narrow(
    struct: Struct, version: int, message: Message, names: TopicNames, chosen: Chosen, place: Place = EVERYTHING
) -> Message:
    result = dict(message)
    for field, kind in _arrays(struct, version):
        kept = []
        for entry in message.get(field.name) or ():
            here = _within(field, kind, entry, names, place)
            inner = list(_places(kind.element, version, entry, names, here)) if isinstance(kind.element, Struct) else []
            if inner and isinstance(kind.element, Struct):
                if any(chosen(*found) for found in inner):
                    kept.append(_narrow(kind.element, version, entry, names, chosen, here))
            elif here == place or chosen(*here):
                kept.append(entry)
        if message.get(field.name) is not None:
            result[field.name] = kept
    return result


def _mirror(request: Struct, response: Struct, version: int, message: Message) -> Message:
    result: Message = {}
    # Entries without a name (log directories) can bear a code, but a place outside them is a better one.
    has_own = bool(_code_name(response, version))
    for asked, kind, field, element in _pairs(request, response, version):
        entries = []
        for entry in message.get(asked.name) or ():
            mirrored = _identity(entry, element, version)
            if not mirrored and has_own:
                continue
            if isinstance(kind.element, Struct):
                mirrored |= _mirror(kind.element, element, version, entry)
            entries.append(mirrored)
        result[field.name] = entries
    return result


def _identity(entry: Any, element: Struct, version: int) -> Message:
    """What names the answer's entry, taken from the request's."""
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


def _place(
    request: Struct,
    response: Struct,
    version: int,
    answer: Message,
    code: int,
    names: TopicNames,
    chosen: Chosen,
    place: Place = EVERYTHING,
) -> tuple[Message, bool]:
    """(the answer with the code, whether it found a place)."""
    has_own = bool(_code_name(response, version))
    if has_own and code in _OF_THE_WHOLE and chosen(*place):
        return _blank(response, version, answer, code), True
    result, placed, is_inner = dict(answer), False, False
    for asked, kind, field, element in _pairs(request, response, version):
        inner = kind.element if isinstance(kind.element, Struct) else _NOTHING
        entries = []
        for entry in answer.get(field.name) or ():
            here = _within(asked, kind, entry, names, place)
            found, done = _place(inner, element, version, entry, code, names, chosen, here)
            entries.append(found)
            placed, is_inner = placed or done, True
        if is_inner:
            result[field.name] = entries
    if placed or is_inner or not has_own or not chosen(*place):
        return result, placed
    return _blank(response, version, answer, code), True


def _merge(request: Struct, response: Struct, version: int, answer: Message, other: Message) -> Message:
    result = dict(answer)
    for _, kind, field, element in _pairs(request, response, version):
        inner = kind.element if isinstance(kind.element, Struct) else _NOTHING
        entries = list(answer.get(field.name) or ())
        for entry in other.get(field.name) or ():
            same = [at for at, there in enumerate(entries) if _is_same(there, entry)]
            if same:
                entries[same[0]] = _merge(inner, element, version, entries[same[0]], entry)
            else:
                entries.append(entry)
        result[field.name] = entries
    return result


def _is_same(one: Message, other: Message) -> bool:
    return all(one.get(name) == other[name] for name in other.keys() & _IDENTITY)
