"""The lag of groups and queries, parsed by Prometheus' own parser."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import ConfigError
from spark_klog.groups.lag import LagMetrics
from spark_klog.metrics import metrics_page
from spark_klog.spark.listener import QueryMetrics, SourceProgress
from spark_klog.wire.http import HttpThread
from tests.support.brokers.batches import make_batch
from tests.support.brokers.raw_client import RawClient
from tests.support.clients.klog import klog, klog_command, klog_lines, klog_refusal
from tests.support.clients.topics import make_topic
from tests.support.servers.samples import Samples, parsed, scrape
from tests.support.waiting import wait_until

HOUR_MS = 3_600_000


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def produce(servers: str, topic: str, count: int, partition: int, timestamp: int) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for _ in range(count):
        producer.produce(topic, b"v", partition=partition, timestamp=timestamp)
    assert producer.flush(20) == 0


def commit(servers: str, group: str, *offsets: tuple[str, int, int]) -> None:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 0})
    consumer.commit(offsets=[TopicPartition(*one) for one in offsets], asynchronous=False)
    consumer.close()


@contextmanager
def lag_server(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = klog_command("groups", "lag", *arguments, "--metrics", "0", "--interval", "0.2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            match = re.fullmatch(r"metrics at http://(127\.0\.0\.1:\d+)/metrics\n", line)
            assert match, line or process.communicate()[1]
            yield match[1], process
        finally:
            process.kill()


def test_a_record_without_a_timestamp_has_no_age(cluster: EmbeddedCluster, topic: str) -> None:
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    with RawClient(int(servers.rpartition(":")[2])) as client:
        assert client.produce(topic, bytes(make_batch([(None, b"v")], [-1])), 8)[0] == 0
    commit(servers, topic, (topic, 0, 0))
    (line,) = klog_lines("groups", "lag", topic, "-b", servers, "--json")
    assert line["stores"]["kafka"] == {"lag": 1, "lost": 0, "lagMs": None}


def test_lag_of_all_groups(cluster: EmbeddedCluster, topic: str) -> None:
    servers, now = cluster.bootstrap_servers, int(time.time() * 1000)
    make_topic(servers, topic, 2)
    produce(servers, topic, 10, 0, now - HOUR_MS)
    produce(servers, topic, 4, 1, now)
    one, two = f'{topic} "quoted"\n', f"{topic}-two"
    commit(servers, one, (topic, 0, 3), (topic, 1, 4))
    commit(servers, two, (topic, 0, 10))
    with lag_server("-b", servers) as (address, process):
        samples = scrape(address)
        place = {"topic": topic, "partition": "0", "store": "kafka"}
        assert value(samples, "klog_group_lag_records", group=one, **place) == 7
        assert value(samples, "klog_group_offset", group=one, **place) == 3
        seconds = value(samples, "klog_group_lag_seconds", group=one, **place)
        assert seconds is not None
        assert 3600 <= seconds < 3700
        assert value(samples, "klog_group_lag_records", group=one, **place | {"partition": "1"}) == 0
        assert value(samples, "klog_group_lag_seconds", group=one, **place | {"partition": "1"}) == 0
        assert value(samples, "klog_group_lag_records", group=two, **place) == 0
        assert value(samples, "klog_topic_latest_offset", topic=topic, partition="0") == 10
        assert value(samples, "klog_group_members", group=two) == 0
        produce(servers, topic, 5, 0, now)
        wait_until(lambda: value(scrape(address), "klog_group_lag_records", group=two, **place) == 5, seconds=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_group_that_does_not_exist(
    cluster: EmbeddedCluster, topic: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It is told of once, again when it exists, and is no group without members and lag."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    produce(servers, topic, 3, 0, int(time.time() * 1000))
    there, missing = f"{topic}-there", f"{topic}-missing"
    commit(servers, there, (topic, 0, 1))
    with Admin({"bootstrap.servers": servers}) as admin:
        metrics = LagMetrics(admin, [there, missing])
        shown = []
        for _ in range(2):
            metrics.refresh()
            shown.append(parsed("\n".join(metrics.page()) + "\n"))
        commit(servers, missing, (topic, 0, 3))
        metrics.refresh()
        shown.append(parsed("\n".join(metrics.page()) + "\n"))
    members = [[value(samples, "klog_group_members", group=name) for name in (there, missing)] for samples in shown]
    assert members == [[0, None], [0, None], [0, 0]]
    texts = [record.getMessage() for record in caplog.records if record.name == "spark_klog.groups.lag"]
    assert texts == [
        f"no such group, its lag is not known until it exists: {missing}",
        f"the group exists now: {missing}",
    ]
    refused = klog(
        "groups", "lag", missing, there, f"{topic}-no", "-b", servers, "--offsets-path", str(tmp_path / "no")
    )
    assert (refused.returncode, refused.stderr) == (1, f"klog: group {topic}-no does not exist\n")
    lines = [line.split() for line in refused.stdout.splitlines()]
    assert [line for line in lines if line[0] in (missing, there)] == [[missing, "Empty"], [there, "Empty"]]
    # of the store without offsets nothing is known: no lag of 0
    nothing = ["-"] * 4
    assert [line[4:7] + line[8:] for line in lines if line[0] == "total"] == [
        ["-", "0", "0", *nothing],
        ["-", "2", "0", *nothing],
    ]
    (line,) = klog_lines("groups", "lag", there, "-b", servers, "--offsets-path", str(tmp_path / "no"))
    assert line["stores"]["files"] == {"lag": None, "lost": None, "lagMs": None}


def test_unread_records_that_are_deleted(cluster: EmbeddedCluster, topic: str) -> None:
    """Their age counts on: of those seen before since they were written, of others since the first look."""
    servers, now = cluster.bootstrap_servers, int(time.time() * 1000)
    make_topic(servers, topic, 2)
    for partition in (0, 1):
        produce(servers, topic, 3, partition, now - HOUR_MS)
    commit(servers, topic, (topic, 0, 1), (topic, 1, 1))

    def of(samples: Samples, name: str, partition: int) -> float | None:
        return value(samples, name, group=topic, topic=topic, partition=str(partition), store="kafka")

    with Admin({"bootstrap.servers": servers}) as admin:
        metrics = LagMetrics(admin, [topic])

        def looked() -> Samples:
            metrics.refresh()
            return parsed("".join(metrics.page()))

        admin.delete_records({(topic, 1): 3}).check()
        samples = looked()
        assert [of(samples, "klog_group_lag_lost_records", partition) for partition in (0, 1)] == [0, 2]
        first = of(samples, "klog_group_lag_seconds", 1)
        assert first is not None
        admin.delete_records({(topic, 0): 3}).check()
        samples = looked()
        assert of(samples, "klog_group_lag_records", 0) == of(samples, "klog_group_lag_lost_records", 0) == 2
        for partition, least in ((0, 3600.0), (1, first)):
            seconds = of(samples, "klog_group_lag_seconds", partition)
            assert seconds is not None
            assert least <= seconds < least + 300
        wait_until(lambda: (of(looked(), "klog_group_lag_seconds", 1) or 0) > first, seconds=30)
        commit(servers, topic, (topic, 0, 3), (topic, 1, 3))
        samples = looked()
        for name in ("klog_group_lag_seconds", "klog_group_lag_lost_records"):
            assert [of(samples, name, partition) for partition in (0, 1)] == [0, 0]


def test_an_outage_keeps_the_last_figures(
    make_cluster: Callable[..., EmbeddedCluster], topic: str, server_dir: Path
) -> None:
    cluster = make_cluster()
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    produce(servers, topic, 3, 0, 1)
    commit(servers, topic, (topic, 0, 1))
    config = server_dir / "client.properties"
    config.write_text("default.api.timeout.ms=1000\nrequest.timeout.ms=1000\n")
    with lag_server(topic, "-b", servers, "--command-config", str(config)) as (address, _):
        cluster.kill(0)
        wait_until(lambda: bool(value(scrape(address), "klog_group_lag_refresh_failures_total")), seconds=30)
        place = {"topic": topic, "partition": "0", "store": "kafka"}
        assert value(scrape(address), "klog_group_lag_records", group=topic, **place) == 2


def test_the_commands_of_lag_refuse(cluster: EmbeddedCluster) -> None:
    assert "give at least one GROUP" in klog("groups", "lag", "-b", cluster.bootstrap_servers).stderr
    both = klog("groups", "lag", "--metrics", "0", "--watch", "-b", cluster.bootstrap_servers)
    assert "without --watch" in both.stderr
    refusal = klog_refusal("groups", "lag", "--metrics", "nowhere", "-b", "127.0.0.1:1", code=2)  # before it connects
    assert refusal == "klog: --metrics: 'nowhere' is not HOST:PORT"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(klog("groups", "dashboard").stdout)
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"klog_\w+", target["expr"])
    }
    from spark_klog.groups import lag
    from spark_klog.spark import listener

    documented = set(re.findall(r"^\| (klog_\w+)", f"{lag.__doc__}\n{listener.__doc__}", re.MULTILINE))
    assert asked <= documented
    assert {"klog_group_lag_records", "klog_group_lag_seconds", "klog_query_lag_seconds"} <= asked
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def progress(batch: int, end: int, behind: int) -> SourceProgress:
    name = "a-topic-0"
    return SourceProgress("q", batch, 5, 2.5, {}, {}, behind, behind, behind, [], 1, {name: end}, {name: behind})


def test_lag_of_a_query_in_seconds() -> None:
    now = [1000.0]
    metrics = QueryMetrics(lambda: now[0])
    place = {"query": "q", "source": "1", "topic": "a-topic", "partition": "0"}

    def seconds() -> float | None:
        return value(parsed("".join(metrics.page())), "klog_query_lag_seconds", **place)

    metrics.add(progress(0, 10, 0))
    now[0] = 1050
    assert seconds() == 0
    metrics.add(progress(1, 10, 20))  # record 10 is first seen at 1050
    now[0] = 1060
    metrics.add(progress(2, 15, 25))
    assert seconds() == 10
    now[0] = 1090
    metrics.add(progress(3, 35, 5))  # record 35 was written between 1050 and 1060
    assert seconds() == 30
    samples = parsed("".join(metrics.page()))
    assert value(samples, "klog_query_lag_records", **place) == 5
    assert value(samples, "klog_query_rows_total", query="q", source="1") == 20
    assert value(samples, "klog_query_batch_id", query="q", source="1") == 3
    metrics.remove("q")
    assert parsed("".join(metrics.page())) == {}


def test_a_port_in_use_is_named() -> None:
    served = HttpThread("0", metrics_page(list))
    try:
        assert scrape(served.address) == {}
        with pytest.raises(ConfigError, match="choose another --metrics"):
            HttpThread(served.address, metrics_page(list))
    finally:
        served.close()
    with pytest.raises(ConnectionRefusedError):
        scrape(served.address)
    served.close()
