"""What the records of `_schemas` say: subjects and their versions, ids, levels of compatibility, modes.

A subject `:.staging:clicks` is in the context `.staging`, others are in the default one, `.`. Each context has ids of
its own. A schema keeps its id as long as any version with it is there, a deleted one too. The next id is one more than
the largest in the log: as with Confluent's registry, that of a version deleted for good counts until the topic is
compacted.

If two registries, or a late write of an earlier producer, give an id or a version to two schemas, the first one in the
log counts. Compaction would keep the other one, so the first is written again (`restoring`).
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from spark_klog.registry.formats import AVRO
from spark_klog.registry.records import (
    CLEAR_SUBJECT,
    CONFIG,
    CONTEXT,
    DELETE_SUBJECT,
    MODE,
    SCHEMA,
    Key,
    decode_key,
    decode_value,
)
from spark_klog.schemas.registry.schemas import Reference

_log = logging.getLogger(__name__)
DEFAULT_CONTEXT: Final = "."
#: Its configuration and mode are those of every context.
GLOBAL_CONTEXT: Final = ":.__GLOBAL:"
DEFAULT_LEVEL: Final = "BACKWARD"
DEFAULT_MODE: Final = "READWRITE"
#: Modes in which clients choose ids and versions.
IMPORTING: Final = frozenset(("IMPORT", "FORWARD"))
MAX_NUMBER: Final = (1 << 31) - 1
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


class Definition(NamedTuple):
    """What makes two schemas the same one."""

    schema_type: str
    schema: str
    references: tuple[Reference, ...] = ()
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = None

    def digest(self) -> bytes:
        """The MD5 of text, references, metadata and rules that Confluent's registry finds schemas by.

        `TypeError` or `AttributeError` if a rule has fields of other types than Confluent's.
        """
        md5 = hashlib.md5(self.schema.encode(), usedforsecurity=False)
        for name, subject, version in self.references:
            md5.update(name.encode() + subject.encode() + version.to_bytes(4, "big", signed=True))
        if self.metadata is not None:
            md5.update(b"\1")
            for key, values in sorted((self.metadata.get("tags") or {}).items()):
                md5.update(b"".join(text.encode() for text in (key, *sorted(values))))
            for key, value in sorted((self.metadata.get("properties") or {}).items()):
                md5.update(key.encode() + value.encode())
            md5.update(b"".join(text.encode() for text in sorted(self.metadata.get("sensitive") or ())))
        if self.rule_set is not None:
            md5.update(b"\1")
            for kind in ("migrationRules", "domainRules", "encodingRules"):
                md5.update(b"".join(map(_rule_bytes, self.rule_set.get(kind) or ())))
            md5.update((self.rule_set.get("enableAt") or "").encode())
        return md5.digest()

    def json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"schemaType": self.schema_type}
        if self.references:
            made["references"] = [reference._asdict() for reference in self.references]
        if self.metadata is not None:
            made["metadata"] = self.metadata
        if self.rule_set is not None:
            made["ruleSet"] = self.rule_set
        return made | {"schema": self.schema}


def _rule_bytes(rule: dict[str, Any]) -> bytes:
    """What of a rule is part of a schema's digest."""
    texts = [
        *(rule.get("name"), rule.get("doc"), rule.get("kind") or "TRANSFORM", rule.get("mode") or "WRITEREAD"),
        *(rule.get("type"), *sorted(rule.get("tags") or ())),
        *(text for pair in sorted((rule.get("params") or {}).items()) for text in pair),
        *(rule.get("expr"), rule.get("onSuccess"), rule.get("onFailure")),
    ]
    return "".join(text for text in texts if text is not None).encode() + b"\1" * bool(rule.get("disabled"))


@dataclass
class Version:
    """A schema under a subject."""

    subject: str
    version: int
    id: int
    definition: Definition
    is_deleted: bool
    #: ms since 1970 at which the record was written.
    timestamp: int
    #: Fields of the record's value that nothing here knows.
    other: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        return self.definition.digest()

    @cached_property
    def words(self) -> int:
        """The `words_of` the text, which may be much."""
        return words_of(self.definition.schema)

    def value(self, is_deleted: bool) -> dict[str, Any]:
        """The record's value."""
        return schema_value(self.subject, self.version, self.id, self.definition, is_deleted) | self.other


def schema_value(subject: str, version: int, id: int, definition: Definition, is_deleted: bool) -> dict[str, Any]:
    """The value of a record of a schema."""
    made = definition.json()
    if definition.schema_type == AVRO:
        del made["schemaType"]
    return {"subject": subject, "version": version, "id": id} | made | {"deleted": is_deleted}


def words_of(text: str) -> int:
    """A hash of the words of a Protobuf schema, but for those that a layout may leave out."""
    return hash(frozenset(_WORD.findall(text)) - {"syntax", "proto2"})


def guid_of(digest: bytes) -> str:
    return str(uuid.UUID(bytes=digest))


def split(subject: str) -> tuple[str, str]:
    """The context of a subject, and its name in there."""
    if not subject.startswith(":."):
        return DEFAULT_CONTEXT, subject
    context, _, name = subject[1:].partition(":")
    return context, name


def qualified(context: str, name: str) -> str:
    """The subject of a name in a context; `split` takes it apart."""
    return name if context == DEFAULT_CONTEXT else f":{context}:{name}"


def within(subject: str, referenced: str) -> str:
    """The subject that a schema of `subject` means by `referenced`: in its own context unless it names another."""
    context, _ = split(subject)
    return referenced if referenced.startswith(":.") else qualified(context, referenced)


class _Context:
    """The ids of a context."""

    def __init__(self) -> None:
        #: False after the context was deleted: its ids are not given again.
        self.is_listed = True
        self.last_id = 0
        #: Ids of a schema by its digest, the smallest first: several if clients chose them.
        self.ids: dict[bytes, tuple[int, ...]] = {}
        #: Versions with an id, by their subjects and numbers.
        self.versions: dict[int, dict[tuple[str, int], Version]] = {}


class State:
    """Not thread-safe: the log's lock is held by whoever uses it."""

    def __init__(self) -> None:
        self._subjects: dict[str, dict[int, Version]] = {}
        self._contexts: dict[str, _Context] = {DEFAULT_CONTEXT: _Context()}
        self._configs: dict[str | None, dict[str, Any]] = {}
        self._modes: dict[str | None, str] = {}
        #: Schemas that use one, by its subject and version.
        self._users: dict[tuple[str, int], dict[tuple[str, int], Version]] = {}
        #: How each key was last spelled, so that another registry's record is replaced when the topic is compacted.
        self._spellings: dict[Key, bytes] = {}
        #: Keys whose last record was passed over because an earlier one counts.
        self._overruled: dict[Key, None] = {}

    def apply(
        self, key_bytes: bytes | None, value_bytes: bytes | None, timestamp: int, *, is_restored: bool = False
    ) -> None:
        """Follow a record. What can't be read is logged, and passed over.

        One of `restoring` counts, whatever was read before it.
        """
        try:
            key, value = decode_key(key_bytes), decode_value(value_bytes)
            if key is None:
                return
            assert key_bytes is not None
            self._spellings[key] = key_bytes
            self._apply(key, value, timestamp, is_restored)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            _log.warning("a record of the schemas' topic is passed over: %r", error)

    def _apply(self, key: Key, value: dict[str, Any] | None, timestamp: int, is_restored: bool) -> None:
        if key.keytype == SCHEMA:
            assert key.subject is not None
            version = None if value is None else _version(key, value, timestamp)
            if version is not None and not is_restored and self._is_overruled(version):
                _log.error(
                    "id %d or version %d of subject %s belongs to another schema: the later record is passed over",
                    *(version.id, version.version, version.subject),
                )
                self._overruled[key] = None
                return
            self._overruled.pop(key, None)
            self._remove(key.subject, key.version)
            if version is not None:
                self._add(version)
        elif key.keytype == CONFIG:
            _put(self._configs, key.subject, value)
        elif key.keytype == MODE:
            _put(self._modes, key.subject, None if value is None else str(value["mode"]))
        elif key.keytype == CONTEXT:
            assert key.subject is not None
            if value is not None:
                self._contexts.setdefault(key.subject, _Context()).is_listed = True
            elif key.subject in self._contexts:
                self._contexts[key.subject].is_listed = key.subject == DEFAULT_CONTEXT
        elif key.keytype == DELETE_SUBJECT and value is not None:
            for number, version in self._subjects.get(str(value["subject"]), {}).items():
                if number <= int(value["version"]):
                    version.is_deleted = True
        elif key.keytype == CLEAR_SUBJECT and value is not None:
            self._clear(value.get("subject"))

    def _add(self, version: Version) -> None:
        digest = version.digest
        context = self._contexts.setdefault(split(version.subject)[0], _Context())
        context.is_listed = True
        place = version.subject, version.version
        same = context.versions.setdefault(version.id, {})
        same[place] = version
        context.last_id = max(context.last_id, version.id)
        if version.id not in (ids := context.ids.get(digest, ())):
            context.ids[digest] = tuple(sorted((*ids, version.id)))
        versions = self._subjects.setdefault(version.subject, {})
        versions[version.version] = version
        if next(reversed(versions)) != max(versions):
            self._subjects[version.subject] = dict(sorted(versions.items()))
        for used in self._used(version):
            self._users.setdefault(used, {})[place] = version

    def _is_overruled(self, version: Version) -> bool:
        """Whether the version's id or place belongs to another schema already, and no client chose it.

        Ids belong to a text: the same with other metadata may have the same id.
        """
        context = self._contexts.get(split(version.subject)[0])
        if context is None:
            return False
        holder = next(iter(context.versions.get(version.id, {}).values()), None)
        is_overruled = holder is not None and holder.definition.schema != version.definition.schema
        there = self.version(version.subject, version.version)
        if there is not None and there.id != version.id and self.mode_in_scope(version.subject) not in IMPORTING:
            is_overruled = True
        if is_overruled:
            context.last_id = max(context.last_id, version.id)  # its writer's clients may have it
        return is_overruled

    def restoring(self) -> list[tuple[Key, dict[str, Any] | None]]:
        """Keys and values of records that have to be written again, since later ones were passed over."""
        values: list[tuple[Key, dict[str, Any] | None]] = []
        for key in self._overruled:
            assert key.subject is not None
            version = self.version(key.subject, key.version)
            values.append((key, None if version is None else version.value(version.is_deleted)))
        return values

    def _remove(self, subject: str, number: int) -> None:
        version = self._subjects.get(subject, {}).pop(number, None)
        if version is None:
            return
        if not self._subjects[subject]:
            del self._subjects[subject]
        place = subject, number
        context = self._contexts[split(subject)[0]]
        same = context.versions[version.id]
        del same[place]
        if not same:
            del context.versions[version.id]
            # `last_id` stays: an id is not given to another schema
        for used in self._used(version):
            self._users.get(used, {}).pop(place, None)

    @staticmethod
    def _used(version: Version) -> Iterator[tuple[str, int]]:
        for _, referenced, number in version.definition.references:
            yield within(version.subject, referenced), number

    def _clear(self, subject: str | None) -> None:
        """Forget which ids the schemas had of subjects that are no longer there."""
        context = self._contexts.get(split(subject or "")[0])
        if context is not None:
            held = {digest: tuple(id for id in ids if id in context.versions) for digest, ids in context.ids.items()}
            context.ids = {digest: ids for digest, ids in held.items() if ids}

    # --- what is asked

    def spelled(self, key: Key) -> bytes:
        return self._spellings.get(key) or key.encode()

    def subjects(self) -> list[str]:
        return sorted(self._subjects)

    def versions(self, subject: str, *, deleted: bool = False) -> list[Version]:
        """Versions of a subject, the oldest first; with `deleted` also those that are soft-deleted."""
        known = self._subjects.get(subject, {}).values()
        return [version for version in known if deleted or not version.is_deleted]

    def version(self, subject: str, number: int) -> Version | None:
        return self._subjects.get(subject, {}).get(number)

    def contexts(self) -> list[str]:
        return sorted(name for name, context in self._contexts.items() if context.is_listed)

    def of_id(self, context: str, id: int) -> list[Version]:
        """Versions that have the id, soft-deleted ones too."""
        there = self._contexts.get(context)
        return [] if there is None else list(there.versions.get(id, {}).values())

    def id_of(self, context: str, definition: Definition) -> int | None:
        """The id of a schema, if any version has it, a soft-deleted one too."""
        there = self._contexts.get(context)
        for id in () if there is None else there.ids.get(definition.digest(), ()):
            assert there is not None
            holder = next(iter(there.versions.get(id, {}).values()), None)
            if holder is not None and holder.definition.schema == definition.schema:
                return id
        return None

    def ids_of_guid(self, guid: str) -> dict[str, int]:
        """The ids of a schema by context."""
        try:
            digest = uuid.UUID(guid).bytes
        except ValueError:
            return {}
        ids: dict[str, int] = {}
        for name, context in sorted(self._contexts.items()):
            for id in context.ids.get(digest, ()):
                if any(version.digest == digest for version in self.of_id(name, id)):
                    ids.setdefault(name, id)
        return ids

    def next_id(self, context: str) -> int:
        there = self._contexts.get(context)
        return 1 if there is None else there.last_id + 1

    def last_id(self, context: str) -> int:
        return self.next_id(context) - 1

    def users(self, subject: str, number: int, *, deleted: bool) -> list[Version]:
        """Versions whose schemas use this one; with `deleted` also those that are soft-deleted."""
        known = self._users.get((subject, number), {}).values()
        return [version for version in known if deleted or not version.is_deleted]

    def config(self, subject: str | None) -> dict[str, Any] | None:
        """What was configured for a subject, a context, or (None) all: fields of the record's value."""
        return self._configs.get(subject)

    def mode(self, subject: str | None) -> str | None:
        return self._modes.get(subject)

    def config_in_scope(self, subject: str | None) -> dict[str, Any]:
        """What holds for a subject: its own configuration over that of its context or of all."""
        made: dict[str, Any] = {"compatibilityLevel": DEFAULT_LEVEL}
        for scope in reversed(list(_scopes(subject))):
            made |= self._configs.get(scope, {})
        return made

    def mode_in_scope(self, subject: str | None) -> str:
        if self._modes.get(None) == "READONLY_OVERRIDE":
            return "READONLY_OVERRIDE"
        return next((self._modes[scope] for scope in _scopes(subject) if scope in self._modes), DEFAULT_MODE)


def _scopes(subject: str | None) -> Iterator[str | None]:
    """Where the setting of a subject is looked for."""
    context = DEFAULT_CONTEXT
    if subject is not None:
        yield subject
        context, _ = split(subject)
    yield None if context == DEFAULT_CONTEXT else qualified(context, "")
    yield GLOBAL_CONTEXT


def _put(values: dict[str | None, Any], subject: str | None, value: Any) -> None:
    if value is None:
        values.pop(subject, None)
    else:
        values[subject] = value


_FIELDS: Final = frozenset(
    ("subject", "version", "id", "schemaType", "references", "metadata", "ruleSet", "schema", "deleted")
)


def _version(key: Key, value: dict[str, Any], timestamp: int) -> Version:
    """The version in a record; `ValueError`, `TypeError` or `LookupError` if it is malformed."""
    assert key.subject is not None
    references = tuple(
        Reference(str(row["name"]), str(row["subject"]), _number(row["version"], "a reference's version", -1))
        for row in value.get("references") or ()
    )
    definition = Definition(
        str(value.get("schemaType") or AVRO),
        str(value["schema"]),
        references,
        value.get("metadata"),
        value.get("ruleSet"),
    )
    other = {name: field for name, field in value.items() if name not in _FIELDS}
    is_deleted = bool(value.get("deleted", False))
    number = _number(key.version, "the version", 1)
    made = Version(key.subject, number, _number(value["id"], "the id", 0), definition, is_deleted, timestamp, other)
    made.digest  # noqa: B018 - raises for what has the wrong type, before anything is changed
    return made


def _number(value: Any, what: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{what} {str(value)[:50]} is not a number from {least} to {MAX_NUMBER}")
    return value
