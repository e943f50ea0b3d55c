"""A schema registry's client: Confluent's REST API, over httpx.

What has an id does not change while a query runs, so the process keeps it until a query begins (`begin`). Versions may
change: who deletes one for good can register another schema in its place. They are kept for a time, or not at all.

Ids are those of a context of the registry, which a subject's name begins with if it is not the default one:
":.staging:orders-value". Another context has other schemas by the same ids.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import ssl
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID
from weakref import WeakSet

from spark_klog.base.cache import Cache, Newest
from spark_klog.base.clock import doubled
from spark_klog.base.extras import require
from spark_klog.base.in_a_thread import within
from spark_klog.base.names import OF_REGISTRY
from spark_klog.base.settings import words
from spark_klog.errors import ConnectionFailed, KlogError, RegistryError, SchemaError, TlsError
from spark_klog.protocol.apis import API_VERSIONS
from spark_klog.protocol.codec import encode_request
from spark_klog.schemas.registry.schemas import NO_REFERENCES, References, Schema, Version
from spark_klog.schemas.registry.settings import RegistryConfig, registry_config
from spark_klog.security.config import Settings, without_secrets
from spark_klog.security.key_stores import client_context
from spark_klog.wire.primitives import SIZE

__all__ = ["RegistryClient"]

_log = logging.getLogger(__name__)
_COMMAND = "httpx._main"
_V = TypeVar("_V")
_TYPE = "application/vnd.schemaregistry.v1+json"
#: Answers after which another try, of another registry, may do.
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_BYTES = 16 * 1024 * 1024
#: Of the question whether a URL is a Kafka broker's.
_PROBE_SECONDS, _CORRELATION_ID = 2.0, 0x6B6C6F67
#: How long an id that is not there is not asked for again.
_ABSENT_SECONDS = 10.0
_BAD_REQUEST, _NOT_FOUND = 400, 404
#: Queries that are known to have begun.
_MOST_QUERIES = 100
#: Error codes of Confluent's API for what is not there: subject, version, schema.
NOT_THERE = frozenset({40401, 40402, 40403})
#: Settings' names by those of the client's SASL, in errors of `token_of`.
_BEARER_NAMES = {
    "sasl.oauthbearer.token.endpoint.url": "bearer.auth.issuer.endpoint.url",
    "sasl.oauthbearer.scope": "bearer.auth.scope",
    "https.ca.location": "ssl.truststore.location",
}


#: OpenSSL's codes of a certificate for another host name or address.
_OTHER_NAME = (62, 64)
#: Of a connection that ends within TLS, as when a server restarts.
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_ABOUT_CERTIFICATES = words("ALERT_CERTIFICATE ALERT_BAD_CERTIFICATE ALERT_UNKNOWN_CA ALERT_UNSUPPORTED_CERTIFICATE")
_HANDSHAKE = "handshake"
_NO_TLS = words("WRONG_VERSION_NUMBER RECORD_LAYER_FAILURE")


def _httpx() -> ModuleType:
    """The package without its command, which imports rich and pygments: Spark's processes would wait for them."""
    is_imported = _COMMAND in sys.modules
    if not is_imported:
        sys.modules[_COMMAND] = None  # type: ignore[assignment]
    try:
        import httpx
    finally:
        if not is_imported:
            del sys.modules[_COMMAND]
    return httpx


class UnknownSchema(SchemaError):
    """An id that the registry does not have, or not yet: it is asked again after 10 s."""


class RegistryClient:
    """A registry, at one of the URLs of `config`: another one after an error. Threads may share it.

    Each call ends within `config.deadline_ms`: a registry that is down is asked again until then, with back-off.
    `ConnectionFailed` if none has answered then; `RegistryError` with the registry's own error code if it refuses;
    `TlsError`, `SaslError` (of a token), `ConfigError`; `MissingPackage` without httpx.
    """

    def __init__(self, config: RegistryConfig) -> None:
        require("a schema registry", "httpx")
        self.config = config
        # without an https URL there is nothing to verify, and no need of the system's certificates
        has_tls = not all(url.startswith("http://") for url in config.urls)
        self._context = client_context(config.tls) if config.tls is not None else has_tls
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        """Begin with nothing learnt and no connection, as a forked process does: those that are open are its parent's,
        and another thread may have held a lock.
        """
        httpx = _httpx()
        config = self.config
        self._client = httpx.Client(
            verify=self._context,
            headers={"Accept": f"{_TYPE}, application/json", "Content-Type": _TYPE, **dict(config.headers)},
            auth=(config.user, config.password) if config.user else None,
            timeout=httpx.Timeout(config.read_ms / 1000, connect=config.connect_ms / 1000),
            follow_redirects=False,  # credentials are for these URLs only
        )
        self._failures = httpx.HTTPError, httpx.InvalidURL
        #: Of a server that ends the connection, or answers in another protocol.
        self._silence = httpx.RemoteProtocolError
        self._current = 0
        #: By context and id; a GUID has no context.
        self._schemas: Cache[tuple[str, int | UUID], Schema] = Cache(config.capacity)
        self._references: Cache[tuple[str, int | UUID], References] = Cache(config.capacity)
        self._absent: Cache[tuple[str, int | UUID], bool] = Cache(config.capacity, _ABSENT_SECONDS)
        self._latest: Cache[str, Version] = Cache(config.capacity, config.latest_seconds)
        #: What it said, and what is not asked for while it is away; see `or_before`.
        self._before: Cache[bytes, Any] = Cache(config.capacity)
        self._unconfirmed: Cache[bytes, bool] = Cache(config.capacity, config.latest_seconds)
        #: 0 of a schema that is no version.
        self._numbers: Cache[tuple[str, Schema], int] = Cache(config.capacity, config.latest_seconds)
        self._begun: Cache[str, bool] = Cache(_MOST_QUERIES)
        #: Whether there is a registry at the URLs.
        self._is_registry = False

    def __repr__(self) -> str:
        return f"RegistryClient({', '.join(self.config.urls)})"

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def begin(self, query: str, *, is_registry: bool = False) -> None:
        """Forget which schemas ids have, unless this was called for that query.

        A registry that was made anew at the same address has other schemas by the same ids, and processes outlive it.
        `is_registry`: another process has found a registry there, so what it does not have is no sign of a wrong URL.
        """
        self._is_registry |= is_registry
        if self._begun.get(query) is None:
            self._forget()
            self._begun.keep(query, True)

    def schema(self, key: int | UUID, subject: str = "", *, is_new: bool = False) -> Schema:
        """The schema of an id, or of a GUID, in the context of a subject. `SchemaError` if there is none.

        `is_new` asks the registry for one that is known, too.
        """
        if isinstance(key, int) and key < 0:
            raise SchemaError("no schema has a negative id")
        place = _place(key, subject)
        kept = None if is_new else self._schemas.get(place)
        if kept is not None:
            return kept
        if is_new or self._absent.get(place) is None:
            what = f"schema {'GUID' if isinstance(key, UUID) else 'id'} {key}"
            path = f"/schemas/guids/{key}" if isinstance(key, UUID) else f"/schemas/ids/{key}"
            if place[0]:
                path += f"?subject={quote(subject, safe='')}"
            try:
                schema = _parsed(Schema.of, self._request("GET", path, what), what)
            except RegistryError as error:
                # a registry that has no GUIDs, or takes an id for no number, has other codes, or a text
                if error.code not in NOT_THERE and not (error.status == _NOT_FOUND and self._is_registry):
                    raise
                self._absent.keep(place, True)
            else:
                self._learn(place, schema)
                return schema
        raise UnknownSchema(f"the schema registry {self._url} does not have it")

    def latest(self, subject: str, *, is_new: bool = False) -> Version:
        """The latest version of a subject, which may be `latest_seconds` old unless `is_new`."""
        kept = None if is_new else self._latest.get(subject)
        if kept is not None:
            return kept
        version = self._version(subject, "latest")
        self._latest.keep(subject, version)
        return version

    def version(self, subject: str, version: int) -> Version:
        """A version of a subject, also one that was deleted: other schemas may refer to it."""
        return self._version(subject, str(version))

    def versions(self, subject: str) -> list[int]:
        """The numbers of a subject's versions that are not deleted."""
        what = f"subject {subject}"
        return _parsed(lambda answer: [int(each) for each in answer], self._request("GET", _path(subject), what), what)

    def or_before(self, key: bytes, ask: Callable[[], _V]) -> _V:
        """What `ask` returns, which asks the registry. While it is away, or answers that it can't serve (503 and the
        like), what was returned for `key` before, with a warning; then without asking for `latest_seconds`.
        """
        before: _V | None = self._before.get(key)
        if before is not None and self._unconfirmed.get(key):
            return before
        try:
            said = ask()
        except (ConnectionFailed, RegistryError) as error:
            if before is None or (isinstance(error, RegistryError) and error.status not in _RETRIED):
                raise
            _log.warning("%s; what it said before counts", error)
            self._unconfirmed.keep(key, True)
            return before
        self._before.keep(key, said)
        return said

    def subjects(self, prefix: str = "", *, deleted: bool = False) -> list[str]:
        """The subjects that begin with `prefix`; with `deleted` also those that can be read by their versions only."""
        path = f"/subjects?deleted={json.dumps(deleted)}"
        if prefix:  # an empty one would leave out other contexts
            path += f"&subjectPrefix={quote(prefix, safe='')}"
        names = _parsed(
            lambda answer: [str(each) for each in answer], self._request("GET", path, "subjects"), "subjects"
        )
        return [subject for subject in names if subject.startswith(prefix)]  # old registries know no prefix

    def uses(self, schema_id: int) -> list[tuple[str, int]]:
        """The subjects and versions that have the schema of an id. `RegistryError` if there is no such id."""
        what = f"schema id {schema_id}"
        answer = self._request("GET", f"/schemas/ids/{schema_id}/versions", what)
        return _parsed(lambda body: [(str(use["subject"]), int(use["version"])) for use in body], answer, what)

    def id_of(self, guid: UUID) -> int | None:
        """The id of a GUID in the default context, None if only others have it; `RegistryError` if none does."""
        what = f"schema GUID {guid}"
        answer = self._request("GET", f"/schemas/guids/{guid}/ids", what)
        ids = _parsed(lambda body: {str(each["context"]): int(each["id"]) for each in body}, answer, what)
        return ids.get(".", ids.get(""))

    def references(
        self, schema: Schema, key: int | UUID | None = None, subject: str = "", *, is_new: bool = False
    ) -> References:
        """The texts of the schemas that a schema uses, by name, each after those that it needs itself.

        `subject` has the context of references that name none. They are kept for the schema's id or GUID, if it has
        one, unless `is_new`.
        """
        if not schema.references:
            return NO_REFERENCES
        place = None if key is None else _place(key, subject)
        kept = None if place is None or is_new else self._references.get(place)
        if kept is None:
            kept = self._texts(schema, context_of(subject), {}, ())
            if place is not None:
                self._references.keep(place, kept)
        return kept

    def register(self, subject: str, schema: Schema, *, normalize: bool = False) -> int:
        """Make a schema a version of a subject, if it is none yet: its id. The registry checks the compatibility.

        Asks each time, as the subject may have been deleted.
        """
        return self._id_of(f"{_path(subject)}?normalize={json.dumps(normalize)}", subject, schema)

    def lookup(self, subject: str, schema: Schema, *, normalize: bool = False) -> int:
        """The id of a schema that is a version of a subject; `RegistryError` if it is none. Asks each time."""
        path = f"/subjects/{quote(subject, safe='')}?normalize={json.dumps(normalize)}"
        return self._id_of(path, subject, schema)

    def version_of(self, subject: str, schema: Schema, *, normalize: bool = False, is_new: bool = False) -> int | None:
        """The number of a schema's version of a subject, None if it is none; `latest_seconds` old unless `is_new`."""
        path = f"/subjects/{quote(subject, safe='')}?normalize={json.dumps(normalize)}"
        kept = None if is_new else self._numbers.get((path, schema))
        if kept is not None:
            return kept or None
        what = f"subject {subject}"
        number = 0
        try:
            answer = self._request("POST", path, what, schema.request())
        except RegistryError as error:
            if error.code not in NOT_THERE:
                raise
        else:
            number = _parsed(lambda body: int(body["version"]), answer, what)
        self._numbers.keep((path, schema), number)
        return number or None

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
        if _parsed(lambda body: bool(body["is_compatible"]), answer, what):
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
        for cache in (self._latest, self._before, self._numbers, self._references):
            cache.clear()  # the subject's schemas may get other numbers
        return _parsed(
            lambda body: [int(number) for number in (body if isinstance(body, list) else [body])], answer, what
        )

    @property
    def _url(self) -> str:
        return self.config.urls[self._current]

    def _version(self, subject: str, number: str) -> Version:
        what = f"subject {subject}, version {number}"
        deleted = "" if number == "latest" else "?deleted=true"
        answer = self._request("GET", f"{_path(subject)}/{number}{deleted}", what)
        version = _parsed(Version.of, answer, what)
        self._learn(_place(version.id, subject), version.schema)
        if version.guid is not None:
            self._learn(_place(version.guid, subject), version.schema)
        return version

    def _id_of(self, path: str, subject: str, schema: Schema) -> int:
        what = f"subject {subject}"
        return _parsed(lambda answer: int(answer["id"]), self._request("POST", path, what, schema.request()), what)

    def _learn(self, place: tuple[str, int | UUID], schema: Schema) -> None:
        """Keep the schema of an id. One that has another schema now shows that the registry was made anew."""
        kept = self._schemas.get(place)
        if kept is not None and kept != schema:
            self._forget()
        self._schemas.keep(place, schema)

    def _forget(self) -> None:
        caches: tuple[Cache[Any, Any], ...] = (self._schemas, self._references, self._absent, self._numbers)
        for cache in caches:
            cache.clear()

    def _texts(self, schema: Schema, context: str, texts: dict[str, str], above: tuple[Schema, ...]) -> dict[str, str]:
        """`texts` with those of the references of a schema in a context; `above` are the schemas that lead to it."""
        if schema in above:
            raise SchemaError(f"schemas of the registry refer to each other in a circle: {schema.references[0].name}")
        for name, subject, version in schema.references:
            if name in texts:  # as in Confluent's clients, one of a name
                continue
            subject = subject if subject.startswith(":.") or not context else f":{context}:{subject}"
            try:
                used = self.version(subject, version).schema
            except RegistryError as error:
                if error.code not in NOT_THERE:
                    raise
                raise SchemaError(f"its reference {name} is missing: {error}") from None
            self._texts(used, context_of(subject), texts, (*above, schema))
            texts[name] = used.text
        return texts

    def _request(self, method: str, path: str, what: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON; `what` is what it is about, for errors."""
        deadline = time.monotonic() + self.config.deadline_ms / 1000
        attempts = hopeless = 0
        while True:
            current = self._current
            wanted = 0.0
            try:
                answer = self._send(method, self.config.urls[current], path, body, deadline)
            except ConnectionFailed as error:
                failure: KlogError = error
                hopeless = hopeless + 1 if isinstance(error, _Hopeless) else 0
                if hopeless == len(self.config.urls):
                    raise ConnectionFailed(str(error)) from None
            else:
                if answer.is_good:
                    if attempts:
                        _log.warning("the schema registry answers again, after %d tries", attempts)
                    return answer.body
                failure = self._refusal(answer, what)
                if answer.status not in _RETRIED:
                    raise failure
                hopeless, wanted = 0, answer.retry_after
            attempts += 1
            self._current = (current + 1) % len(self.config.urls)
            # others are tried at once
            rounds, is_at_once = divmod(attempts, len(self.config.urls))
            pause = 0.0 if is_at_once else doubled(self.config.wait_ms, self.config.longest_wait_ms, rounds + 1)
            pause = max(pause * random.uniform(0.8, 1.2) / 1000, 0.0 if is_at_once else wanted)
            if time.monotonic() + pause >= deadline:
                if isinstance(failure, ConnectionFailed):
                    seconds = self.config.deadline_ms / 1000
                    raise ConnectionFailed(f"{failure}; gave up on {what} after {attempts} tries in {seconds:g} s")
                raise failure
            if attempts == 1:
                _log.warning("%s; trying again, for %g s", failure, self.config.deadline_ms / 1000)
            time.sleep(pause)

    def _send(self, method: str, url: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> _Answer:
        headers = {}
        if self.config.token or self.config.oauth is not None:
            token = self.config.token or self._token(url, deadline)
            headers["Authorization"] = f"Bearer {token}"
        content = None if body is None else json.dumps(body).encode()
        until = min(deadline, time.monotonic() + (self.config.connect_ms + self.config.read_ms) / 1000)

        def exchange() -> tuple[int, bytes, str, str]:
            with self._client.stream(method, url + path, content=content, headers=headers) as response:
                data = b""
                for part in response.iter_bytes():
                    data += part
                    if len(data) > _MOST_BYTES:
                        break
                place = response.headers.get("Location", "")
                return response.status_code, data, place, response.headers.get("Retry-After", "")

        try:
            # the timeouts of httpx are for each read, and not for the look-up of the name
            status, data, location, retry_after = within(until, exchange, "klog-registry")
        except TimeoutError:
            raise ConnectionFailed(f"the schema registry {url} did not answer in time{_is_http(url)}") from None
        except self._failures as error:
            raise self._failure(url, error) from None
        try:
            answer = json.loads(data) if len(data) <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            answer = None
        self._is_registry |= answer is not None
        return _Answer(url, status, answer, location, float(retry_after) if retry_after.isdecimal() else 0.0)

    def _failure(self, url: str, error: Exception) -> KlogError:
        """The error to raise for one of httpx."""
        causes = list(_causes(error))
        refused = next((cause for cause in causes if isinstance(cause, ssl.SSLCertVerificationError)), None)
        if refused is not None:
            text = f"the certificate of the schema registry {url} is refused: {refused.verify_message}; "
            if refused.verify_code in _OTHER_NAME:
                return TlsError(f"{text}set the URL with a name that it is for, instead of {urlsplit(url).hostname}")
            return TlsError(f"{text}{self.config.named('ssl.truststore.location')} is the file of its authority")
        why = without_secrets(str(error) or type(error).__name__, self._secrets)
        text = f"the schema registry {url} gives no answer: {why}"
        tls = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
        if (tls is not None or isinstance(error, self._silence)) and _is_kafka(url):
            return _Hopeless(f"{text}; a Kafka broker listens there: set {self.config.named('url')} to the registry's")
        if tls is not None and not isinstance(tls, _CUT):
            in_words = why.upper().replace(" ", "_")
            hint = "; is it an http:// URL?" if any(word in in_words for word in _NO_TLS) else ""
            if any(word in in_words for word in _ABOUT_CERTIFICATES):
                hint = f"; it wants another certificate of {self.config.named('ssl.keystore.location')}"
            return TlsError(f"no TLS with the schema registry {url}: {why}{hint}")
        if isinstance(error, self._silence) and url.startswith("http:"):
            return ConnectionFailed(f"{text}; is it an https:// URL?")
        looked_up = next((cause for cause in causes if isinstance(cause, socket.gaierror)), None)
        if looked_up is not None and looked_up.errno != socket.EAI_AGAIN:
            return _Hopeless(f"{text}; check the name in {self.config.named('url')}")
        return ConnectionFailed(text + (_is_http(url) if _HANDSHAKE in why.lower() else ""))

    def _refusal(self, answer: _Answer, what: str) -> RegistryError:
        url, status, body = answer.url, answer.status, answer.body
        code = body.get("error_code") if isinstance(body, dict) else None
        code = code if isinstance(code, int) else status
        said = body.get("message") if isinstance(body, dict) else None
        text = f"{what}: the schema registry {url} answers {status}"
        if isinstance(said, str) and said:
            text += f" ({without_secrets(said, self._secrets, 1000)})"
        elif status // 100 == 3:
            place = urlsplit(answer.location)
            to = without_secrets(f" to {place.scheme}://{place.hostname}", self._secrets) if place.hostname else ""
            text += f", a redirection{to}, which is not followed: set the URL that it leads to"
        elif status // 100 == 2 or status == _NOT_FOUND:
            text += ", without JSON: is it the URL of a schema registry?"
        elif status == _BAD_REQUEST and url.startswith("http:"):
            text += ", without JSON: is it an https:// URL?"
        if status in (401, 403):
            if self.config.credentials:
                text += f": check {self.config.named(self.config.credentials)}, and what that user may do"
            else:
                names = map(self.config.named, ("basic.auth.username", "basic.auth.password", "bearer.auth.token"))
                text += ": set {} and {}, or {}".format(*names)
        return RegistryError(text, status, code)

    @property
    def _secrets(self) -> tuple[str, ...]:
        config, oauth = self.config, self.config.oauth
        # as it stands in the header, which some servers and proxies tell in their answers
        basic = b64encode(f"{config.user}:{config.password}".encode()).decode() if config.user else ""
        return config.password, basic, config.token, "" if oauth is None else oauth.client_secret

    def _token(self, url: str, deadline: float) -> str:
        from spark_klog.security.tokens import token_of  # as in `security.sasl`

        assert self.config.oauth is not None
        host = urlsplit(url).hostname or ""
        return token_of(
            self.config.oauth, host, deadline, lambda name: self.config.named(_BEARER_NAMES.get(name, name))
        )


def _is_http(url: str) -> str:
    """A question about a URL that gave no answer: a server without TLS waits for the rest of a request."""
    return "; is it an http:// URL?" if url.startswith("https:") else ""


def _is_kafka(url: str) -> bool:
    """Whether a broker's listener without TLS answers at the URL's host and port."""
    at = urlsplit(url)
    request = encode_request(API_VERSIONS, 0, _CORRELATION_ID, None, {}).to_bytes()
    try:
        address = at.hostname or "", at.port or (443 if at.scheme == "https" else 80)
        with socket.create_connection(address, _PROBE_SECONDS) as connected:
            connected.sendall(SIZE.pack(len(request)) + request)
            return connected.makefile("rb").read(2 * SIZE.size)[SIZE.size :] == SIZE.pack(_CORRELATION_ID)
    except OSError:
        return False


def _config(subject: str | None) -> tuple[str, str]:
    """What a request is about, and the path of its settings."""
    if subject is None:
        return "the registry's settings", "/config"
    return f"subject {subject}", f"/config/{quote(subject, safe='')}"


class _Answer(NamedTuple):
    """An HTTP answer: its JSON, None if it has none or is too long; the header Location; the seconds of Retry-After."""

    url: str
    status: int
    body: Any
    location: str
    retry_after: float

    @property
    def is_good(self) -> bool:
        return self.status // 100 == 2 and self.body is not None


class _Hopeless(ConnectionFailed):
    """A failure that the same URL gives again."""


def context_of(subject: str) -> str:
    """The context that a subject's name begins with, such as ".staging"; "" for the default one."""
    context, colon, _ = subject.removeprefix(":").partition(":")
    return context if colon and subject.startswith(":.") and context != "." else ""


def _place(key: int | UUID, subject: str) -> tuple[str, int | UUID]:
    return "" if isinstance(key, UUID) else context_of(subject), key


def _path(subject: str) -> str:
    return f"/subjects/{quote(subject, safe='')}/versions"


def _parsed(parse: Callable[[Any], _V], answer: Any, what: str) -> _V:
    try:
        return parse(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RegistryError(f"{what}: the schema registry's answer is malformed: {error!r}", 200, 0) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it comes from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_lock = threading.Lock()
#: Of at most 8 configurations: whoever still has another one goes on with it.
_registries: Newest[RegistryConfig, RegistryClient] = Newest(8)
_clients: WeakSet[RegistryClient] = WeakSet()


def registry_of(
    settings: Mapping[str, str],
    prefix: str = OF_REGISTRY,
    client: Mapping[str, str] | None = None,
    longest_ms: int | None = None,
) -> RegistryClient:
    """The process's registry of these settings, see `registry_config`: what it has learnt is asked for once only.

    Secrets are resolved each time: a token's file may have another one. `longest_ms` is a shorter deadline of calls
    than the settings'.
    """
    config = registry_config(settings, prefix, client)
    if longest_ms is not None:
        config = replace(config, deadline_ms=min(config.deadline_ms, longest_ms))
    with _lock:
        registry = _registries.get(config)
        if registry is None:
            registry = _registries[config] = RegistryClient(config)
    return registry


@dataclass(frozen=True)
class RegistrySettings:
    """Settings by `registry.settings.NAMES`, secrets as the user wrote them: references stay references."""

    settings: Settings
    #: What users write before a name.
    prefix: str = OF_REGISTRY
    #: The Kafka client's settings, if it is its user that asks.
    client: Settings = field(default_factory=Settings)

    @classmethod
    def beside(cls, client: Mapping[str, str], settings: Settings, prefix: str = OF_REGISTRY) -> RegistrySettings:
        """With the client's settings only if they are needed: they have secrets, too."""
        inherits = settings.get("basic.auth.credentials.source", "").strip().upper() == "SASL_INHERIT"
        return cls(settings, prefix, Settings(client if inherits else {}))

    def registry(self, longest_ms: int | None = None) -> RegistryClient:
        return registry_of(self.settings, self.prefix, self.client, longest_ms)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for client in list(_clients):
        client._begin()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
