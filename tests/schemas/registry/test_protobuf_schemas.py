"""Protobuf schemas in a registry: the canonical text, and Confluent's rules of compatibility."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from spark_klog.registry import errors, state
from spark_klog.registry.api import answer
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.formats import InvalidSchema
from spark_klog.registry.formats.protobuf import ProtobufSchema, differences
from spark_klog.registry.records import SCHEMA, Key, Record
from spark_klog.registry.registry import Registry
from spark_klog.registry.state import Definition, schema_value
from tests.schemas.registry.memory_log import MemoryLog

_WHOLE = """syntax = "proto3";
package a.b;

import "other.proto";
import "confluent/meta.proto";
import public "google/protobuf/timestamp.proto";

option java_package = "x.y";

message M {
  reserved 20 to 22;
  reserved 30;
  reserved "gone";

  option deprecated = true;

  int32 a = 1;
  repeated string many = 2 [json_name = "MANY"];
  map<string, Inner> map = 3;
  optional double maybe = 4;
  google.protobuf.Timestamp at = 5 [
    deprecated = true,
    (confluent.field_meta) = { doc: "when" }
  ];
  c.Other other = 6;
  Kind kind = 7;

  oneof choice {
    int64 left = 8;
    Inner right = 9;
  }

  message Inner {
    bytes data = 1;
  }
  enum Kind {
    option allow_alias = true;
    ZERO = 0;
    NULL = 0;
    ONE = 1 [deprecated = true];
  }
}
message Empty {}
enum Top {
  FIRST = 0;
}

service Service {
  rpc Call (M) returns (stream Empty);
}
"""
_OTHER = {"other.proto": 'syntax = "proto3"; package c; message Other { int32 x = 1; }'}
_PROTO2 = """syntax = "proto2";

message M {
  required int32 a = 1;
  optional string b = 2 [default = "x\\"y"];
  optional double c = 3 [default = 1.5];

  repeated group G = 4 {
    optional bool on = 1 [default = true];
  }

  extensions 100 to max;
}

extend M {
  optional int32 more = 100;
}
"""


@pytest.mark.parametrize(("text", "references"), [(_WHOLE, _OTHER), (_PROTO2, {})])
def test_the_canonical_text(text: str, references: dict[str, str]) -> None:
    schema = ProtobufSchema(text, references)
    assert schema.canonical() == text
    squeezed = "// a comment\n" + text.replace("\n  ", "\n/* x */ ").replace("{\n", "{")
    assert ProtobufSchema(squeezed, references).canonical() == text
    serialized = ProtobufSchema(schema.formatted("serialized"), references)
    assert serialized.normalized() == schema.normalized()
    assert ProtobufSchema(serialized.canonical(), references).canonical() == serialized.canonical()
    descriptor = FileDescriptorProto.FromString(base64.b64decode(schema.formatted("serialized")))
    assert descriptor.message_type[0].name == "M"


def test_maps_of_serialized_schemas_are_messages() -> None:
    """As Confluent's registry writes them, though protoc does not take such a text."""
    text = 'syntax = "proto3";\n\nmessage M {\n  map<string, M> ms = 1;\n}\n'
    serialized = ProtobufSchema(text, {}).formatted("serialized")
    schema = ProtobufSchema(serialized, {})
    assert schema.canonical() == (
        'syntax = "proto3";\n\nmessage M {\n  repeated .M.MsEntry ms = 1;\n\n  message MsEntry {\n'
        "    option map_entry = true;\n\n    string key = 1;\n    .M value = 2;\n  }\n}\n"
    )
    again = ProtobufSchema(schema.canonical(), {})
    assert again.canonical() == schema.canonical()
    assert again.formatted("serialized") == serialized
    assert again.normalized() == ProtobufSchema(text, {}).normalized() == text.replace(", M>", ", .M>")
    changed = ProtobufSchema(text.replace("string, M", "string, int32"), {})
    assert "FIELD_KIND_CHANGED" in changed.unreadable(again)[0]
    assert ProtobufSchema(text, {}).unreadable(again) == []


def test_the_normalized_text() -> None:
    one = 'syntax = "proto3"; message M { N b = 2; string a = 1; enum E { Y = 0; X = 1; } } message N {}'
    other = 'syntax = "proto3"; message M { string a = 1; .N b = 2; enum E { Y = 0; X = 1; } } message N {}'
    assert ProtobufSchema(one, {}).canonical() != ProtobufSchema(other, {}).canonical()
    assert ProtobufSchema(one, {}).normalized() == ProtobufSchema(other, {}).normalized()


@pytest.mark.parametrize(
    ("text", "references", "reason"),
    [
        ('syntax = "proto3"; message M { int32 a = 1 }', {}, r"1:\d+: Expected"),
        ('syntax = "proto3"; message M { X a = 1; }', {}, '"X" is not defined'),
        ('syntax = "proto3"; import "none.proto";', {}, "none.proto: File not found"),
        ('syntax = "proto3"; import "../../../etc/hosts";', {}, "etc/hosts"),
        ('syntax = "proto3";', {"../x.proto": ""}, "is not a path"),
        ('syntax = "proto3";', {"/x.proto": ""}, "is not a path"),
    ],
)
def test_what_is_no_schema(text: str, references: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidSchema, match=reason) as refused:
        ProtobufSchema(text, references)
    assert "klog-proto" not in str(refused.value)  # no folder of this machine


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("int32 a = 1;", "int32 a = 1; string b = 2;", "+FIELD_ADDED #/M/2"),
        ("int32 a = 1;", "", "+FIELD_REMOVED #/M/1"),
        ("int32 a = 1;", "int32 b = 1;", "+FIELD_NAME_CHANGED #/M/1"),
        ("int32 a = 1;", "uint64 a = 1;", "+"),
        ("int32 a = 1;", "sint32 a = 1;", "-FIELD_SCALAR_KIND_CHANGED #/M/1"),
        ("string a = 1;", "bytes a = 1;", "+"),
        ("fixed32 a = 1;", "fixed64 a = 1;", "-FIELD_SCALAR_KIND_CHANGED #/M/1"),
        ("int32 a = 1;", "N a = 1;", "-FIELD_KIND_CHANGED #/M/1"),
        ("N a = 1;", "O a = 1;", "-FIELD_NAMED_TYPE_CHANGED #/M/1"),
        ("optional int32 a = 1;", "repeated int32 a = 1;", "-FIELD_NUMERIC_LABEL_CHANGED #/M/1"),
        ("optional string a = 1;", "repeated string a = 1;", "+FIELD_STRING_OR_BYTES_LABEL_CHANGED #/M/1"),
        ("map<string, int32> a = 1;", "map<string, string> a = 1;", "-FIELD_SCALAR_KIND_CHANGED #/M/1"),
        ("E a = 1;", "int32 a = 1;", "+"),
        ("oneof o { int32 a = 1; int32 b = 2; }", "oneof o { int32 a = 1; }", "-ONEOF_FIELD_REMOVED #/M/o/2"),
        ("oneof o { int32 a = 1; }", "oneof o { int32 a = 1; int32 b = 2; }", "+ONEOF_FIELD_ADDED #/M/o/2"),
        ("int32 a = 1; int32 b = 2;", "oneof o { int32 a = 1; int32 b = 2; }", "-MULTIPLE_FIELDS_MOVED_TO_ONEOF #/M/o"),
        ("int32 a = 1;", "oneof o { int32 a = 1; }", "+ONEOF_ADDED #/M/o"),
        ("oneof o { int32 a = 1; }", "int32 a = 1;", "+ONEOF_FIELD_MOVED_TO_TOP_LEVEL #/M/1"),
        ("message X {}", "", "-MESSAGE_REMOVED #/M/X"),
        ("", "message X {}", "+MESSAGE_ADDED #/M/X"),
        ("M m = 1; int32 a = 2;", "M m = 1; string a = 2;", "-FIELD_SCALAR_KIND_CHANGED #/M/2"),  # recursive
    ],
)
def test_rules_of_compatibility(old: str, new: str, change: str) -> None:
    before, after = (
        ProtobufSchema(
            f'syntax = "proto3"; message M {{ {body} }} message N {{}} message O {{}} enum E {{ Z = 0; }}', {}
        )
        for body in (old, new)
    )
    found = {f"{each.kind} {each.path}" for each in differences(before.files, after.files)}
    assert found >= ({change[1:]} if change[1:] else set())
    assert (not after.unreadable(before)) is (change[0] == "+")


def test_imported_messages_are_compared() -> None:
    text = 'syntax = "proto3"; import "other.proto"; message M { c.Other other = 1; }'
    before = ProtobufSchema(text, _OTHER)
    assert ProtobufSchema(text, {"other.proto": _OTHER["other.proto"].replace(" x =", " y =")}).unreadable(before) == []
    changes = ProtobufSchema(text, {"other.proto": _OTHER["other.proto"].replace("int32", "string")}).unreadable(before)
    assert ["FIELD_SCALAR_KIND_CHANGED" in changes[0], "FIELD_NAMED_TYPE_CHANGED" in changes[1]] == [True, True]


def test_required_fields_and_packages() -> None:
    def schema(package: str, fields: str) -> ProtobufSchema:
        return ProtobufSchema(f'syntax = "proto2"; package {package}; message M {{ {fields} }}', {})

    before = schema("p", "required int32 a = 1;")
    assert "REQUIRED_FIELD_REMOVED" in schema("p", "").unreadable(before)[0]
    assert "REQUIRED_FIELD_ADDED" in schema("p", "required int32 a = 1; required int32 b = 2;").unreadable(before)[0]
    assert "PACKAGE_CHANGED" in schema("q", "required int32 a = 1;").unreadable(before)[0]


@pytest.mark.parametrize("paths", [["a.proto", "a.proto/b.proto"], ["a.proto/b.proto", "a.proto"], ["n" * 300]])
def test_paths_that_no_file_can_have(paths: list[str]) -> None:
    with pytest.raises(InvalidSchema, match="can't be imported"):
        ProtobufSchema('syntax = "proto3";', dict.fromkeys(paths, 'syntax = "proto3";'))


def test_differences_do_not_multiply() -> None:
    def nested(leaf: str) -> ProtobufSchema:
        """Each imported message has the one before it twice."""
        messages = [f"message L0 {{ {leaf} x = 1; }}"]
        messages += [f"message L{n} {{ L{n - 1} a = 1; L{n - 1} b = 2; }}" for n in range(1, 40)]
        text = 'syntax="proto3"; import "l.proto"; message M { L39 l = 1; }'
        return ProtobufSchema(text, {"l.proto": "\n".join(['syntax="proto3";', *messages])})

    found = nested("int32").unreadable(nested("string"))
    assert 1 <= len(found) <= 100
    assert nested("int32").unreadable(nested("int64")) == []


_HEAD = 'syntax = "proto3";\npackage shop;\n\n'
_BODY = "message M {\n  string a = 1;\n}\n"
#: As Confluent's registry stores them: options as they were in their source, or by name; values of several lines.
_OPTIONS = {
    "by number": 'option java_package = "com.x";\noption java_outer_classname = "X";\noption optimize_for = SPEED;\n',
    "by name": 'option java_outer_classname = "X";\noption java_package = "com.x";\noption optimize_for = SPEED;\n',
    "go first": 'option go_package = "example.com/x";\noption java_package = "com.x";\n',
}
_OF_CONFLUENT = {name: f"{_HEAD}{options}\n{_BODY}" for name, options in _OPTIONS.items()} | {
    "of a field": (
        f"{_HEAD}message M {{\n  repeated int32 a = 1 [\n    deprecated = true,\n    packed = false\n  ];\n}}\n"
    ),
    "of an enum": (
        f"{_HEAD}enum E {{\n  option deprecated = true;\n  option allow_alias = true;\n  A = 0;\n  B = 0 [\n"
        "    debug_redact = true,\n    deprecated = true\n  ];\n}\n"
    ),
    "of a message": (
        f"{_HEAD}message M {{\n  option deprecated = true;\n  option no_standard_descriptor_accessor = true;\n}}\n"
    ),
    "reserved together": f"{_HEAD}message M {{\n  reserved 2, 5 to 7;\n\n  string a = 1;\n}}\n",
    "a map": (
        f'{_HEAD}import "confluent/meta.proto";\n\nmessage M {{\n  string a = 1 [(confluent.field_meta) = {{\n'
        '    doc: "when",\n    tags: [\n      "PII"\n    ]\n  }];\n}\n'
    ),
    "a part of a value": (
        f'{_HEAD}import "confluent/meta.proto";\n\nmessage M {{\n'
        '  string a = 1 [(confluent.field_meta).doc = "x"];\n}\n'
    ),
    "no syntax": "message M {\n  optional double a = 1 [default = 1.0];\n}\n",
}


@pytest.mark.parametrize("name", _OF_CONFLUENT)
def test_what_another_registry_stored_is_the_same_schema(name: str) -> None:
    """By its own text, and by its source with comments; in another subject it has the same id."""
    log = MemoryLog()
    text = _OF_CONFLUENT[name]
    value = schema_value("a", 1, 700, Definition("PROTOBUF", text), False)
    log.append([Record(Key(SCHEMA, "a", 1), value)])
    registry = Registry(log)  # type: ignore[arg-type]
    before = list(log.records)
    commented = "// a comment\n" + text.replace("\n  ", "\n    ")
    for sent, path, query in (
        (text, "/subjects/a", ""),
        (text, "/subjects/a/versions", "normalize=true"),
        (commented, "/subjects/a", ""),
    ):
        body = json.dumps({"schemaType": "PROTOBUF", "schema": sent}).encode()
        made = json.loads(answer(registry, "POST", path, query, body).body)
        assert (made.get("id"), made.get("version")) == (700, 1), (path, query, made)
    assert log.records == before
    body = json.dumps({"schemaType": "PROTOBUF", "schema": text}).encode()
    assert json.loads(answer(registry, "POST", "/subjects/b/versions", "", body).body)["id"] == 700
    other = json.dumps({"schemaType": "PROTOBUF", "schema": text + "message Other {}\n"}).encode()
    assert json.loads(answer(registry, "POST", "/subjects/b/versions", "", other).body)["id"] == 701


def test_a_stored_text_that_does_not_compile_is_another_schema() -> None:
    log = MemoryLog()
    value = schema_value("a", 1, 700, Definition("PROTOBUF", f"{_HEAD}{_BODY}".replace("1;", "1")), False)
    log.append([Record(Key(SCHEMA, "a", 1), value)])
    registry = Registry(log)  # type: ignore[arg-type]
    registry.configure(None, {"compatibilityLevel": "NONE"})
    body = json.dumps({"schemaType": "PROTOBUF", "schema": f"{_HEAD}{_BODY}"}).encode()
    assert answer(registry, "POST", "/subjects/a", "", body).status == 404
    assert json.loads(answer(registry, "POST", "/subjects/a/versions", "", body).body)["id"] == 701


@pytest.mark.parametrize("name", [*_OPTIONS, "of a field", "of an enum", "of a message"])
def test_the_order_of_options(name: str) -> None:
    text = _OF_CONFLUENT[name]
    assert ProtobufSchema(text, {}).canonical() == text
    serialized = ProtobufSchema(ProtobufSchema(text, {}).formatted("serialized"), {})
    assert serialized.normalized() == ProtobufSchema(text, {}).normalized()


def test_options_are_sorted_by_name() -> None:
    texts = {ProtobufSchema(_OF_CONFLUENT[name], {}).normalized() for name in ("by number", "by name")}
    assert texts == {_OF_CONFLUENT["by name"]}
    of_descriptor = ProtobufSchema(ProtobufSchema(_OF_CONFLUENT["by name"], {}).formatted("serialized"), {})
    assert of_descriptor.canonical() == _OF_CONFLUENT["by number"]


@pytest.mark.parametrize("refusal", [errors.timed_out("busy"), errors.schema_too_large("large")])
def test_a_stored_text_that_cannot_be_parsed_now_may_be_the_schema(refusal: RegistryRefusal) -> None:
    log = MemoryLog()
    stored = 'syntax = "proto3";\n\n\nmessage M   { int32 a = 1; }\n'
    value = schema_value("s", 1, 7, Definition("PROTOBUF", stored), False)
    log.append([Record(Key(SCHEMA, "s", 1), value)])
    is_busy = [True]

    def run(function: Any, *arguments: Any, deadline: float) -> Any:
        if is_busy and arguments[0].text == stored:
            raise refusal
        return function(*arguments)

    registry = Registry(log, run)  # type: ignore[arg-type]
    body = json.dumps({"schemaType": "PROTOBUF", "schema": 'syntax = "proto3"; message M { int32 a = 1; }'}).encode()
    for path in ("/subjects/s", "/subjects/s/versions"):
        assert json.loads(answer(registry, "POST", path, "", body).body)["error_code"] == refusal.code
    is_busy.clear()
    assert json.loads(answer(registry, "POST", "/subjects/s/versions", "", body).body)["id"] == 7
    assert len(log.records) == 1


def test_versions_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up of a few bytes does not take apart again what all versions of a subject say."""
    log = MemoryLog()
    stored = {f'syntax = "proto3";\n\n\nmessage A {{ int32 {name} = 1; }}\n' for name in ("A", "int32", "message")}
    for number, text in enumerate(stored, 1):
        log.append(
            [Record(Key(SCHEMA, "s", number), schema_value("s", number, number, Definition("PROTOBUF", text), False))]
        )
    taken_apart, parsed = [], []
    words_of = state.words_of
    monkeypatch.setattr(state, "words_of", lambda text: (taken_apart.append(text), words_of(text))[1])

    def run(function: Any, *arguments: Any, deadline: float) -> Any:
        parsed.append(arguments[0].text)
        return function(*arguments)

    registry = Registry(log, run)  # type: ignore[arg-type]
    body = json.dumps({"schemaType": "PROTOBUF", "schema": 'syntax = "proto3"; message A { int32 A = 2; }'}).encode()
    for _ in range(3):
        assert json.loads(answer(registry, "POST", "/subjects/s", "", body).body)["error_code"] == 40403
    assert sorted(taken_apart) == sorted(stored)
    assert len([text for text in parsed if text in stored]) == 2 * len(stored)


def test_texts_are_taken_apart_within_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one request has done is kept for the next one."""
    log, taken_apart, now = MemoryLog(), [], 0.0
    for number in range(1, 6):
        text = f'syntax = "proto3";\n\n\nmessage A {{ int32 a{number} = 1; }}\n'
        log.append(
            [Record(Key(SCHEMA, "s", number), schema_value("s", number, number, Definition("PROTOBUF", text), False))]
        )

    def slow_words(text: str) -> int:
        nonlocal now
        taken_apart.append(text)
        now += 0.1
        return 0

    monkeypatch.setattr(state, "words_of", slow_words)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    registry = Registry(log, lambda function, *arguments, deadline: function(*arguments))  # type: ignore[arg-type]
    wanted = Definition("PROTOBUF", 'syntax = "proto3"; message B { int32 b = 2; }')

    def look_up(seconds: float) -> RegistryRefusal:
        with pytest.raises(RegistryRefusal) as refused:
            registry.look_up("s", wanted, normalize=False, deleted=False, deadline=now + seconds)
        return refused.value

    assert look_up(0.25).code == 50002
    assert len(taken_apart) == 3
    assert look_up(60).code == 40403
    assert len(taken_apart) == len(set(taken_apart)) == 5
