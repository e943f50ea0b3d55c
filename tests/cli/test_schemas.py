"""`klog schemas` with our registry and with franz-go's srfake, beside confluent-kafka's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient

from spark_klog.embedded import EmbeddedCluster
from spark_klog.registry.differences import Change, changes, in_words
from spark_klog.schema_registry import SchemaRegistry
from tests.support.clients.klog import klog_bytes
from tests.support.clients.srfake import serving_srfake

_LINE = {"type": "record", "name": "Line", "fields": [{"name": "price", "type": "double"}]}
_FIELDS: list[dict[str, Any]] = [
    {"name": "id", "type": "int"},
    {"name": "name", "type": "string"},
    {"name": "lines", "type": {"type": "array", "items": _LINE}},
]


def order(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "a.Order", "fields": list(fields)})


_FIRST = order(*_FIELDS)
_SECOND = order(
    {"name": "id", "type": "long"},
    {"name": "title", "type": "string", "aliases": ["name"]},
    {"name": "note", "type": ["null", "string"], "default": None},
    {
        "name": "lines",
        "type": {
            "type": "array",
            "items": {**_LINE, "fields": [*_LINE["fields"], {"name": "count", "type": "int", "default": 1}]},
        },
    },
)
_THIRD = order(*json.loads(_SECOND)["fields"][:3], {"name": "must", "type": "string"})


@pytest.fixture(
    scope="module", params=["ours", pytest.param("srfake", marks=[pytest.mark.peer, pytest.mark.test_all("client")])]
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "ours":
        cluster = request.getfixturevalue("cluster")
        assert isinstance(cluster, EmbeddedCluster)
        with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
            yield running.url
    else:
        with serving_srfake(tmp_path_factory.mktemp("srfake")) as server:
            yield server.url


#: srfake takes all schemas for compatible.
_with_rules = pytest.mark.parametrize("url", ["ours"], indirect=True)


class Klog:
    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        """What the command prints; on stderr, if it fails otherwise than by `check`."""
        done = klog_bytes("schemas", *arguments, "-r", self.url, stdin=stdin.encode())
        assert done.returncode == code, done.stderr.decode()
        assert b"Traceback" not in done.stderr
        return (done.stdout or done.stderr).decode()

    def lines(self, *arguments: str, **others: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*arguments, "--json", **others).splitlines()]


@pytest.fixture
def klog(url: str) -> Klog:
    return Klog(url)


@pytest.fixture
def subject(request: pytest.FixtureRequest, url: str) -> str:
    name = request.node.originalname.removeprefix("test_")
    return f"{name}-value"


def test_what_is_registered(klog: Klog, subject: str, tmp_path: Path) -> None:
    theirs = SchemaRegistryClient({"url": klog.url})
    file = tmp_path / "order.avsc"
    file.write_text(_FIRST)
    told = klog("register", str(file), "--subject", subject)
    first = theirs.get_latest_version(subject)
    assert told == f"{subject} version 1 has id {first.schema_id}\n"
    assert json.loads(first.schema.schema_str)["name"] in ("Order", "a.Order")
    (line,) = klog.lines("register", "--subject", subject, stdin=_SECOND)
    second = SchemaRegistryClient({"url": klog.url}).get_latest_version(subject)  # which keeps what it has learnt
    assert line == {"subject": subject, "version": 2, "id": second.schema_id}
    assert json.loads(klog("show", subject)) == json.loads(second.schema.schema_str)
    (shown,) = klog.lines("show", subject, "latest")
    assert shown["version"] == 2
    for wrong in ("0", "newest"):
        assert f"'{wrong}' is neither a version from 1 on nor latest" in klog("show", subject, wrong, code=2)
    (shown,) = klog.lines("show", subject, "1")
    assert (shown["version"], shown["id"], shown["type"], shown["references"]) == (1, first.schema_id, "avro", [])
    (shown,) = klog.lines("show", "--id", str(first.schema_id))
    assert {"subject": subject, "version": 1} in shown["versions"]
    assert [line["version"] for line in klog.lines("versions", subject)] == [1, 2]
    assert {"subject": subject} in klog.lines("list")
    (line,) = klog.lines("list", subject[:12], "--long")
    assert line == {**klog.lines("versions", subject)[-1], "compatibility": "BACKWARD"}
    assert "404" in klog("show", "no-such", code=1)
    assert "schema id 999999: the schema registry" in klog("show", "--id", "999999", code=1)


def test_references_and_other_formats(klog: Klog, subject: str, tmp_path: Path) -> None:
    theirs = SchemaRegistryClient({"url": klog.url})
    money = tmp_path / "money.proto"
    money.write_text('syntax = "proto3";\npackage a;\nmessage Money {\n  int64 cents = 1;\n}\n')
    klog("register", str(money), "--subject", "money.proto")
    total = 'syntax = "proto3";\nimport "money.proto";\nmessage Total {\n  a.Money sum = 1;\n}\n'
    arguments = ("--type", "protobuf", "--reference", "money.proto=money.proto:1")
    klog("register", "--subject", subject, *arguments, stdin=total)
    found = theirs.get_latest_version(subject).schema
    assert (found.schema_type, found.references) == ("PROTOBUF", [SchemaReference("money.proto", "money.proto", 1)])
    (shown,) = klog.lines("show", subject)
    assert shown["references"] == [{"name": "money.proto", "subject": "money.proto", "version": 1}]
    assert klog("show", subject).split() == total.split()
    file = tmp_path / "thing.json"
    file.write_text('{"type": "object"}')
    klog("register", str(file), "--subject", f"{subject}-json")
    assert theirs.get_latest_version(f"{subject}-json").schema.schema_type == "JSON"


@_with_rules
def test_check(klog: Klog, subject: str) -> None:
    check = ("check", "--subject", subject)
    assert klog(*check, stdin=_THIRD).startswith(f"{subject} has no version yet")
    SchemaRegistryClient({"url": klog.url}).register_schema(subject, Schema(_FIRST, "AVRO"))
    assert klog(*check, stdin=_SECOND) == f"compatible with {subject} (BACKWARD)\n"
    told = klog(*check, stdin=_THIRD, code=1)
    assert told.startswith(f"not compatible with {subject} (BACKWARD):\n  ")
    (line,) = klog.lines(*check, stdin=_THIRD, code=1)
    assert (line["compatible"], line["new"]) == (False, False)
    assert line["reasons"]
    klog(*check, "--version", "1", stdin=_SECOND)
    assert "404" in klog(*check, "--version", "7", stdin=_SECOND, code=1)
    assert "--reference x: must be NAME=SUBJECT:VERSION" in klog(*check, "--reference", "x", stdin=_FIRST, code=2)


def test_config(klog: Klog, subject: str) -> None:
    theirs = SchemaRegistryClient({"url": klog.url})
    theirs.register_schema(subject, Schema(_FIRST, "AVRO"))
    assert klog("config", subject) == f"{subject}: BACKWARD\n"
    klog("config", subject, "--compatibility", "full_transitive")
    assert theirs.get_compatibility(subject) == "FULL_TRANSITIVE"
    assert klog.lines("config", subject, "--reset") == [{"subject": subject, "compatibility": "BACKWARD"}]
    assert klog("config") == "all other subjects: BACKWARD\n"


@_with_rules
def test_diff(klog: Klog, subject: str) -> None:
    theirs = SchemaRegistryClient({"url": klog.url})
    klog("config", subject, "--compatibility", "NONE")
    ids = [theirs.register_schema(subject, Schema(text, "AVRO")) for text in (_FIRST, _SECOND, _THIRD)]
    told = klog("diff", subject, "1", "2").splitlines()
    assert told[:6] == [
        f"{subject} version 1 (id {ids[0]}) -> version 2 (id {ids[1]})",
        "  changed  id: int -> long",
        "  renamed  title: name: string -> string",
        "  added    note: null | string = null",
        "  added    lines[].count: int = 1",
        "BACKWARD             yes",
    ]
    assert f"--- {subject} version 1 (id {ids[0]})" in told
    assert '-      "type": "int"' in told
    (line,) = klog.lines("diff", subject)
    assert (line["from"], line["to"]) == (2, 3)
    assert {(one["kind"], one["path"]) for one in line["changes"]} == {
        ("added", "must"),
        ("removed", "lines"),
        ("removed", "lines[].price"),
        ("removed", "lines[].count"),
    }
    assert not any(line["compatibility"].values())
    (line,) = klog.lines("diff", subject, "1", "2")
    held = [level for level, holds in line["compatibility"].items() if holds]
    assert held == ["BACKWARD", "BACKWARD_TRANSITIVE"]
    # what each level says is what the registry says
    for level, holds in klog.lines("diff", subject, "1", "3")[0]["compatibility"].items():
        theirs.set_compatibility(subject_name=subject, level=level)
        if not level.endswith("_TRANSITIVE"):
            assert theirs.test_compatibility(subject, Schema(_THIRD, "AVRO"), 1) == holds, level


def test_delete(klog: Klog, subject: str) -> None:
    theirs = SchemaRegistryClient({"url": klog.url})
    for text in (_FIRST, _SECOND):
        theirs.register_schema(subject, Schema(text, "AVRO"))
    assert "Aborted" in klog("delete", subject, code=1)
    assert klog("delete", subject, "--version", "1", "--yes") == f"{subject}: version 1 deleted\n"
    assert theirs.get_versions(subject) == [2]
    klog("delete", subject, "--yes")
    assert subject not in theirs.get_subjects()
    assert {"subject": subject} in klog.lines("list", "--deleted")
    klog("delete", subject, "--permanent", "--yes")
    assert {"subject": subject} not in klog.lines("list", "--deleted")


def test_where_the_registry_is(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = tmp_path / "clusters.toml"
    clusters.write_text(f'[prod]\nbootstrap.servers = "h:1"\nschema.registry.url = "{url}"\n')
    monkeypatch.setenv("KLOG_CONFIG", str(clusters))
    config = tmp_path / "client.properties"
    config.write_text(f"bootstrap.servers=h:1\nschema.registry.url={url}\n")
    for arguments in (
        ("--cluster", "prod"),
        ("--command-config", str(config)),
        ("-X", f"schema.registry.url={url}"),
    ):
        done = klog_bytes("schemas", "config", *arguments)
        assert (done.returncode, done.stdout) == (0, b"all other subjects: BACKWARD\n"), done.stderr
    for arguments, error in (
        (("-X", "schema.registry.uri=h"), "unknown setting schema.registry.uri: it is not known to this version"),
        (("--cluster", "prod", "-r", "http://other:8081"), "--schema-registry, --set schema.registry.url and"),
        (
            ("-X", "acks=1"),
            "-X acks: -X takes schema.registry.* settings here; settings of the client go in",
        ),
        (("-X", "schema.registry.basic.auth.user.info=alice"), "must be USER:PASSWORD"),
    ):
        done = klog_bytes("schemas", "list", "-r", url, *arguments)
        assert done.returncode
        assert error in done.stderr.decode()
        assert b"alice" not in done.stderr


def test_changes_of_a_recursive_json_schema() -> None:
    tree: dict[str, Any] = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}}}
    newer = {**tree, "required": ["value"], "properties": {**tree["properties"], "tags": {"type": ["array", "null"]}}}
    assert changes("json-schema", json.dumps(tree), json.dumps(newer)) == [
        Change("changed", "value", "integer", "integer, required"),
        Change("changed", "next.value", "integer", "integer, required"),
        Change("added", "next.tags", None, "array | null"),
        Change("added", "tags", None, "array | null"),
    ]


def test_changes_of_avro_types() -> None:
    state = {"type": "enum", "name": "State", "symbols": ["A"]}
    money = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    old = [{"name": "state", "type": state}, {"name": "next", "type": ["null", "R"]}, {"name": "hash", "type": "a.H"}]
    new = [
        {"name": "state", "type": state | {"symbols": ["A", "B"]}, "default": "A"},
        {"name": "next", "type": ["null", "R"]},
        {"name": "sums", "type": {"type": "map", "values": ["null", money]}},
    ]
    references = {"a.H": json.dumps({"type": "fixed", "name": "a.H", "size": 16})}
    texts = [json.dumps({"type": "record", "name": "s.R", "fields": fields}) for fields in (old, new)]
    assert changes("avro", *texts, references) == [
        Change("changed", "state", "enum s.State (A)", 'enum s.State (A, B) = "A"'),
        Change("added", "sums", None, "map<null | bytes decimal(9, 2)>"),
        Change("removed", "hash", "fixed a.H (16 bytes)", None),
    ]
    assert changes("avro", '"int"', '["null", "int"]') == [Change("changed", "", "int", "null | int")]
    with pytest.raises(ValueError, match="neither an Avro type nor a name"):
        changes("avro", texts[0], '"int"')


def test_changes_of_messages() -> None:
    text = 'syntax = "proto3"; message M {{ {} }}'
    old = text.format("int32 a = 1; repeated string b = 2; enum E { Z = 0; }")
    new = text.format("int64 a = 1; optional bool c = 3; oneof o { M d = 4; } enum E { Z = 0; Y = 1; }")
    assert changes("protobuf", old, new) == [
        Change("changed", "M.a", "int32 = 1", "int64 = 1"),
        Change("added", "M.c", None, "optional bool = 3"),
        Change("added", "M.d", None, "M of oneof o = 4"),
        Change("added", "M.E.Y", None, "enum value 1"),
        Change("removed", "M.b", "repeated string = 2", None),
    ]


def test_reasons_in_words() -> None:
    reason = "{errorType:'NAME_MISMATCH', description:'The name's other', additionalInfo:'expected: \"x\"'}"
    assert in_words(reason) == "The name's other"
    assert in_words("{errorType:\"A_B\", description:\"It is 'x' now'}") == "It is 'x' now"
    assert in_words("not compatible") == "not compatible"
