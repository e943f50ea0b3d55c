"""A schema registry's client: Confluent's REST API, over httpx.

What has an id or a version never changes, and is kept by the process; a subject's latest version for a time.
"""

from __future__ import annotations

import json
import logging
import random
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID

from spark_klog.base.extras import require
from spark_klog.base.in_a_thread import within
from spark_klog.errors import ConnectionFailed, KlogError, RegistryError, SchemaError, TlsError
from spark_klog.schemas.registry.schemas import Schema, Version
from spark_klog.schemas.registry.settings import RegistryConfig, registry_config
from spark_klog.security.config import without_secrets
from spark_klog.security.key_stores import client_context
from spark_klog.security.tokens import token_of

_log = logging.getLogger(__name__)
_K = TypeVar("_K")
_V = TypeVar("_V")
_TYPE = "application/vnd.schemaregistry.v1+json"
#: Answers after which another try, of another registry, may do.
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_BYTES = 16 * 1024 * 1024
_LONGEST_PAUSE = 60.0
#: Error codes of Confluent's API for what is not there: subject, version, schema.
NOT_THERE = frozenset({40401, 40402, 40403})
#: Settings' names by those of the client's SASL, in errors of `token_of`.
_BEARER_NAMES = {
    "sasl.oauthbearer.token.endpoint.url": "bearer.auth.issuer.endpoint.url",
    "sasl.oauthbearer.scope": "bearer.auth.scope",
    "https.ca.location": "ssl.truststore.location",
}


class RegistryClient:
    """A registry, at one of the URLs of `config`: another one after an error. Threads may share it.

    Each call ends within `config.deadline_ms`: a registry that is down is asked again until then, with back-off.
    `ConnectionFailed` if none has answered then; `RegistryError` with the registry's own error code if it refuses;
    `TlsError`, `SaslError` (of a token), `ConfigError`; `MissingPackage` without httpx.
    """

    def __init__(self, config: RegistryConfig) -> None:
        require("a schema registry", "httpx")
        import httpx

        self.config = config
        context = client_context(config.tls) if config.tls is not None else True
        self._client = httpx.Client(
            verify=context,
            headers={"Accept": f"{_TYPE}, application/json", "Content-Type": _TYPE, **dict(config.headers)},
            auth=(config.user, config.password) if config.user else None,
            timeout=httpx.Timeout(config.read_ms / 1000, connect=config.connect_ms / 1000),
            follow_redirects=False,  # credentials are for these URLs only
        )
        self._failures = httpx.HTTPError, httpx.InvalidURL
        self._current = 0
        self._lock = threading.Lock()
        self._schemas: dict[int | UUID, Schema] = {}
        self._versions: dict[tuple[str, int], Version] = {}
        self._latest: dict[str, tuple[float, Version]] = {}
        self._registered: dict[tuple[str, Schema], int] = {}
        self._numbers: dict[tuple[str, Schema], int] = {}

    def __repr__(self) -> str:
        return f"RegistryClient({', '.join(self.config.urls)})"

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def schema(self, key: int | UUID) -> Schema:
        """The schema of an id, or of a GUID. `SchemaError` if there is none."""
        kept = self._schemas.get(key)
        if kept is not None:
            return kept
        what = f"schema {'GUID' if isinstance(key, UUID) else 'id'} {key}"
        path = f"/schemas/guids/{key}" if isinstance(key, UUID) else f"/schemas/ids/{key}"
        try:
            schema = _parsed(Schema.of, self._request("GET", path, what), what)
        except RegistryError as error:
            if error.code not in NOT_THERE:
                raise
            raise SchemaError(f"the schema registry {self._url} does not have it") from None
        self._keep(self._schemas, key, schema)
        return schema

    def latest(self, subject: str, *, is_new: bool = False) -> Version:
        """The latest version of a subject, which may be `latest_seconds` old unless `is_new`."""
        kept = self._latest.get(subject)
        if kept is not None and not is_new and time.monotonic() - kept[0] < self.config.latest_seconds:
            return kept[1]
        version = self._version(subject, "latest")
        self._keep(self._latest, subject, (time.monotonic(), version))
        return version

    def version(self, subject: str, version: int) -> Version:
        """A version of a subject, also one that was deleted: other schemas may refer to it."""
        kept = self._versions.get((subject, version))
        return kept if kept is not None else self._version(subject, str(version))

    def versions(self, subject: str) -> list[int]:
        """The numbers of a subject's versions that are not deleted."""
        what = f"subject {subject}"
        return _parsed(lambda answer: [int(one) for one in answer], self._request("GET", _path(subject), what), what)

    def subjects(self, prefix: str = "", *, deleted: bool = False) -> list[str]:
        """The subjects that begin with `prefix`; with `deleted` also those that can be read by their versions only."""
        path = f"/subjects?deleted={json.dumps(deleted)}"
        if prefix:  # an empty one would leave out other contexts
            path += f"&subjectPrefix={quote(prefix, safe='')}"
        found = _parsed(lambda answer: [str(one) for one in answer], self._request("GET", path, "subjects"), "subjects")
        return [subject for subject in found if subject.startswith(prefix)]  # old registries know no prefix

    def uses(self, schema_id: int) -> list[tuple[str, int]]:
        """The subjects and versions that have the schema of an id. `RegistryError` if there is no such id."""
        what = f"schema id {schema_id}"
        answer = self._request("GET", f"/schemas/ids/{schema_id}/versions", what)
        return _parsed(lambda found: [(str(one["subject"]), int(one["version"])) for one in found], answer, what)

    def references(self, schema: Schema) -> dict[str, str]:
        """The texts of the schemas that a schema uses, by name, each after those that it needs itself."""
        texts: dict[str, str] = {}
        self._add_references(schema, texts, ())
        return texts

    def register(self, subject: str, schema: Schema, *, normalize: bool = False) -> int:
        """Make a schema a version of a subject, if it is none yet: its id. The registry checks the compatibility."""
        return self._id_of("POST", f"{_path(subject)}?normalize={json.dumps(normalize)}", subject, schema)

    def lookup(self, subject: str, schema: Schema, *, normalize: bool = False) -> int:
        """The id of a schema that is a version of a subject; `RegistryError` if it is none."""
        path = f"/subjects/{quote(subject, safe='')}?normalize={json.dumps(normalize)}"
        return self._id_of("POST", path, subject, schema)

    def version_of(self, subject: str, schema: Schema, *, normalize: bool = False) -> int | None:
        """The number of a schema's version of a subject, None if it is none."""
        path = f"/subjects/{quote(subject, safe='')}?normalize={json.dumps(normalize)}"
        kept = self._numbers.get((path, schema))
        if kept is not None:
            return kept
        what = f"subject {subject}"
        try:
            answer = self._request("POST", path, what, schema.request())
        except RegistryError as error:
            if error.code not in NOT_THERE:
                raise
            return None
        number = _parsed(lambda found: int(found["version"]), answer, what)
        self._keep(self._numbers, (path, schema), number)
        return number

    def incompatibilities(
        self, subject: str, schema: Schema, version: str | None = "latest", *, normalize: bool = False
    ) -> list[str]:
        """Why a schema can't be the subject's next version; [] if it can.

        It is compared with one version, a number or "latest"; with None, as when it is registered, with those that the
        subject's level names.
        """
        number = "" if version is None else f"/{quote(version, safe='')}"
        path = f"/compatibility{_path(subject)}{number}?verbose=true&normalize={json.dumps(normalize)}"
        what = f"subject {subject}"
        answer = self._request("POST", path, what, schema.request())
        if _parsed(lambda found: bool(found["is_compatible"]), answer, what):
            return []
        return [str(message) for message in answer.get("messages") or ["the schema is not compatible"]]

    def compatibility(self, subject: str | None = None) -> str:
        """The compatibility level of a subject, or the registry's: BACKWARD, FULL_TRANSITIVE, NONE and so on."""
        what, path = _config(subject)
        if subject is not None:
            path += "?defaultToGlobal=true"
        return _parsed(lambda answer: str(answer["compatibilityLevel"]), self._request("GET", path, what), what)

    def set_compatibility(self, subject: str | None, level: str) -> None:
        """Set the compatibility level of a subject, or the registry's."""
        what, path = _config(subject)
        self._request("PUT", path, what, {"compatibility": level})

    def reset_compatibility(self, subject: str | None) -> None:
        """Let a subject have the registry's level again, or the registry its default."""
        what, path = _config(subject)
        self._request("DELETE", path, what)

    def delete(self, subject: str, version: str | None = None, *, permanent: bool = False) -> list[int]:
        """Delete a subject, or a version, a number or "latest"; return the numbers of what was deleted.

        What is deleted can be read by its id and number until it is deleted a second time, with `permanent`.
        """
        what = f"subject {subject}" if version is None else f"subject {subject}, version {version}"
        path = f"/subjects/{quote(subject, safe='')}"
        if version is not None:
            path = f"{_path(subject)}/{quote(version, safe='')}"
        answer = self._request("DELETE", f"{path}?permanent={json.dumps(permanent)}", what)
        with self._lock:  # the subject's schemas may get other numbers
            self._latest.pop(subject, None)
            self._registered.clear()
            self._numbers.clear()
            for key in [key for key in self._versions if key[0] == subject]:
                del self._versions[key]
        return _parsed(
            lambda found: [int(one) for one in (found if isinstance(found, list) else [found])], answer, what
        )

    @property
    def _url(self) -> str:
        return self.config.urls[self._current]

    def _version(self, subject: str, number: str) -> Version:
        what = f"subject {subject}, version {number}"
        deleted = "" if number == "latest" else "?deleted=true"
        answer = self._request("GET", f"{_path(subject)}/{number}{deleted}", what)
        version = _parsed(Version.of, answer, what)
        self._keep(self._versions, (subject, version.version), version)
        self._keep(self._schemas, version.id, version.schema)
        if version.guid is not None:
            self._keep(self._schemas, version.guid, version.schema)
        return version

    def _id_of(self, method: str, path: str, subject: str, schema: Schema) -> int:
        kept = self._registered.get((path, schema))
        if kept is not None:
            return kept
        what = f"subject {subject}"
        number = _parsed(lambda answer: int(answer["id"]), self._request(method, path, what, schema.request()), what)
        self._keep(self._registered, (path, schema), number)
        self._keep(self._schemas, number, schema)
        return number

    def _add_references(self, schema: Schema, texts: dict[str, str], above: tuple[Schema, ...]) -> None:
        if schema in above:
            raise SchemaError(f"schemas of the registry refer to each other in a circle: {schema.references[0].name}")
        for name, subject, version in schema.references:
            if name in texts:  # as in Confluent's clients, one of a name
                continue
            try:
                used = self.version(subject, version).schema
            except RegistryError as error:
                if error.code not in NOT_THERE:
                    raise
                raise SchemaError(f"its reference {name} is missing: {error}") from None
            self._add_references(used, texts, (*above, schema))
            texts[name] = used.text

    def _keep(self, kept: dict[_K, _V], key: _K, value: _V) -> None:
        with self._lock:
            kept[key] = value
            while len(kept) > self.config.capacity:
                del kept[next(iter(kept))]

    def _request(self, method: str, path: str, what: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON; `what` is what it is about, for errors."""
        deadline = time.monotonic() + self.config.deadline_ms / 1000
        attempts = 0
        while True:
            current = self._current
            try:
                answer = self._send(method, self.config.urls[current], path, what, body, deadline)
            except ConnectionFailed as error:
                failure: KlogError = error
            except RegistryError as error:
                if error.status not in _RETRIED:
                    raise
                failure = error
            else:
                if attempts:
                    _log.warning("the schema registry answers again, after %d tries", attempts)
                return answer
            attempts += 1
            self._current = (current + 1) % len(self.config.urls)
            # others are tried at once
            rounds, is_at_once = divmod(attempts, len(self.config.urls))
            pause = 0.0 if is_at_once else min(self.config.longest_wait_ms, self.config.wait_ms * 2 ** min(rounds, 16))
            pause *= random.uniform(0.8, 1.2) / 1000
            if time.monotonic() + pause >= deadline:
                if isinstance(failure, ConnectionFailed):
                    seconds = self.config.deadline_ms / 1000
                    raise ConnectionFailed(f"{failure}; gave up on {what} after {attempts} tries in {seconds:g} s")
                raise failure
            if attempts == 1:
                _log.warning("%s; trying again, for %g s", failure, self.config.deadline_ms / 1000)
            time.sleep(pause)

    def _send(
        self, method: str, url: str, path: str, what: str, body: Mapping[str, Any] | None, deadline: float
    ) -> Any:
        headers = {}
        if self.config.token or self.config.oauth is not None:
            token = self.config.token or self._token(url, deadline)
            headers["Authorization"] = f"Bearer {token}"
        content = None if body is None else json.dumps(body).encode()
        until = min(deadline, time.monotonic() + (self.config.connect_ms + self.config.read_ms) / 1000)

        def exchange() -> tuple[int, bytes]:
            with self._client.stream(method, url + path, content=content, headers=headers) as response:
                data = b""
                for part in response.iter_bytes():
                    data += part
                    if len(data) > _MOST_BYTES:
                        break
                return response.status_code, data

        try:
            # the timeouts of httpx are for each read, and not for the look-up of the name
            status, data = within(until, exchange, "klog-registry")
        except TimeoutError:
            raise ConnectionFailed(f"the schema registry {url} did not answer in time") from None
        except self._failures as error:
            refused = _verification(error)
            if refused is not None:
                trust = self.config.named("ssl.truststore.location")
                raise TlsError(
                    f"the certificate of the schema registry {url} is refused: {refused.verify_message}; {trust} is "
                    "the file of its authority"
                ) from None
            why = without_secrets(str(error) or type(error).__name__, self._secrets)
            raise ConnectionFailed(f"the schema registry {url} gives no answer: {why}") from None
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if status // 100 == 2 and answer is not None and len(data) <= _MOST_BYTES:
            return answer
        raise self._refusal(url, status, answer, what)

    def _refusal(self, url: str, status: int, answer: Any, what: str) -> RegistryError:
        code = answer.get("error_code") if isinstance(answer, dict) else None
        code = code if isinstance(code, int) else status
        said = answer.get("message") if isinstance(answer, dict) else None
        text = f"{what}: the schema registry {url} answers {status}"
        if isinstance(said, str) and said:
            text += f" ({without_secrets(said, self._secrets, 1000)})"
        elif status // 100 == 2 or status == 404:
            text += ", without JSON: is it the URL of a schema registry?"
        if status in (401, 403):
            names = " or ".join(map(self.config.named, ("basic.auth.user.info", "bearer.auth.token")))
            text += f": check {names}, and what that user may do"
        return RegistryError(text, status, code)

    @property
    def _secrets(self) -> tuple[str, ...]:
        config, oauth = self.config, self.config.oauth
        # as it stands in the header, which some servers tell in their answers
        basic = b64encode(f"{config.user}:{config.password}".encode()).decode() if config.user else ""
        return config.password, basic, config.token, "" if oauth is None else oauth.client_secret

    def _token(self, url: str, deadline: float) -> str:
        assert self.config.oauth is not None
        host = urlsplit(url).hostname or ""
        return token_of(
            self.config.oauth, host, deadline, lambda name: self.config.named(_BEARER_NAMES.get(name, name))
        )


def _config(subject: str | None) -> tuple[str, str]:
    """What a request is about, and the path of its settings."""
    if subject is None:
        return "the registry's settings", "/config"
    return f"subject {subject}", f"/config/{quote(subject, safe='')}"


def _path(subject: str) -> str:
    return f"/subjects/{quote(subject, safe='')}/versions"


def _parsed(parse: Callable[[Any], _V], answer: Any, what: str) -> _V:
    try:
        return parse(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RegistryError(f"{what}: the schema registry's answer is malformed: {error!r}", 200, 0) from None


def _verification(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """What OpenSSL said, if an error comes from a certificate that is not trusted."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


_lock = threading.Lock()
_registries: dict[RegistryConfig, RegistryClient] = {}
_MOST_REGISTRIES = 8


def registry_of(
    settings: Mapping[str, str], prefix: str = "schema.registry.", client: Mapping[str, str] | None = None
) -> RegistryClient:
    """The process's registry of these settings, see `registry_config`: what it has learnt is asked for once only.

    Secrets are resolved each time: a token's file may have another one.
    """
    config = registry_config(settings, prefix, client)
    with _lock:
        registry = _registries.get(config)
        if registry is None:
            registry = _registries[config] = RegistryClient(config)
            while len(_registries) > _MOST_REGISTRIES:  # who still has it goes on with it
                del _registries[next(iter(_registries))]
    return registry
