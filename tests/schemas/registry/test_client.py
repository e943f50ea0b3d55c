"""The registry's client, against franz-go's srfake, beside confluent-kafka's client."""

from __future__ import annotations

import copy
import json
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from confluent_kafka.schema_registry import Schema as ConfluentSchema, SchemaReference, SchemaRegistryClient

from spark_klog.errors import ConnectionFailed, RegistryError, SaslError, SchemaError, TlsError
from spark_klog.schemas.avro.schema import parse_schema
from spark_klog.schemas.registry.client import RegistryClient, registry_of
from spark_klog.schemas.registry.schemas import Reference, Schema
from spark_klog.schemas.registry.settings import registry_config
from tests.support.clients.srfake import SrFake, serving_srfake
from tests.support.servers.certificates import KEY_PASSWORD, make_certificates
from tests.support.servers.kafka import HOST
from tests.support.servers.token_server import TokenServer

pytestmark = pytest.mark.peer
_CITY = json.dumps({"type": "record", "name": "a.City", "fields": [{"name": "name", "type": "string"}]})
_PERSON = json.dumps({"type": "record", "name": "a.Person", "fields": [{"name": "city", "type": "a.City"}]})
_INT = Schema('"int"')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SrFake]:
    with serving_srfake(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


def _client(url: str, **settings: str) -> RegistryClient:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return RegistryClient(registry_config({"url": url, **named}))


def _theirs(server: SrFake) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": server.url})


def test_what_confluents_client_registers(server: SrFake) -> None:
    theirs, ours = _theirs(server), _client(server.url)
    subject = "a/b c\u20ac-value"
    city = theirs.register_schema("city", ConfluentSchema(_CITY, "AVRO"))
    person = ConfluentSchema(_PERSON, "AVRO", [SchemaReference("a.City", "city", 1)])
    number = theirs.register_schema(subject, person)
    latest = ours.latest(subject)
    assert (latest.subject, latest.version, latest.id) == (subject, 1, number)
    assert latest.schema == Schema(_PERSON, "avro", (Reference("a.City", "city", 1),))
    assert ours.schema(city) == Schema(_CITY)
    assert ours.schema(number) == ours.version(subject, 1).schema
    assert latest.guid is not None
    assert _client(server.url).schema(latest.guid) == latest.schema
    texts = ours.references(latest.schema)
    assert texts == {"a.City": _CITY}
    assert parse_schema(latest.schema.text, texts.values()).fields[0].schema.name == "a.City"
    assert {"city", subject} <= set(ours.subjects())
    assert ours.versions(subject) == [1]


def test_what_it_registers(server: SrFake) -> None:
    theirs, ours = _theirs(server), _client(server.url)
    with pytest.raises(RegistryError, match=r"subject made: .* answers 404") as caught:
        ours.lookup("made", _INT)
    assert (caught.value.status, caught.value.code) == (404, 40401)
    assert str(copy.copy(caught.value)) == str(caught.value)
    number = ours.register("made", _INT)
    assert ours.register("made", _INT) == ours.lookup("made", _INT) == number
    assert theirs.get_latest_version("made").schema_id == number
    proto = Schema('syntax = "proto3"; message M { int32 a = 1; }', "protobuf")
    ours.register("proto", proto)
    found = theirs.get_latest_version("proto").schema
    assert (found.schema_type, found.schema_str) == ("PROTOBUF", proto.text)
    assert ours.latest("proto").schema == proto
    assert ours.compatibility("made") == "BACKWARD"
    assert ours.incompatibilities("made", _INT) == []


def test_each_id_is_asked_for_once(server: SrFake) -> None:
    number = _theirs(server).register_schema("once", ConfluentSchema(_CITY, "AVRO"))
    settings = {"url": server.url, "cache.latest.ttl.sec": "3600"}
    before = len(server.requests)
    for _ in range(3):
        registry = registry_of(settings)
        registry.schema(number)
        registry.latest("once")
    assert server.requests[before:] == [f"GET /schemas/ids/{number}", "GET /subjects/once/versions/latest"]
    assert registry_of(settings) is registry
    registry.latest("once", is_new=True)
    assert len(server.requests) == before + 3
    assert [registry.version_of("once", Schema(_CITY)) for _ in range(2)] == [1, 1]
    assert len(server.requests) == before + 4
    assert registry.version_of("once", _INT) is None


def test_what_is_not_there(server: SrFake) -> None:
    ours = _client(server.url)
    for key in (999_999, UUID(int=7)):
        with pytest.raises(SchemaError, match=rf"^the schema registry {server.url} does not have it$"):
            ours.schema(key)
    with pytest.raises(RegistryError, match=r"^subject none, version latest: .* answers 404 \(.*none.*\)$") as caught:
        ours.latest("none")
    assert caught.value.code == 40401


def test_basic(tmp_path: Path) -> None:
    with serving_srfake(tmp_path, "Basic YWxpY2U6c2VjOnJldA==") as server:
        info = {"basic_auth_credentials_source": "USER_INFO", "basic_auth_user_info": "alice:sec:ret"}
        assert _client(server.url, **info).subjects() == []
        assert _client(server.url.replace("//", "//alice:sec%3Aret@")).subjects() == []
        sasl = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
        sasl |= {"sasl.username": "alice", "sasl.password": "sec:ret"}
        source = {"url": server.url, "basic.auth.credentials.source": "SASL_INHERIT"}
        assert RegistryClient(registry_config(source, client=sasl)).subjects() == []
        with pytest.raises(
            RegistryError, match=r"answers 40[13].*check schema.registry.basic.auth.user.info"
        ) as caught:
            _client(server.url, basic_auth_user_info="alice:wrong").subjects()
        assert caught.value.status in (401, 403)
        assert "wrong" not in str(caught.value)


def test_bearer(tmp_path: Path) -> None:
    with serving_srfake(tmp_path, "Bearer abc.def") as server:
        assert _client(server.url, bearer_auth_token="abc.def").subjects() == []
    file = tmp_path / "token"
    with serving_srfake(tmp_path, "Bearer abc.def") as server:
        settings = {"url": server.url, "bearer.auth.token": f"file:{file}"}
        file.write_text("old\n")
        with pytest.raises(RegistryError, match="answers 40"):
            registry_of(settings).subjects()
        file.write_text("abc.def\n")
        assert registry_of(settings).subjects() == []
    with TokenServer() as tokens, serving_srfake(tmp_path) as server:
        settings = {
            "bearer_auth_credentials_source": "OAUTHBEARER",
            "bearer_auth_issuer_endpoint_url": tokens.url,
            "bearer_auth_client_id": tokens.client_id,
            "bearer_auth_client_secret": tokens.secret,
        }
        client = _client(server.url, **settings)
        assert client.subjects() == client.subjects() == []
        assert tokens.given == 1
        with pytest.raises(SaslError, match=r"check .*schema.registry.bearer.auth.scope") as caught:
            _client(server.url, **{**settings, "bearer_auth_client_secret": "wrong-one"}).subjects()
        assert "wrong-one" not in str(caught.value)


def test_mutual_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    folder = files.ca.parent
    key = folder / "server.plain.key"
    decrypt = ["openssl", "ec", "-in", folder / "server.key", "-passin", f"pass:{KEY_PASSWORD}", "-out", key]
    subprocess.run(decrypt, check=True, capture_output=True)
    with serving_srfake(tmp_path, "", folder / "server.crt", key, files.ca) as server:
        url = server.url.replace("http:", "https:")
        own = {"ssl_keystore_location": str(files.client), "ssl_keystore_type": "PEM"}
        assert _client(url, ssl_truststore_location=str(files.ca), **own).subjects() == []
        librdkafkas = {"ssl_certificate_location": str(files.client), "ssl_key_location": str(files.client)}
        assert _client(url, ssl_ca_location=str(files.ca), **librdkafkas).subjects() == []
        with pytest.raises(TlsError, match=r"is refused: .*schema\.registry\.ssl\.truststore\.location"):
            _client(url, **own).subjects()
        with pytest.raises(TlsError, match=r"certificate.*schema\.registry\.ssl\.keystore\.location"):
            _client(url, ssl_ca_location=str(files.ca)).subjects()  # without one
        with pytest.raises(RegistryError, match=r"answers 400, without JSON: is it an https:// URL\?"):
            _client(server.url).subjects()


def test_another_url_answers_at_once(server: SrFake) -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        url = f"http://{HOST}:{closed.getsockname()[1]},{server.url}"
        began = time.monotonic()
        client = _client(url, retries_wait_ms="60000")
        client.subjects()
        client.subjects()
        assert time.monotonic() - began < 30


def test_a_registry_that_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        port = closed.getsockname()[1]
    results: list[list[str]] = []
    client = _client(f"http://{HOST}:{port}", retries_wait_ms="50")
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: results.append(client.subjects()))
        thread.start()
        time.sleep(0.5)
        with serving_srfake(tmp_path, port=port):
            thread.join(20)
    assert results == [[]]
    first, last = caplog.messages
    assert first.startswith(f"the schema registry http://{HOST}:{port} gives no answer")
    assert last.startswith("the schema registry answers again, after ")


def test_one_that_stays_away() -> None:
    with socket.create_server((HOST, 0)) as silent:  # it accepts, and never answers
        url = f"http://{HOST}:{silent.getsockname()[1]}"
        client = _client(url, retries_deadline_ms="600", http_read_timeout_ms="200", retries_wait_ms="10")
        began = time.monotonic()
        with pytest.raises(ConnectionFailed, match=r"gave up on schema id 7 after \d+ tries in 0\.6 s"):
            client.schema(7)
        assert time.monotonic() - began < 30


def test_no_registry(server: SrFake) -> None:
    with pytest.raises(RegistryError, match="is it the URL of a schema registry"):
        _client(f"{server.url}/elsewhere").subjects()
