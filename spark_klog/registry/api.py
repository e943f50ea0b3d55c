"""The REST API of Confluent's schema registry.

    /subjects...  /schemas...  /compatibility...  /config...  /mode...  /contexts  /v1/metadata/id  /v1/metadata/version

Any of the first five may stand behind /contexts/CONTEXT. A page is a function of the `Request` of its row in `_PAGES`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote

from spark_klog.base.names import VERSION
from spark_klog.registry import errors
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.formats import AVRO, PROTOBUF, TYPES
from spark_klog.registry.registry import LATEST, Registry
from spark_klog.registry.state import (
    DEFAULT_CONTEXT,
    DEFAULT_LEVEL,
    DEFAULT_MODE,
    GLOBAL_CONTEXT,
    MAX_NUMBER,
    Definition,
    State,
    Version,
    guid_of,
    qualified,
    split,
    within,
)
from spark_klog.registry.work import decoded
from spark_klog.schemas.registry.schemas import LEVELS, Reference

CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
#: What a client may ask for; any other gets the first.
_ACCEPTED: Final = (CONTENT_TYPE, "application/vnd.schemaregistry+json", "application/json")
#: A number with more digits is too large, whatever it is: Python does not convert thousands of them.
_DIGITS: Final = re.compile("[0-9]{1,10}")
#: Rows of a list, if no limit is given.
_MOST_ROWS: Final = 20_000
#: Seconds that a list of schemas may take, and bytes that it may have.
_LIST_SECONDS: Final = 10.0
_MOST_BYTES: Final = 32 << 20
#: Bytes of a body that is decoded at once.
_SMALL_BODY: Final = 16 << 10
#: Held while a body is taken apart: with each thread that computes, those that read wait longer for the interpreter.
_computing: Final = threading.Lock()
#: Fields of a configuration, and their types.
_CONFIG_TYPES: Final[dict[str, Any]] = {
    "compatibility": str | None,
    "alias": str | None,
    **dict.fromkeys(("normalize", "validateFields", "validateRules"), bool | None),
    **dict.fromkeys(("compatibilityPolicy", "compatibilityGroup"), str | None),
    **dict.fromkeys(("defaultMetadata", "overrideMetadata", "defaultRuleSet", "overrideRuleSet"), dict | None),
}
#: As they are stored, if that is another name.
_STORED: Final = {"compatibility": "compatibilityLevel"}


class Answer(NamedTuple):
    """A response: the body's bytes, and the methods that a 405 names."""

    status: int
    body: bytes
    allow: str = ""


class Asked:
    """A request for a page: what its path names, its query, its body."""

    def __init__(self, registry: Registry, context: str, names: list[str], query: str, body: bytes) -> None:
        self.registry = registry
        #: When the request is given up, a time of `time.monotonic`.
        self.deadline = registry.deadline()
        #: What the path calls the context, "." if it names none.
        self.context = context
        self.names = names
        self._query = parse_qs(query, keep_blank_values=True)
        self._body = body

    def flag(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def text(self, name: str) -> str:
        return self._query.get(name, [""])[-1]

    def texts(self, name: str) -> list[str]:
        return self._query.get(name, [])

    def subject(self, index: int = 0) -> str:
        """The subject in the path, in the context of the path unless it names one."""
        subject = self.names[index]
        return subject if subject.startswith(":.") else qualified(self.context, subject)

    def scope(self) -> str | None:
        """The subject or context in the path, None for the default context."""
        if self.names:
            subject = self.subject()
            return None if subject in (":.:", "") else subject
        return None if self.context == DEFAULT_CONTEXT else qualified(self.context, "")

    def number(self, index: int) -> int:
        """The version in the path."""
        text = self.names[index]
        if text.lower() in ("latest", "-1"):
            return LATEST
        if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= MAX_NUMBER:
            raise errors.invalid_version(text[:100])
        return int(text)

    def id(self) -> int:
        """The id in the path, which may be negative: no schema has it."""
        text = self.names[0]
        if not _DIGITS.fullmatch(text.removeprefix("-")) or abs(int(text)) > MAX_NUMBER:
            raise errors.bare(HTTPStatus.NOT_FOUND)
        return int(text)

    def rows(self, values: list[Any]) -> list[Any]:
        """The rows that `offset` and `limit` ask for."""
        offset, limit = (
            int(text) if _DIGITS.fullmatch(text) else 0 for text in (self.text("offset"), self.text("limit"))
        )
        return values[offset : offset + (limit or _MOST_ROWS)]

    def fields(self) -> dict[str, Any]:
        """The body's JSON object."""
        if len(self._body) <= _SMALL_BODY:
            with _computing:
                return decoded(self._body)
        return self.registry.run(decoded, self._body, deadline=self.deadline)

    def definition(self) -> tuple[Definition, dict[str, Any]]:
        """The schema in the body, and all of the body."""
        fields = self.fields()
        with _computing:
            return self._definition(fields), fields

    @staticmethod
    def _definition(fields: dict[str, Any]) -> Definition:
        references = fields.get("references") or []
        metadata, rule_set = fields.get("metadata"), fields.get("ruleSet")
        for name, value, wanted in (
            ("schema", fields.get("schema"), str | None),
            ("schemaType", fields.get("schemaType"), str | None),
            ("references", references, list),
            ("metadata", metadata, dict | None),
            ("ruleSet", rule_set, dict | None),
            ("id", fields.get("id"), int | None),
            ("version", fields.get("version"), int | None),
        ):
            _check_type(name, value, wanted)
            if isinstance(value, int) and value > MAX_NUMBER:
                raise errors.bare(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} is larger than {MAX_NUMBER}")
        _check_metadata(metadata)
        schema_type = fields.get("schemaType") or AVRO
        if schema_type not in TYPES:
            raise errors.invalid_schema(f"Invalid schema type {schema_type}")
        if not (fields.get("schema") or "").strip():
            raise errors.invalid_schema("Empty schema")
        made = Definition(schema_type, fields["schema"], tuple(map(_reference, references)), metadata, rule_set)
        try:
            made.digest()
        except (TypeError, AttributeError):
            raise errors.invalid_rule_set() from None
        return made


def _check_type(name: str, value: Any, wanted: Any) -> None:
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted == int | None):
        raise errors.bare(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name} has the wrong type")


def _check_metadata(metadata: dict[str, Any] | None) -> None:
    """Refuse metadata whose tags, properties and sensitive names have other types than texts."""
    tags, properties, sensitive = ((metadata or {}).get(name) for name in ("tags", "properties", "sensitive"))
    texts = [*(properties or {}).values()] if isinstance(properties or {}, dict) else [None]
    for names in [*(tags or {}).values(), sensitive or []] if isinstance(tags or {}, dict) else [None]:
        texts += names if isinstance(names, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise errors.bare(HTTPStatus.UNPROCESSABLE_ENTITY, "metadata has tags, properties and sensitive, of texts")


def _reference(value: Any) -> Reference:
    fields = value if isinstance(value, dict) else {}
    name, subject, version = fields.get("name"), fields.get("subject"), fields.get("version")
    if not isinstance(name, str) or not isinstance(subject, str) or type(version) is not int:
        raise errors.bare(HTTPStatus.UNPROCESSABLE_ENTITY, "a reference has name, subject and version")
    if version != LATEST and not 1 <= version <= MAX_NUMBER:
        raise errors.invalid_version(str(version))
    return Reference(name, subject, version)


# --- subjects


def _list_subjects(asked: Asked) -> Any:
    prefix = asked.text("subjectPrefix")
    any_context = prefix.startswith(":*:") or (not asked.texts("subjectPrefix") and asked.context == DEFAULT_CONTEXT)
    prefix = prefix.removeprefix(":*:")

    def look_up(state: State) -> list[str]:
        subjects = []
        for subject in state.subjects():
            if any_context:
                if not (subject.startswith(prefix) or split(subject)[1].startswith(prefix)):
                    continue
            elif not subject.startswith(prefix if prefix.startswith(":.") else qualified(asked.context, prefix)):
                continue
            there, current = state.versions(subject, deleted=True), state.versions(subject)
            if asked.flag("deletedOnly"):
                is_listed = len(current) < len(there)
            else:
                is_listed = bool(there if asked.flag("deleted") else current)
            if is_listed:
                subjects.append(subject)
        return subjects

    return asked.rows(asked.registry.read(look_up))


def _list_versions(asked: Asked) -> Any:
    subject = asked.subject()
    deleted, only = asked.flag("deleted"), asked.flag("deletedOnly")
    there = asked.registry.read(lambda state: state.versions(subject, deleted=True))
    if not any(deleted or only or not version.is_deleted for version in there):
        raise errors.subject_not_found(subject)
    if asked.flag("deletedAsNegative"):
        return asked.rows([-version.version if version.is_deleted else version.version for version in there])
    return asked.rows(
        [version.version for version in there if (version.is_deleted if only else deleted or not version.is_deleted)]
    )


def _get_version(asked: Asked) -> Any:
    version = asked.registry.version(asked.subject(), asked.number(1), deleted=asked.flag("deleted"))
    return _whole(asked, version)


def _get_version_text(asked: Asked) -> Any:
    return _get_version(asked)["schema"].encode()


def _referenced_by(asked: Asked) -> Any:
    version = asked.registry.version(asked.subject(), asked.number(1), deleted=True)
    deleted = asked.flag("deleted")
    users = asked.registry.read(lambda state: state.users(version.subject, version.version, deleted=deleted))
    return asked.rows(sorted({user.id for user in users}))


def _register(asked: Asked) -> Any:
    definition, fields = asked.definition()
    id, number = fields.get("id"), fields.get("version")
    version = asked.registry.register(
        asked.subject(),
        _resolved(asked, definition),
        id=-1 if id is None else id,
        version=max(number or 0, 0),
        normalize=asked.flag("normalize"),
        deadline=asked.deadline,
    )
    made = _whole(asked, version)
    del made["subject"]
    if definition.schema_type == PROTOBUF:
        # confluent-kafka keeps the answer for its deserializers, which can only read the base64 that it sends
        made["schema"] = definition.schema
    return {"id": made.pop("id")} | made


def _resolved(asked: Asked, definition: Definition) -> Definition:
    """The schema with references to the latest version, -1, as those to the version that is it now."""
    if all(reference.version != LATEST for reference in definition.references):
        return definition
    subject = asked.subject()
    references = []
    for reference in definition.references:
        if reference.version == LATEST:
            latest = asked.registry.version(within(subject, reference.subject), LATEST)
            reference = reference._replace(version=latest.version)
        references.append(reference)
    return definition._replace(references=tuple(references))


def _look_up(asked: Asked) -> Any:
    definition, _ = asked.definition()
    version = asked.registry.look_up(
        asked.subject(),
        _resolved(asked, definition),
        normalize=asked.flag("normalize"),
        deleted=asked.flag("deleted"),
        deadline=asked.deadline,
    )
    return _whole(asked, version)


def _latest_with_metadata(asked: Asked) -> Any:
    subject = asked.subject()
    wanted = dict(zip(asked.texts("key"), asked.texts("value"), strict=False))
    deleted = asked.flag("deleted")
    there = asked.registry.read(lambda state: state.versions(subject, deleted=deleted))
    if not there:
        raise errors.subject_not_found(subject)
    for version in reversed(there):
        properties = (version.definition.metadata or {}).get("properties") or {}
        if wanted.items() <= properties.items():
            return _whole(asked, version)
    raise errors.schema_not_found()


def _delete_subject(asked: Asked) -> Any:
    return asked.registry.delete_subject(asked.subject(), permanent=asked.flag("permanent"))


def _delete_version(asked: Asked) -> Any:
    return asked.registry.delete_version(asked.subject(), asked.number(1), permanent=asked.flag("permanent"))


def _whole(asked: Asked, version: Version) -> dict[str, Any]:
    """A version as JSON, its text in the form that `format` asks for."""
    made = {"subject": version.subject, "version": version.version, "id": version.id}
    return made | _schema(asked, version)


def _schema(asked: Asked, version: Version) -> dict[str, Any]:
    definition = version.definition
    made: dict[str, Any] = {"guid": guid_of(version.digest)} | definition.json()
    if form := asked.text("format"):
        made["schema"] = asked.registry.formatted(version, form, asked.deadline)
    if asked.text("referenceFormat") == "qualified" and definition.references:
        made["references"] = [
            reference._replace(subject=within(version.subject, reference.subject))._asdict()
            for reference in definition.references
        ]
    made["ts"] = version.timestamp
    return made | ({"deleted": True} if version.is_deleted else {})


# --- schemas


def _list_schemas(asked: Asked) -> Any:
    prefix = asked.text("subjectPrefix").removeprefix(":*:")
    deleted, latest = asked.flag("deleted"), asked.flag("latestOnly")

    def look_up(state: State) -> list[Version]:
        chosen: list[Version] = []
        for subject in state.subjects():
            context, name = split(subject)
            if asked.context not in (DEFAULT_CONTEXT, context) or not (
                subject.startswith(prefix) or name.startswith(prefix)
            ):
                continue
            versions = state.versions(subject, deleted=deleted)
            chosen += versions[-1:] if latest else versions
        return chosen

    rows: list[bytes] = []
    size = 0
    asked.deadline = deadline = time.monotonic() + _LIST_SECONDS
    for version in asked.rows(asked.registry.read(look_up)):
        advice = "ask for them with limit and offset"
        if time.monotonic() > deadline:  # with a format each is parsed
            raise errors.timed_out(f"{len(rows):,} schemas took {_LIST_SECONDS:g} s: {advice}")
        rows.append(_dumps(_whole(asked, version)))  # one by one: the encoder lets no other thread run
        size += len(rows[-1])
        if size > _MOST_BYTES:
            raise errors.schema_too_large(f"{len(rows):,} schemas have more than {_MOST_BYTES >> 20} MiB: {advice}")
    return b"[%s]" % b",".join(rows)


def _get_id(asked: Asked) -> Any:
    version = asked.registry.of_id(asked.context, asked.id(), asked.text("subject") or None)
    made = _schema(asked, version)
    made.pop("deleted", None)
    if asked.flag("fetchMaxId"):
        context = split(version.subject)[0]
        made["maxId"] = asked.registry.read(lambda state: state.last_id(context))
    return made


def _get_id_text(asked: Asked) -> Any:
    return _get_id(asked)["schema"].encode()


def _versions_of_id(asked: Asked) -> list[Version]:
    """Versions that have an id, those of a subject if the query names one."""
    subject = asked.text("subject")
    context = split(subject)[0] if subject.startswith(":.") else asked.context
    there = asked.registry.read(lambda state: state.of_id(context, asked.id()))
    if not there:
        raise errors.schema_not_found()
    name = split(subject)[1]
    return sorted(
        (
            version
            for version in there
            if (asked.flag("deleted") or not version.is_deleted) and name in ("", split(version.subject)[1])
        ),
        key=lambda version: (version.subject, version.version),
    )


def _subjects_of_id(asked: Asked) -> Any:
    return asked.rows(sorted({version.subject for version in _versions_of_id(asked)}))


def _places_of_id(asked: Asked) -> Any:
    versions = _versions_of_id(asked)
    return asked.rows([{"subject": version.subject, "version": version.version} for version in versions])


def _get_guid(asked: Asked) -> Any:
    ids = asked.registry.read(lambda state: state.ids_of_guid(asked.names[0]))
    for context, id in ids.items():
        made = _schema(asked, asked.registry.of_id(context, id))
        made.pop("deleted", None)
        return made
    raise errors.schema_not_found(asked.names[0])


def _ids_of_guid(asked: Asked) -> Any:
    ids = asked.registry.read(lambda state: state.ids_of_guid(asked.names[0]))
    if not ids:
        raise errors.schema_not_found(asked.names[0])
    return [{"context": context, "id": id} for context, id in ids.items()]


# --- compatibility


def _compatibility(asked: Asked) -> Any:
    """With the version in the path, or else those that the level of the subject asks for."""
    number = asked.number(1) if len(asked.names) > 1 else None
    verbose = asked.flag("verbose")
    try:
        definition, _ = asked.definition()
        messages = asked.registry.incompatibilities(
            asked.subject(),
            _resolved(asked, definition),
            number,
            normalize=asked.flag("normalize"),
            deadline=asked.deadline,
        )
    except RegistryRefusal as refused:
        if refused.code != errors.INVALID_SCHEMA or not verbose:
            raise
        messages = [refused.reason]
    return {"is_compatible": not messages} | ({"messages": messages} if verbose else {})


# --- configuration and modes


def _get_config(asked: Asked) -> Any:
    scope = asked.scope()
    if asked.flag("defaultToGlobal"):
        return _shown(asked.registry.read(lambda state: state.config_in_scope(scope)))
    config = asked.registry.read(lambda state: state.config(scope))
    if config is None and scope not in (None, GLOBAL_CONTEXT):
        assert scope is not None
        raise errors.no_level_of_subject(scope)
    return _shown(config or {})


def _shown(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"compatibilityLevel": DEFAULT_LEVEL} | {name: value for name, value in config.items() if name != "subject"}


def _put_config(asked: Asked) -> Any:
    fields = asked.fields()
    level = fields.get("compatibility")
    if level is not None:
        if not isinstance(level, str) or level.upper() not in LEVELS:
            raise errors.invalid_level()
        fields["compatibility"] = level.upper()
    for name, wanted in _CONFIG_TYPES.items():
        _check_type(name, fields.get(name), wanted)
    for name in ("defaultMetadata", "overrideMetadata"):
        _check_metadata(fields.get(name))
    changes = {_STORED.get(name, name): fields[name] for name in _CONFIG_TYPES if name in fields}
    value = asked.registry.configure(asked.scope(), changes)
    return {name: value[_STORED.get(name, name)] for name in _CONFIG_TYPES if _STORED.get(name, name) in value}


def _delete_config(asked: Asked) -> Any:
    return _shown(asked.registry.delete_config(asked.scope()))


def _get_mode(asked: Asked) -> Any:
    scope = asked.scope()
    if asked.flag("defaultToGlobal"):
        return {"mode": asked.registry.read(lambda state: state.mode_in_scope(scope))}
    mode = asked.registry.read(lambda state: state.mode(scope))
    if mode is None and scope not in (None, GLOBAL_CONTEXT):
        assert scope is not None
        raise errors.no_mode_of_subject(scope)
    return {"mode": mode or DEFAULT_MODE}


def _put_mode(asked: Asked) -> Any:
    mode = asked.fields().get("mode")
    if not isinstance(mode, str):
        raise errors.invalid_mode()
    asked.registry.set_mode(asked.scope(), mode.upper(), force=asked.flag("force"))
    return {"mode": mode.upper()}


def _delete_mode(asked: Asked) -> Any:
    return {"mode": asked.registry.delete_mode(asked.scope())}


# --- the server


def _list_contexts(asked: Asked) -> Any:
    prefix = asked.text("contextPrefix")
    contexts = asked.registry.read(lambda state: state.contexts())
    return asked.rows([context for context in contexts if context.startswith(prefix)])


def _delete_context(asked: Asked) -> Any:
    asked.registry.delete_context(_context(asked.names[0]))


def _get_cluster(asked: Asked) -> Any:
    clusters = {"kafka-cluster": asked.registry.cluster_id, "schema-registry-cluster": "schema-registry"}
    return {"scope": {"path": [], "clusters": clusters}}


_Page = Callable[[Asked], Any]
#: Pages by path (* is a name) and method.
_PAGES: Final[dict[tuple[str, ...], dict[str, _Page]]] = {
    (): dict.fromkeys(("GET", "POST"), lambda _: {}),
    ("subjects",): {"GET": _list_subjects},
    ("subjects", "*"): {"POST": _look_up, "DELETE": _delete_subject},
    ("subjects", "*", "metadata"): {"GET": _latest_with_metadata},
    ("subjects", "*", "versions"): {"GET": _list_versions, "POST": _register},
    ("subjects", "*", "versions", "*"): {"GET": _get_version, "DELETE": _delete_version},
    ("subjects", "*", "versions", "*", "schema"): {"GET": _get_version_text},
    ("subjects", "*", "versions", "*", "referencedby"): {"GET": _referenced_by},
    ("schemas",): {"GET": _list_schemas},
    ("schemas", "types"): {"GET": lambda _: list(TYPES)},
    ("schemas", "ids", "*"): {"GET": _get_id},
    ("schemas", "ids", "*", "schema"): {"GET": _get_id_text},
    ("schemas", "ids", "*", "subjects"): {"GET": _subjects_of_id},
    ("schemas", "ids", "*", "versions"): {"GET": _places_of_id},
    ("schemas", "guids", "*"): {"GET": _get_guid},
    ("schemas", "guids", "*", "ids"): {"GET": _ids_of_guid},
    ("compatibility", "subjects", "*", "versions"): {"POST": _compatibility},
    ("compatibility", "subjects", "*", "versions", "*"): {"POST": _compatibility},
    ("config",): {"GET": _get_config, "PUT": _put_config, "DELETE": _delete_config},
    ("config", "*"): {"GET": _get_config, "PUT": _put_config, "DELETE": _delete_config},
    ("mode",): {"GET": _get_mode, "PUT": _put_mode, "DELETE": _delete_mode},
    ("mode", "*"): {"GET": _get_mode, "PUT": _put_mode, "DELETE": _delete_mode},
    ("contexts",): {"GET": _list_contexts},
    ("contexts", "*"): {"DELETE": _delete_context},
    ("v1", "metadata", "id"): {"GET": _get_cluster},
    ("v1", "metadata", "version"): {"GET": lambda _: {"version": VERSION}},
}


def answer(registry: Registry, method: str, path: str, query: str, body: bytes) -> Answer:
    """Answer a request; `path` as it was sent, its names still quoted."""
    try:
        parts = [unquote(part) for part in path.strip("/").split("/")] if path.strip("/") else []
        context = DEFAULT_CONTEXT
        if len(parts) > 2 and parts[0] == "contexts":
            context, parts = _context(parts[1]), parts[2:]
        pages, names = _page(parts)
        if pages is None:
            raise errors.bare(HTTPStatus.NOT_FOUND)
        page = pages.get("GET" if method == "HEAD" else method)
        if page is None:
            refused = errors.bare(HTTPStatus.METHOD_NOT_ALLOWED)
            return Answer(refused.status, refusal_body(refused), ", ".join(sorted(pages)))
        registry.wait_until_read()
        made = page(Asked(registry, context, names, query, body))
    except RegistryRefusal as refused:
        return Answer(refused.status, refusal_body(refused))
    if made is None:
        return Answer(HTTPStatus.NO_CONTENT, b"")
    return Answer(HTTPStatus.OK, made if isinstance(made, bytes) else _dumps(made))


def refusal_body(refused: RegistryRefusal) -> bytes:
    return _dumps({"error_code": refused.code, "message": refused.reason})


def content_type(accept: str) -> str:
    """The type of the answer to a request with an Accept header."""
    wanted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return next((name for name in wanted if name in _ACCEPTED), CONTENT_TYPE)


def _dumps(value: Any) -> bytes:
    """JSON, whatever a text has: half of a surrogate pair is a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def _page(parts: list[str]) -> tuple[dict[str, _Page] | None, list[str]]:
    """The pages of a path by method, and the names in it."""
    for pattern, pages in _PAGES.items():
        if len(pattern) == len(parts) and all(
            want == part or (want == "*" and part) for want, part in zip(pattern, parts, strict=True)
        ):
            return pages, [part for want, part in zip(pattern, parts, strict=True) if want == "*"]
    return None, []


def _context(text: str) -> str:
    """A context's name: CONTEXT, .CONTEXT and :.CONTEXT: all mean .CONTEXT."""
    name = text.strip(":")
    return name if name.startswith(".") else f".{name}"
