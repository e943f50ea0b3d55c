"""What a query asks of a cluster of many partitions and brokers: requests, partitions in them, connections.

The numbers do not depend on the machine. The cluster is simulated; docs/explanation/scale.md has its sizes and times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from spark_klog.client import Consumer, ConsumerRecord
from spark_klog.client.cluster import Cluster
from spark_klog.client.consumer import core
from spark_klog.client.consumer.fetches import Fetches
from spark_klog.client.fetch.sampling import next_timestamps
from spark_klog.columns.schema import FULL
from spark_klog.errors import ConnectionFailed
from spark_klog.load.by_topic import _ANSWER_MS, _look
from spark_klog.load.journal.model import Progress
from spark_klog.load.planning import Look, find_extent, make_tasks
from spark_klog.spark import worker_process
from spark_klog.spark.options import RECORD_BYTES, SourceOptions, source_options
from spark_klog.spark.read import stream as stream_module
from spark_klog.spark.read.stream import RangePartition, StreamReader
from spark_klog.spark.read.tasks import read_ranges
from spark_klog.spark.versions import ReadAllAvailable, ReadMaxRows
from tests.support.brokers.simulated_cluster import SimulatedCluster

TOPICS, PARTITIONS, BROKERS, RECORDS = 40, 5, 8, 20


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatedCluster]:
    with SimulatedCluster(TOPICS, PARTITIONS, BROKERS, RECORDS) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: SimulatedCluster) -> SimulatedCluster:
    running.tell("forget")
    return running


def _options(cluster: SimulatedCluster, **more: str) -> SourceOptions:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribepattern": "t.*"}
    return source_options({**servers, "startingoffsets": "earliest", **more}, True)


@pytest.fixture
def reader(cluster: SimulatedCluster) -> Iterator[StreamReader]:
    reader = StreamReader(_options(cluster), FULL)
    yield reader
    reader.stop()


def _asked(cluster: SimulatedCluster) -> tuple[dict[str, int], dict[str, int]]:
    """The requests by API, and the partitions in them, since the last call."""
    figures = cluster.figures()
    cluster.tell("forget")
    return {api: count for api, count in figures["requests"].items() if api != "ApiVersions"}, figures["partitions"]


def _planned(reader: StreamReader, start: Any, end: Any) -> int:
    tasks: list[Any] = reader.partitions(start, end)
    return sum(span.end - span.start for task in tasks for span in task.ranges)


def test_plans(cluster: SimulatedCluster, reader: StreamReader) -> None:
    """A plan asks for metadata once, and each leader once; for first offsets only of partitions with news."""
    first = reader.latestOffset({}, ReadAllAvailable())
    requests, partitions = _asked(cluster)
    assert requests == {"Metadata": 3, "ListOffsets": 3 * BROKERS}  # connecting, the start, the end
    assert partitions == {"ListOffsets": 3 * TOPICS * PARTITIONS}
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    requests, partitions = _asked(cluster)
    assert requests == {"Metadata": 1, "ListOffsets": BROKERS}
    assert partitions == {"ListOffsets": TOPICS * PARTITIONS}
    cluster.tell("append", every=100, records=7)
    second = reader.latestOffset(first, ReadAllAvailable())
    requests, partitions = _asked(cluster)
    assert partitions == {"ListOffsets": TOPICS * PARTITIONS + 2}
    assert requests["ListOffsets"] <= BROKERS + 2
    assert _planned(reader, first, second) == 14
    assert _asked(cluster) == ({}, {})


def _tasks(reader: StreamReader, end: Any) -> list[RangePartition]:
    return [task for task in reader.partitions({}, end) if isinstance(task, RangePartition)]


def _rows_of(options: SourceOptions, tasks: list[RangePartition]) -> int:
    return sum(
        batch.num_rows
        for task in tasks
        for batch in read_ranges(options, task.ranges, FULL, task.topic_ids, leaders=task.leaders)
    )


def _records(tasks: list[RangePartition]) -> int:
    return sum(span.end - span.start for task in tasks for span in task.ranges)


@pytest.mark.parametrize("least", [50, 37])
def test_a_task_is_one_fetch(cluster: SimulatedCluster, least: int) -> None:
    """Ranges of one leader are in one task, which needs no metadata but the worker's first."""
    options = _options(cluster, minpartitions=str(least))
    reader = StreamReader(options, FULL)
    end = reader.latestOffset({}, ReadAllAvailable())
    tasks, all_records = _tasks(reader, end), _records(_tasks(reader, end))
    reader.stop()
    assert least <= len(tasks) <= least + BROKERS
    nodes = [set(task.leaders) for task in tasks]
    assert sum(map(len, nodes)) <= len(tasks) + BROKERS
    assert all(first.isdisjoint(second) for first, second in pairwise(nodes[:BROKERS]))  # tasks that run at once
    cluster.tell("forget")
    worker_process._forget_clusters()
    assert _rows_of(options, tasks) == all_records
    figures = cluster.figures()
    worker_process._forget_clusters()
    assert figures["requests"]["Fetch"] == sum(map(len, nodes))
    assert figures["requests"]["Metadata"] == 1
    assert figures["opened"] <= 2 * BROKERS
    assert figures["requests"].get("ListOffsets", 0) == 0


def test_leaders_that_have_moved_since_the_plan(cluster: SimulatedCluster) -> None:
    """A task whose leaders are not right any more reads the same records, also of brokers that it does not know."""
    options = _options(cluster, minpartitions="50")
    reader = StreamReader(options, FULL)
    tasks = _tasks(reader, reader.latestOffset({}, ReadAllAvailable()))
    reader.stop()
    for task in tasks:
        task.leaders = tuple(
            999 if span.partition == 1 else node for span, node in zip(task.ranges, task.leaders, strict=True)
        )
    for number in range(0, TOPICS, 10):
        cluster.tell("move", topic=f"t{number:05}", partition=2, node=number % BROKERS)
    worker_process._forget_clusters()
    rows = _rows_of(options, tasks)
    worker_process._forget_clusters()
    assert rows == _records(tasks)


def test_a_sample_of_many_partitions_is_bounded() -> None:
    """A connection keeps the memory of its largest answer: no request asks for more than 1 MiB of a sample."""
    with SimulatedCluster(1, 200, 1, RECORDS) as one:
        with Cluster.connect({"bootstrap.servers": one.bootstrap_servers}) as client:
            assert len(next_timestamps(client, {("t00000", number): 3 for number in range(200)})) == 200
        assert one.figures()["requests"]["Fetch"] == 4


def test_a_limit_by_bytes_samples_some_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 50,000 partitions that have much to read, samples of all would be 3 GB for each micro-batch."""
    topics, records, sampled = 60, 500, 25
    monkeypatch.setattr(stream_module, "_MOST_SAMPLED", sampled)
    with SimulatedCluster(topics, PARTITIONS, 2, records) as large:
        reader = StreamReader(_options(large, maxbytespertrigger="1000000"), FULL)
        end: dict[str, Any] = {}
        for count in range(1, 4):
            begin, end = end, reader.latestOffset(end, ReadMaxRows(1))
            assert large.figures()["partitions"]["Fetch"] <= count * sampled
            # a record takes 105 to 110 bytes
            assert 8_500 < _planned(reader, begin, end) < 10_000
        assert RECORD_BYTES not in reader.reportLatestOffset()
        reader.stop()


def test_the_samples_of_a_limit_by_bytes_are_those_of_the_estimate() -> None:
    with SimulatedCluster(1, PARTITIONS, 2, 20) as small:
        reader = StreamReader(_options(small, maxbytespertrigger="1000", estimaterecordbytes="true"), FULL)
        reader.latestOffset({}, ReadMaxRows(1))
        assert small.figures()["partitions"]["Fetch"] == PARTITIONS
        assert len(reader.reportLatestOffset()[RECORD_BYTES]) == PARTITIONS  # type: ignore[arg-type]
        reader.stop()


def test_a_leader_that_moves_costs_its_partitions_alone(cluster: SimulatedCluster, reader: StreamReader) -> None:
    first = reader.latestOffset({}, ReadAllAvailable())
    cluster.tell("move", topic="t00007", partition=1, node=0)
    _asked(cluster)
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    requests, partitions = _asked(cluster)
    assert requests == {"Metadata": 1, "ListOffsets": BROKERS}
    assert partitions == {"ListOffsets": TOPICS * PARTITIONS}


def test_all_brokers_are_slow(cluster: SimulatedCluster) -> None:
    """Of a request's time each of many brokers gets a quarter of what is left: one that takes longer than its share of
    a fair division can still answer."""
    cluster.tell("slow", node=-1, seconds=0.5)
    try:
        settings = {"bootstrap.servers": cluster.bootstrap_servers, "request.timeout.ms": "20000"}
        with Cluster.connect(settings) as client:
            cluster.tell("slow", node=-1, seconds=3.5)  # 20 s by 8 brokers are 2.5 s
            assert len(client.metadata(None)) == TOPICS
    finally:
        cluster.tell("slow", node=-1)


def test_many_silent_brokers_are_asked_first() -> None:
    """Each of them had a quarter of what was left: after twelve that was too little for any answer."""
    brokers, silent = 20, 12
    with SimulatedCluster(10, 1, brokers) as large:
        with Cluster.connect({"bootstrap.servers": large.bootstrap_servers, "request.timeout.ms": "20000"}) as client:
            large.tell("slow", node=-1, seconds=100)
            for node in range(silent, brokers):
                large.tell("slow", node=node, seconds=0.3)
            assert len(client.metadata(None)) == 10
            assert len(client.metadata(None)) == 10
            large.tell("forget")
            assert len(client.metadata(None)) == 10  # by one that has answered
            assert large.figures()["nodes"] == 1


def test_an_error_about_many_brokers_is_short() -> None:
    with SimulatedCluster(1, 1, 30) as large:
        with Cluster.connect({"bootstrap.servers": large.bootstrap_servers, "request.timeout.ms": "1000"}) as client:
            client.metadata(None)
            for node in range(30):
                large.tell("stop", node=node)
            with pytest.raises(ConnectionFailed, match=r"no broker answers.* and 20 more") as caught:
                client.metadata(None)
    assert len(str(caught.value)) < 1500


def test_a_silent_broker_delays_the_others_little(cluster: SimulatedCluster, reader: StreamReader) -> None:
    """A micro-batch reads what other brokers lead; what the broker leads is read when it answers again."""
    first = reader.latestOffset({}, ReadAllAvailable())
    cluster.tell("append", every=1, records=3)
    cluster.tell("slow", node=5, seconds=100)
    try:
        begin = time.monotonic()
        second = reader.latestOffset(first, ReadAllAvailable())
        assert time.monotonic() - begin < 25  # of the 30 of a request
    finally:
        cluster.tell("slow", node=5)
    silent = TOPICS * PARTITIONS // BROKERS
    assert _planned(reader, first, second) == 3 * (TOPICS * PARTITIONS - silent)
    third = reader.latestOffset(second, ReadAllAvailable())
    assert _planned(reader, second, third) == 3 * silent


@pytest.fixture
def consumer(cluster: SimulatedCluster) -> Iterator[Consumer]:
    """A consumer of all partitions, from their ends on, which has a fetch session with each broker."""
    settings = {"auto.offset.reset": "latest", "request.timeout.ms": "5000", "fetch.max.wait.ms": "100"}
    with Consumer({"bootstrap.servers": cluster.bootstrap_servers, **settings}) as consumer:
        consumer.assign([(f"t{topic:05}", number) for topic in range(TOPICS) for number in range(PARTITIONS)])
        poll_until(consumer, lambda _: cluster.figures()["partitions"].get("Fetch", 0) >= TOPICS * PARTITIONS)
        cluster.tell("forget")
        yield consumer


def poll_until(consumer: Consumer, is_enough: Callable[[list[ConsumerRecord]], bool]) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    deadline = time.monotonic() + 60
    while not is_enough(records):
        assert time.monotonic() < deadline, f"{len(records)} records within a minute"
        records += consumer.poll(0.2)
    return records


def test_a_consumer_of_all_partitions_asks_for_what_has_changed(cluster: SimulatedCluster, consumer: Consumer) -> None:
    """A fetch without news names no partition, and a step looks at none: its time does not grow with them."""
    poll_until(consumer, lambda _: cluster.figures()["requests"].get("Fetch", 0) >= 3 * BROKERS)
    requests, partitions = _asked(cluster)
    assert requests.keys() == {"Fetch"}
    assert partitions == {"Fetch": 0}
    assert not consumer._assignment.restless
    cluster.tell("append", every=100, records=7)
    assert len(poll_until(consumer, lambda records: len(records) >= 14)) == 14
    poll_until(consumer, lambda _: cluster.figures()["partitions"].get("Fetch", 0) >= 2)  # their new offsets
    assert _asked(cluster)[1] == {"Fetch": 2}
    poll_until(consumer, lambda _: cluster.figures()["requests"].get("Fetch", 0) >= 3 * BROKERS)
    requests, partitions = _asked(cluster)
    assert requests.keys() == {"Fetch"}
    assert partitions == {"Fetch": 0}
    assert not consumer._assignment.restless


def test_a_record_at_hand_costs_no_look_at_the_partitions_that_wait(
    cluster: SimulatedCluster, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If 5 % of 10,000 partitions have no leader, a look at these costs several times what a record does."""
    looks, step = 0, Fetches.step

    def counted(fetches: Fetches) -> None:
        nonlocal looks
        looks += 1
        step(fetches)

    monkeypatch.setattr(core, "_STEP", 60.0)
    monkeypatch.setattr(Fetches, "step", counted)
    cluster.tell("append", every=1, records=1)
    poll_until(consumer, lambda records: len(records) >= TOPICS * PARTITIONS)
    assert looks < TOPICS * PARTITIONS / 2


def test_a_consumer_asks_for_the_topic_whose_leader_has_moved(cluster: SimulatedCluster, consumer: Consumer) -> None:
    cluster.tell("move", topic="t00004", partition=0, node=7)
    cluster.tell("append", every=100, records=2)
    read = poll_until(consumer, lambda records: len(records) >= 4)
    assert sorted({(record.topic, record.partition) for record in read}) == [("t00000", 0), ("t00020", 0)]
    poll_until(consumer, lambda _: not consumer._assignment.restless)
    requests, partitions = _asked(cluster)
    assert partitions["Metadata"] == PARTITIONS * requests["Metadata"]


def test_a_silent_broker_delays_no_other_of_a_consumer(cluster: SimulatedCluster, consumer: Consumer) -> None:
    silent = TOPICS * PARTITIONS // BROKERS
    cluster.tell("slow", node=5, seconds=100)
    try:
        cluster.tell("append", every=1, records=3)
        read = poll_until(consumer, lambda records: len(records) >= 3 * (TOPICS * PARTITIONS - 2 * silent))
    finally:
        cluster.tell("slow", node=5)
    read += poll_until(consumer, lambda records: len(read) + len(records) >= 3 * TOPICS * PARTITIONS)
    seen = [(record.topic, record.partition, record.offset) for record in read]
    assert len(set(seen)) == len(seen) == 3 * TOPICS * PARTITIONS


def test_a_broker_that_throttles_delays_no_other_of_a_consumer(cluster: SimulatedCluster, consumer: Consumer) -> None:
    """It is asked for nothing until its time is over; what others lead is read meanwhile."""
    throttled = TOPICS * PARTITIONS // BROKERS
    cluster.tell("slow", node=5, throttle_ms=600_000)
    cluster.tell("append", every=1, records=3)
    poll_until(consumer, lambda records: len(records) >= 3 * (TOPICS * PARTITIONS - throttled))
    try:
        cluster.tell("forget")
        poll_until(consumer, lambda _: cluster.figures()["requests"].get("Fetch", 0) >= 10 * (BROKERS - 1))
        assert cluster.figures()["by_node"].get("5", 0) <= 1  # that which was under way
    finally:
        cluster.tell("slow", node=5)


def test_a_broker_that_is_gone_delays_no_other(
    cluster: SimulatedCluster, reader: StreamReader, consumer: Consumer
) -> None:
    """What others lead is read meanwhile; metadata is asked for the topics of the broker alone."""
    gone = TOPICS * PARTITIONS // BROKERS
    first = reader.latestOffset({}, ReadAllAvailable())
    cluster.tell("stop", node=5)
    try:
        cluster.tell("append", every=1, records=3)
        cluster.tell("forget")
        read = poll_until(consumer, lambda records: len(records) >= 3 * (TOPICS * PARTITIONS - gone))
        requests, partitions = _asked(cluster)
        assert partitions.get("Metadata", 0) <= requests.get("Metadata", 0) * gone * PARTITIONS
        second = reader.latestOffset(first, ReadAllAvailable())
        assert _planned(reader, first, second) == 3 * (TOPICS * PARTITIONS - gone)
    finally:
        cluster.tell("start", node=5)
    assert len(read) == 3 * (TOPICS * PARTITIONS - gone)
    assert len(poll_until(consumer, lambda records: len(records) >= 3 * gone)) == 3 * gone
    assert _planned(reader, second, reader.latestOffset(second, ReadAllAvailable())) == 3 * gone


@pytest.mark.parametrize("subscription", [[f"t{topic:05}" for topic in range(1000)], re.compile("t0.*")])
def test_metadata_of_many_topics_takes_longer_than_a_poll(subscription: list[str] | re.Pattern[str]) -> None:
    """What a short poll drops the next one would ask for, and drop, again."""
    with SimulatedCluster(1000, 1, 4) as large:
        large.tell("slow", node=-1, seconds=0.5, apis=["Metadata"])
        settings = {"group.id": "all", "group.protocol": "consumer", "auto.offset.reset": "latest"}
        with Consumer({"bootstrap.servers": large.bootstrap_servers, **settings}) as consumer:
            consumer.subscribe(subscription)
            poll_until(consumer, lambda _: len(consumer.assignment()) == 1000)


def test_a_group_of_the_consumer_protocol(cluster: SimulatedCluster) -> None:
    """Heartbeats name the partitions only when these have changed; topics are looked up together."""
    settings = {"group.id": "all", "group.protocol": "consumer", "auto.offset.reset": "latest"}
    with Consumer({"bootstrap.servers": cluster.bootstrap_servers, **settings}) as consumer:
        consumer.subscribe([f"t{topic:05}" for topic in range(TOPICS)])
        poll_until(consumer, lambda _: len(consumer.assignment()) == TOPICS * PARTITIONS)
        poll_until(consumer, lambda _: cluster.figures()["requests"].get("ConsumerGroupHeartbeat", 0) >= 3)
        cluster.tell("forget")
        poll_until(consumer, lambda _: cluster.figures()["requests"].get("ConsumerGroupHeartbeat", 0) >= 2)
        figures = cluster.figures()
    assert figures["partitions"].get("ConsumerGroupHeartbeat", 0) == 0


def test_a_load_plans_as_a_stream_does(cluster: SimulatedCluster) -> None:
    """A round asks each leader once for ends, and for first offsets only of partitions with news."""
    names, all_of_them = [f"t{topic:05}" for topic in range(TOPICS)], TOPICS * PARTITIONS
    with Cluster.connect({"bootstrap.servers": cluster.bootstrap_servers}) as client:
        _asked(cluster)
        look = Look.at(client, names)
        extent = find_extent(client, look, {}, fail_on_loss=True)
        requests, partitions = _asked(cluster)
        assert requests == {"Metadata": 1, "ListOffsets": 2 * BROKERS}
        assert partitions["ListOffsets"] == 2 * all_of_them
        tasks = make_tasks(extent, 2, None, client.last_leader)
        leaders = [{client.last_leader(span.topic, span.partition) for span in task} for task in tasks]
        progress = {key: Progress(end, 0, look.ids[key]) for key, end in look.end.items()}
        for records in (0, 7):
            cluster.tell("append", every=100, records=records)
            _asked(cluster)
            extent = find_extent(client, Look.at(client, names), progress, fail_on_loss=True)
            news = all_of_them // 100 if records else 0
            requests, partitions = _asked(cluster)
            assert requests["ListOffsets"] <= BROKERS + news
            assert partitions["ListOffsets"] == all_of_them + news
            assert (extent.records, extent.lost) == (news * records, [])
    assert sum(map(len, leaders)) < len(tasks) + BROKERS
    assert sum(map(len, tasks)) == all_of_them


def test_a_round_of_loads_by_topic(cluster: SimulatedCluster) -> None:
    """A look at all topics for their loads: each of them then asks for nothing."""
    names, all_of_them = [f"t{topic:05}" for topic in range(TOPICS)], TOPICS * PARTITIONS
    with Cluster.connect({"bootstrap.servers": cluster.bootstrap_servers}) as client:
        metadata = client.metadata(None)
        _asked(cluster)
        looks, _ = _look(client, metadata, names, {})
        assert _asked(cluster)[1] == {"ListOffsets": 2 * all_of_them}
        loaded = {key: end for look in looks.values() for key, end in look.end.items()}
        cluster.tell("append", every=100, records=7)
        _asked(cluster)
        looks, _ = _look(client, metadata, names, loaded)
        assert _asked(cluster)[1] == {"ListOffsets": all_of_them + all_of_them // 100}
        for name, look in looks.items():
            progress = {key: Progress(loaded[key], 0, topic_id) for key, topic_id in look.ids.items()}
            extent = find_extent(client, look, progress, fail_on_loss=True)
            assert (extent.records, extent.lost) == (7 if name in ("t00000", "t00020") else 0, [])
        assert _asked(cluster) == ({}, {})


def test_a_silent_broker_delays_no_other_topic_of_a_round(cluster: SimulatedCluster) -> None:
    """A round of loads leaves the topics of a leader that does not answer for last."""
    names = [f"t{topic:05}" for topic in range(0, TOPICS, BROKERS)]  # of brokers 0 to 4
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "request.timeout.ms": "90000"}
    with Cluster.connect(settings) as client:
        metadata = client.metadata(None)
        cluster.tell("slow", node=4, seconds=100)
        try:
            begin = time.monotonic()
            looks, lost = _look(client, metadata, [*names, "t00001", "t00005"], {}, _ANSWER_MS)
            assert time.monotonic() - begin < 80  # of the 90 of a request
        finally:
            cluster.tell("slow", node=4)
    assert looks.keys() == {"t00005"}
    assert lost.keys() == {*names, "t00001"}
