"""`klog consume -s` and `klog produce -s`: with confluent-kafka's Avro serializers on the other side, and with kcat."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.cli.records import decoding
from spark_klog.cli.records.serdes import Serdes
from spark_klog.columns.schema import FULL
from spark_klog.embedded import EmbeddedCluster
from spark_klog.schema_registry import SchemaRegistry
from spark_klog.schemas.column_format import ColumnFormat, RegistrySettings
from spark_klog.security.config import Settings
from tests.support.clients.klog import klog_bytes
from tests.support.clients.tools import kcat

_FIELDS = [
    {"name": "id", "type": "long"},
    {"name": "name", "type": ["null", "string"], "default": None},
    {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "tags", "type": {"type": "array", "items": "string"}},
    {"name": "rates", "type": {"type": "map", "values": "double"}},
    {"name": "raw", "type": "bytes"},
    {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
    {"name": "either", "type": ["null", "int", "string"], "default": None},
]
_ORDER = {"type": "record", "name": "a.Order", "fields": _FIELDS}
_NEWER = {**_ORDER, "fields": [*_FIELDS, {"name": "extra", "type": "string", "default": "x"}]}


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    """The registry's URL."""
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url


def order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "name": None if number % 2 else f'n"\u00e9{number}',
        "total": Decimal(number).scaleb(-2),
        "at": datetime(2026, 1, 2, 3, 4, 5, 678_000, timezone.utc),
        "day": date(2026, 1, number + 1),
        "tags": ["a", "b"][: number % 3],
        "rates": {"x": 0.25, "y": -1.0},
        "raw": b"\xff\0" if number % 2 else b"text",
        "kind": "OLD" if number % 2 else "NEW",
        "either": [None, number, "s"][number % 3],
    }


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """What the command prints of an order."""
    either = row["either"]
    is_text = isinstance(either, str)
    return {
        **row,
        "total": float(row["total"]),
        "at": "2026-01-02T03:04:05.678000Z",
        "day": row["day"].isoformat(),
        "raw": {"base64": "/wA="} if row["raw"] == b"\xff\0" else "text",
        "either": None
        if either is None
        else {"member0": None if is_text else either, "member1": either if is_text else None},
    }


class Confluent:
    """Serializes as Confluent's client does, and reads so."""

    def __init__(self, servers: str, url: str, topic: str) -> None:
        self._servers, self._topic = servers, topic
        self._client = SchemaRegistryClient({"url": url})
        self._context = SerializationContext(topic, MessageField.VALUE, [])

    def write(self, schema: dict[str, Any], values: Sequence[Any], *, in_headers: bool = False) -> None:
        """Values that are bytes or None are written as they are; the key is the value's number."""
        settings = {"schema.id.serializer": header_schema_id_serializer} if in_headers else {}
        serializer = AvroSerializer(self._client, json.dumps(schema), conf={"auto.register.schemas": True, **settings})
        producer = confluent_kafka.Producer({"bootstrap.servers": self._servers})
        for number, value in enumerate(values):
            context = SerializationContext(self._topic, MessageField.VALUE, [])
            data = serializer(value, context) if isinstance(value, dict) else value
            producer.produce(self._topic, data, struct.pack(">i", number), headers=context.headers or None)
        assert producer.flush(30) == 0

    def read(self, count: int) -> list[Any]:
        deserializer = AvroDeserializer(self._client)
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self._servers, "group.id": "reader"})
        consumer.assign([confluent_kafka.TopicPartition(self._topic, 0, 0)])
        messages = consumer.consume(count, 30)
        consumer.close()
        return [deserializer(message.value(), self._context) for message in messages]


class Klog:
    def __init__(self, servers: str, url: str) -> None:
        self._servers, self.url = servers, url

    def __call__(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> tuple[bytes, str]:
        registry = () if "-r" in arguments or "-X" in arguments or not self.url else ("-r", self.url)
        done = klog_bytes(*arguments, *registry, "-b", self._servers, stdin=stdin)
        assert done.returncode == code, done.stderr.decode()
        assert b"Traceback" not in done.stderr
        return done.stdout, done.stderr.decode()


@pytest.fixture
def klog(cluster: EmbeddedCluster, registry: str) -> Klog:
    return Klog(cluster.bootstrap_servers, registry)


@pytest.fixture
def confluent(cluster: EmbeddedCluster, registry: str, topic: str) -> Confluent:
    return Confluent(cluster.bootstrap_servers, registry, topic)


def lines_of(output: bytes) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


def test_what_confluent_writes(klog: Klog, confluent: Confluent, topic: str) -> None:
    orders = [order(number) for number in range(4)]
    confluent.write(_ORDER, [*orders[:2], None])
    confluent.write(_NEWER, [{**one, "extra": "e"} for one in orders[2:]], in_headers=True)
    wanted = [as_json(orders[0]), as_json(orders[1]), None, *({**as_json(one), "extra": "e"} for one in orders[2:])]
    output, told = klog("consume", topic, "-s", "value=avro")
    assert (lines_of(output), told) == (wanted, "")
    assert lines_of(klog("consume", topic, "-s", "value=avro", "--from", "1", "--until", "4")[0]) == wanted[1:4]
    output, _ = klog("consume", topic, "-s", "key=i", "-s", "value=avro", "--json")
    lines = lines_of(output)
    assert [(line["key"], line["value"]) for line in lines] == list(zip([0, 1, 2, 0, 1], wanted, strict=True))
    ids = [line.get("value_schema_id") for line in lines]
    assert ids[0] == ids[1] != ids[3]
    assert ids[2] is None
    assert isinstance(ids[3], int | str)
    # the length is that of the record, and a filter is about what is printed
    output, _ = klog("consume", topic, "-s", "value=avro", "-f", r"%o %S\n", "--where", ".either.member0=1")
    sizes, _ = Klog(klog._servers, "")("consume", topic, "-f", r"%o %S\n", "--where", "offset=1")
    assert output == sizes
    output, _ = klog(
        "consume", topic, "-s", "value=avro", "--where", "offset>=3", "-n", "1", "-X", f"schema.registry.url={klog.url}"
    )
    assert lines_of(output) == wanted[3:4]


def test_what_confluent_reads(klog: Klog, confluent: Confluent, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(_NEWER))
    orders = [order(number) for number in range(5)]
    lines = [json.dumps(as_json(one)).encode() for one in orders]
    klog("produce", topic, "-s", "value=avro", "--value-schema", str(file), stdin=b"\n".join([*lines, b"null"]))
    klog("produce", topic, "-s", "value=avro", stdin=json.dumps({**as_json(orders[0]), "extra": "y"}).encode())
    expected = [{**one, "extra": "x"} for one in orders]
    assert confluent.read(7) == [*expected, None, {**orders[0], "extra": "y"}]


def test_a_copied_record_has_no_id_of_its_old_schema(
    klog: Klog, confluent: Confluent, topic: str, tmp_path: Path
) -> None:
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(_NEWER))
    headers = [["h", "1"], ["__value_schema_id", "\0\0\0\0\1"], ["__key_schema_id", "x"]]
    line = json.dumps({"value": as_json(order(1)), "headers": headers}).encode()
    klog("produce", topic, "-s", "value=avro", "--value-schema", str(file), "--json", stdin=line)
    (found,) = lines_of(klog("consume", topic, "-s", "value=avro", "--json")[0])
    assert found["headers"] == [["h", "1"], ["__key_schema_id", "x"]]
    assert confluent.read(1) == [{**order(1), "extra": "x"}]


def test_there_and_back(klog: Klog, confluent: Confluent, topic: str) -> None:
    confluent.write(_ORDER, [*(order(number) for number in range(5)), None])
    first, _ = klog("consume", topic, "-s", "value=avro", "--json")
    schema_id = json.loads(klog("consume", topic, "-s", "value=avro", "--json", "-n", "1")[0])["value_schema_id"]
    copy = f"{topic}-copy"
    klog("produce", copy, "-s", "value=avro", "--value-schema-id", str(schema_id), "--json", stdin=first)
    second, _ = klog("consume", copy, "-s", "value=avro", "--json")
    assert second.replace(copy.encode(), topic.encode()) == first
    raw = Klog(klog._servers, "")
    assert raw("consume", copy, "-f", "%s")[0] == raw("consume", topic, "-f", "%s")[0]


def test_records_that_do_not_decode(klog: Klog, confluent: Confluent, topic: str) -> None:
    unknown = b"\0\0\1\0\0zz"
    confluent.write(_ORDER, [order(0), b"garbage", order(1), unknown, b"", order(2)])
    output, told = klog("consume", topic, "-s", "value=avro", code=1)
    assert lines_of(output) == [as_json(order(number)) for number in range(3)]
    first, second, third, last = told.splitlines()
    assert first == f"klog: {topic}-0, offset 1: value: the value begins with the byte 0x67, not with a schema id"
    assert second.startswith(f"klog: {topic}-0, offset 3: value: schema id 65536: ")
    assert second.endswith(f"the schema registry {klog.url} does not have it")
    assert third == f"klog: {topic}-0, offset 4: value: the value has 0 bytes: too few for a schema id"
    assert last == "klog: 3 records do not decode"
    # what is not printed for another reason is not named
    assert klog("consume", topic, "-s", "value=avro", "-n", "1")[1] == ""
    assert klog("consume", topic, "-s", "value=avro", "--where", "offset=2")[1] == ""
    # a group goes on at the record that stopped it
    output, told = klog("consume", topic, "-s", "value=avro", "--stop-on-error", "-G", f"{topic}-group", code=1)
    assert lines_of(output) == [as_json(order(0))]
    assert told == f"{first}; the records after it are not read\n"
    again, _ = Klog(klog._servers, "")("consume", topic, "-G", f"{topic}-group", "-f", r"%o\n")
    assert again.split() == [b"1", b"2", b"3", b"4", b"5"]


def test_a_group_at_the_wrong_registry(klog: Klog, confluent: Confluent, topic: str) -> None:
    """It commits nothing of what another registry may have; a record that no registry could read does not stop it."""
    unknown = b"\0\0\1\0\0zz"
    confluent.write(_ORDER, [order(0), b"garbage", order(1), unknown, order(2)])
    reading = ("consume", topic, "-s", "value=avro", "-G", f"{topic}-group")
    output, told = klog(*reading, code=1)
    assert lines_of(output) == [as_json(order(number)) for number in range(2)]
    named, last = told.splitlines()
    assert named.startswith(f"klog: {topic}-0, offset 1: value: the value begins with the byte 0x67")
    assert last.startswith(f"klog: {topic}-0, offset 3: value: schema id 65536: ")
    assert f"group {topic}-group stays before it: name the registry that has it, or set" in last
    # by one schema for all records, too
    schema_id = json.loads(klog("consume", topic, "-s", "value=avro", "--json", "-n", "1")[0])["value_schema_id"]
    output, told = klog(*reading, "--value-schema-id", str(schema_id), code=1)
    assert (output, len(told.splitlines())) == (b"", 1)
    again, _ = Klog(klog._servers, "")("consume", topic, "-G", f"{topic}-group", "-f", r"%o\n")
    assert again.split() == [b"3", b"4"]


def test_lines_that_do_not_fit(klog: Klog, confluent: Confluent, topic: str) -> None:
    confluent.write(_ORDER, [order(0)])
    good = json.dumps(as_json(order(1))).encode()
    wrong = [
        (good.replace(b'"id": 1', b'"id": "one"'), 'field id must be an integer of 64 bits, not a string: "one"'),
        (good.replace(b'"OLD"', b'"TORN"'), "field kind: "),
        (
            good.replace(b'"name": null', b'"name": "\\ud800"'),
            "field name has half of a surrogate pair",
        ),
        (good.replace(b'"day"', b'"date"'), "the schema has no field date"),
        (b'{"id": 1}', "field total: is missing, and the schema has no default for it"),
        (b"{", "it is not JSON: "),
    ]
    for line, error in wrong:
        told = klog("produce", topic, "-s", "value=avro", stdin=b"\n".join([good, line, good]), code=1)[1]
        assert told.startswith(f"klog: record 2: value: {error}"), told
    assert confluent.read(1 + len(wrong))[1:] == [order(1)] * len(wrong)
    told = klog("produce", f"{topic}-none", "-s", "value=avro", stdin=good, code=1)[1]
    assert f"subject {topic}-none-value" in told


def test_a_json_schema(klog: Klog, topic: str, tmp_path: Path) -> None:
    """Bytes are base64 in the record, as it is shown, and as it is given; what does not fit is named."""
    file = tmp_path / "schema.json"
    properties = {"raw": {"type": "string", "contentEncoding": "base64"}, "id": {"type": "integer"}}
    file.write_text(json.dumps({"type": "object", "properties": properties, "required": ["id"]}))
    chosen = ("-s", "value=json-schema", "--value-schema", str(file))
    line = b'{"raw": "aGVsbG8=", "id": 1}'
    klog("produce", topic, *chosen, stdin=b"\n".join([line, b'{"raw": {"base64": "aGVsbG8="}, "id": 1}']))
    assert klog("consume", topic, *chosen)[0].splitlines() == [line] * 2
    bare = Klog(klog._servers, "")("consume", topic, "-f", "%s\\n")[0].splitlines()
    assert [json.loads(record[5:]) for record in bare] == [json.loads(line)] * 2
    for wrong, error in (
        (b'{"id": 1, "raw": "hello"}', 'field raw is not base64: "hello"'),
        (b'{"raw": "", "raw": "", "id": 1}', "it has 'raw' twice in one object: remove one of them"),
        (b'{"id": %s}' % (b"1" * 5000), "field id must be an integer of 64 bits, not a number: 11111"),
        (b'{"raw": ""}', "field id is required, but missing: add it"),
    ):
        told = klog("produce", topic, *chosen, stdin=wrong, code=1)[1]
        assert told.startswith(f"klog: record 1: value: {error}"), told


def test_without_a_registry(klog: Klog, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(_ORDER))
    bare = Klog(klog._servers, "")
    line = json.dumps(as_json(order(2))).encode()
    bare(
        "produce",
        topic,
        "-s",
        "avro",
        "--value-schema",
        str(file),
        "--key-schema",
        str(file),
        "-k",
        line.decode(),
        stdin=line,
    )
    output, _ = bare("consume", topic, "-s", "avro", "--value-schema", str(file), "--key-schema", str(file), "-K", "|")
    key, _, value = output.partition(b"|")
    assert json.loads(key) == json.loads(value) == as_json(order(2))
    for arguments, error in (
        (("-s", "value=avro"), "needs --schema-registry URL, or --value-schema FILE"),
        (("-s", "value=avro", "--value-schema-id", "1"), "needs --schema-registry URL"),
        (("-s", "value=avro", "-X", "schema.registry.uri=http://h"), "unknown setting schema.registry.uri"),
        (("-s", "value=avro", "-X", "schema.registry.bearer.auth.token=abc"), "but no URL: give --schema-registry"),
    ):
        told = bare("consume", topic, *arguments, code=2)[1]
        assert error in told
        assert "abc" not in told
    for arguments, error in (
        (("-s", "value=arvo"), "-s value=arvo: the formats are avro, protobuf, json-schema, and kcat's letters"),
        (("-s", "headers=avro"), "must be key=FORMAT, value=FORMAT or FORMAT"),
        (("-r", "http://h"), "--schema-registry needs -s FORMAT"),
        (("--key-schema-id", "1", "-s", "value=avro"), "--key-schema-id needs -s key=FORMAT"),
        (("--stop-on-error",), "--stop-on-error needs -s"),
        (("-s", "value=avro", "--value-message", "M"), "--value-message needs -s value=protobuf"),
        (("-s", "protobuf", "--key-message", "M"), "--key-message needs --key-schema or --key-schema-id"),
    ):
        assert error in bare("consume", topic, *arguments, code=2)[1]
    assert "-s i: records are written as avro" in bare("produce", topic, "-s", "i", code=2)[1]


def test_bytes_of_many_unknown_ids(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its reason, and few are kept; those that are not are looked up again."""
    monkeypatch.setattr(decoding, "_MOST_SCHEMAS", 3)
    form = ColumnFormat("value", "avro", RegistrySettings(Settings({"url": registry})))
    texts = decoding.RecordTexts(Serdes((form,)))
    values = [b"\0" + (900_000 + number).to_bytes(4, "big") for number in range(6)]
    rows = [
        {"topic": "t", "partition": 0, "offset": offset, "value": value, "headers": []}
        for offset, value in enumerate([*values, *values])
    ]
    batch = pa.RecordBatch.from_pylist(rows, FULL)
    _, undecoded = texts.decode(batch)
    assert [one.offset for one in undecoded] == list(range(12))
    assert all("does not have it" in one.reason for one in undecoded)
    (column,) = texts._columns
    assert isinstance(column, decoding._SchemaColumn)
    assert len(column._by_schema) == 3


@pytest.mark.peer
@pytest.mark.test_all("client")
def test_numbers_as_kcat(klog: Klog, topic: str) -> None:
    bare = Klog(klog._servers, "")
    data = b"\x00\x00\x00\x01\xff\xfe\x80\x02hello"
    bare("produce", topic, "-k", "key1", "-D", "", stdin=data)
    for form in ("i", ">ihhs", "ih Hs$", "ibBccs", "q", "Q", "iHBs", "value=ihhs"):
        arguments = ("-s", form, *(() if "=" in form else ("-s", "key=s")), "-f", "%k %s|")
        printed = kcat("-C", "-q", "-e", "-b", klog._servers, "-t", topic, *arguments)
        assert bare("consume", topic, *arguments)[0] == printed, form
    assert bare("consume", topic, "-s", "value=<h h", "-D", "")[0] == b"0 256"  # kcat 1.7.1 takes it as >
    for form, error in (("i$", "9 bytes are left at the end ($)"), ("qq", "5 bytes are left for a number of 8 (q)")):
        assert error in bare("consume", topic, "-s", f"value={form}", code=1)[1]
    lines = lines_of(bare("consume", topic, "-s", "key=hH", "-s", "value=i", "--json")[0])
    assert [(line["key"], line["value"]) for line in lines] == [("2749331025", 1)]
