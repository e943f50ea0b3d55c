"""Kill a stream of rows by a schema, and its schema registry, at any moment: each record once, the bad ones as letters.

Meanwhile the subject gets new versions, and some values do not decode. SPARK_KLOG_KILLS is the number of kills
(default 1), SPARK_KLOG_SEED the random seed.
"""

from __future__ import annotations

import io
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyspark.sql import SparkSession

from spark_klog.embedded import EmbeddedCluster
from tests.spark.read.test_stream_kills import PARTITIONS, TARGETS, Stream, Writer
from tests.spark.support import consume, create_topic
from tests.support.processes import kill
from tests.support.runs.soak import in_soak

# Each step has its own deadline.
pytestmark = [pytest.mark.timeout(0), pytest.mark.test_all("kill")]

_TOPIC = "orders"
_UNKNOWN_ID = 4711


class _Format:
    """Values of a format: of versions 0, 1, ... of a schema, each with a field more, all with `id` and `name`."""

    name: str
    registry_type: str

    def schema(self, version: int) -> str:
        raise NotImplementedError

    def payload(self, number: int, version: int) -> bytes:
        raise NotImplementedError

    def cut_off(self) -> bytes:
        """A payload that no version can have."""
        raise NotImplementedError


class _Avro(_Format):
    name, registry_type = "avro", "AVRO"

    def schema(self, version: int) -> str:
        more = [{"name": f"more{number}", "type": "string", "default": "-"} for number in range(version)]
        fields = [{"name": "id", "type": "long"}, *more, {"name": "name", "type": ["null", "string"], "default": None}]
        return json.dumps({"type": "record", "name": "Order", "fields": fields})

    def payload(self, number: int, version: int) -> bytes:
        order = {"id": number, "name": f"n{number}" if number % 3 else None}
        order |= {f"more{added}": "m" for added in range(version)}
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(self.schema(version))), order)
        return stream.getvalue()

    def cut_off(self) -> bytes:
        return b"\x80"


class _Protobuf(_Format):
    name, registry_type = "protobuf", "PROTOBUF"

    def schema(self, version: int) -> str:
        more = "".join(f"  string more{number} = {3 + number};\n" for number in range(version))
        return f'syntax = "proto3";\nmessage Order {{\n  int64 id = 1;\n  optional string name = 2;\n{more}}}\n'

    def payload(self, number: int, version: int) -> bytes:
        name = b"n%d" % number
        parts = [b"\0\x08", _varint(number)]  # the first message of the file, its field 1
        if number % 3:
            parts.append(b"\x12" + _varint(len(name)) + name)
        parts += [_varint((3 + added) << 3 | 2) + b"\x01m" for added in range(version)]
        return b"".join(parts)

    def cut_off(self) -> bytes:
        return b"\0\x08\x80"


class _Json(_Format):
    name, registry_type = "json-schema", "JSON"

    def schema(self, version: int) -> str:
        properties: dict[str, Any] = {"id": {"type": "integer"}, "name": {"type": ["string", "null"]}}
        properties |= {f"more{number}": {"type": "string"} for number in range(version)}
        schema = {"title": "Order", "type": "object", "properties": properties, "additionalProperties": False}
        return json.dumps(schema)

    def payload(self, number: int, version: int) -> bytes:
        order = {"id": number, "name": f"n{number}" if number % 3 else None}
        return json.dumps(order | {f"more{added}": "m" for added in range(version)}).encode()

    def cut_off(self) -> bytes:
        return b'{"id": 1, '


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


class _Orders(Writer):
    """Produces orders by any version of the subject so far, and a bad value now and then."""

    def __init__(self, servers: str, url: str, form: _Format, seed: int) -> None:
        super().__init__(servers, _TOPIC, seed)
        self._client = SchemaRegistryClient({"url": url})
        self._form = form
        self._ids: list[int] = []
        self._choose = random.Random(seed + 1)
        self.bad: set[int] = set()
        self.add_version()

    def add_version(self) -> None:
        schema = Schema(self._form.schema(len(self._ids)), self._form.registry_type)
        self._ids.append(self._client.register_schema(f"{_TOPIC}-value", schema))

    def value(self, number: int) -> bytes:
        version = self._choose.randrange(len(self._ids))
        prefix = b"\0" + self._ids[version].to_bytes(4, "big")
        if self._choose.random() > 0.03:
            return prefix + self._form.payload(number, version)
        self.bad.add(number)
        # the number makes bad values different
        return self._choose.choice(
            [
                b"bad %d" % number,
                b"\0" + _UNKNOWN_ID.to_bytes(4, "big") + b"%d" % number,
                prefix + self._form.cut_off(),
            ]
        )


class _Outages(threading.Thread):
    """Kills the schema registry every few seconds, and starts it again."""

    def __init__(self, cluster: EmbeddedCluster, orders: _Orders, seed: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._orders = cluster, orders
        self._choose = random.Random(seed)
        self._done = threading.Event()
        self.failure: BaseException | None = None
        self.count = 0

    def run(self) -> None:
        try:
            while not self._done.wait(self._choose.uniform(1, 6)):
                self._cluster.kill_schema_registry()
                self._done.wait(self._choose.uniform(0, 4))
                self._cluster.restart_schema_registry()
                self.count += 1
                if self.count % 2:
                    self._orders.add_version()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._done.set()
        self.join(60)
        assert not self.is_alive()
        assert self.failure is None, self.failure


@pytest.fixture
def typed_cluster(server_dir: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(1, data_dir=server_dir / "cluster", schema_registry=True) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "form",
    [_Avro(), pytest.param(_Protobuf(), marks=in_soak), pytest.param(_Json(), marks=in_soak)],
    ids=lambda form: form.name,
)
def test_killed_with_its_registry(
    request: pytest.FixtureRequest, typed_cluster: EmbeddedCluster, server_dir: Path, form: _Format
) -> None:
    kills = int(os.environ.get("SPARK_KLOG_KILLS", "1"))
    seed = int(os.environ.get("SPARK_KLOG_SEED", "1"))
    print(f"seed {seed}")  # noqa: T201 - pytest shows it with a failure
    chance = random.Random(seed)
    servers, url = typed_cluster.bootstrap_servers, typed_cluster.schema_registry_url
    assert url is not None
    letters = server_dir / "letters"
    create_topic(servers, _TOPIC, PARTITIONS)
    options = {"valueFormat": form.name, "schemaRegistryUrl": url}
    options |= {"badRecords": "deadletter", "badRecordsPath": str(letters)}
    stream = Stream(servers, _TOPIC, server_dir, **options)
    orders = _Orders(servers, url, form, seed)
    outages = _Outages(typed_cluster, orders, seed)
    orders.start()
    with closing(stream):
        outages.start()
        for number in range(kills):
            running = stream.start()
            stream.wait_for_a_moment(chance)
            assert not running.ended, stream.errors()[-3000:]
            kill(TARGETS[["jvm", "python driver", "everything"][number % 3]](running.tree()))
            assert stream.end() != 0
        outages.stop()
        orders.stop()
        spark: SparkSession = request.getfixturevalue("spark")  # not earlier: it is one more JVM
        stream.run_to_the_end(spark)
        records = [(record.partition, record.offset, record.value) for record in consume(servers, _TOPIC)]
        assert len(records) == orders.sent
        schema = "partition int, offset long, value struct<id: long, name: string>"
        read = spark.read.schema(schema).parquet(str(stream.output)).collect()
        rows = {(row.partition, row.offset): row.value for row in read}
        assert len(read) == len(rows)
        assert len(rows) == orders.sent - len(orders.bad)
        good = {row.id: row.name for row in rows.values()}
        sent = set(range(orders.sent)) - orders.bad
        assert good == {number: f"n{number}" if number % 3 else None for number in sent}
        bad = {(letter["partition"], letter["offset"]) for letter in _letters(letters)}
        assert bad == {(partition, offset) for partition, offset, _ in records} - set(rows)
        ends = Counter((_TOPIC, partition) for partition, _, _ in records)
        assert stream.check_group() == stream.committed() == ends
        print(f"{outages.count} outages, {len(rows)} rows, {len(bad)} letters")  # noqa: T201


def _letters(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.iterdir():
        yield json.loads(path.read_text())
