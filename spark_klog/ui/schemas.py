"""Keys and values of messages by the schemas that they name, for the page: decoded, with id, subject and version.

What names a schema and does not decode stays what it is, with the reason; bytes may only look as if they named one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa

from spark_klog.base.cache import Newest
from spark_klog.base.names import Format
from spark_klog.columns.schema import FULL
from spark_klog.errors import KlogError, RegistryError, SchemaError
from spark_klog.schemas.column_format import Column, ColumnDecoder, ColumnFormat, ReaderSchema
from spark_klog.schemas.json_schema.texts import json_texts
from spark_klog.schemas.prefix import schema_keys
from spark_klog.schemas.registry.client import RegistrySettings
from spark_klog.security.config import Settings

#: A view should not wait longer for a registry, unless the settings say otherwise.
_TIMEOUTS = {"retries.deadline.ms": "2000", "http.connect.timeout.ms": "2000", "http.read.timeout.ms": "2000"}
#: Schemas that a view asks for: bytes that are no schema's may look like many ids.
_MOST_LOOK_UPS = 20
#: And for how many seconds: a registry may be slow.
_VIEW_SECONDS = 5.0
#: Schemas that are kept; for how many seconds, as they may get new subjects; and for how many it is taken for granted
#: that the registry does not know an id, or gives no answer.
_MOST_KEPT, _KEPT_SECONDS, _FAILED_SECONDS = 1000, 60.0, 5.0
#: Statuses that are about the registry, and not about a schema.
_OF_REGISTRY = (401, 403, 429)
#: Bytes of a key or value up to which it is decoded, of the rows that it becomes, and the values in them: a schema may
#: make much of few bytes. For so many seconds a view decodes.
_MOST_BYTES, _MOST_DECODED_BYTES, _MOST_VALUES, _DECODING_SECONDS = 1 << 20, 4 << 20, 100_000, 5.0


class _Decoding:
    """What decoding has taken of a view's time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - begin


class Raw(NamedTuple):
    """A record's bytes."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[dict[str, Any]] | None


@dataclass(frozen=True)
class _Known:
    """What the registry says of an id or GUID, or why it says nothing; until when that holds."""

    until: float
    format: Format = "avro"
    text: str = ""
    references: tuple[tuple[str, str], ...] = ()
    uses: tuple[tuple[str, int], ...] = ()
    error: str | None = None


class MessageSchemas:
    """Decodes keys and values by a registry; any threads may use it. `ConfigError`, `MissingPackage` without httpx."""

    def __init__(self, registry: RegistrySettings) -> None:
        self._settings = RegistrySettings(
            Settings({**_TIMEOUTS, **registry.settings}), registry.prefix, registry.client
        )
        self._settings.registry()
        self._lock = threading.Lock()
        self._known: Newest[int | UUID, _Known] = Newest(_MOST_KEPT)
        #: Until when nobody asks the registry, which has failed, and why.
        self._failed_until, self._failure = 0.0, ""

    def subjects(self) -> list[str]:
        """All subjects, sorted; errors as of the registry's client."""
        return sorted(self._settings.registry().subjects())

    def subject(self, name: str, version: int | None) -> dict[str, Any]:
        """A version of a subject, by default the latest; errors as of the registry's client."""
        registry = self._settings.registry()
        versions = sorted(registry.versions(name))
        registered = registry.latest(name, is_new=True) if version is None else registry.version(name, version)
        try:
            compatibility = registry.compatibility(name)
        except RegistryError:  # an older registry, or a user who may not know
            compatibility = None
        return {
            "subject": name,
            "versions": versions,
            "version": registered.version,
            "id": registered.id,
            "format": registered.schema.format,
            "text": registered.schema.text,
            "references": [reference._asdict() for reference in registered.schema.references],
            "compatibility": compatibility,
        }

    def columns(self, topic: str, records: Sequence[Raw]) -> list[dict[Column, dict[str, Any]]]:
        """For each record its key and value, of those that name a schema:

        {"id" or "guid", "format", "subject", "version", "uses", "json", "error"}, each null if it is not known. `json`
        is the text of the decoded value, `error` why there is none; `uses` counts the subjects with the schema.
        """
        deadline = time.monotonic() + _VIEW_SECONDS
        result: list[dict[Column, dict[str, Any]]] = [{} for _ in records]
        headers = pa.array([record.headers for record in records], FULL.field("headers").type)
        asked: set[int | UUID] = set()
        decoding = _Decoding()
        column: Column
        for column in ("key", "value"):
            whole = [getattr(record, column) for record in records]
            # the beginning has the schema, and does not decode
            values = pa.array([value and value[: _MOST_BYTES + 1] for value in whole], pa.binary())
            keys = schema_keys(values, headers, column)
            for number, key in enumerate(keys.keys):
                if isinstance(key.id, int) and key.id < 0:
                    continue
                rows = np.flatnonzero(keys.which == number)
                known = self._look_up(key.id, asked, deadline)
                shown = self._described(key.id, known, f"{topic}-{column}")
                take = pa.array(rows)
                texts = self._decoded(column, key.id, known, values.take(take), headers.take(take), decoding)
                for row, (text, error) in zip(rows.tolist(), texts, strict=True):
                    result[row][column] = {**shown, "json": text, "error": error}
        return result

    def _look_up(self, key: int | UUID, asked: set[int | UUID], deadline: float) -> _Known:
        """What is known of a schema; what was known before, if the registry gives no answer now."""
        now = time.monotonic()
        with self._lock:
            known = self._known.get(key)
            if known is not None and now < known.until:
                return known
            kept = known if known is not None and known.text else None
            failure = self._failure if now < self._failed_until else None
        if failure is None and key not in asked:
            if len(asked) >= _MOST_LOOK_UPS:
                failure = f"not looked up: a view asks for {_MOST_LOOK_UPS} schemas at most"
            elif now >= deadline:
                failure = "not looked up: the schema registry is slow"
        if failure is not None:
            return kept or _Known(now, error=failure)
        asked.add(key)
        try:
            known = self._ask(key, kept)
        except RegistryError as error:
            if error.status >= 500 or error.status in _OF_REGISTRY:
                return kept or _Known(now, error=self._failed(error))
            known = _Known(time.monotonic() + _FAILED_SECONDS, error=str(error))
        except SchemaError as error:
            known = _Known(time.monotonic() + _FAILED_SECONDS, error=str(error))
        except KlogError as error:
            return kept or _Known(now, error=self._failed(error))
        with self._lock:
            self._known[key] = known
        return known

    def _failed(self, error: KlogError) -> str:
        """Ask nobody for a while: the registry has failed."""
        with self._lock:
            self._failed_until, self._failure = time.monotonic() + _FAILED_SECONDS, str(error)
        return str(error)

    def _ask(self, key: int | UUID, kept: _Known | None) -> _Known:
        registry = self._settings.registry()
        schema = registry.schema(key)
        references = tuple(registry.references(schema).items())
        uses, seconds = () if kept is None else kept.uses, _KEPT_SECONDS
        if isinstance(key, int):
            try:
                uses = tuple(sorted(registry.uses(key)))
            except RegistryError:  # of an older registry, or a user who may not know
                pass
            except KlogError as error:
                self._failed(error)
                seconds = _FAILED_SECONDS
        return _Known(time.monotonic() + seconds, schema.format, schema.text, references, uses)

    def _described(self, key: int | UUID, known: _Known, subject: str) -> dict[str, Any]:
        """The schema; of its subjects that of the topic, or else the first."""
        uses = [use for use in known.uses if use[0] == subject] or list(known.uses)
        return {
            "id": key if isinstance(key, int) else None,
            "guid": str(key) if isinstance(key, UUID) else None,
            "format": known.format if known.text else None,
            "subject": uses[0][0] if uses else None,
            "version": max(version for name, version in uses if name == uses[0][0]) if uses else None,
            "uses": len({name for name, _ in known.uses}),
        }

    def _decoded(
        self,
        column: Column,
        key: int | UUID,
        known: _Known,
        values: pa.Array,
        headers: pa.Array,
        decoding: _Decoding,
    ) -> list[tuple[str | None, str | None]]:
        """The JSON of each value, or why there is none."""
        if known.error is not None:
            return [(None, known.error)] * len(values)
        source = ColumnFormat(column, known.format, self._settings)
        schema = ReaderSchema(source, known.text, dict(known.references), key if isinstance(key, int) else None)
        _, which, _, bad = keys = schema_keys(values, headers, column, has_indexes=source.codec.has_indexes)
        outcomes: list[tuple[str | None, str | None]] = [(None, None)] * len(values)
        for row, reason in bad:
            outcomes[row] = None, reason
        for number, schema_key in enumerate(keys.keys):
            rows = np.flatnonzero(which == number)
            take = pa.array(rows)
            texts = _texts(schema, schema_key.rest, values.take(take), headers.take(take), decoding)
            for row, text in zip(rows.tolist(), texts, strict=True):
                outcomes[row] = text
        return outcomes


def _texts(
    schema: ReaderSchema, rest: bytes, values: pa.Array, headers: pa.Array, decoding: _Decoding
) -> list[tuple[str | None, str | None]]:
    """The JSON of each record with `rest` after its id, or why there is none. One by one: each may be large."""
    undecodable = f"its {schema.format.format} can't be decoded"
    try:
        decoder = schema.of_message(rest).decoder()
    except (NotImplementedError, RecursionError):
        return [(None, undecodable)] * len(values)
    except KlogError as error:
        return [(None, str(error))] * len(values)
    is_base64 = schema.format.format == "json-schema"
    texts: list[tuple[str | None, str | None]] = []
    for row in range(len(values)):
        take = pa.array([row])
        try:
            if decoding.seconds > _DECODING_SECONDS:
                raise ValueError("it is not decoded: those before it took too long")
            with decoding.measured():
                texts.append((_json_text(decoder, values.take(take), headers.take(take), is_base64), None))
        except (NotImplementedError, RecursionError):
            texts.append((None, undecodable))
        except (KlogError, ValueError, OverflowError) as error:
            texts.append((None, str(error)))
    return texts


def _json_text(decoder: ColumnDecoder, values: pa.Array, headers: pa.Array, is_base64: bool) -> str:
    """The JSON of one record, bytes in base64 if `is_base64`; ValueError says why there is none."""
    if len(values[0].as_py()) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES} bytes: it is not decoded")
    decoded, bad = decoder.decode(values, headers)
    if bad:
        raise ValueError(bad[0].reason)
    if decoded.nbytes > _MOST_DECODED_BYTES or _count(decoded) > _MOST_VALUES:
        raise ValueError(f"it is not shown: decoded it is {decoded.nbytes:,} bytes, of {_count(decoded):,} values")
    try:
        return str(json_texts(decoded, base64=is_base64)[0].as_py(), "utf-8")  # as klog consume -s
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"it can't be shown: {error}") from None


def _count(array: pa.Array) -> int:
    """The values in an array, of all its levels."""
    if pa.types.is_struct(array.type):
        below = [array.field(number) for number in range(array.type.num_fields)]
    elif pa.types.is_map(array.type):
        below = [array.keys, array.items]
    else:
        below = [array.values] if pa.types.is_list(array.type) else []
    return len(array) + sum(map(_count, below))
