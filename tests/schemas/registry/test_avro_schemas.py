"""Avro schemas in a registry: the canonical text is Java's, and compatibility is that of Apache's avro package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import avro.compatibility
import avro.schema
import pytest
from hypothesis import assume, given, settings, strategies as st

from spark_klog.registry.formats import READER, WRITER, InvalidSchema
from spark_klog.registry.formats.avro import AvroSchema

_PRIMITIVES = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('"int"', '"int"'),
        ("int", '"int"'),
        ('{"type": "int"}', '"int"'),
        ('{"type": {"type": "int"}}', '"int"'),
        ('{"type":"long","logicalType":"timestamp-millis"}', '{"type":"long","logicalType":"timestamp-millis"}'),
        ('["null", {"type":"string"}]', '["null","string"]'),
        ('{"items":"int","type":"array","x":1}', '{"type":"array","items":"int","x":1}'),
        (
            '{"name":"a.b.R","type":"record","aliases":["Q","c.Q"],"fields":[],"doc":"what"}',
            '{"type":"record","name":"R","namespace":"a.b","doc":"what","fields":[],"aliases":["Q","c.Q"]}',
        ),
        (  # a name is short in its own namespace, and full in another one
            '{"type":"record","name":"R","namespace":"n","fields":[{"name":"f","type":{"type":"fixed","name":"F","size":2}},'
            '{"name":"g","type":{"type":"record","name":"m.S","fields":[{"name":"h","type":"n.F"}]}},'
            '{"name":"i","type":"F","order":"ignore","default":"ab","x":null}]}',
            '{"type":"record","name":"R","namespace":"n","fields":[{"name":"f","type":{"type":"fixed","name":"F","size":2}},'
            '{"name":"g","type":{"type":"record","name":"S","namespace":"m","fields":[{"name":"h","type":"n.F"}]}},'
            '{"name":"i","type":"F","default":"ab","order":"ignore","x":null}]}',
        ),
        (
            '{"type":"enum","default":"A","symbols":["A","B"],"name":"E","x":1}',
            '{"type":"enum","name":"E","symbols":["A","B"],"default":"A","x":1}',
        ),
        (  # numbers as Java writes them
            '{"type":"array","items":"int","x":[1.0,100000000.0,1e300,-2.5e-5,0.001,12345678.9,1,0.0,9999999.0]}',
            '{"type":"array","items":"int","x":[1.0,1.0E8,1.0E300,-2.5E-5,0.001,1.23456789E7,1,0.0,9999999.0]}',
        ),
        ('{"type":"record","name":"R","fields":[{"name":"é","type":["null","R"],"default":null}]}', None),
    ],
)
def test_the_canonical_text(text: str, canonical: str | None) -> None:
    schema = AvroSchema(text, {})
    assert schema.canonical() == (text if canonical is None else canonical)
    assert AvroSchema(schema.canonical(), {}).canonical() == schema.canonical()


def test_the_normalized_text() -> None:
    text = (
        '{"type":"record","name":"R","namespace":"n","z":1,"aliases":["B","A"],"fields":[{"type":{"type":"bytes","scale":0,'
        '"precision":4,"logicalType":"decimal","y":{"b":1,"a":2}},"name":"f","default":"x"},{"name":"g","type":"int"}]}'
    )
    assert AvroSchema(text, {}).normalized() == (
        '{"name":"n.R","type":"record","fields":[{"name":"f","type":{"type":"bytes","logicalType":"decimal","precision":4,'
        '"y":{"a":2,"b":1}},"order":"ascending","default":"x"},{"name":"g","type":"int","order":"ascending"}],'
        '"aliases":["n.A","n.B"],"z":1}'
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "must be JSON"),
        ("NaN", "must be JSON"),
        ('{"type":"int","x":1e400}', "1e400 is too large"),
        ("7", "7 is not an Avro type"),
        ("{}", "has no type"),
        ('"R"', '"R" is neither an Avro type nor a name'),
        ('{"type":"array"}', "array without 'items'"),
        ('{"type":"fixed","name":"F"}', "fixed F without a size"),
        ('{"type":"enum","name":"E","symbols":["A","A"]}', "has a symbol twice"),
        (
            '{"type":"enum","name":"E","symbols":["A"],"default":"B"}',
            'the default "B" of enum E is not one of its symbols',
        ),
        ('{"type":"record","name":"R"}', "record R without a list 'fields'"),
        ('{"type":"record","fields":[]}', "record without a name"),
        ('{"type":"record","name":"int","fields":[]}', 'name "int", which is an Avro type'),
        ('{"type":"record","name":"1R","fields":[]}', "Illegal name"),
        (
            '{"type":"record","name":"R","fields":[{"name":"a","type":"int"},{"name":"a","type":"int"}]}',
            'two fields "a"',
        ),
        ('{"type":"record","name":"R","fields":[{"name":"a","type":"int","default":"x"}]}', "Invalid default"),
        (  # the default has no "b"
            '{"type":"record","name":"R","fields":[{"name":"a","type":"R","default":{}},{"name":"b","type":"int"}]}',
            "Invalid default for field a",
        ),
        ('["int","int"]', "int is twice in a union"),
        ('["int",["long"]]', "a union directly in a union"),
        ('[{"type":"fixed","name":"F","size":1},{"type":"fixed","name":"F","size":1}]', "F is defined twice"),
    ],
)
def test_what_is_no_schema(text: str, reason: str) -> None:
    with pytest.raises(InvalidSchema, match=reason):
        AvroSchema(text, {}, is_new=True)


def test_references() -> None:
    references = {
        "n.F": '{"type":"fixed","name":"n.F","size":2}',
        "n.A": '{"type":"record","name":"n.A","fields":[{"name":"f","type":"F"}]}',
    }
    schema = AvroSchema('{"type":"array","items":"n.A"}', references)
    assert schema.canonical() == '{"type":"array","items":"n.A"}'
    assert '"size":2' in schema.formatted("resolved")
    with pytest.raises(InvalidSchema, match=r'reference n\.A: field f: "F" is neither'):
        AvroSchema('{"type":"array","items":"n.A"}', {"n.A": references["n.A"]})


_SCHEMAS = st.deferred(
    lambda: st.one_of(st.sampled_from(_PRIMITIVES), _ARRAYS, _MAPS, _UNIONS, _FIXED, _ENUMS, _RECORDS)
)
_ARRAYS = st.builds(lambda items: {"type": "array", "items": items}, _SCHEMAS)
_MAPS = st.builds(lambda items: {"type": "map", "values": items}, _SCHEMAS)
_UNIONS = st.lists(st.sampled_from(_PRIMITIVES), min_size=1, max_size=4, unique=True)
_FIXED = st.builds(lambda size: {"type": "fixed", "name": "F", "size": size}, st.integers(1, 2))
_ENUMS = st.builds(
    lambda symbols, has_default: (
        {"type": "enum", "name": "E", "symbols": symbols} | ({"default": symbols[0]} if has_default else {})
    ),
    st.lists(st.sampled_from("XYZ"), min_size=1, max_size=3, unique=True),
    st.booleans(),
)
_FIELDS = st.fixed_dictionaries(
    {"name": st.sampled_from("abc"), "type": _SCHEMAS},
    optional={"aliases": st.lists(st.sampled_from("abcd"), max_size=1)},
)
_DEFAULTED = st.builds(lambda name: {"name": name, "type": "int", "default": 1}, st.sampled_from("abc"))
_RECORDS = st.builds(
    lambda name, fields: {"type": "record", "name": name, "fields": fields},
    st.sampled_from(["R", "n.R"]),
    st.lists(st.one_of(_FIELDS, _DEFAULTED), max_size=3, unique_by=lambda field: str(field["name"])),
)

#: Reads lines READER TAB WRITER; writes the reader's text, then TAB KIND|PATH|MESSAGE for each difference.
_ORACLE = """
import java.io.*;
import org.apache.avro.*;

public class AvroOracle {
    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        PrintStream out = new PrintStream(System.out, false, "UTF-8");
        for (String line; (line = lines.readLine()) != null; out.println()) {
            Schema reader = new Schema.Parser().parse(line.split("\\t")[0]);
            Schema writer = new Schema.Parser().parse(line.split("\\t")[1]);
            out.print(reader);
            try {
                for (SchemaCompatibility.Incompatibility each : SchemaCompatibility.checkReaderWriterCompatibility(
                        reader, writer).getResult().getIncompatibilities())
                    out.print("\\t" + each.getType() + "|" + each.getLocation() + "|" + each.getMessage());
            } catch (AvroRuntimeException error) {
                out.print("\\tAvroRuntimeException");
            }
        }
        out.flush();
    }
}
"""


def _renamed(schema: Any, numbers: dict[str, int]) -> Any:
    """The schema with each named type having a name of its own: names are declared once."""
    if isinstance(schema, list):
        return [_renamed(branch, numbers) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _renamed(value, numbers) if key != "default" else value for key, value in schema.items()}
    if "name" in made and made.get("type") in ("record", "enum", "fixed"):
        simple = made["name"].rpartition(".")[2]
        numbers[simple] = numbers.get(simple, 0) + 1
        made["name"] += str(numbers[simple])
    return made


@given(_SCHEMAS, _SCHEMAS)
def test_compatibility_is_that_of_apaches_package(reader: Any, writer: Any) -> None:
    texts = [json.dumps(_renamed(schema, {})) for schema in (reader, writer)]
    ours = [AvroSchema(text, {}) for text in texts]
    checker = avro.compatibility.ReaderWriterCompatibilityChecker()
    theirs = checker.get_compatibility(*(avro.schema.parse(text) for text in texts))
    messages = ours[0].unreadable(ours[1])
    assume(not any("matches several fields" in message for message in messages))  # there theirs takes the first one
    is_compatible = theirs.compatibility is avro.compatibility.SchemaCompatibilityType.compatible
    assert (not messages) is is_compatible
    assert AvroSchema(ours[0].normalized(), {}).normalized() == ours[0].normalized()


@pytest.mark.test_all("client")
def test_texts_and_differences_are_javas(tmp_path: Path) -> None:
    """Avro for Java, of pyspark's jars, on random schemas: the same canonical texts, and the same differences."""
    pairs: list[tuple[str, str]] = []

    @settings(max_examples=500, database=None)
    @given(_SCHEMAS, _SCHEMAS)
    def gather(reader: Any, writer: Any) -> None:
        pairs.append((json.dumps(_renamed(reader, {})), json.dumps(_renamed(writer, {}))))

    gather()
    oracle = tmp_path / "AvroOracle.java"
    oracle.write_text(_ORACLE)
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    command = ["java", "-cp", str(Path(spec.origin).parent / "jars" / "*"), str(oracle)]
    lines = "".join("\t".join(pair) + "\n" for pair in pairs)
    done = subprocess.run(command, input=lines.encode(), stdout=subprocess.PIPE, timeout=120, check=True)
    for (reader, writer), line in zip(pairs, done.stdout.decode().splitlines(), strict=True):
        text, *theirs = line.split("\t")
        ours = AvroSchema(reader, {}, is_new=True)
        assert ours.canonical() == text
        messages = ours.unreadable(AvroSchema(writer, {}, is_new=True))
        if theirs == ["AvroRuntimeException"]:
            (message,) = messages
            assert "matches several fields" in message
            continue
        assert len(messages) == len(theirs)
        for message, difference in zip(messages, theirs, strict=True):
            kind, path, said = difference.split("|")
            assert message.startswith(f"{{errorType:'{kind}'")
            assert f"path '{path}'" in message
            assert message.endswith(f"additionalInfo:'{said}'}}")


@pytest.mark.parametrize(
    ("reader", "writer", "kind", "path", "message"),
    [
        ('"int"', '"long"', "TYPE_MISMATCH", "/", "reader type: INT not compatible with writer type: LONG"),
        (
            '"int"',
            '["int","string"]',
            "TYPE_MISMATCH",
            "/1",
            "reader type: INT not compatible with writer type: STRING",
        ),
        ('["int"]', '["int","string"]', "MISSING_UNION_BRANCH", "/1", "reader union lacking writer type: STRING"),
        (
            '{"type":"fixed","name":"F","size":2}',
            '{"type":"fixed","name":"F","size":3}',
            "FIXED_SIZE_MISMATCH",
            "/size",
            "expected: 3, found: 2",
        ),
        (
            '{"type":"enum","name":"E","symbols":["A"]}',
            '{"type":"enum","name":"E","symbols":["C","B","A"]}',
            "MISSING_ENUM_SYMBOLS",
            "/symbols",
            "[B, C]",
        ),
        (
            '{"type":"record","name":"R","fields":[]}',
            '{"type":"record","name":"n.S","fields":[]}',
            "NAME_MISMATCH",
            "/name",
            "expected: n.S",
        ),
        (
            '{"type":"record","name":"R","fields":[{"name":"a","type":{"type":"map","values":"int"}}]}',
            '{"type":"record","name":"R","fields":[{"name":"a","type":{"type":"map","values":"string"}}]}',
            "TYPE_MISMATCH",
            "/fields/0/type/values",
            "reader type: INT not compatible with writer type: STRING",
        ),
    ],
)
def test_what_a_difference_says(reader: str, writer: str, kind: str, path: str, message: str) -> None:
    (text,) = AvroSchema(reader, {}).unreadable(AvroSchema(writer, {}))
    assert text.startswith(f"{{errorType:'{kind}', description:'")
    assert f"path '{path}'" in text
    assert text.endswith(f"additionalInfo:'{message}'}}")
    assert (READER in text) is (WRITER in text) is (kind != "NAME_MISMATCH")


def _chain(depth: int, leaf: str) -> AvroSchema:
    """Each record has the one before it twice."""
    record = {"type": "record", "name": "L0", "fields": [{"name": "x", "type": leaf}]}
    fields: list[dict[str, Any]] = [{"name": "f0", "type": record}]
    for n in range(1, depth):
        twice = [{"name": name, "type": f"L{n - 1}"} for name in ("a", "b")]
        fields.append({"name": f"f{n}", "type": {"type": "record", "name": f"L{n}", "fields": twice}})
    return AvroSchema(json.dumps({"type": "record", "name": "R", "fields": fields}), {})


def test_differences_do_not_multiply() -> None:
    assert len(_chain(60, "int").unreadable(_chain(60, "string"))) == 100
    assert len(_chain(3, "int").unreadable(_chain(3, "string"))) == 7  # few are all said


def test_a_default_is_checked_once_with_each_type() -> None:
    union = ["null", "A", {"type": "record", "name": "B", "fields": [{"name": "n", "type": ["null", "A", "B"]}]}]
    a = {"type": "record", "name": "A", "fields": [{"name": "n", "type": union}]}
    default: dict[str, Any] = {"n": 5}  # no A, and no B, of which each level could be either
    for _ in range(60):
        default = {"n": default}
    fields = [{"name": "z", "type": a}, {"name": "f", "type": ["A", "B"], "default": default}]
    with pytest.raises(InvalidSchema, match="Invalid default for field f"):
        AvroSchema(json.dumps({"type": "record", "name": "R", "fields": fields}), {}, is_new=True)
    branches = [{"type": "record", "name": f"R{n}", "fields": [{"name": "x", "type": "int"}]} for n in range(500)]
    branches.append({"type": "record", "name": "Last", "fields": []})
    fields = [{"name": "f", "type": {"type": "array", "items": branches}, "default": [{} for _ in range(500)]}]
    with pytest.raises(InvalidSchema, match="a default has more than"):
        AvroSchema(json.dumps({"type": "record", "name": "R", "fields": fields}), {}, is_new=True)


def test_unions_that_are_too_large_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_klog.registry.formats.avro._MOST_PAIRS", 2000)
    branches = [{"type": "record", "name": f"R{n}", "fields": []} for n in range(100)]
    writer, reader = AvroSchema(json.dumps(branches), {}), AvroSchema(json.dumps(branches[::-1]), {})
    (text,) = reader.unreadable(writer)
    assert "more than 2,000 pairs" in text
