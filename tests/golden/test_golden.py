"""Today's code goes on with what each release wrote: brokers, registry, mirror, loads and tables.

tests/spark/test_golden_streams.py does so with the checkpoints of streams. What must come out is known from what the
maker sent, and read by clients and readers of others.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable
from kafka import KafkaAdminClient
from kafka.errors import CoordinatorNotAvailableError

from spark_klog.client import Admin, Producer
from spark_klog.client.producer.transactions import PreparedTransaction
from spark_klog.embedded import EmbeddedCluster
from spark_klog.load import files
from spark_klog.load.audit import status
from spark_klog.load.run import MaxBad
from spark_klog.load.settings import WriteSettings
from spark_klog.mirror.mirror import Mirror
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.restore import replay
from spark_klog.schema_registry import SchemaRegistry
from tests.golden.names import is_listed, written_names
from tests.golden.support import (
    CLASSIC,
    CONSUMER,
    FIRST,
    KEEP_ALL,
    KINDS,
    MORE,
    NUMBERS,
    PARTITIONS,
    SCHEMAS,
    SIMPLE,
    TABLES,
    VERSIONS,
    ask_registry,
    expected as expected_of,
    unpack,
)
from tests.load.support import Place, by_duckdb, expected, run
from tests.load.tables import NAME, check_each_once, make_lake
from tests.spark.support import create_topic
from tests.support.clients.mirrors import Seen, read_partition, read_topic
from tests.support.clients.transactional.readers import by_confluent
from tests.support.papers import pages
from tests.support.servers.broker import KlogBroker
from tests.support.spark.spark_tables import Kind

_SECONDS = 20.0


class _Golden(NamedTuple):
    """Running brokers on copies of a version's directories."""

    version: str
    source: str
    target: str
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=VERSIONS)
def golden(request: pytest.FixtureRequest, module_server_dir: Path) -> Iterator[_Golden]:
    version = request.param
    folder = module_server_dir / version
    for name in ("source", "target"):
        unpack(version, name, folder)
    with KlogBroker(folder, *KEEP_ALL, name="source") as source, KlogBroker(folder, *KEEP_ALL, name="target") as target:
        yield _Golden(version, source.bootstrap_servers, target.bootstrap_servers, expected_of(version))


def _all_numbers() -> list[list[bytes]]:
    """The values of `NUMBERS` by partition, in order."""
    every = range(FIRST + MORE)
    return [[b'{"id":%d}' % number for number in every[partition::PARTITIONS]] for partition in range(PARTITIONS)]


def _all_places() -> list[Place]:
    return expected(NUMBERS, {partition: len(values) for partition, values in enumerate(_all_numbers())})


def test_records_and_settings(golden: _Golden) -> None:
    plain = [
        [
            offset,
            _text(seen.key),
            _text(seen.value),
            seen.timestamp[1],
            [[name, _text(data)] for name, data in seen.headers],
        ]
        for offset, seen in _plain(golden)
    ]
    assert plain == golden.expected["plain"]
    (compacted,) = read_topic(golden.source, "compacted", 1)
    last = {seen.key: seen.value for seen in compacted}
    assert {(key or b"").decode(): value.decode() for key, value in last.items() if value} == golden.expected[
        "compacted"
    ]
    assert _settings(golden.source, "plain", "retention.ms", "max.message.bytes") == ["-1", "2000000"]


def _plain(golden: _Golden) -> list[tuple[int, Seen]]:
    """The records before offset 2 are deleted."""
    return read_partition(golden.source, "plain", 0, 2)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()


@pytest.mark.parametrize("version", VERSIONS)
def test_all_names_are_those_of_today(version: str, tmp_path: Path) -> None:
    """Names of files, nodes, fields, properties and headers that a release wrote are in the list of today's formats."""
    listed = (pages.ROOT / "tests" / "public" / "formats.txt").read_text()
    assert [name for name in sorted(written_names(version, tmp_path)) if not is_listed(name, listed)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_cluster_of_two_brokers(version: str, server_dir: Path) -> None:
    folder = unpack(version, "cluster", server_dir)
    keep_all = dict(setting.split("=") for setting in KEEP_ALL[1::2])
    with EmbeddedCluster(2, data_dir=folder, settings=keep_all) as cluster:
        servers = cluster.bootstrap_servers
        seen = [[seen.value for seen in each] for each in read_topic(servers, "shared", 4)]
        assert seen == [[b"%d" % partition, b"%d" % (partition + 4)] for partition in range(4)]
        assert _offsets(servers, SIMPLE) == {("shared", 3): (1, "")}
        assert _settings(servers, "shared", "retention.ms") == ["1234567890123"]


def _settings(servers: str, topic: str, *names: str) -> list[str | None]:
    with Admin({"bootstrap.servers": servers}) as admin:
        (entries,) = admin.describe_configs([("topic", topic)]).check().values()
    return [entries[name].value for name in names]


@pytest.mark.parametrize(("group", "protocol"), [(CLASSIC, "classic"), (CONSUMER, "consumer")])
def test_groups_and_their_static_members(golden: _Golden, group: str, protocol: str) -> None:
    assert _offsets(golden.source, group) == {(NUMBERS, 0): (5, "note"), (NUMBERS, 1): (6, "note")}
    admin = AdminClient({"bootstrap.servers": golden.source, "log_level": 0})
    (described,) = admin.describe_consumer_groups([group], request_timeout=_SECONDS).values()
    assert [member.group_instance_id for member in described.result().members] == ["one"]
    named = {"group.id": group, "group.protocol": protocol, "group.instance.id": "one"}
    consumer = Consumer({"bootstrap.servers": golden.source, "enable.auto.commit": False, "log_level": 0, **named})
    consumer.subscribe([NUMBERS])
    values = _all_numbers()
    wanted = {value for partition, begin in ((0, 5), (1, 6)) for value in values[partition][begin:]}
    seen = set()
    try:
        while seen != wanted:
            message = consumer.poll(_SECONDS)
            assert message is not None
            assert message.error() is None
            assert message.value() in wanted - seen
            seen.add(message.value())
    finally:
        consumer.close()


def _offsets(servers: str, group: str) -> dict[tuple[str, int], tuple[int, str]]:
    """By kafka-python: confluent-kafka does not see where the metadata end.

    It does not try again while the broker that it asks has not seen the coordinator's registration.
    """
    until = time.monotonic() + _SECONDS
    with closing(KafkaAdminClient(bootstrap_servers=servers)) as admin:
        while True:
            try:
                listed = admin.list_group_offsets({group: None})[group]
                break
            except CoordinatorNotAvailableError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
    return {(place.topic, place.partition): (held.offset, held.metadata) for place, held in listed.items()}


def test_transactions(golden: _Golden) -> None:
    servers = golden.source

    def seen(partition: int, *, committed: bool = True) -> list[str]:
        return by_confluent(servers, "transactions", partition, committed=committed)

    assert seen(0) == ["done"]
    assert seen(0, committed=False) == ["done", "aborted"]
    assert seen(1) == ["prepared"]  # its commit was decided, and is completed
    assert (seen(2), seen(2, committed=False)) == ([], ["handed"])
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.end_transactions([PreparedTransaction(*golden.expected["handed"])], commits=True).check()
    assert seen(2) == ["handed"]
    assert (seen(3), seen(3, committed=False)) == ([], ["open"])
    assert _offsets(servers, SIMPLE)[NUMBERS, 0][0] == 7
    with Producer({"bootstrap.servers": servers, "transactional.id": "open"}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("transactions", b"again", partition=3)
        producer.commit_transaction()
    assert (seen(3), seen(3, committed=False)) == (["again"], ["open", "again"])
    assert _offsets(servers, SIMPLE)[NUMBERS, 0][0] == 7


def test_schema_registry(golden: _Golden) -> None:
    with SchemaRegistry({"bootstrap.servers": golden.source}, "0") as registry:
        for number, (subject, schema) in enumerate(SCHEMAS, 1):
            assert ask_registry(registry.url, f"/schemas/ids/{number}")["schema"] == schema["schema"]
            assert subject in ask_registry(registry.url, "/subjects?deleted=true")
        assert ask_registry(registry.url, "/subjects") == ["numbers-value", "place"]
        assert ask_registry(registry.url, "/subjects/numbers-value/versions") == [1, 2]
        assert ask_registry(registry.url, "/config/numbers-value") == {"compatibilityLevel": "FULL"}
        assert ask_registry(registry.url, "/subjects/other/versions", {"schema": '"long"'})["id"] == 5
        subject, schema = SCHEMAS[1]
        assert ask_registry(registry.url, f"/subjects/{subject}/versions", schema)["id"] == 2


def test_mirror(golden: _Golden) -> None:
    settings = MirrorSettings(
        {"bootstrap.servers": golden.source},
        {"bootstrap.servers": golden.target},
        name="golden",
        topics=re.compile(f"{NUMBERS}|plain"),
        groups=re.compile(SIMPLE),
        exactly_once=True,
    )
    assert [[seen.value for seen in each] for each in read_topic(golden.target, NUMBERS, PARTITIONS)] == [
        values[: FIRST // PARTITIONS] for values in _all_numbers()
    ]
    assert Mirror(settings).run(until_end=True).records == MORE
    copied = [[seen.value for seen in each] for each in read_topic(golden.target, NUMBERS, PARTITIONS)]
    assert copied == _all_numbers()
    assert read_topic(golden.target, "plain", 1) == [[seen for _, seen in _plain(golden)]]
    assert _offsets(golden.target, SIMPLE) == {(NUMBERS, 0): (7, ""), ("plain", 0): (7, "")}


@pytest.mark.parametrize("state", ["begun", "prepared", "committed", "published"])
def test_load(golden: _Golden, tmp_path: Path, state: str) -> None:
    output = unpack(golden.version, "loads", tmp_path) / state
    run(golden.source, output, NUMBERS)
    assert by_duckdb(output) == _all_places()
    assert sum(file.records for file in files(str(output))) == FIRST + MORE
    assert status(str(output)).findings == []


def test_load_with_dead_letters(golden: _Golden, tmp_path: Path) -> None:
    output = unpack(golden.version, "loads", tmp_path) / "letters"
    settings = WriteSettings(schema="id bigint")
    assert run(golden.source, output, "bad", settings=settings, max_bad=MaxBad(50, is_percent=True)).runs == []
    create_topic(golden.target, "again")
    assert replay(str(output), {"bootstrap.servers": golden.target}, "again").records == 2
    assert by_confluent(golden.target, "again", 0) == ["bad", "bad"]


@pytest.mark.parametrize("kind", KINDS)
def test_load_into_a_table(golden: _Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """The table has a run that its journal does not know, and lacks the last records."""
    unpack(golden.version, "tables", tmp_path)
    monkeypatch.chdir(tmp_path)
    lake = make_lake(kind, TABLES / kind, monkeypatch)
    assert check_each_once(lake, NUMBERS, FIRST) == FIRST
    run(golden.source, lake.address, NUMBERS)
    assert check_each_once(lake, NUMBERS, FIRST + MORE) == FIRST + MORE
    (identity,) = tmp_path.glob(f"tables/{kind}/**/_klog/load.json")
    if kind == "delta":
        properties = DeltaTable(lake.uri).metadata().configuration
    else:
        properties = lake.catalog.load_table(NAME).properties
    assert properties["klog.load"] == json.loads(identity.read_text())["load"]
