"""The page with a schema registry: records decoded, bytes that only look like them, a registry that is down."""

from __future__ import annotations

import json
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from datetime import date, datetime, time as time_of_day, timezone
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import (
    Schema,
    SchemaRegistryClient,
    header_schema_id_serializer,
    record_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from selenium import webdriver

from spark_klog.embedded import EmbeddedCluster
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import RegistrySettings
from spark_klog.security.config import Settings
from spark_klog.spark.option_table import Use
from spark_klog.spark.options import split
from spark_klog.ui.schemas import MessageSchemas, Raw
from tests.support.clients.klog import klog, klog_lines
from tests.support.clients.topics import make_topic
from tests.ui.browser import Browser
from tests.ui.support import Page, serving

_ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
_HOSTILE = "</pre></td></script><img src=x onerror='window.pwned = 1'>\u202e"


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


@pytest.fixture(scope="module")
def page(cluster: EmbeddedCluster, registry: str) -> Iterator[Page]:
    with serving("-b", cluster.bootstrap_servers, "--schema-registry", registry) as running:
        yield running


def _send(servers: str, topic: str, *records: dict[str, Any]) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for record in records:
        producer.produce(topic, partition=0, **record)
    assert producer.flush(30) == 0


def _written(url: str, topic: str, schema: Any, row: Any, field: str = MessageField.VALUE, **conf: Any) -> Any:
    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(schema), conf=conf or None)
    return write(row, SerializationContext(topic, field, []))


def _order(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "tags": {}, "at": 1_700_002_800_000_000, **more}


def _messages(page: Page, topic: str) -> list[dict[str, Any]]:
    return list(page.get("messages", name=topic, order="oldest", partition=0)["messages"])


def _json(schema: dict[str, Any]) -> Any:
    return json.loads(schema["json"]["text"])


def test_decoded_with_id_subject_and_version(page: Page, cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    client = SchemaRegistryClient({"url": registry})
    client.set_compatibility(f"{topic}-value", "NONE")
    client.register_schema(f"{topic}-value", Schema('{"type":"record","name":"Order","fields":[]}', "AVRO"))
    order = _written(registry, topic, _ORDER, _order(2**62))
    id = client.get_latest_version(f"{topic}-value").schema_id
    client.register_schema("of another topic", Schema(json.dumps(_ORDER), "AVRO"))
    headers: list[tuple[str, bytes]] = []
    write = AvroSerializer(client, json.dumps(_ORDER), conf={"schema.id.serializer": header_schema_id_serializer})
    in_header = write(_order(7), SerializationContext(topic, MessageField.VALUE, headers))
    key = _written(registry, topic, "string", "a key", MessageField.KEY)
    sent = [
        {"value": order, "key": key},
        {"value": in_header, "headers": headers},
        {"value": None, "key": "plain"},
        {"value": b'{"plain":1}'},
    ]
    _send(cluster.bootstrap_servers, topic, *sent)
    first, second, third, fourth = _messages(page, topic)
    schema = first["valueSchema"]
    assert {name: schema[name] for name in ("id", "guid", "format", "subject", "version", "uses", "error")} == {
        "id": id,
        "guid": None,
        "format": "avro",
        "subject": f"{topic}-value",
        "version": 2,
        "uses": 2,
        "error": None,
    }
    assert _json(schema) == {"id": 2**62, "tags": {}, "at": "2023-11-14T23:00:00.000000Z"}
    assert (first["keySchema"]["subject"], _json(first["keySchema"])) == (f"{topic}-key", "a key")
    assert first["value"]["size"] == len(order)
    named = second["valueSchema"]["id"] or second["valueSchema"]["guid"]
    assert named
    assert (_json(second["valueSchema"])["id"], second["value"]["size"]) == (7, len(in_header))
    assert [row[name] for row in (third, fourth) for name in ("keySchema", "valueSchema")] == [None] * 4
    # a search finds bytes, and shows them decoded
    found = [data for name, data in page.get("search", name=topic, text="a key") if name == "match"]
    assert [one["valueSchema"] for one in found] == [schema]
    # an export has the bytes
    text, _ = page.download("export", name=topic)
    assert "valueSchema" not in text
    assert "raw" not in json.loads(text.splitlines()[0])


def test_bytes_that_only_look_like_it(page: Page, cluster: EmbeddedCluster, registry: str, topic: str) -> None:
    """They stay bytes, with why; the page asks for few ids, and shows times that Python does not have, too."""
    make_topic(cluster.bootstrap_servers, topic, 1)
    good = _written(registry, topic, _ORDER, _order(1))
    late = good[:5] + b"\x02\x00" + b"\xfe" + b"\xff" * 8 + b"\x01"
    unknown = b"\x00" + (999_999).to_bytes(4, "big") + b"x"
    numbers = [{"value": b"\x00" + (500_000 + number).to_bytes(4, "big")} for number in range(30)]
    others = [good[:-2], late, unknown, b"\x00", b"", b"\x00\xff\xff\xff\xff", b"\x01" * 17]
    _send(cluster.bootstrap_servers, topic, *({"value": value} for value in others), *numbers)
    rows = _messages(page, topic)
    assert [row["value"]["size"] for row in rows] == [*map(len, others), *[5] * 30]
    assert [number for number, row in enumerate(rows) if row["valueSchema"] and row["valueSchema"]["json"]] == [1]
    assert _json(rows[1]["valueSchema"]) == {"id": 1, "tags": {}, "at": 2**63 - 1}
    errors = [row["valueSchema"] and row["valueSchema"]["error"] for row in rows]
    assert errors[0]
    assert f"the schema registry {registry} does not have it" in errors[2]
    assert errors[3:6] == [None, None, None]
    assert errors[-1] == "not looked up: a view asks for 20 schemas at most"


@pytest.mark.test_all("long")
def test_the_registry_is_down(cluster: EmbeddedCluster, topic: str) -> None:
    """It is said at each record, soon; what is known stays, and the page goes on when the registry does."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    with SchemaRegistry({"bootstrap.servers": servers}, "0") as running:
        url = running.url
        values = [_written(url, topic, _ORDER, _order(1)), _written(url, f"{topic}-b", "string", "text")]
    _send(servers, topic, *({"value": value} for value in values))
    with serving("-b", servers, "--schema-registry", url) as page:
        began = time.monotonic()
        rows = _messages(page, topic)
        assert time.monotonic() - began < 8
        assert [row["value"]["size"] for row in rows] == [*map(len, values)]
        assert all("gives no answer" in row["valueSchema"]["error"] for row in rows)
        began = time.monotonic()
        assert "gives no answer" in _messages(page, topic)[0]["valueSchema"]["error"]
        assert time.monotonic() - began < 1.5, "nobody is asked again and again"
        with SchemaRegistry({"bootstrap.servers": servers}, url.rpartition(":")[2]):
            deadline = time.monotonic() + 60
            while _messages(page, topic)[0]["valueSchema"]["json"] is None:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert _json(_messages(page, topic)[1]["valueSchema"]) == "text"
        assert _json(_messages(page, topic)[1]["valueSchema"]) == "text"


class _Slow(BaseHTTPRequestHandler):
    """A registry that says nothing, and one that refuses its user; it keeps the headers of requests."""

    seen: list[str] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization", ""))
        self.send_response(401)
        self.end_headers()
        self.wfile.write(json.dumps({"error_code": 40101, "message": f"no {self.headers['Authorization']}"}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_no_secret_in_the_page(cluster: EmbeddedCluster, topic: str, tmp_path: Any) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    _send(servers, topic, {"value": b"\x00\x00\x00\x00\x05abc"})
    server = HTTPServer(("127.0.0.1", 0), _Slow)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    config = tmp_path / "client.properties"
    config.write_text(
        f"schema.registry.url=http://me:hunter2@h3@127.0.0.1:{server.server_port}\nbootstrap.servers={servers}\n"
    )
    try:
        with serving("--command-config", str(config)) as page:
            [row] = _messages(page, topic)
            assert "401" in row["valueSchema"]["error"]
            shown = json.dumps([row, page.get("session")])
            assert "hunter2" not in shown
            assert "bWU6aHVudGVyMk" not in shown
            assert page.get("session")["registry"] == f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert _Slow.seen[0] == "Basic bWU6aHVudGVyMkBoMw=="


@pytest.mark.test_all("long")
def test_a_silent_registry_holds_up_no_page(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    _send(servers, topic, *({"value": b"\x00\x00\x00\x00" + bytes([number])} for number in range(20)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with serving("-b", servers, "--schema-registry", f"http://127.0.0.1:{silent.getsockname()[1]}") as page:
            began = time.monotonic()
            rows = _messages(page, topic)
            assert time.monotonic() - began < 8
            assert all(row["valueSchema"]["error"] for row in rows)


class _Hostile(BaseHTTPRequestHandler):
    """A registry with schemas that nobody should write."""

    deep = '{"type":"array","items":' * 3000 + '"int"' + "}" * 3000
    texts = ("", "{", "[]", '"nobody"', deep, '{"type":"record","name":"A","fields":[{"name":"a","type":"A"}]}')
    answers = (*({"schema": text} for text in texts), {"schema": 7}, {}, [], {"schema": '"int"', "schemaType": "XML"})

    def do_GET(self) -> None:
        number = int(self.path.split("/")[3])
        data = json.dumps([{"subject": None}] if "versions" in self.path else self.answers[number]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_hostile_schemas(cluster: EmbeddedCluster) -> None:
    """Each has its reason, whatever a registry says; large values stay bytes."""
    server = HTTPServer(("127.0.0.1", 0), _Hostile)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        schemas = MessageSchemas(RegistrySettings(Settings({"url": f"http://127.0.0.1:{server.server_port}"})))
        records = [Raw(None, b"\0" + number.to_bytes(4, "big") + b"x", None) for number in range(len(_Hostile.answers))]
        found = [one["value"] for one in schemas.columns("t", records)]
        assert [one["json"] for one in found] == [None] * len(found)
        assert all(isinstance(one["error"], str) and one["error"] for one in found)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_large_values(registry: str) -> None:
    large = _written(registry, "large", "string", "x" * (1 << 20))
    small = _written(registry, "large", "string", "x")
    schemas = MessageSchemas(RegistrySettings(Settings({"url": registry})))
    found = schemas.columns("large", [Raw(small, large, None), Raw(None, small, None)])
    assert "larger than" in found[0]["value"]["error"]
    assert [found[0]["key"]["json"], found[1]["value"]["json"]] == ['"x"', '"x"']


def test_few_bytes_that_become_many_values(registry: str) -> None:
    """They are neither built nor shown; the records beside them are, among them times of all kinds."""
    fields = "".join(f"int64 f{number} = {number};" for number in range(1, 4))
    text = (
        f'syntax = "proto3"; import "google/protobuf/duration.proto"; message M {{ repeated I items = 1; '
        f"google.protobuf.Duration took = 2; }} message I {{ {fields} }}"
    )
    id = SchemaRegistryClient({"url": registry}).register_schema("many-value", Schema(text, "PROTOBUF"))
    before = b"\0" + id.to_bytes(4, "big") + b"\0"
    values = [before + b"\x0a\0" * 200_000, before + b"\x12\2\x08\3"]
    schemas = MessageSchemas(RegistrySettings(Settings({"url": registry})))
    began = time.monotonic()
    first, second, third = schemas.columns("many", [Raw(None, value, None) for value in (*values, None)])
    assert time.monotonic() - began < 20
    assert first["value"]["json"] is None
    assert first["value"]["error"].startswith("it is not shown: decoded it is ")
    assert json.loads(second["value"]["json"]) == {"items": [], "took": "3.000000s"}
    assert third == {}


@pytest.mark.test_all("long")
def test_values_and_lines_to_copy(
    chromium: webdriver.Chrome, page: Page, cluster: EmbeddedCluster, registry: str, topic: str
) -> None:
    """Decimals, times and long numbers are as klog consume -s prints them, and so is what the copied line prints."""
    kinds = {
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2},
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "local": {"type": "long", "logicalType": "local-timestamp-micros"},
        "day": {"type": "int", "logicalType": "date"},
        "clock": {"type": "int", "logicalType": "time-millis"},
        "long": "long",
        "ratio": "double",
        "text": "string",
    }
    schema = {"type": "record", "name": "All", "fields": [{"name": name, "type": kind} for name, kind in kinds.items()]}
    row = {
        "price": Decimal("1234567890123456789.10"),
        "at": datetime(2026, 11, 21, 10, tzinfo=timezone.utc),
        "local": datetime(2026, 11, 21, 10),
        "day": date(2026, 11, 21),
        "clock": time_of_day(10, 30),
        "long": 2**62 + 1,
        "ratio": 1.0,
        "text": 'n1.50 "quoted" \\',
    }
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    key = _written(registry, topic, "string", "a key", MessageField.KEY)
    _send(servers, topic, {"key": key, "value": _written(registry, topic, schema, row)})
    (shown,) = _messages(page, topic)
    printed = klog("consume", topic, "-b", servers, "-s", "value=avro", "-r", registry)
    assert printed.stdout == shown["valueSchema"]["json"]["text"] + "\n", printed
    assert '"price": 1234567890123456789.10, "at": "2026-11-21T10:00:00.000000Z"' in printed.stdout
    browser = Browser(chromium, page)
    browser.open("record", topic, "0", "0")
    tree = browser.text("#main .tree")
    for text in ("price: 1234567890123456789.10", f"long: {2**62 + 1}", "ratio: 1.0", 'text: "n1.50 \\"quoted'):
        assert text in tree
    line = browser.text("#main pre[aria-label='klog consume']")
    words = shlex.split(line)
    assert words[0] == "klog"
    (record,) = klog_lines(*(word for word in words[1:] if word != "--json"))
    assert (record["key"], record["value"]) == ("a key", json.loads(printed.stdout))
    snippet = browser.text("#main pre[aria-label='Spark']")
    for option in ('"keyFormat", "avro"', '"valueFormat", "avro"', f'"schemaRegistryUrl", "{registry}"'):
        assert f".option({option})" in snippet


@pytest.mark.test_all("long")
def test_the_snippet_names_other_subjects_than_the_topics(
    chromium: webdriver.Chrome, cluster: EmbeddedCluster, registry: str, topic: str, tmp_path: Path
) -> None:
    """The records of a producer with RecordNameStrategy; the file's settings are added as the comment says."""
    make_topic(cluster.bootstrap_servers, topic, 1)
    schema = {"type": "record", "name": "Rec", "namespace": topic.replace("-", "_"), "fields": [_ORDER["fields"][0]]}
    conf = {"subject.name.strategy": record_subject_name_strategy}
    value = _written(registry, topic, schema, {"id": 7}, **conf)
    key_schema = schema | {"name": "Key"}
    key = _written(registry, topic, key_schema, {"id": 1}, MessageField.KEY, **conf)
    usual = _written(registry, topic, "string", "a key", MessageField.KEY)
    _send(cluster.bootstrap_servers, topic, {"key": key, "value": value}, {"key": usual, "value": value})
    config = tmp_path / "client.properties"
    config.write_text(f"bootstrap.servers={cluster.bootstrap_servers}\nschema.registry.url={registry}\n")
    shown = []
    with serving("--command-config", str(config)) as page:
        browser = Browser(chromium, page)
        for offset in ("0", "1"):
            browser.open("record", topic, "0", offset)
            lines = browser.text("#main pre[aria-label='Spark']").splitlines()
            assert lines[0] == (
                f"# add the settings of {json.dumps(str(config))} as options, each with the prefix "
                '"kafka.", but those of "schema.registry." as they are'
            )
            shown.append(
                dict(json.loads(f"[{line[len('    .option(') : -1]}]") for line in lines if ".option(" in line)
            )
        chromium.get("about:blank")  # the page would go on asking when nobody serves it any more
    subjects = [{name: found.get(name) for name in ("keySubject", "valueSubject")} for found in shown]
    name = f"{schema['namespace']}.Rec"
    assert subjects == [
        {"keySubject": f"{schema['namespace']}.Key", "valueSubject": name},
        {"keySubject": None, "valueSubject": name},
    ]
    for found in shown:
        settings, own = split(found | {"schema.registry.url": registry}, Use.BATCH)
        assert settings["bootstrap.servers"] == cluster.bootstrap_servers
        for column in ("key", "value"):
            subject = own.get(f"{column}Subject", f"{topic}-{column}")
            assert SchemaRegistryClient({"url": own["schemaRegistryUrl"]}).get_latest_version(subject).schema_id > 0


def test_two_versions_are_compared(chromium: webdriver.Chrome, page: Page, registry: str) -> None:
    client = SchemaRegistryClient({"url": registry})
    fields = [{"name": f"f{number}", "type": ["null", "int"], "default": None} for number in range(5)]
    for chosen in (fields[:4], [*fields[:1], *fields[2:]]):
        client.register_schema("compared", Schema(json.dumps({**_ORDER, "fields": chosen}), "AVRO"))
    browser = Browser(chromium, page)
    browser.open("schema", "compared")
    browser.click("#compare a")
    browser.wait(lambda: browser.text(".diff"))
    assert browser.text("h2") == "From version 1 to version 2"
    lines = browser.js("return [...document.querySelectorAll('.diff span')].map((one) => one.textContent)")
    first, second = (page.get("subject", name="compared", version=number)["text"] for number in (1, 2))
    assert json.loads("".join(one[2:] for one in lines if one[0] in " -")) == json.loads(first)
    assert json.loads("".join(one[2:] for one in lines if one[0] in " +")) == json.loads(second)
    changed = [(one[0], field["name"]) for one in lines if one[0] != " " for field in [json.loads(one[2:].strip(" ,"))]]
    assert sorted(changed) == [("+", "f3"), ("+", "f4"), ("-", "f1"), ("-", "f3")]  # f3 has a comma now
    assert browser.problems() == []


def test_subjects(page: Page, registry: str) -> None:
    client = SchemaRegistryClient({"url": registry})
    client.register_schema("pages", Schema('"int"', "AVRO"))
    client.register_schema("pages", Schema('"long"', "AVRO"))
    assert "pages" in page.get("subjects")
    found = page.get("subject", name="pages")
    assert (found["versions"], found["version"], found["format"], found["text"]) == ([1, 2], 2, "avro", '"long"')
    assert (found["compatibility"], found["references"]) == ("BACKWARD", [])
    assert page.get("subject", name="pages", version=1)["text"] == '"int"'
    status, answer = page.ask("subject", name="no such one")
    assert status == 502
    assert "no such one" in answer["error"]
    assert page.ask("subject", name="pages", version="-1")[0] == 400


def test_what_schemas_hold_is_text(
    chromium: webdriver.Chrome, page: Page, cluster: EmbeddedCluster, registry: str, topic: str
) -> None:
    """In the browser: keys and strings of a record, the name of a subject."""
    make_topic(cluster.bootstrap_servers, topic, 1)
    schema = {**_ORDER, "doc": _HOSTILE}
    SchemaRegistryClient({"url": registry}).register_schema(_HOSTILE, Schema(json.dumps(schema), "AVRO"))
    conf = {"subject.name.strategy": lambda *_: _HOSTILE}
    value = _written(registry, topic, schema, _order(5, tags={_HOSTILE: _HOSTILE}), **conf)
    _send(cluster.bootstrap_servers, topic, {"value": value}, {"value": b"\x00\x00\x0f\x42\x3f" + _HOSTILE.encode()})
    chromium.get_log("browser")
    browser = Browser(chromium, page)
    browser.open("record", topic, "0", "0")
    open_all = "document.querySelectorAll('#main details').forEach((one) => one.open = true)"
    browser.js(open_all)
    browser.wait(lambda: "tags: " in browser.text("#main"))
    browser.js(open_all)
    browser.wait(lambda: browser.js("return document.getElementById('main').textContent").count("onerror") >= 4)
    shown = browser.js("return document.getElementById('main').textContent")
    assert f"version 1 of {_HOSTILE[:-1]}\\u202e" in shown
    browser.open("record", topic, "0", "1")
    assert "does not have it" in browser.text("#main .schema")
    browser.open("schemas")
    assert _HOSTILE[:-1] in browser.text("#main")
    browser.open("schema", _HOSTILE)
    assert "compatibility BACKWARD" in browser.text("#main")
    assert browser.text("#main pre").count("onerror") == 1
    browser.open("messages", topic)
    assert '"tags"' in browser.text("#messages")
    for check in (
        "return window.pwned ?? null",
        "return document.querySelector('img, iframe, object, embed, main script, [onclick], [onerror], [onload]')",
        "return document.scripts.length === 1 ? null : document.scripts.length",
    ):
        assert browser.js(check) is None, check
    assert browser.problems() == []
    chromium.get("about:blank")
