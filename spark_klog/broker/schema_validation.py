"""Schema ids of produced records, checked at a schema registry, as Confluent Server does for topics that want it.

A topic's `confluent.value.schema.validation` (and that of keys) asks for it; the broker's setting
`confluent.schema.registry.url` says where. Only the id is checked, not the bytes after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.cache import Cache
from spark_klog.base.extras import require
from spark_klog.base.settings import any_of
from spark_klog.errors import ConfigError, ConnectionFailed, KlogError, RegistryError, SchemaError
from spark_klog.log.config import LogConfig
from spark_klog.records.reading.produced import MOST_INDEXES, RejectedRecords
from spark_klog.schemas.registry.client import NOT_THERE, RegistryClient, registry_of
from spark_klog.schemas.registry.settings import BROKER_PREFIX, BROKER_URL
from spark_klog.security.config import Settings, dereferenced

_MOST_KEPT = 10_000
#: How long an id that is of its subject is not asked for again, and one that is not: its schema may be registered next.
_KEPT_SECONDS, _REFUSED_SECONDS = 60.0, 1.0
#: How long a look-up may take, and how long none is made after one that failed.
_LONGEST_MS, _AWAY_SECONDS = 5000, 1.0
#: Refused ids of a column after which the request's other ones are not looked at.
_MOST_REFUSED = 16
_ID, _ID_SIZE, _GUID, _GUID_SIZE = 0, 5, 1, 17


class RegistryAway(KlogError):
    """The schema registry can't be asked whether an id is of its subject."""


class _Asked(NamedTuple):
    """What is asked of the registry: whether a schema, by its id or GUID as in records, is one for that column."""

    topic: str
    column: str
    #: One of the values of `SUBJECT_STRATEGIES`.
    strategy: str
    schema: bytes


def check_validation(config: LogConfig, registry: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a topic that validates schemas if there is no registry to ask, or no client for it."""
    if not config.validated:
        return
    named = any_of([f"confluent.{column}.schema.validation" for column in config.validated])
    if not registry:
        raise ConfigError(f"{named}: the broker knows no schema registry, set its {BROKER_URL}")
    require(named, "httpx", *(() if {*config.validated.values()} == {"topic"} else ("pyarrow",)))


class SchemaValidator:
    """Checks ids at the registry of `settings`. For one event loop, which never waits: a thread looks ids up.

    What the registry has said counts for a minute, and after that as long as it is away.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: Cache[_Asked, bool] = Cache(_MOST_KEPT, _KEPT_SECONDS)
        self._refused: Cache[_Asked, bool] = Cache(_MOST_KEPT, _REFUSED_SECONDS)
        #: Look-ups that are under way: requests with the same id share one.
        self._asking: dict[_Asked, asyncio.Future[bool]] = {}
        self._thread = ThreadPoolExecutor(1, "klog-schema-ids")
        self._away, self._away_until = "", 0.0

    async def check(
        self, topic: str, strategies: Mapping[str, str], ids: Mapping[str, Mapping[bytes | None, Sequence[int]]]
    ) -> None:
        """Raise `RejectedRecords` for records that name no schema of their subject; `RegistryAway`.

        `strategies` and `ids` (see `schema_ids`) are by column.
        """
        reasons: dict[int, str] = {}
        for column, strategy in strategies.items():
            refused: dict[bytes, str] = {}
            for schema in ids[column]:
                if len(refused) == _MOST_REFUSED:
                    break
                if schema is None or self._known.get(asked := _Asked(topic, column, strategy, schema)):
                    continue
                if not (named := _shown(schema)):
                    refused[schema] = f"the {column} has no schema id"
                elif not await self._is_of_subject(asked):
                    subject = f"{topic}-{column}" if strategy == "topic" else "that its record's name calls for"
                    refused[schema] = f"{named} of the {column} is not of the subject {subject}"
            for schema, reason in refused.items():
                for index in ids[column][schema]:
                    reasons.setdefault(index, reason)
        if reasons:
            reasons = dict(sorted(reasons.items())[:MOST_INDEXES])
            index, reason = next(iter(reasons.items()))
            others = f", and {len(reasons) - 1} others" if len(reasons) > 1 else ""
            raise RejectedRecords(f"record {index} of a batch{others}: {reason}", reasons)

    async def _is_of_subject(self, asked: _Asked) -> bool:
        if self._refused.get(asked):
            return False
        answer = self._asking.get(asked)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = self._asking[asked] = loop.run_in_executor(self._thread, self._look_up, asked)
            answer.add_done_callback(lambda done: self._note(asked, done))
        return await asyncio.shield(answer)  # a request that is cancelled leaves it to the others

    def _note(self, asked: _Asked, answer: asyncio.Future[bool]) -> None:
        del self._asking[asked]
        if answer.cancelled() or answer.exception() is not None:
            return
        (self._known if answer.result() else self._refused).keep(asked, True)

    def _look_up(self, asked: _Asked) -> bool:
        try:
            settings = self._settings
            if not settings:
                raise ConfigError(f"the broker knows no schema registry: set its {BROKER_URL}")
            url = dereferenced(BROKER_URL, settings["url"])
            registry = registry_of({**settings, "url": url}, BROKER_PREFIX, longest_ms=_LONGEST_MS)
            key = "\0".join(asked[:3]).encode() + asked.schema
            return bool(registry.or_before(key, lambda: self._ask(registry, asked)))
        except KlogError as error:
            raise RegistryAway(f"the schema can't be looked up: {error}") from None

    def _ask(self, registry: RegistryClient, asked: _Asked) -> bool | None:
        """Whether the registry confirms it; if not, None, which does not count while it is away.

        After a failure it is left alone for a while, as all ids wait for one thread.
        """
        if time.monotonic() < self._away_until:
            raise ConnectionFailed(self._away)
        try:
            return _is_of(registry, asked) or None
        except KlogError as error:
            self._away, self._away_until = str(error), time.monotonic() + _AWAY_SECONDS
            raise

    def close(self) -> None:
        """Let the thread end, after what it does now."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _shown(schema: bytes) -> str:
    """The id or GUID with which a record begins, for messages; "" if it is none."""
    if len(schema) == _ID_SIZE and schema[0] == _ID and schema[1] < 1 << 7:
        return f"schema id {int.from_bytes(schema[1:], 'big')}"
    if len(schema) == _GUID_SIZE and schema[0] == _GUID:
        return f"schema GUID {UUID(bytes=schema[1:])}"
    return ""


def _is_of(registry: RegistryClient, asked: _Asked) -> bool:
    """Whether the registry has the schema in the subject that the strategy calls for."""
    topic, column, strategy, named = asked
    try:
        is_id = named[0] == _ID
        number = int.from_bytes(named[1:], "big") if is_id else registry.id_of(UUID(bytes=named[1:]))
        subjects = set() if number is None else {subject for subject, _ in registry.uses(number)}
    except RegistryError as error:
        if error.code not in NOT_THERE:
            raise
        return False
    if strategy == "topic" or number is None:
        return f"{topic}-{column}" in subjects
    require(f"a subject by a {strategy} name", "pyarrow")
    from spark_klog.schemas.codec import codec_of

    prefix = "" if strategy == "record" else f"{topic}-"
    schema = registry.schema(number)
    references = registry.references(schema, number)
    for name in (subject.removeprefix(prefix) for subject in subjects if subject.startswith(prefix)):
        # a file of Protobuf has several messages
        codec = codec_of(schema.format, name if schema.format == "protobuf" else None)
        try:
            if codec.name(codec.parse(schema.text, references)) == name:
                return True
        except SchemaError:
            continue
    return False
