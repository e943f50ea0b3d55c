"""The schema registry's REST API: what Confluent's documentation says, request by request."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

import pytest

from spark_klog import __version__
from tests.schemas.registry.asking import CONTENT_TYPE, ask, ask_whole, record, register, with_default

ONE = '{"type":"record","name":"Click","fields":[{"name":"a","type":"int"}]}'


def test_a_schema_is_registered_once(registry: str) -> None:
    first = register(registry, "once", record("a"))
    assert register(registry, "once", ONE) == first  # other white space
    assert register(registry, "once-again", ONE) == first  # the same schema, of another subject
    assert ask(registry, "GET", "/subjects/once/versions") == (200, [1])
    second = register(registry, "once", record("a", with_default("b")))
    assert second > first
    assert ask(registry, "GET", "/subjects/once/versions") == (200, [1, 2])


def test_how_a_schema_is_found(registry: str) -> None:
    id = register(registry, "found", record("f"))
    text = record("f").replace(": ", ":").replace(", ", ",")
    guid = str(uuid.UUID(bytes=hashlib.md5(text.encode()).digest()))
    status, version = ask(registry, "GET", "/subjects/found/versions/latest")
    assert status == 200
    assert version.pop("ts") > 1_600_000_000_000
    whole = {"subject": "found", "version": 1, "id": id, "guid": guid, "schemaType": "AVRO", "schema": text}
    assert version == whole
    assert ask(registry, "GET", "/subjects/found/versions/1")[1].items() >= whole.items()
    assert ask(registry, "POST", "/subjects/found", {"schema": record("f")})[1].items() >= whole.items()
    assert ask(registry, "GET", f"/schemas/ids/{id}")[1].items() >= {"guid": guid, "schema": text}.items()
    assert ask(registry, "GET", f"/schemas/guids/{guid}")[1].items() >= {"guid": guid, "schema": text}.items()
    assert ask(registry, "GET", f"/schemas/guids/{guid}/ids") == (200, [{"context": ".", "id": id}])
    assert ask(registry, "GET", f"/schemas/ids/{id}/subjects") == (200, ["found"])
    assert ask(registry, "GET", f"/schemas/ids/{id}/versions") == (200, [{"subject": "found", "version": 1}])
    assert ask_whole(registry, "GET", f"/schemas/ids/{id}/schema")[1] == text.encode()
    assert ask_whole(registry, "GET", "/subjects/found/versions/1/schema")[1] == text.encode()
    assert ask(registry, "GET", f"/schemas/ids/{id}?fetchMaxId=true")[1]["maxId"] >= id
    assert "found" in ask(registry, "GET", "/subjects")[1]
    assert ask(registry, "GET", "/subjects?subjectPrefix=foun") == (200, ["found"])
    assert [each["id"] for each in ask(registry, "GET", "/schemas?subjectPrefix=found")[1]] == [id]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/subjects/none/versions", None, 40401),
        ("GET", "/subjects/none/versions/1", None, 40401),
        ("POST", "/subjects/none", {"schema": ONE}, 40401),
        ("DELETE", "/subjects/none", None, 40401),
        ("GET", "/subjects/refused/versions/7", None, 40402),
        ("GET", "/schemas/ids/999999", None, 40403),
        ("GET", "/schemas/guids/none", None, 40403),
        ("POST", "/subjects/refused", {"schema": '"long"'}, 40403),
        ("GET", "/config/refused", None, 40408),
        ("GET", "/mode/refused", None, 40409),
        ("DELETE", "/subjects/refused?permanent=true", None, 40405),
        ("DELETE", "/subjects/refused/versions/1?permanent=true", None, 40407),
        ("POST", "/subjects/refused/versions", {"schema": record("a", "b")}, 409),
        ("POST", "/subjects/refused/versions", {"schema": "{"}, 42201),
        ("POST", "/subjects/refused/versions", {"schema": '{"type":"nothing"}'}, 42201),
        ("POST", "/subjects/refused/versions", {"schema": ""}, 42201),
        ("POST", "/subjects/refused/versions", {"schema": ONE, "schemaType": "XML"}, 42201),
        (
            "POST",
            "/subjects/refused/versions",
            {"schema": ONE, "references": [{"name": "x", "subject": "none", "version": 1}]},
            42201,
        ),
        ("GET", "/subjects/refused/versions/0", None, 42202),
        ("GET", "/subjects/refused/versions/two", None, 42202),
        ("PUT", "/config/refused", {"compatibility": "SOMEWHAT"}, 42203),
        ("PUT", "/mode/refused", {"mode": "SOMEHOW"}, 42204),
        ("POST", "/subjects/refused/versions", {"schema": ONE, "id": 7}, 42205),
        ("POST", "/subjects/refused/versions", b"{", 400),
        ("POST", "/subjects/refused/versions", [], 422),
        ("POST", "/subjects/refused/versions", {"schema": 7}, 422),
        ("POST", "/subjects/refused/versions", {"schema": ONE, "metadata": {"properties": {"a": 1}}}, 422),
        ("POST", "/subjects/refused/versions", {"schema": ONE, "metadata": {"tags": ["a"]}}, 422),
        ("POST", "/subjects/refused/versions", {"schema": ONE, "ruleSet": {"domainRules": [{"name": 7}]}}, 42210),
        ("POST", "/subjects/refused/versions", b'{"schema": "\\ud800"}', 400),
        ("POST", "/subjects/a%0Ab/versions", {"schema": ONE}, 42208),
        ("POST", "/subjects/:.x:/versions", {"schema": ONE}, 42208),
        ("GET", "/nothing", None, 404),
        ("GET", "/schemas/ids/x", None, 404),
        ("PUT", "/subjects", None, 405),
    ],
)
def test_refusals_have_codes(registry: str, method: str, path: str, body: Any, code: int) -> None:
    register(registry, "refused", ONE)
    status, answer = ask(registry, method, path, body)
    assert (status, answer["error_code"]) == (code if code < 1000 else code // 100, code)
    assert answer["message"]
    assert ask(registry, "GET", "/subjects/refused/versions") == (200, [1])


def test_deletes(registry: str) -> None:
    first = register(registry, "gone", record("gone"))
    register(registry, "gone", record("gone", with_default("b")))
    assert ask(registry, "DELETE", "/subjects/gone/versions/1") == (200, 1)
    assert ask(registry, "DELETE", "/subjects/gone/versions/1")[1]["error_code"] == 40406
    assert ask(registry, "GET", "/subjects/gone/versions") == (200, [2])
    assert ask(registry, "GET", "/subjects/gone/versions?deleted=true") == (200, [1, 2])
    assert ask(registry, "GET", "/subjects/gone/versions?deletedOnly=true") == (200, [1])
    assert ask(registry, "GET", "/subjects/gone/versions?deletedAsNegative=true") == (200, [-1, 2])
    assert ask(registry, "GET", f"/schemas/ids/{first}")[0] == 200  # records that have it can still be read
    assert ask(registry, "GET", "/subjects/gone/versions/1")[1]["error_code"] == 40402
    assert ask(registry, "GET", "/subjects/gone/versions/1?deleted=true")[1]["deleted"] is True

    assert register(registry, "gone", record("gone")) == first  # the same id, as the next version
    assert ask(registry, "GET", "/subjects/gone/versions?deleted=true") == (200, [2, 3])

    assert ask(registry, "DELETE", "/subjects/gone") == (200, [2, 3])
    assert ask(registry, "DELETE", "/subjects/gone")[1]["error_code"] == 40404
    assert "gone" not in ask(registry, "GET", "/subjects")[1]
    assert "gone" in ask(registry, "GET", "/subjects?deletedOnly=true")[1]
    assert ask(registry, "DELETE", "/subjects/gone?permanent=true") == (200, [2, 3])
    assert ask(registry, "GET", f"/schemas/ids/{first}")[1]["error_code"] == 40403
    assert "gone" not in ask(registry, "GET", "/subjects?deleted=true")[1]
    assert register(registry, "gone", record("gone")) > first  # an id is not given to another schema
    assert ask(registry, "GET", "/subjects/gone/versions") == (200, [1])


def test_a_schema_that_another_one_uses_is_not_deleted(registry: str) -> None:
    register(registry, "used", '{"type":"enum","name":"Kind","symbols":["A"]}')
    using = {"name": "kind", "type": "Kind"}
    reference = {"name": "Kind", "subject": "used", "version": 1}
    id = register(registry, "using", record(using), references=[reference])
    assert ask(registry, "GET", f"/schemas/ids/{id}")[1]["references"] == [reference]
    assert ask(registry, "GET", "/subjects/used/versions/1/referencedby") == (200, [id])
    assert ask(registry, "DELETE", "/subjects/used")[1]["error_code"] == 42206
    assert ask(registry, "DELETE", "/subjects/used/versions/1")[1]["error_code"] == 42206
    resolved = json.loads(ask(registry, "GET", f"/schemas/ids/{id}?format=resolved")[1]["schema"])
    assert resolved["fields"][0]["type"] == {"type": "enum", "name": "Kind", "symbols": ["A"]}
    assert ask(registry, "DELETE", "/subjects/using") == (200, [1])
    assert ask(registry, "DELETE", "/subjects/used") == (200, [1])
    # it is still there for the deleted schema, which may come back
    assert ask(registry, "DELETE", "/subjects/used?permanent=true")[1]["error_code"] == 42206


@pytest.mark.parametrize(
    ("level", "new", "is_compatible"),
    [
        ("BACKWARD", record("a"), True),  # the last one has a and b
        ("BACKWARD", record("a", "b", with_default("c")), True),
        ("BACKWARD", record("a", "b", "c"), False),
        ("FORWARD", record("a", "b", "c"), True),
        ("FORWARD", record("a", "c"), False),
        ("FORWARD_TRANSITIVE", record("a", "b"), True),
        ("FULL", record("a", "b", with_default("c")), True),
        ("FULL", record("a", "b", "c"), False),
        # the first one has a only
        ("BACKWARD_TRANSITIVE", record("a", "b", with_default("c")), False),
        ("BACKWARD_TRANSITIVE", record("a", with_default("b")), True),
        ("FULL_TRANSITIVE", record("a", with_default("b"), with_default("c")), True),
        ("FULL_TRANSITIVE", record("a", "b", with_default("c")), False),
        ("NONE", '"string"', True),
        ("BACKWARD", '"string"', False),
    ],
)
def test_levels_of_compatibility(registry: str, level: str, new: str, is_compatible: bool) -> None:
    subject = f"level-{uuid.uuid4()}"
    assert ask(registry, "PUT", f"/config/{subject}", {"compatibility": "NONE"})[0] == 200
    register(registry, subject, record("a"))
    register(registry, subject, record("a", "b"))
    assert ask(registry, "PUT", f"/config/{subject}", {"compatibility": level}) == (200, {"compatibility": level})
    path = f"/compatibility/subjects/{subject}/versions"
    assert ask(registry, "POST", path, {"schema": new}) == (200, {"is_compatible": is_compatible})
    status, answer = ask(registry, "POST", f"{path}?verbose=true", {"schema": new})
    assert (status, bool(answer["messages"])) == (200, not is_compatible)
    status, answer = ask(registry, "POST", f"/subjects/{subject}/versions", {"schema": new})
    assert status == (200 if is_compatible else 409)
    assert is_compatible or answer["error_code"] == 409


def test_the_compatibility_with_one_version(registry: str) -> None:
    register(registry, "one-version", record("a"))
    register(registry, "one-version", record("a", with_default("b")))
    new = {"schema": record("a", "b")}
    path = "/compatibility/subjects/one-version/versions"
    assert ask(registry, "POST", f"{path}/latest", new) == (200, {"is_compatible": True})
    assert ask(registry, "POST", f"{path}/1", new) == (200, {"is_compatible": False})
    assert ask(registry, "POST", f"{path}/9", new)[1]["error_code"] == 40402
    messages = ask(registry, "POST", f"{path}/1?verbose=true", new)[1]["messages"]
    assert messages == [
        "{errorType:'READER_FIELD_MISSING_DEFAULT_VALUE', description:'The field 'b' at path '/fields/1' in the new "
        "schema has no default value and is missing in the old schema', additionalInfo:'b'}",
        "{oldSchemaVersion: 1}",
        f"{{oldSchema: '{ONE}'}}",
        "{validateFields: 'false', compatibility: 'BACKWARD'}",
    ]
    status, answer = ask(registry, "POST", f"{path}/1?verbose=true", {"schema": "{"})
    assert (status, answer["is_compatible"], len(answer["messages"])) == (200, False, 1)


def test_configuration(registry: str) -> None:
    assert ask(registry, "GET", "/config") == (200, {"compatibilityLevel": "BACKWARD"})
    assert ask(registry, "GET", "/config/c1?defaultToGlobal=true") == (200, {"compatibilityLevel": "BACKWARD"})
    changed = {"compatibility": "full_transitive", "normalize": True}
    assert ask(registry, "PUT", "/config/c1", changed) == (200, {"compatibility": "FULL_TRANSITIVE", "normalize": True})
    found = {"compatibilityLevel": "FULL_TRANSITIVE", "normalize": True}
    assert ask(registry, "GET", "/config/c1") == (200, found)
    one = '{"type":"record","name":"R","namespace":"n","fields":[{"type":"int","name":"a","z":1,"b":2}]}'
    assert register(registry, "c1", one) == register(registry, "c1", one.replace('"z":1,"b":2', '"b":2,"z":1'))
    assert ask(registry, "DELETE", "/config/c1") == (200, found)
    assert ask(registry, "DELETE", "/config/c1")[1]["error_code"] == 40401
    assert ask(registry, "GET", "/config/c1")[1]["error_code"] == 40408


def test_metadata_is_part_of_a_schema(registry: str) -> None:
    metadata = {"properties": {"owner": "me"}, "tags": {"a": ["pii"]}, "sensitive": ["owner"]}
    register(registry, "meta", record("meta"))
    register(registry, "meta", record("meta"), metadata=metadata)
    assert ask(registry, "GET", "/subjects/meta/versions") == (200, [1, 2])
    assert ask(registry, "GET", "/subjects/meta/versions/2")[1]["metadata"] == metadata
    assert ask(registry, "GET", "/subjects/meta/metadata?key=owner&value=me")[1]["version"] == 2
    assert ask(registry, "GET", "/subjects/meta/metadata?key=owner&value=you")[1]["error_code"] == 40403
    rule = {"name": "r", "kind": "CONDITION", "mode": "WRITE", "type": "CEL", "expr": "true", "tags": ["b", "a"]}
    register(registry, "meta", record("meta"), metadata=metadata, ruleSet={"domainRules": [rule]})
    found = ask(registry, "GET", "/subjects/meta/versions/3")[1]
    text = record("meta").replace(": ", ":").replace(", ", ",")
    digest = hashlib.md5(f"{text}\1apiiownermeowner\1rCONDITIONWRITECELabtrue".encode()).digest()
    assert (found["ruleSet"], found["guid"]) == ({"domainRules": [rule]}, str(uuid.UUID(bytes=digest)))
    ask(registry, "PUT", "/config/meta", {"compatibilityGroup": "owner"})
    new = {"schema": '"string"', "metadata": {"properties": {"owner": "you"}}}
    assert ask(registry, "POST", "/subjects/meta/versions", new)[0] == 200  # nobody else is of this group


def test_modes(registry: str) -> None:
    assert ask(registry, "GET", "/mode") == (200, {"mode": "READWRITE"})
    register(registry, "mode-1", record("a"))
    assert ask(registry, "PUT", "/mode/mode-1", {"mode": "READONLY"}) == (200, {"mode": "READONLY"})
    more = {"schema": record("a", with_default("b"))}
    assert ask(registry, "POST", "/subjects/mode-1/versions", more)[1]["error_code"] == 42205
    assert ask(registry, "DELETE", "/subjects/mode-1")[1]["error_code"] == 42205
    assert ask(registry, "DELETE", "/mode/mode-1") == (200, {"mode": "READONLY"})
    assert ask(registry, "PUT", "/mode/mode-1", {"mode": "IMPORT"})[1]["error_code"] == 42205
    assert ask(registry, "PUT", "/mode/mode-2", {"mode": "IMPORT"}) == (200, {"mode": "IMPORT"})
    imported = {"schema": record("imported"), "id": 4_711, "version": 5}
    assert ask(registry, "POST", "/subjects/mode-2/versions", imported)[1]["id"] == 4_711
    assert ask(registry, "GET", "/subjects/mode-2/versions/5")[1]["id"] == 4_711
    other = {"schema": record("other"), "id": 4_711, "version": 6}
    assert ask(registry, "POST", "/subjects/mode-2/versions", other)[1]["error_code"] == 42205
    assert register(registry, "mode-3", record("after")) == 4_712
    assert ask(registry, "PUT", "/mode/mode-2", {"mode": "READWRITE"})[0] == 200


def test_contexts_have_ids_of_their_own(registry: str) -> None:
    register(registry, "ctx", record("here"))
    assert register(registry, ":.staging:ctx", record("there")) == 1
    assert ask(registry, "GET", "/contexts/.staging/subjects") == (200, [":.staging:ctx"])
    assert ask(registry, "GET", "/contexts/staging/subjects/ctx/versions/latest")[1]["id"] == 1
    assert "there" in ask(registry, "GET", "/contexts/.staging/schemas/ids/1")[1]["schema"]
    assert "there" in ask(registry, "GET", "/schemas/ids/1?subject=:.staging:ctx")[1]["schema"]
    assert ask(registry, "GET", "/contexts")[1] == [".", ".staging"]
    assert ask(registry, "DELETE", "/contexts/.staging")[1]["error_code"] == 42211


def test_the_server(registry: str) -> None:
    clusters = ask(registry, "GET", "/v1/metadata/id")[1]["scope"]["clusters"]
    assert (len(clusters["kafka-cluster"]), clusters["schema-registry-cluster"]) == (22, "schema-registry")
    assert ask(registry, "GET", "/v1/metadata/version") == (200, {"version": __version__})
    assert ask(registry, "GET", "/schemas/types") == (200, ["JSON", "PROTOBUF", "AVRO"])
    assert ask(registry, "GET", "/") == (200, {})
    status, body, headers = ask_whole(registry, "GET", "/subjects", Accept="application/json, */*")
    assert (status, headers["content-type"]) == (200, "application/json")
    status, body, headers = ask_whole(registry, "GET", "/subjects/none/versions", Accept="text/html")
    assert (status, headers["content-type"]) == (404, CONTENT_TYPE)
    assert ask_whole(registry, "PUT", "/subjects")[2]["allow"] == "GET"
    status, body, _ = ask_whole(registry, "HEAD", "/subjects")
    assert (status, body) == (200, b"")


def test_what_browsers_and_large_bodies_get(registry: str) -> None:
    assert ask(registry, "GET", "/subjects", Host="rebound.example")[0] == 403
    assert ask(registry, "GET", "/subjects", Origin="http://example.com")[0] == 403
    assert ask_whole(registry, "POST", "/subjects/x/versions", None, Content_Length=str(1 << 30))[0] == 413
    assert ask(registry, "POST", "/subjects/x/versions", {"schema": json.dumps("x" * 1_500_000)})[0] == 422
    large = json.dumps({"type": "enum", "name": "E", "symbols": [f"s{n}" for n in range(200_000)]})
    assert ask(registry, "POST", "/subjects/x/versions", {"schema": large})[1]["error_code"] == 42209
    assert register(registry, "after-large", record("a"))


@pytest.mark.parametrize("depth", [100, 100_000])
def test_nested_deeply(registry: str, depth: int) -> None:
    text = '{"type":"array","items":' * depth + '"int"' + "}" * depth
    status, answer = ask(registry, "POST", "/subjects/deep/versions", {"schema": text})
    assert status == (200 if depth == 100 else 422), answer
