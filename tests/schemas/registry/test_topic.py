"""The registry's topic: a real one's is taken over, ours has the same form, and kills and races lose nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import Consumer as ConfluentConsumer, Producer as ConfluentProducer, TopicPartition

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError
from spark_klog.schema_registry import SchemaRegistry
from tests.schemas.registry.asking import ask, record, register, with_default
from tests.support.waiting import wait_until

_Record = tuple[bytes, bytes | None]
#: As Confluent Platform 5 to 8 write it: with and without subject in the global keys, NOOP of the leader, an old schema
#: whose value has no type, one with md5, one that was deleted softly by its subject, one for good, a context.
_CONFLUENT: list[_Record] = [
    (b'{"keytype":"NOOP","magic":0}', None),
    (b'{"keytype":"CONFIG","subject":null,"magic":0}', b'{"compatibilityLevel":"FULL"}'),
    (
        b'{"keytype":"SCHEMA","subject":"a-value","version":1,"magic":1}',
        b'{"subject":"a-value","version":1,"id":3,"schema":"\\"string\\"","deleted":false}',
    ),
    (
        b'{"keytype":"SCHEMA","subject":"b-value","version":1,"magic":1}',
        b'{"subject":"b-value","version":1,"id":7,"md5":"x+FQnWZqxzP8NfPGcPZ1Vw==","schema":"\\"long\\"","deleted":false}',
    ),
    (
        b'{"keytype":"SCHEMA","subject":"b-value","version":2,"magic":1}',
        b'{"subject":"b-value","version":2,"id":3,"schema":"\\"string\\"","deleted":false}',
    ),
    (b'{"keytype":"DELETE_SUBJECT","subject":"b-value","magic":0}', b'{"subject":"b-value","version":1}'),
    (
        b'{"keytype":"SCHEMA","subject":"c-value","version":1,"magic":1}',
        b'{"subject":"c-value","version":1,"id":9,"schema":"\\"int\\"","deleted":true}',
    ),
    (b'{"keytype":"SCHEMA","subject":"c-value","version":1,"magic":1}', None),
    (
        b'{"keytype":"SCHEMA","subject":"p-value","version":1,"magic":1}',
        b'{"subject":"p-value","version":1,"id":8,"schemaType":"JSON","references":[{"name":"r","subject":"a-value",'
        b'"version":1}],"schema":"{\\"type\\":\\"object\\"}","deleted":false}',
    ),
    (b'{"keytype":"MODE","subject":"a-value","magic":0}', b'{"subject":"a-value","mode":"READONLY"}'),
    (
        b'{"keytype":"CONTEXT","tenant":"default","context":".x","magic":0}',
        b'{"tenant":"default","context":".x"}',
    ),
    (
        b'{"keytype":"SCHEMA","subject":":.x:a","version":1,"magic":1}',
        b'{"subject":":.x:a","version":1,"id":1,"schema":"\\"double\\"","deleted":false}',
    ),
    (b'{"keytype":"ASSOC","tenant":"default","magic":0}', b'{"of":"a newer registry"}'),
    (b"not JSON", b"{}"),
]
_FIXED = (
    b'{"subject":"a","version":1,"id":1,"schema":"{\\"type\\":\\"fixed\\",\\"name\\":\\"F\\",\\"size\\":2}",'
    b'"deleted":%s}'
)


def _written(cluster: EmbeddedCluster, topic: str = "_schemas") -> list[_Record]:
    """All records of the topic but NOOP, as confluent-kafka reads them."""
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "none", "enable.partition.eof": True}
    consumer = ConfluentConsumer(settings)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[_Record] = []
    while True:
        message = consumer.poll(20)
        assert message is not None
        if message.error():
            consumer.close()
            return found
        key = message.key()
        if b"NOOP" not in key:
            found.append((key, message.value()))


def _fill(cluster: EmbeddedCluster, records: list[_Record]) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(settings) as admin:
        admin.create_topic("_schemas", 1, configs={"cleanup.policy": "compact"})
    with Producer(settings) as producer:
        for key, value in records:
            producer.send("_schemas", value, key)


def test_a_real_registrys_topic_is_taken_over(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster()
    _fill(cluster, _CONFLUENT)
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as registry:
        url = registry.url
        assert ask(url, "GET", "/subjects") == (200, [":.x:a", "a-value", "b-value", "p-value"])
        assert ask(url, "GET", "/subjects/b-value/versions") == (200, [2])
        assert ask(url, "GET", "/subjects/b-value/versions?deleted=true") == (200, [1, 2])
        assert ask(url, "GET", "/subjects/c-value/versions?deleted=true")[0] == 404
        assert ask(url, "GET", "/schemas/ids/3")[1]["schema"] == '"string"'
        assert ask(url, "GET", "/schemas/ids/7")[1]["schema"] == '"long"'
        assert ask(url, "GET", "/subjects/a-value/versions/1/referencedby") == (200, [8])
        assert ask(url, "GET", "/config") == (200, {"compatibilityLevel": "FULL"})
        assert ask(url, "GET", "/mode/a-value") == (200, {"mode": "READONLY"})
        assert ask(url, "GET", "/contexts") == (200, [".", ".x"])
        assert register(url, "d-value", '"long"') == 7  # the id of the deleted one
        assert register(url, "e-value", '"int"') == 10  # after 9, which is gone, and not given again
        assert ask(url, "PUT", "/config", {"compatibility": "NONE"})[0] == 200
    own = _written(cluster)[len(_CONFLUENT) - 1 :]  # without NOOP
    assert own[-1] == (b'{"keytype":"CONFIG","subject":null,"magic":0}', b'{"compatibilityLevel":"NONE"}')


def test_the_form_of_our_records(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster(schema_registry=True)
    url = cluster.schema_registry_url
    assert url is not None
    register(url, "a", '{"type": "fixed", "name": "F", "size": 2}')
    reference = {"name": "F", "subject": "a", "version": 1}
    register(url, "b", '{"type": "array", "items": "F"}', references=[reference])
    register(url, "c", '{"type": "object"}', "JSON")
    ask(url, "PUT", "/config/a", {"compatibility": "FORWARD"})
    ask(url, "PUT", "/mode/a", {"mode": "READONLY"})
    ask(url, "DELETE", "/mode/a")
    ask(url, "DELETE", "/subjects/b")
    ask(url, "DELETE", "/subjects/b?permanent=true")
    ask(url, "DELETE", "/subjects/a/versions/1")
    register(url, ":.x:a", '"int"')
    ask(url, "PUT", "/config", {"compatibility": "NONE"})
    assert _written(cluster) == [
        (
            b'{"keytype":"SCHEMA","subject":"a","version":1,"magic":1}',
            _FIXED % b"false",
        ),
        (
            b'{"keytype":"SCHEMA","subject":"b","version":1,"magic":1}',
            b'{"subject":"b","version":1,"id":2,"references":[{"name":"F","subject":"a","version":1}],'
            b'"schema":"{\\"type\\":\\"array\\",\\"items\\":\\"F\\"}","deleted":false}',
        ),
        (
            b'{"keytype":"SCHEMA","subject":"c","version":1,"magic":1}',
            b'{"subject":"c","version":1,"id":3,"schemaType":"JSON","schema":"{\\"type\\":\\"object\\"}","deleted":false}',
        ),
        (b'{"keytype":"CONFIG","subject":"a","magic":0}', b'{"subject":"a","compatibilityLevel":"FORWARD"}'),
        (b'{"keytype":"MODE","subject":"a","magic":0}', b'{"subject":"a","mode":"READONLY"}'),
        (b'{"keytype":"MODE","subject":"a","magic":0}', None),
        (b'{"keytype":"DELETE_SUBJECT","subject":"b","magic":0}', b'{"subject":"b","version":1}'),
        (b'{"keytype":"SCHEMA","subject":"b","version":1,"magic":1}', None),
        (
            b'{"keytype":"SCHEMA","subject":"a","version":1,"magic":1}',
            _FIXED % b"true",
        ),
        (
            b'{"keytype":"CONTEXT","tenant":"default","context":".x","magic":0}',
            b'{"tenant":"default","context":".x"}',
        ),
        (
            b'{"keytype":"SCHEMA","subject":":.x:a","version":1,"magic":1}',
            b'{"subject":":.x:a","version":1,"id":1,"schema":"\\"int\\"","deleted":false}',
        ),
        (b'{"keytype":"CONFIG","magic":0}', b'{"compatibilityLevel":"NONE"}'),
    ]


def test_a_late_write_is_undone_before_compaction(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    """Of another registry, or of a producer that was given up: with the key of a schema, or its id."""
    cleaner = {
        "log.cleaner.backoff.ms": "50",
        "log.cleaner.min.cleanable.ratio": "0.01",
        "internal.segment.bytes": "1024",
    }
    cluster = make_cluster(settings=cleaner, schema_registry=True)
    url = cluster.schema_registry_url
    assert url is not None
    id = register(url, "a", '"int"')
    producer = ConfluentProducer({"bootstrap.servers": cluster.bootstrap_servers})
    for subject in ("a", "b"):
        key = b'{"keytype":"SCHEMA","subject":"%s","version":1,"magic":1}' % subject.encode()
        value = b'{"subject":"%s","version":1,"id":%d,"schema":"\\"long\\"","deleted":false}'
        producer.produce("_schemas", value % (subject.encode(), id), key)
    producer.flush(20)
    for n in range(60):
        register(url, f"later-{n}", record(f"f{n}"))
        of_a = [value for key, value in _written(cluster) if b'"a"' in key]
        if len(of_a) == 1:  # compacted
            break
    assert len(of_a) == 1
    assert b"int" in (of_a[0] or b"")
    for _ in range(2):
        assert ask(url, "GET", f"/schemas/ids/{id}")[1]["schema"] == '"int"'
        assert ask(url, "GET", f"/schemas/ids/{id}/versions") == (200, [{"subject": "a", "version": 1}])
        assert ask(url, "GET", "/subjects/b/versions")[0] == 404
        cluster.kill_schema_registry()
        cluster.restart_schema_registry()


def _everything(url: str) -> dict[str, Any]:
    paths = ["/subjects?deleted=true", "/schemas?deleted=true", "/config", "/mode", "/contexts"]
    return {path: ask(url, "GET", path) for path in paths}


@pytest.mark.parametrize("killed", ["registry", pytest.param("broker", marks=pytest.mark.test_all("kill"))])
def test_a_kill_in_the_middle_of_registrations(make_cluster: Callable[..., EmbeddedCluster], killed: str) -> None:
    cluster = make_cluster(schema_registry=True)
    url = cluster.schema_registry_url
    assert url is not None
    acknowledged: dict[int, int] = {}
    has_many, is_over = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            try:
                acknowledged[number] = register(url, f"s{number}", record(f"f{number}"))
                number += 1
            except (OSError, AssertionError):  # killed; or a write that timed out, which may be there
                pass
            if number == 10:
                has_many.set()
            if number == 30:
                break

    writer = threading.Thread(target=write)
    writer.start()
    assert has_many.wait(60)
    if killed == "registry":
        cluster.kill_schema_registry()
        cluster.restart_schema_registry()
    else:
        cluster.kill(0)
        cluster.restart(0)
    writer.join(60)
    is_over.set()
    writer.join()
    assert len(acknowledged) == 30
    assert len(set(acknowledged.values())) == 30  # an id for each schema, none twice
    for number, id in acknowledged.items():
        assert f"f{number}" in ask(url, "GET", f"/schemas/ids/{id}")[1]["schema"]
        assert ask(url, "GET", f"/subjects/s{number}/versions") == (200, [1])
    before = _everything(url)
    cluster.kill_schema_registry()
    cluster.restart_schema_registry()
    assert _everything(url) == before


def test_races_of_registrations(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster(schema_registry=True)
    url = cluster.schema_registry_url
    assert url is not None
    same = record("same")
    with ThreadPoolExecutor(12) as pool:
        ids = list(pool.map(lambda n: register(url, f"same-{n % 2}", same), range(12)))
        assert set(ids) == {1}
        others = list(pool.map(lambda n: register(url, f"other-{n}", record(f"f{n}")), range(12)))
        assert sorted(others) == list(range(2, 14))

        def evolve(n: int) -> int:
            status, _ = ask(url, "POST", "/subjects/one/versions", {"schema": record("a", with_default(f"f{n}"))})
            return status

        ask(url, "PUT", "/config/one", {"compatibility": "FULL_TRANSITIVE"})
        assert set(pool.map(evolve, range(12))) == {200}
    assert ask(url, "GET", "/subjects/one/versions") == (200, list(range(1, 13)))


def test_topics_that_do_not_do(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    cluster = make_cluster()
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(settings) as admin:
        admin.create_topic("deleted", 1)
        admin.create_topic("two", 2, configs={"cleanup.policy": "compact"})
    with pytest.raises(ConfigError, match=r"topic deleted has cleanup.policy=delete: schemas would be lost"):
        SchemaRegistry(settings, "0", "deleted")
    with pytest.raises(ConfigError, match="topic two has 2 partitions"):
        SchemaRegistry(settings, "0", "two")
    with SchemaRegistry(settings, "0", "other") as registry:
        register(registry.url, "s", json.dumps("int"))
        with pytest.raises(ConfigError, match="choose another --listen"):
            SchemaRegistry(settings, registry.url.removeprefix("http://"), "other")
    assert len(_written(cluster, "other")) == 1


@pytest.mark.test_all("kill")
def test_a_broker_that_is_gone(make_cluster: Callable[..., EmbeddedCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster()
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with SchemaRegistry(settings, "0") as registry:
        id = register(registry.url, "s", '"int"')
        cluster.kill(0)
        monkeypatch.setattr("spark_klog.registry.registry.WRITE_SECONDS", 5.0)
        url = registry.url
        for _ in range(2):  # with the producer that is there, and with a new one
            started = time.monotonic()
            with ThreadPoolExecutor(3) as pool:  # one deadline for each, although one waits for the other
                asked = [
                    pool.submit(ask, url, "POST", f"/subjects/s{n}/versions", {"schema": '"long"'}) for n in range(3)
                ]
                for future in asked:
                    status, answer = future.result()
                    assert (status, answer["error_code"]) == (500, 50002)
            assert time.monotonic() - started < 9
        assert ask(registry.url, "GET", f"/schemas/ids/{id}")[0] == 200  # reading goes on
        assert register(registry.url, "s", '"int"') == id  # what is there needs no log
        cluster.restart(0)
        monkeypatch.undo()
        assert register(registry.url, "s", '"long"') == id + 1
    with pytest.raises(KlogError):
        SchemaRegistry({"bootstrap.servers": "127.0.0.1:1", "default.api.timeout.ms": "1000"}, "0")


def test_a_topic_that_is_deleted(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    """The state goes with the topic: an id that is acknowledged is in a log, and is the same after a restart."""
    cluster = make_cluster(schema_registry=True)
    url = cluster.schema_registry_url
    assert url is not None
    for n in range(3):
        register(url, f"s{n}", record(f"f{n}"))
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        admin.delete_topics(["_schemas"])
    id = register(url, "other", record("g"))
    assert ask(url, "GET", "/subjects") == (200, ["other"])
    assert [json.loads(value or b"")["id"] for _, value in _written(cluster)] == [id]
    assert register(url, "s0", record("f0")) == id + 1
    before = _everything(url)
    cluster.kill_schema_registry()
    cluster.restart_schema_registry()
    assert _everything(url) == before
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        (settings,) = admin.describe_configs([("topic", "_schemas")]).check().values()
    assert settings["cleanup.policy"].value == "compact"


def test_a_topic_that_a_broker_does_not_know_for_a_moment(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state stays; if it begins again, those who read wait for it."""
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0", "unknown") as registry:
        id = register(registry.url, "s", '"int"')
        log, state = registry._log, registry._log.state
        describe, unknown = log._admin.describe_topic, [True]

        def describe_topic(name: str) -> Any:
            if unknown:
                unknown.pop()
                raise ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name)
            return describe(name)

        monkeypatch.setattr(log._admin, "describe_topic", describe_topic)
        log._check_topic()
        assert (log.state, unknown) == (state, [])
        for _ in range(2):
            log._begin_again(log.state, "a test")
            assert ask(registry.url, "GET", f"/schemas/ids/{id}")[0] in (200, 503)
            wait_until(lambda: ask(registry.url, "GET", f"/schemas/ids/{id}")[0] == 200)


@pytest.mark.test_all("long")
def test_a_known_schema_at_once_after_its_topic_is_deleted(cluster: EmbeddedCluster) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    with SchemaRegistry(settings, "0", "gone") as registry, Admin(settings) as admin:
        register(registry.url, "s", '"int"')
        assert register(registry.url, "t", '"long"') == 2
        admin.delete_topics(["gone"])
        time.sleep(0.3)
        assert register(registry.url, "t", '"long"') == 1  # not its id in the topic that is gone
