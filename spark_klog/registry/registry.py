"""A schema registry's operations on what is in its topic, as Confluent's registry does them.

Reads use the state; what changes it waits until the state has all of the log, decides, writes, and returns once that is
read back. One write at a time, so two registrations of the same schema get the same id. Schemas are parsed and compared
before that (`work`), and again if what they were compared with has changed meanwhile.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from spark_klog.base.cache import Newest
from spark_klog.registry import errors, work
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.formats import PROTOBUF
from spark_klog.registry.log import WRITE_SECONDS, SchemaLog
from spark_klog.registry.records import (
    CLEAR_SUBJECT,
    CONFIG,
    CONTEXT,
    DELETE_SUBJECT,
    MODE,
    SCHEMA,
    Key,
    Record,
)
from spark_klog.registry.state import (
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
    words_of,
)
from spark_klog.registry.work import Run, Source, run_here

#: Schemas that refer to each other, from one that is registered, how many are one behind the other, and their letters.
_MOST_REFERENCES: Final = 1000
_MOST_IN_A_ROW: Final = 200
_MOST_LETTERS: Final = 4 << 20
#: How often a schema is compared with versions that have come meanwhile.
_MOST_TRIES: Final = 50
_MAX_SCHEMA_SHOWN: Final = 10 * 1024
LATEST: Final = -1
#: Versions with the words of a schema that are compared with it.
_MOST_LIKE: Final = 20
_MOST_LAID_OUT: Final = 2000
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
_T = TypeVar("_T")


#: Versions that a schema is compatible with, by their identity.
_Compatible = dict[int, Version]


class _Basis(NamedTuple):
    """What the decision on a new version of a subject rests on: it holds as long as this is the same."""

    #: The texts that its schema refers to.
    references: tuple[tuple[str, str], ...]
    config: dict[str, Any]
    mode: str
    #: The versions that are not deleted.
    versions: list[Version]


class Registry:
    """The operations; thread-safe. Each raises `RegistryRefusal`. Subjects are qualified by their context (`state`).

    `run` carries out what may take long.
    """

    def __init__(self, log: SchemaLog, run: Run = run_here) -> None:
        self._log = log
        self.run = run
        #: What `_laid_out_here` has made.
        self._laid_out: Newest[tuple[bytes, int, bool], Definition | None] = Newest(_MOST_LAID_OUT)
        #: Held while a change is decided and written.
        self._changing = threading.Lock()

    @property
    def cluster_id(self) -> str | None:
        """The id of the Kafka cluster."""
        return self._log.cluster_id

    @staticmethod
    def deadline() -> float:
        """When an operation that begins now is given up, a time of `time.monotonic`."""
        return time.monotonic() + WRITE_SECONDS

    def read(self, look_up: Callable[[State], _T]) -> _T:
        """What `look_up` finds in the state, which nothing changes meanwhile."""
        with self._log.lock:
            return look_up(self._log.state)

    def wait_until_read(self) -> None:
        """Return when the state is not an earlier part of the log, see `SchemaLog`."""
        self._log.wait_until_read()

    @contextmanager
    def _change(self, deadline: float | None = None) -> Iterator[float]:
        """Be the only one to change something, with a state that has all of the log; the deadline of the change.

        It is for the wait for others' changes, too.
        """
        deadline = self.deadline() if deadline is None else deadline
        if not self._changing.acquire(timeout=max(0.0, deadline - time.monotonic())):
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

    def formatted(self, version: Version, form: str, deadline: float) -> str:
        """The text of a version in a form that its format knows."""
        references = self._texts(version.subject, version.definition)
        return self.run(work.formatted, _source(version.definition, references), form, deadline=deadline)

    def _texts(self, subject: str, definition: Definition) -> tuple[tuple[str, str], ...]:
        """Names and texts of the schemas that a schema refers to, directly or not, each after those that it needs."""
        texts: dict[str, str] = {}
        letters = 0
        under_way: set[tuple[str, int]] = set()

        def add(parent: str, definition: Definition) -> None:
            nonlocal letters
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
                letters += len(texts[name])
                if len(texts) > _MOST_REFERENCES:
                    raise errors.invalid_schema(f"the schema refers to more than {_MOST_REFERENCES} others")
                if letters > _MOST_LETTERS:
                    raise errors.schema_too_large(f"the schema refers to others of more than {_MOST_LETTERS:,} letters")

        add(subject, definition)
        return tuple(texts.items())

    def _canonical(
        self,
        definition: Definition,
        references: tuple[tuple[str, str], ...],
        config: dict[str, Any],
        *,
        normalize: bool,
        is_new: bool,
        deadline: float,
    ) -> Definition:
        """A schema as it is stored; `references` are the texts that it refers to, `config` is that of its subject."""
        normalize = normalize or bool(config.get("normalize"))
        text = self.run(work.canonical, _source(definition, references), normalize, is_new, deadline=deadline)
        named = tuple(sorted(set(definition.references))) if normalize else definition.references
        return definition._replace(schema=text, references=named)

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
                versions = state.of_id(context, id)
                subject = qualified(context, name)
                same = [version for version in versions if not name or version.subject == subject]
                if same or context != DEFAULT_CONTEXT:
                    versions = same
            else:
                versions = state.of_id(context, id)
            if not versions:
                raise errors.schema_not_found(id)
            return versions[0]

    def look_up(
        self, subject: str, definition: Definition, *, normalize: bool, deleted: bool, deadline: float
    ) -> Version:
        """The version of a subject that has a schema."""
        references, config = self._texts(subject, definition), self.read(lambda state: state.config_in_scope(subject))
        canonical = self._canonical(
            definition, references, config, normalize=normalize, is_new=False, deadline=deadline
        )
        versions = self.read(lambda state: state.versions(subject, deleted=deleted))
        if not versions:
            raise errors.subject_not_found(subject)
        version = self._with_schema(versions, definition, canonical, normalize=normalize, deadline=deadline)
        if version is None:
            raise errors.schema_not_found()
        return version

    def _with_schema(
        self,
        versions: list[Version],
        definition: Definition,
        canonical: Definition,
        *,
        normalize: bool,
        deadline: float,
    ) -> Version | None:
        """The newest of versions that has a schema, which is `canonical` as it would be stored here.

        Texts that another registry has stored may be laid out otherwise. They count if they are the same text, or have
        the same words and the same canonical text.
        """
        for form in (canonical, definition):
            if (version := _with_text(versions, form)) is not None:
                return version
        if definition.schema_type != PROTOBUF:
            return None
        words, like = words_of(canonical.schema), []
        for version in versions:  # the first call takes their texts apart, which may be much
            if time.monotonic() > deadline:
                raise errors.timed_out("the schemas of the subject were not compared: not in time")
            if version.words == words:
                like.append(version)
        for version in like[: -_MOST_LIKE - 1 : -1]:
            stored = self._laid_out_here(version, normalize, deadline)
            if stored is not None and _with_text([replace(version, definition=stored)], _hashed(canonical)) is not None:
                return version
        return None

    def _laid_out_here(self, version: Version, normalize: bool, deadline: float) -> Definition | None:
        """What a version is here, with a hash in place of its text; None if it is that text, or no schema."""
        references = self._texts(version.subject, version.definition)
        key = version.digest, hash(references), normalize
        with suppress(KeyError):
            return self._laid_out[key]
        try:
            own, same = (
                self._canonical(
                    *(version.definition, references, {}), normalize=is_normal, is_new=False, deadline=deadline
                )
                for is_normal in (False, normalize)
            )
            made = _hashed(same) if own.schema != version.definition.schema else None
        except RegistryRefusal as refused:
            if refused.code != errors.INVALID_SCHEMA:  # it may be this schema
                raise
            made = None
        self._laid_out[key] = made
        return made

    def register(
        self,
        subject: str,
        definition: Definition,
        *,
        id: int = -1,
        version: int = 0,
        normalize: bool = False,
        deadline: float | None = None,
    ) -> Version:
        """The version of a subject that has a schema; it becomes the next one if there is none.

        `id` and `version` are given in mode IMPORT only.
        """
        if not split(subject)[1] or subject in ("__GLOBAL", "__EMPTY") or _CONTROL.search(subject):
            raise errors.invalid_subject(subject)
        deadline = self.deadline() if deadline is None else deadline
        basis, compatible = None, _Compatible()
        for _ in range(_MOST_TRIES):
            before, basis = basis, self._basis(subject, definition)
            _check_register_mode(subject, basis.mode, has_id=id >= 0)
            if before is None or (before.references, before.config) != (basis.references, basis.config):
                compatible.clear()
                canonical = self._canonical(
                    *(definition, basis.references, basis.config),
                    normalize=normalize,
                    is_new=id < 0,
                    deadline=deadline,
                )
            there = self._with_schema(basis.versions, definition, canonical, normalize=normalize, deadline=deadline)
            if there is not None and version == 0 and id in (-1, there.id):
                if self._holds(basis, subject, definition):
                    return there
                continue
            if basis.mode not in IMPORTING:
                messages = self._incompatibilities(subject, canonical, basis, compatible, deadline)
                if messages:
                    if self._holds(basis, subject, definition):
                        raise errors.incompatible(subject, messages)
                    continue
            with self._change(deadline):
                if self._basis(subject, definition) == basis:
                    return self._add(subject, definition, canonical, id, version, deadline)
        raise errors.timed_out(f"subject {subject} changed each time that the schema was compared with its versions")

    def _holds(self, basis: _Basis, subject: str, definition: Definition) -> bool:
        """Whether a decision that needs no change still holds, in the topic as it is now."""
        self._log.check_topic()
        return self._basis(subject, definition) == basis

    def _basis(self, subject: str, definition: Definition) -> _Basis:
        with self._log.lock:
            state = self._log.state
            return _Basis(
                self._texts(subject, definition),
                state.config_in_scope(subject),
                state.mode_in_scope(subject),
                state.versions(subject),
            )

    def _add(
        self, subject: str, definition: Definition, canonical: Definition, id: int, version: int, deadline: float
    ) -> Version:
        """Write a version that may be registered. `id` and `version` as of `register`."""
        with self._log.lock:
            state = self._log.state
            versions = state.versions(subject, deleted=True)
            mode = state.mode_in_scope(subject)
            context = split(subject)[0]
            known_id = state.id_of(context, canonical)
            if known_id is None and (known_id := state.id_of(context, definition)) is not None:
                canonical = definition  # as another registry has stored it under another subject
            has_context = context in state.contexts()
            next_id = state.next_id(context)
            holders = state.of_id(context, id) if id >= 0 else []
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
        records = [] if has_context else [Record(Key(CONTEXT, context), {"tenant": "default", "context": context})]
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

    # --- compatibility

    def incompatibilities(
        self, subject: str, definition: Definition, number: int | None, *, normalize: bool, deadline: float
    ) -> list[str]:
        """Why a schema is not compatible with a version of a subject, or with those that its level asks for (None)."""
        with self._log.lock:
            basis = self._basis(subject, definition)
            if number is not None:
                version = _numbered(self._log.state, subject, number, deleted=False)
                if version is None and number != LATEST:
                    raise errors.version_not_found(number)
                basis = basis._replace(versions=[] if version is None else [version])
        canonical = self._canonical(
            definition, basis.references, basis.config, normalize=normalize, is_new=True, deadline=deadline
        )
        return self._incompatibilities(subject, canonical, basis, _Compatible(), deadline)

    def _incompatibilities(
        self, subject: str, definition: Definition, basis: _Basis, compatible: _Compatible, deadline: float
    ) -> list[str]:
        """Why a schema is not compatible with the versions that its level asks for, but for those in `compatible`.

        That gets those that it is compatible with.
        """
        level = str(basis.config["compatibilityLevel"])
        direction = level.removesuffix("_TRANSITIVE")
        source = _source(definition, basis.references)
        for version in reversed(_checked(basis.config, definition, basis.versions)):
            if id(version) in compatible:
                continue
            if definition.schema_type != version.definition.schema_type:
                messages = ["Incompatible because of different schema type"]
            else:
                earlier = _source(version.definition, self._texts(subject, version.definition))
                messages = self.run(work.unreadable, direction, source, earlier, deadline=deadline)
                if messages:
                    text = version.definition.schema
                    is_short = len(text) <= _MAX_SCHEMA_SHOWN
                    shown = f"'{text}'" if is_short else f"<truncated> '{text[:_MAX_SCHEMA_SHOWN]}...'"
                    messages += [f"{{oldSchemaVersion: {version.version}}}", f"{{oldSchema: {shown}}}"]
            if messages:
                return [*messages, f"{{validateFields: 'false', compatibility: '{level}'}}"]
            compatible[id(version)] = version
        return []

    # --- deletes

    def delete_version(self, subject: str, number: int, *, permanent: bool) -> int:
        """Delete a version, which stays readable by its id; with `permanent`, after that, for good. Its number."""
        with self._change() as deadline:
            with self._log.lock:
                state, version = self._log.state, self.version(subject, number, deleted=True)
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
            value = {name: field for name, field in value.items() if field is not None}
            self._log.append([Record(Key(CONFIG, subject), value)], deadline)
            return value

    def delete_config(self, subject: str | None) -> dict[str, Any]:
        """Forget a configuration; what it was."""

        def held(state: State) -> dict[str, Any] | None:
            self._check_writable(state, subject)
            return state.config(subject)

        return self._forget(CONFIG, subject, held) or {"compatibilityLevel": DEFAULT_LEVEL}

    def _forget(self, keytype: str, subject: str | None, held: Callable[[State], _T | None]) -> _T | None:
        """Forget a setting of a subject, a context or (None) all, which has to be there unless it is that of all."""
        with self._change() as deadline:
            old = self.read(held)
            if old is None and subject is not None:
                raise errors.subject_not_found(subject)
            if old is not None:
                self._log.append([Record(Key(keytype, subject), None)], deadline)
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
        return self._forget(MODE, subject, lambda state: state.mode(subject)) or DEFAULT_MODE


def _source(definition: Definition, references: tuple[tuple[str, str], ...]) -> Source:
    return Source(definition.schema_type, definition.schema, references)


def _check_register_mode(subject: str, mode: str, *, has_id: bool) -> None:
    context = _context_of(subject)
    if mode.startswith("READONLY"):
        raise errors.not_permitted(f"Subject {subject} in context {context} is in read-only mode")
    if has_id and mode not in IMPORTING:
        raise errors.not_permitted(f"Subject {subject} in context {context} is not in import mode")
    if not has_id and mode != DEFAULT_MODE:
        raise errors.not_permitted(f"Subject {subject} in context {context} is not in read-write mode")


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


def _with_text(versions: list[Version], definition: Definition) -> Version | None:
    """The newest of versions with a schema. One without metadata or rules also means one that has some."""
    same = [version for version in versions if version.definition == definition]
    if not same and definition.metadata is None and definition.rule_set is None:
        same = [version for version in versions if version.definition[:3] == definition[:3]]
    return same[-1] if same else None


def _hashed(definition: Definition) -> Definition:
    text = hashlib.sha256(definition.schema.encode()).hexdigest()
    return definition._replace(schema=text)


def _context_of(subject: str) -> str:
    return qualified(split(subject)[0], "")


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


def _property(definition: Definition, name: str) -> object:
    return ((definition.metadata or {}).get("properties") or {}).get(name)
