"""Producers kept between tasks: each row is written once whatever happens in between, with few producer ids."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions  # the stubs of .admin do not export it
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from spark_klog.broker.faults import ErrorAnswer, Fault
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError, ErrorCode, InvalidRecords, KlogError, ProtocolError
from spark_klog.spark.write import producers, sink
from spark_klog.spark.write.producers import PRODUCERS, ProducerCache
from spark_klog.spark.write.sink_options import sink_options
from tests.spark.support import consume, create_topic, delete_topic, producer_ids, wait_for
from tests.support.brokers.model_cluster import Fate, Key, ModelCluster
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.servers.kafka import Kafka

SCHEMA = StructType(
    [StructField("topic", StringType()), StructField("partition", IntegerType()), StructField("value", BinaryType())]
)
SEEDS = 6


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    yield
    PRODUCERS.forget()


def task(servers: str, rows: list[tuple[Key, bytes]], failure: Exception | None = None, **settings: str) -> None:
    """Run a Spark task that writes rows in batches of ten; Spark's side raises `failure` after them."""
    options = {"kafka.bootstrap.servers": servers, "kafka.retry.backoff.ms": "1"}
    options |= {f"kafka.{name.replace('_', '.')}": value for name, value in settings.items()}

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(rows), 10):
            part = rows[start : start + 10]
            topics = pa.array([key[0] for key, _ in part])
            numbers = pa.array([key[1] for key, _ in part], pa.int32())
            values = pa.array([value for _, value in part], pa.binary())
            yield pa.record_batch([topics, numbers, values], SCHEMA.names)
        if failure is not None:
            raise failure

    sink.BatchQueryWriter(sink_options(options), SCHEMA).write(batches())


class Story:
    """Tasks with a random event before each, against model brokers; keeps the expected logs."""

    def __init__(self, seed: int, brokers: ModelCluster) -> None:
        self.draw = random.Random(seed)
        self.brokers = brokers
        self.wanted: dict[Key, list[bytes]] = {key: [] for key in brokers.log}
        self.unsure: set[bytes] = set()
        #: Producers so far: the first one, and one after each event that ends a producer.
        self.ends = 1
        self.count = 0

    def run(self) -> None:
        events = [
            lambda: None,
            self.brokers.forget_producers,
            self.make_anew,
            self.add_partitions,
            self.move,
            lambda: self.brokers.disconnect(self.draw.randrange(2)),
            self.fail,
            self.fail_at_broker,
            self.become_another_cluster,
        ]
        for event in [*self.draw.sample(events, len(events)), *self.draw.choices(events, k=12)]:
            event()
            rows = self.rows()
            task(self.brokers.servers, rows)
            for key, value in rows:
                self.wanted[key].append(value)
            self.check()
        with self.brokers.lock:
            assert self.brokers.inits == self.ends

    def rows(self) -> list[tuple[Key, bytes]]:
        self.count += 1
        keys = self.draw.sample(sorted(self.wanted), self.draw.randint(1, len(self.wanted)))
        return [(key, b"%d %d %d" % (self.count, key[1], number)) for key in keys for number in range(12)]

    def check(self) -> None:
        with self.brokers.lock:
            for key, values in self.brokers.log.items():
                assert max(Counter(values).values(), default=1) == 1, key
                assert [value for value in values if value not in self.unsure] == self.wanted[key]

    def make_anew(self) -> None:
        self.brokers.make_anew("t", self.draw.randint(1, 3))
        self.renew_keys()

    def add_partitions(self) -> None:
        self.brokers.add_partitions("u", 1)
        self.renew_keys()

    def renew_keys(self) -> None:
        with self.brokers.lock:
            self.wanted = {key: [v for v in log if v not in self.unsure] for key, log in self.brokers.log.items()}

    def move(self) -> None:
        with self.brokers.lock:
            self.brokers.leaders[self.draw.choice(sorted(self.wanted))] = self.draw.randrange(2)

    def fail(self) -> None:
        """Let Spark end a task after some of its rows were sent."""
        rows = self.rows()
        self.unsure |= {value for _, value in rows}
        with pytest.raises(EOFError):
            task(self.brokers.servers, rows, EOFError("killed"))
        self.ends += 1

    def fail_at_broker(self) -> None:
        rows = self.rows()
        self.unsure |= {value for _, value in rows}
        self.brokers.script = lambda node, keys: Fate(errors={keys[0]: ErrorCode.TOPIC_AUTHORIZATION_FAILED})
        with pytest.raises(ProtocolError):
            task(self.brokers.servers, rows)
        self.brokers.script = lambda node, keys: Fate()
        self.ends += 1

    def become_another_cluster(self) -> None:
        """Become another cluster at the same addresses, which knows no producers."""
        self.brokers.cluster_id += "+"
        self.brokers.forget_producers()
        self.ends += 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tasks_with_events_in_between(seed: int) -> None:
    with ModelCluster(2, {"t": 2, "u": 2}) as brokers:
        story = Story(seed, brokers)
        task(brokers.servers, [(("t", 0), b"first")])
        story.wanted["t", 0].append(b"first")
        story.run()


A: Key = ("t", 0)


def test_settings_that_differ_have_producers_of_their_own() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        for turn in range(3):
            task(brokers.servers, [(A, b"a%d" % turn)], client_id="one")
            task(brokers.servers, [(A, b"b%d" % turn)], client_id="two")
        assert (brokers.inits, len(brokers.log[A])) == (2, 6)


def test_idle_producers_are_few_and_not_old() -> None:
    now = 0.0
    cache = ProducerCache(lambda: now)
    with ModelCluster(1, {"t": 1}) as brokers:

        def use(name: str) -> None:
            with cache.borrow({"bootstrap.servers": brokers.servers, "client.id": name}) as producer:
                producer.send_arrow(pa.record_batch({"value": [b"v"]}), "t", None, 0)

        for number in range(producers._MOST_IDLE + 1):
            use(f"c{number}")
        taken = brokers.inits
        use("c1")
        assert brokers.inits == taken
        use("c0")  # closed when the cache was full
        assert brokers.inits == taken + 1
        now += producers._IDLE_SECONDS
        use("c0")
        assert brokers.inits == taken + 2
        for _ in range(20):
            now += producers._LIFETIME_SECONDS / 20
            use("c0")
        assert brokers.inits == taken + 3
        cache.forget()


def test_threads_do_not_share_a_producer() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        settings = {"bootstrap.servers": brokers.servers}
        barrier = threading.Barrier(2, timeout=30)
        seen = []

        def run() -> None:
            with PRODUCERS.borrow(settings) as producer:
                seen.append(producer)
                barrier.wait()

        for _ in range(2):
            threads = [threading.Thread(target=run) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert seen[0] is not seen[1]
        assert set(map(id, seen[2:])) == set(map(id, seen[:2]))


def test_a_forked_process_has_none() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        task(brokers.servers, [(A, b"parent 1")])
        child = os.fork()
        if not child:
            code = 1
            try:
                task(brokers.servers, [(A, b"child")])
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        task(brokers.servers, [(A, b"parent 2")])
        assert (brokers.inits, brokers.log[A]) == (2, [b"parent 1", b"child", b"parent 2"])


def test_a_partition_that_is_gone_is_refused_by_what_is_there_now() -> None:
    with ModelCluster(1, {"t": 2}) as brokers:
        task(brokers.servers, [(("t", 1), b"v")])
        brokers.make_anew("t", 1)
        with pytest.raises(ConfigError, match="partitions 0 to 0"):
            task(brokers.servers, [(("t", 1), b"v")])


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"topic": pa.array(["t", None])}, "row 4 has a null topic"),
        ({"topic": pa.array([b"t", b"\xff"]).view(pa.string())}, "row 4: column 'topic' is b'.xff'"),
        ({"topic": ["t", "t"], "partition": pa.array([0, 1 << 32])}, "row 4: column 'partition' of type int64"),
        ({"topic": ["t", "t"], "partition": pa.array([0, 1], pa.int32())}, "row 4: partition 1 of topic t"),
    ],
)
def test_a_row_that_is_no_record_is_counted_from_the_tasks_first(columns: dict[str, Any], told: str) -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        options = sink_options({"kafka.bootstrap.servers": brokers.servers})
        batches = [{"value": [b"v"] * 3, "topic": ["t"] * 3}, {"value": [b"v"] * 2, **columns}]
        with pytest.raises(InvalidRecords, match=f"^{told}") as failed:
            sink.BatchQueryWriter(options, SCHEMA).write(map(pa.record_batch, batches))
        assert failed.value.row == 4


@pytest.mark.parametrize("more", [{}, {"createTopics": "1"}], ids=str)
def test_an_illegal_topic_name(more: dict[str, str]) -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        options = sink_options({"kafka.bootstrap.servers": brokers.servers, **more})
        batch = pa.record_batch({"value": [b"v"], "topic": ["a b"]})
        with pytest.raises(ConfigError, match="illegal topic name 'a b': 1 to 249 of a-z"):
            sink.BatchQueryWriter(options, SCHEMA).write(iter([batch]))


def test_a_topic_that_is_still_being_deleted_is_created_as_the_option_says(
    make_cluster: Callable[..., EmbeddedCluster], topic: str
) -> None:
    """CreateTopics first answers that it exists; meanwhile the producer's metadata requests must not auto-create it."""
    cluster = make_cluster(faults=[Fault(ErrorAnswer("TOPIC_ALREADY_EXISTS"), api="CreateTopics", count=2)])
    servers = cluster.bootstrap_servers
    with PRODUCERS.borrow({"bootstrap.servers": servers, "retry.backoff.ms": "1"}) as producer:
        producer.send_arrow(pa.record_batch({"value": [b"v"]}), topic, 3, 0)
    assert all(cluster.faults_fired().values())
    found = AdminClient({"bootstrap.servers": servers}).list_topics(topic, timeout=30).topics[topic]
    assert len(found.partitions) == 3
    assert [record.value for record in consume(servers, topic)] == [b"v"]


@pytest.mark.parametrize("create", [None, 3])
def test_a_topic_deleted_while_a_task_waits_for_its_rows_is_not_auto_created(
    cluster: EmbeddedCluster, topic: str, create: int | None
) -> None:
    servers, row = cluster.bootstrap_servers, pa.record_batch({"value": [b"v"]})
    create_topic(servers, topic, 2)
    settings = {"bootstrap.servers": servers, "metadata.max.age.ms": "1"}
    admin = AdminClient({"bootstrap.servers": servers})
    with PRODUCERS.borrow(settings) as producer:
        producer.send_arrow(row, topic, create, 0)
    with PRODUCERS.borrow(settings) as producer:
        delete_topic(servers, topic)
        wait_for(lambda: topic not in admin.list_topics(timeout=30).topics, "deleted")
        time.sleep(0.01)  # the producer's metadata is now older than metadata.max.age.ms
        if create is None:
            with pytest.raises(ProtocolError, match=f"{topic} .option createTopics"):
                producer.send_arrow(row, topic, create, 0)
            assert topic not in admin.list_topics(timeout=30).topics
        else:
            producer.send_arrow(row, topic, create, 0)
    if create is not None:
        assert len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == create


def test_a_task_asks_for_metadata_once_and_of_the_topics_of_the_task_before() -> None:
    with ScriptedCluster({"t": 1, "u": 1}) as brokers:
        for topic in "tuuu":
            before = len(brokers.asked)
            task(brokers.bootstrap_servers, [((topic, 0), b"v")])
        last = brokers.asked[before:]
        assert [asked.name for asked in last] == ["Metadata", "Produce"]
        assert [topic["name"] for topic in last[0].message["topics"]] == ["u"]
        assert brokers.values("u", 0) == [b"v"] * 3


def test_settings_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with ModelCluster(1, {"t": 1}) as brokers:
        for _ in range(2):
            task(brokers.servers, [(A, b"v")], client_id="secret")
            brokers.cluster_id += "+"
    with pytest.raises(KlogError):
        task(brokers.servers, [(A, b"v")], client_id="secret", request_timeout_ms="500")
    assert "the producer" in caplog.text
    assert "secret" not in caplog.text


def test_passwords_are_not_in_an_entrys_repr() -> None:
    entry = producers._Entry((("sasl.password", "hunter2"),), object(), 0.0)  # type: ignore[arg-type]
    assert "hunter2" not in repr(entry)


def _between_tasks(servers: str, topic: str, restart: Callable[[], None]) -> None:
    """Tasks write after a broker kill, to new partitions and to a topic created again: all with one producer id."""
    wanted: Counter[bytes | None] = Counter()

    def write(name: str, partitions: int) -> None:
        rows = [((topic, number % partitions), b"%s %d" % (name.encode(), number)) for number in range(40)]
        task(servers, rows)
        wanted.update(value for _, value in rows)
        assert Counter(record.value for record in consume(servers, topic)) == wanted

    create_topic(servers, topic, 2)
    write("first", 2)
    ids = producer_ids(servers, topic, 2)
    restart()
    write("after a kill", 2)
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(timeout=30)
    wait_for(lambda: len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 3, "a third partition")
    write("more partitions", 3)
    delete_topic(servers, topic)
    wait_for(lambda: _is_created(servers, topic), "the end of the topic")
    wanted.clear()
    write("anew", 2)
    write("anew again", 2)
    assert len(ids) == 1
    assert producer_ids(servers, topic, 2) == ids


def _is_created(servers: str, topic: str) -> bool:
    """Create a topic; False while Kafka still deletes the old one of that name."""
    try:
        create_topic(servers, topic, 2)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
        return False
    return True


def test_between_tasks_a_broker_is_killed_and_a_topic_made_anew(cluster: EmbeddedCluster, topic: str) -> None:
    def restart() -> None:
        cluster.kill(0)
        cluster.restart(0)

    _between_tasks(cluster.bootstrap_servers, topic, restart)


@pytest.mark.peer
@pytest.mark.skipif("SPARK_KLOG_PRODUCER_SECONDS" not in os.environ, reason="part of make soak")
def test_the_same_at_kafka(server_dir: Path, topic: str) -> None:
    with Kafka("3.9.1", server_dir) as kafka:

        def restart() -> None:
            kafka.kill()
            kafka.start()

        _between_tasks(kafka.bootstrap_servers, topic, restart)
