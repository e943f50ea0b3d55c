"""jobs/batch_load.py with Avro values: killed while it loads, and new versions of the schema between its runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import psutil
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from spark_klog.cli.jobs.batch_load import main as batch_load
from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.audit import status
from spark_klog.schema_registry import SchemaRegistry
from tests.jobs.support import BATCH_LOAD, Load, wait_for_the_moment
from tests.load.support import by_duckdb, expected
from tests.spark.support import Sent, create_topic, produce
from tests.support.processes import kill, named
from tests.support.runs.soak import in_soak

_GIVEN = ("-b", "127.0.0.1:1", "--topics", "t", "--output", "o")
_JSON_VALUES = ("--value-format", "json", "--schema", "a int")
_PARTITIONS, _EACH = 3, 400
#: Picks the processes to kill from those of a run.
_TARGETS: dict[str, Callable[[list[psutil.Process]], list[psutil.Process]]] = {
    "python driver": lambda tree: named(tree[1:], BATCH_LOAD.name),
    "python workers": lambda tree: named(tree[1:], "pyspark.daemon"),
}


@pytest.fixture
def registry(zookeeper_cluster: EmbeddedCluster) -> Iterator[str]:
    with SchemaRegistry({"bootstrap.servers": zookeeper_cluster.bootstrap_servers}, "0") as running:
        yield running.url


def _written(url: str, topic: str, names: tuple[str, ...], numbers: range) -> list[Sent]:
    """Records with a field for each of these names, as confluent-kafka writes them."""
    fields = [{"name": name, "type": ["null", "string"], "default": None} for name in names]
    schema = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}, *fields]}
    write = AvroSerializer(SchemaRegistryClient({"url": url}), json.dumps(schema))
    context = SerializationContext(topic, MessageField.VALUE, [])
    rows = ({"id": number, **{name: f"{name}{number}" for name in names}} for number in numbers)
    return [Sent(write(row, context), partition=row["id"] % _PARTITIONS) for row in rows]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--value-format", "json"],
            "--value-format json needs --schema: fields as DDL, 'user_id bigint, at timestamp",
        ),
        (["--schema", "a int"], "--value-schema, or --schema, needs --value-format json, avro, "),
        (["--value-schema", '"int"'], "--value-schema, or --schema, needs --value-format json, avro, "),
        (
            [*_JSON_VALUES, "-r", "http://r"],
            "--schema-registry needs --value-format or --key-format avro, protobuf or json-schema: the schema of json",
        ),
        (["--key-subject", "s"], "--key-subject needs --key-format avro"),
        (["--value-format", "json", "--schema", "a int", "--value-schema-id", "1"], "--value-schema-id needs"),
        (["--value-format", "avro", "--value-schema-id", "1", "--value-subject", "s"], "give only one of"),
        (["--value-format", "avro", "--value-message", "M"], "--value-message needs --value-format protobuf"),
        (["--schema-registry", "http://r"], "--schema-registry needs --value-format"),
        (["-X", "auto.offset.reset=latest"], "-X takes schema.registry.* settings here; settings of the client go in"),
        (["--schema-evolution", "latest"], "--schema-evolution needs --value-format"),
        (["--value-format", "avro", "--format", "delta", "--checkpoint", "c"], "are for parquet, arrow, json"),
    ],
)
def test_wrong_arguments(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch_load([*_GIVEN, *options])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert words in last


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--value-format", "avro", "--value-schema", "/no/file.avsc"], "--value-schema /no/file.avsc does not exist"),
        (["--value-format", "avro"], "--value-format avro needs --schema-registry, or --value-schema"),
        (["--value-format", "avro", "--value-schema-id", "1"], "needs --schema-registry"),
        (["--value-format", "json", "--schema", "Variant"], "--schema variant is for --table delta:, as files have no"),
        (["--value-format", "json", "--schema", "v variant"], "VARIANT is the type of whole values alone (--schema "),
        (["--value-format", "avro", "--schema", "INFER"], "--value-schema INFER is for --value-format json: give avro"),
        (["--value-format", "avro", "--value-schema", '{"type": "recrd"}'], "Error: --value-schema: "),
        (["--key-format", "protobuf", "--key-schema", "message {"], "Error: --key-schema: "),
        (
            [*_JSON_VALUES, "--key-format", "avro", "--key-schema", '"string"', "--dictionary", "topic,key"],
            "dictionary: keys are rows here",
        ),
        ([*_JSON_VALUES, "--dictionary", "value"], "dictionary: values are rows here"),
        (["--key-format", "avro", "--key-schema", '"string"', "--dictionary", "key"], "dictionary: keys are rows here"),
        (["--value-format", "avro", "--schema-registry", "ftp://me:hunter2@r"], "schema.registry.url must be http"),
        (["--value-format", "avro", "-X", "schema.registry.basic.auth.username=me"], "no URL: give --schema-registry"),
        (["--value-format", "avro", "-X", "sasl.password=hunter2"], "-X sasl.password: -X takes schema.registry.*"),
        (
            [
                "--value-format",
                "avro",
                "--schema-registry",
                "http://r",
                "-X",
                "schema.registry.basic.auth.user=hunter2",
            ],
            "unknown setting schema.registry.basic.auth.user",
        ),
    ],
)
def test_wrong_settings(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch_load([*_GIVEN, *options])
    said = capsys.readouterr().err
    assert words in said
    assert "hunter2" not in said


@in_soak  # a slice: load/test_table_kills.py
@pytest.mark.timeout(900)
def test_killed_while_schemas_change(
    zookeeper_cluster: EmbeddedCluster, registry: str, make_load: Callable[..., Load], topic: str
) -> None:
    servers = zookeeper_cluster.bootstrap_servers
    create_topic(servers, topic, _PARTITIONS)
    chance = random.Random(1)
    load = make_load(topic)
    options = ("--value-format", "avro", "--schema-registry", registry, "--schema-evolution", "latest")
    sent = 0
    targets = [*_TARGETS, *_TARGETS]
    for number, target in enumerate(targets):
        names = tuple("abcd"[: number + 1])
        produce(servers, topic, _written(registry, topic, names, range(sent, sent + _PARTITIONS * _EACH)))
        sent += _PARTITIONS * _EACH
        running = load.start("--json", *options, "--max-file-records", "10")
        wait_for_the_moment(running, load, chance)
        if not running.ended:
            kill(_TARGETS[target](running.tree()))
        running.result()
        seen = by_duckdb(load.output)
        assert len(set(seen)) == len(seen)
    load.report(*options)
    assert by_duckdb(load.output) == expected(topic, dict.fromkeys(range(_PARTITIONS), sent // _PARTITIONS))
    # each run has one schema, and each value is that of its record
    schema = None
    for run in load.committed():
        manifest = json.loads((load.output / f"_klog/runs/{run:08d}/manifest.json").read_text())
        schemas = [pq.read_schema(load.output / item["path"]) for item in manifest["files"]]
        schema = schemas[0]
        assert all(one.equals(schema) for one in schemas)
    table = ds.dataset(list(load.output.rglob("*.parquet")), schema=schema).to_table()
    rows = table.to_pylist()
    assert sorted(row["value"]["id"] for row in rows) == [*range(sent)]
    assert set(rows[0]["value"]) == {"id", *"abcd"[: len(targets)]}
    for value in (row["value"] for row in rows):
        assert all(text is None or text == f"{name}{value['id']}" for name, text in value.items() if name != "id")
    assert status(str(load.output)).findings == []
