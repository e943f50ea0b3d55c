"""A schema registry's operations on what is in its topic, as Confluent's registry does them.

Reads use the state; what changes it waits until the state has all of the log, decides, writes, and returns once that is
read back. One write at a time, so two registrations of the same schema get the same id.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from spark_klog.errors import MissingPackage
from spark_klog.schemas.registry.formats import InvalidSchema, ParsedSchema, parse
from spark_klog.schemas.registry.formats.contract import READER, WRITER
from spark_klog.schemas.registry.server import errors
from spark_klog.schemas.registry.server.log import WRITE_SECONDS, SchemaLog
from spark_klog.schemas.registry.server.records import (
    CLEAR_SUBJECT,
    CONFIG,
    CONTEXT,
    DELETE_SUBJECT,
    MODE,
    SCHEMA,
    Key,
    Record,
)
from spark_klog.schemas.registry.server.state import (
    DEFAULT_CONTEXT,
    DEFAULT_LEVEL,
    DEFAULT_MODE,
    GLOBAL_CONTEXT,
    IMPORTING,
    MAX_NUMBER,
    Definition,
    State,
    Version,
    qualified,
    schema_value,
    split,
    within,
)

#: Parsed schemas that are kept, and letters of their texts and of those of their references.
_MOST_PARSED: Final = 1000
_MOST_LETTERS: Final = 16 << 20
#: Schemas that refer to each other, from one that is registered, and how many are one behind the other.
_MOST_REFERENCES: Final = 1000
_MOST_IN_A_ROW: Final = 200
_MAX_SCHEMA_SHOWN: Final = 10 * 1024
LATEST: Final = -1
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
_T = TypeVar("_T")


#: A type, a text, and the names and texts of references.
_Texts = tuple[str, str, tuple[tuple[str, str], ...]]
#: Earlier schemas that one is compatible with, by direction and identity, which only holds for one that is there.
_Compatible = dict[tuple[str, int], ParsedSchema]


class Registry:
    """The operations; thread-safe. Each raises `RegistryRefusal`. Subjects are qualified by their context (`state`)."""

    def __init__(self, log: SchemaLog) -> None:
        self._log = log
        #: Held while a change is decided and written.
        self._changing = threading.Lock()
        #: Parsed schemas by their text and the texts that they refer to: a number may get another text.
        self._parsed: OrderedDict[_Texts, ParsedSchema] = OrderedDict()
        self._letters = 0
        self._parsing = threading.Lock()

    @property
    def cluster_id(self) -> str | None:
        """The id of the Kafka cluster."""
        return self._log.cluster_id

    def read(self, look_up: Callable[[State], _T]) -> _T:
        """What `look_up` finds in the state, which nothing changes meanwhile."""
        with self._log.lock:
            return look_up(self._log.state)

    @contextmanager
    def _change(self) -> Iterator[float]:
        """Be the only one to change something, with a state that has all of the log; the deadline of the change.

        The deadline counts from the call: it is for the wait for others' changes, too.
        """
        deadline = time.monotonic() + WRITE_SECONDS
        if not self._changing.acquire(timeout=WRITE_SECONDS):
            raise errors.timed_out(f"changes before this one took {WRITE_SECONDS:g} s")
        try:
            self._log.catch_up(deadline)
            self._restore(deadline)
            yield deadline
        finally:
            self._changing.release()

    def restore(self) -> None:
        """Write again what a later record of the log would replace when the topic is compacted."""
        with self._change():
            pass

    def _restore(self, deadline: float) -> None:
        with self._log.lock:
            records = [Record(key, value, is_restored=True) for key, value in self._log.state.restoring()]
        if records:
            self._log.append(records, deadline)

    # --- schemas

    @staticmethod
    def _parse(definition: Definition, references: dict[str, str], *, is_new: bool = False) -> ParsedSchema:
        """A schema with those that it refers to."""
        try:
            return parse(definition.schema_type, definition.schema, references, is_new=is_new)
        except InvalidSchema as error:
            raise errors.invalid_schema(f"Invalid schema of type {definition.schema_type}, details: {error}") from error
        except RecursionError:
            raise errors.invalid_schema("the schema is nested too deeply") from None
        except MissingPackage as error:
            raise errors.invalid_schema(str(error)) from error

    def stored(self, version: Version) -> ParsedSchema:
        """The parsed schema of a version."""
        definition = version.definition
        references = self._texts(version.subject, definition)
        key = definition.schema_type, definition.schema, tuple(references.items())
        with self._parsing:
            if (kept := self._parsed.get(key)) is not None:
                self._parsed.move_to_end(key)
                return kept
        made = self._parse(definition, references)
        with self._parsing:
            if key not in self._parsed:
                self._parsed[key] = made
                self._letters += _size(key)
            while len(self._parsed) > 1 and (len(self._parsed) > _MOST_PARSED or self._letters > _MOST_LETTERS):
                self._letters -= _size(self._parsed.popitem(last=False)[0])
        return made

    def _texts(self, subject: str, definition: Definition) -> dict[str, str]:
        """Texts of the schemas that a schema refers to, directly or not, each after those that it needs itself."""
        texts: dict[str, str] = {}
        under_way: set[tuple[str, int]] = set()

        def add(parent: str, definition: Definition) -> None:
            for name, referenced, number in definition.references:
                if name in texts:
                    continue
                place = within(parent, referenced), number
                if place in under_way:
                    raise errors.invalid_schema(f"schemas refer to each other in a circle: {name}")
                if len(under_way) >= _MOST_IN_A_ROW:
                    raise errors.invalid_schema(f"more than {_MOST_IN_A_ROW} schemas refer each to the next one")
                with self._log.lock:
                    version = _numbered(self._log.state, *place, deleted=True)
                if version is None:
                    raise errors.invalid_schema(
                        f'No schema reference found for subject "{referenced}" and version {number}'
                    )
                under_way.add(place)
                add(place[0], version.definition)
                under_way.discard(place)
                texts[name] = version.definition.schema
                if len(texts) > _MOST_REFERENCES:
                    raise errors.invalid_schema(f"the schema refers to more than {_MOST_REFERENCES} others")

        add(subject, definition)
        return texts

    def _canonical(
        self, subject: str, definition: Definition, texts: dict[str, str], *, normalize: bool, is_new: bool
    ) -> tuple[Definition, ParsedSchema]:
        """A schema as it is stored; `texts` are those that it refers to."""
        normalize = normalize or bool(self.read(lambda state: state.config_in_scope(subject)).get("normalize"))
        parsed = self._parse(definition, texts, is_new=is_new)
        try:
            text = parsed.normalized() if normalize else parsed.canonical()
        except RecursionError:
            raise errors.invalid_schema("the schema is nested too deeply") from None
        references = tuple(sorted(set(definition.references))) if normalize else definition.references
        return definition._replace(schema=text, references=references), parsed

    def version(self, subject: str, number: int, *, deleted: bool = False) -> Version:
        """A version of a subject; `LATEST` is the newest that is not deleted (with `deleted`, of all)."""
        with self._log.lock:
            state = self._log.state
            version = _numbered(state, subject, number, deleted=deleted)
            if version is None:
                if not state.versions(subject, deleted=deleted):
                    raise errors.subject_not_found(subject)
                raise errors.version_not_found(number)
            return version

    def of_id(self, context: str, id: int, subject: str | None = None) -> Version:
        """A version with the schema of an id, which may be deleted; that of `subject` if there is one.

        A `subject` that names a context takes the place of `context`, and must have the id.
        """
        with self._log.lock:
            state = self._log.state
            if subject is not None:
                own, name = split(subject)
                context = own if own != DEFAULT_CONTEXT else context
                found = state.of_id(context, id)
                subject = qualified(context, name)
                same = [version for version in found if not name or version.subject == subject]
                if same or context != DEFAULT_CONTEXT:
                    found = same
            else:
                found = state.of_id(context, id)
            if not found:
                raise errors.schema_not_found(id)
            return found[0]

    def look_up(self, subject: str, definition: Definition, *, normalize: bool, deleted: bool) -> Version:
        """The version of a subject that has a schema."""
        texts = self._texts(subject, definition)
        canonical, _ = self._canonical(subject, definition, texts, normalize=normalize, is_new=False)
        with self._log.lock:
            state = self._log.state
            version = _with_schema(state, subject, canonical, deleted=deleted)
            if version is None:
                if not state.versions(subject, deleted=deleted):
                    raise errors.subject_not_found(subject)
                raise errors.schema_not_found()
            return version

    def register(
        self, subject: str, definition: Definition, *, id: int = -1, version: int = 0, normalize: bool = False
    ) -> Version:
        """The version of a subject that has a schema; it becomes the next one if there is none.

        `id` and `version` are given in mode IMPORT only.
        """
        if not split(subject)[1] or subject in ("__GLOBAL", "__EMPTY") or _CONTROL.search(subject):
            raise errors.invalid_subject(subject)
        self._check_register_mode(subject, has_id=id >= 0)
        texts = self._texts(subject, definition)
        canonical, parsed = self._canonical(subject, definition, texts, normalize=normalize, is_new=id < 0)
        compatible = _Compatible()
        if id < 0 and version == 0:
            with self._log.lock:
                state = self._log.state
                there = _with_schema(state, subject, canonical, deleted=False)
                config, versions = state.config_in_scope(subject), state.versions(subject)
            if there is not None:
                return there
            # which may take long, now that nobody waits for it
            self._check_compatible(subject, config, canonical, parsed, versions, compatible)
        with self._change() as deadline:
            self._check_register_mode(subject, has_id=id >= 0)
            if (now := self._texts(subject, definition)) != texts:
                canonical, parsed = self._canonical(subject, definition, now, normalize=normalize, is_new=id < 0)
                compatible.clear()
            with self._log.lock:
                state = self._log.state
                versions = state.versions(subject, deleted=True)
                there = _with_schema(state, subject, canonical, deleted=False)
                config, mode = state.config_in_scope(subject), state.mode_in_scope(subject)
                context = split(subject)[0]
                known_id = state.id_of(context, canonical)
                has_context = state.has_context(context)
                next_id = state.next_id(context)
                holders = state.of_id(context, id) if id >= 0 else []
            if version == 0 and there is not None and id in (-1, there.id):
                return there
            if mode not in IMPORTING:
                current = [known for known in versions if not known.is_deleted]
                self._check_compatible(subject, config, canonical, parsed, current, compatible)
            next_version = max((known.version for known in versions), default=0) + 1
            if version and version != next_version and mode not in IMPORTING:
                raise errors.invalid_schema("Version is not one more than previous version")
            if any(holder.definition != canonical for holder in holders):
                raise errors.not_permitted(f"Overwrite new schema with id {id} in context {context} is not permitted.")
            number = version or next_version
            chosen = id if id >= 0 else next_id if known_id is None else known_id
            if max(chosen, number) > MAX_NUMBER:
                raise errors.not_permitted(f"The ids of context {context} or versions of {subject} are used up")
            value = schema_value(subject, number, chosen, canonical, False)
            records = [] if has_context else [_context_record(context)]
            # a deleted version that comes back is forgotten, once the new one is there
            records += [Record(Key(SCHEMA, subject, number), value), *self._replaced(versions, chosen, number)]
            self._log.append(records, deadline)
            with self._log.lock:
                made = self._log.state.version(subject, number)
            if made is None or (made.id, made.definition) != (chosen, canonical):
                self._restore(deadline)
                raise errors.store_failed(
                    f"id {chosen} or version {number} of subject {subject} went to another schema meanwhile: another "
                    "registry writes to this topic, stop one of them"
                )
            return made

    def _replaced(self, versions: list[Version], id: int, number: int) -> list[Record]:
        """Tombstones of the deleted versions before `number` that have an id and that no schema refers to."""
        with self._log.lock:
            return [
                Record(Key(SCHEMA, known.subject, known.version), None)
                for known in versions
                if known.is_deleted
                and known.id == id
                and known.version < number
                and not self._log.state.users(known.subject, known.version, deleted=True)
            ]

    def _check_register_mode(self, subject: str, *, has_id: bool) -> None:
        mode = self.read(lambda state: state.mode_in_scope(subject))
        context = _context_of(subject)
        if mode.startswith("READONLY"):
            raise errors.not_permitted(f"Subject {subject} in context {context} is in read-only mode")
        if has_id and mode not in IMPORTING:
            raise errors.not_permitted(f"Subject {subject} in context {context} is not in import mode")
        if not has_id and mode != DEFAULT_MODE:
            raise errors.not_permitted(f"Subject {subject} in context {context} is not in read-write mode")

    # --- compatibility

    def incompatibilities(
        self, subject: str, definition: Definition, number: int | None, *, normalize: bool
    ) -> list[str]:
        """Why a schema is not compatible with a version of a subject, or with those that its level asks for (None)."""
        with self._log.lock:
            state = self._log.state
            config = state.config_in_scope(subject)
            if number is None:
                versions = state.versions(subject)
            else:
                version = _numbered(state, subject, number, deleted=False)
                if version is None and number != LATEST:
                    raise errors.version_not_found(number)
                versions = [] if version is None else [version]
        texts = self._texts(subject, definition)
        canonical, parsed = self._canonical(subject, definition, texts, normalize=normalize, is_new=True)
        return self._incompatibilities(config, canonical, parsed, versions, _Compatible())

    def _check_compatible(
        self,
        subject: str,
        config: dict[str, Any],
        definition: Definition,
        parsed: ParsedSchema,
        versions: list[Version],
        compatible: _Compatible,
    ) -> None:
        """Refuse a schema that is not compatible with the versions that its level asks for; `compatible` gets them."""
        messages = self._incompatibilities(config, definition, parsed, versions, compatible)
        if messages:
            raise errors.incompatible(subject, messages)

    def _incompatibilities(
        self,
        config: dict[str, Any],
        definition: Definition,
        parsed: ParsedSchema,
        versions: list[Version],
        compatible: _Compatible,
    ) -> list[str]:
        """Why a schema is not compatible with earlier ones, the oldest first, but for those in `compatible`."""
        level = str(config["compatibilityLevel"])
        direction = level.removesuffix("_TRANSITIVE")
        for version in reversed(_checked(config, definition, versions)):
            messages = self._differences(direction, parsed, version, compatible)
            if messages:
                return [*messages, f"{{validateFields: 'false', compatibility: '{level}'}}"]
        return []

    def _differences(
        self, direction: str, parsed: ParsedSchema, version: Version, compatible: _Compatible
    ) -> list[str]:
        if parsed.schema_type != version.definition.schema_type:
            return ["Incompatible because of different schema type"]
        earlier = self.stored(version)
        if (direction, id(earlier)) in compatible:
            return []
        messages = []
        try:
            if direction in ("FORWARD", "FULL"):
                messages += [_worded(text, "old", "new") for text in earlier.unreadable(parsed)]
            if direction in ("BACKWARD", "FULL"):
                messages += [_worded(text, "new", "old") for text in parsed.unreadable(earlier)]
        except RecursionError:
            messages.append("Unexpected exception during compatibility check: the schemas are nested too deeply")
        if messages:
            text = version.definition.schema
            shown = f"'{text}'" if len(text) <= _MAX_SCHEMA_SHOWN else f"<truncated> '{text[:_MAX_SCHEMA_SHOWN]}...'"
            messages += [f"{{oldSchemaVersion: {version.version}}}", f"{{oldSchema: {shown}}}"]
        else:
            compatible[direction, id(earlier)] = earlier
        return messages

    # --- deletes

    def delete_version(self, subject: str, number: int, *, permanent: bool) -> int:
        """Delete a version, which stays readable by its id; with `permanent`, after that, for good. Its number."""
        with self._change() as deadline:
            with self._log.lock:
                state = self._log.state
                version = _numbered(state, subject, number, deleted=True)
                if version is None:
                    if not state.versions(subject, deleted=True):
                        raise errors.subject_not_found(subject)
                    raise errors.version_not_found(number)
                number = version.version
                if version.is_deleted and not permanent:
                    raise errors.version_soft_deleted(subject, number)
                self._check_writable(state, subject)
                if state.users(subject, number, deleted=permanent):
                    raise errors.reference_exists(subject, number)
                if permanent and not version.is_deleted:
                    raise errors.version_not_soft_deleted(subject, number)
                is_last = len(state.versions(subject, deleted=True)) == 1
                records = [Record(Key(SCHEMA, subject, number), None if permanent else version.value(True))]
                if permanent and is_last:
                    records += _settings_gone(state, subject)
            self._log.append(records, deadline)
            return number

    def delete_subject(self, subject: str, *, permanent: bool) -> list[int]:
        """Delete all versions of a subject, or with `permanent` those that were deleted. Returns their numbers."""
        with self._change() as deadline:
            with self._log.lock:
                state = self._log.state
                if not state.versions(subject, deleted=True):
                    raise errors.subject_not_found(subject)
                versions = state.versions(subject, deleted=permanent)
                if not versions:
                    raise errors.subject_soft_deleted(subject)
                self._check_writable(state, subject)
                for version in versions:
                    users = state.users(subject, version.version, deleted=permanent)
                    if any(user.subject != subject for user in users):
                        raise errors.reference_exists(subject, version.version)
                    if permanent and not version.is_deleted:
                        raise errors.subject_not_soft_deleted(subject)
                numbers = [version.version for version in versions]
                if permanent:
                    records = [Record(Key(SCHEMA, subject, number), None) for number in reversed(numbers)]
                    records += _settings_gone(state, subject)
                else:
                    # the largest of all: the record replaces that of an earlier delete, which may be of later versions
                    value = {"subject": subject, "version": state.versions(subject, deleted=True)[-1].version}
                    records = [Record(Key(DELETE_SUBJECT, subject), value)]
            self._log.append(records, deadline)
            return numbers

    def delete_context(self, context: str) -> None:
        """Forget a context without subjects."""
        with self._change() as deadline:
            with self._log.lock:
                if any(split(subject)[0] == context for subject in self._log.state.subjects()):
                    raise errors.context_not_empty(context)
            self._log.append([Record(Key(CONTEXT, context), None)], deadline)

    @staticmethod
    def _check_writable(state: State, subject: str | None) -> None:
        if state.mode_in_scope(subject).startswith("READONLY"):
            raise errors.not_permitted(
                f"Subject {subject} in context {_context_of(subject or '')} is in read-only mode"
            )

    # --- configuration

    def configure(self, subject: str | None, changes: dict[str, Any]) -> dict[str, Any]:
        """Change fields of the configuration of a subject, a context or (None) all; the configuration as it is then."""
        with self._change() as deadline:
            with self._log.lock:
                self._check_writable(self._log.state, subject)
                old = self._log.state.config(subject) or {}
            value = ({} if subject is None else {"subject": subject}) | old | changes
            value = {name: item for name, item in value.items() if item is not None}
            self._log.append([Record(Key(CONFIG, subject), value)], deadline)
            return value

    def delete_config(self, subject: str | None) -> dict[str, Any]:
        """Forget a configuration; what it was."""
        with self._change() as deadline:
            with self._log.lock:
                self._check_writable(self._log.state, subject)
                old = self._log.state.config(subject)
            if old is None:
                if subject is not None:
                    raise errors.subject_not_found(subject)
                return {"compatibilityLevel": DEFAULT_LEVEL}
            self._log.append([Record(Key(CONFIG, subject), None)], deadline)
            return old

    def set_mode(self, subject: str | None, mode: str, *, force: bool) -> None:
        """Set the mode of a subject, a context or (None) all; unless forced, IMPORT needs that there are no schemas."""
        if mode not in errors.MODES:
            raise errors.invalid_mode()
        with self._change() as deadline:
            records = []
            with self._log.lock:
                state = self._log.state
                if mode == "IMPORT" and state.mode_in_scope(subject) != "IMPORT" and not force:
                    for name in state.subjects():
                        if not _is_meant(subject, name):
                            continue
                        if state.versions(name):
                            raise errors.not_permitted("Cannot import since found existing subjects")
                        for version in state.versions(name, deleted=True):
                            if state.users(name, version.version, deleted=True):
                                raise errors.reference_exists(name, version.version)
                            records.append(Record(Key(SCHEMA, name, version.version), None))
                    cleared = {} if subject is None else {"subject": subject}
                    records.append(Record(Key(CLEAR_SUBJECT, subject), cleared))
            value = ({} if subject is None else {"subject": subject}) | {"mode": mode}
            self._log.append([*records, Record(Key(MODE, subject), value)], deadline)

    def delete_mode(self, subject: str | None) -> str:
        """Forget the mode of a subject, a context or (None) all; what it was."""
        with self._change() as deadline:
            old = self.read(lambda state: state.mode(subject))
            if old is None:
                if subject is not None:
                    raise errors.subject_not_found(subject)
                return DEFAULT_MODE
            self._log.append([Record(Key(MODE, subject), None)], deadline)
            return old


def _size(texts: _Texts) -> int:
    _, text, references = texts
    return len(text) + sum(len(reference) for _, reference in references)


def _checked(config: dict[str, Any], definition: Definition, versions: list[Version]) -> list[Version]:
    """Those versions that a new schema is compared with, the oldest first."""
    level = str(config["compatibilityLevel"])
    if level == "NONE":
        return []
    group = config.get("compatibilityGroup")
    if isinstance(group, str):
        own = _property(definition, group)
        versions = [version for version in versions if _property(version.definition, group) == own]
    return versions if level.endswith("_TRANSITIVE") else versions[-1:]


def _numbered(state: State, subject: str, number: int, *, deleted: bool) -> Version | None:
    if number == LATEST:
        there = state.versions(subject) or (state.versions(subject, deleted=True) if deleted else [])
        return there[-1] if there else None
    version = state.version(subject, number)
    return version if version is not None and (deleted or not version.is_deleted) else None


def _with_schema(state: State, subject: str, definition: Definition, *, deleted: bool) -> Version | None:
    """The newest version of a subject with a schema. One without metadata or rules also means one that has some."""
    versions = state.versions(subject, deleted=deleted)
    same = [version for version in versions if version.definition == definition]
    if not same and definition.metadata is None and definition.rule_set is None:
        bare = [version for version in versions if version.definition[:3] == definition[:3]]
        same = bare
    return same[-1] if same else None


def _context_of(subject: str) -> str:
    return qualified(split(subject)[0], "")


def _context_record(context: str) -> Record:
    return Record(Key(CONTEXT, context), {"tenant": "default", "context": context})


def _settings_gone(state: State, subject: str) -> list[Record]:
    """Records that forget the configuration and the mode of a subject, if it has any."""
    gone = [MODE] if state.mode(subject) is not None else []
    gone += [CONFIG] if state.config(subject) is not None else []
    return [Record(Key(keytype, subject), None) for keytype in gone]


def _is_meant(scope: str | None, subject: str) -> bool:
    """Whether a setting of a subject, a context or (None) the default context is one for the subject."""
    if scope == GLOBAL_CONTEXT:
        return True
    context, name = split(scope or "")
    return subject == scope if name else split(subject)[0] == context


def _worded(text: str, reader: str, writer: str) -> str:
    return text.replace(READER, reader).replace(WRITER, writer)


def _property(definition: Definition, name: str) -> object:
    return ((definition.metadata or {}).get("properties") or {}).get(name)
