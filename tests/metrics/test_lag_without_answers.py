"""Lag, and the page, with a silent broker: the rest is shown, and nothing looks smaller than it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.client import Admin
from spark_klog.groups import look
from spark_klog.groups.lag import LagMetrics
from spark_klog.ui import views
from tests.support.brokers.simulated_cluster import SimulatedCluster, topic_name
from tests.support.clients.klog import klog
from tests.support.servers.samples import Samples, parsed

TOPICS, PARTITIONS, BROKERS, RECORDS, READ = 5, 4, 4, 20, 15
#: The coordinator is the sum of the bytes of a group's name modulo the brokers: 3 that of the other group.
SILENT, GROUP, OTHER = 3, "a", "c"
#: How many partitions the silent broker leads.
LED = sum((topic + partition) % BROKERS == SILENT for topic in range(TOPICS) for partition in range(PARTITIONS))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCluster]:
    monkeypatch.setattr(look, "_ANSWER_SECONDS", 1.5)
    monkeypatch.setattr(look, "_LATER_SECONDS", 1.0)
    with SimulatedCluster(TOPICS, PARTITIONS, BROKERS, RECORDS) as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: SimulatedCluster) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
        offsets = {(topic_name(topic), number): READ for topic in range(TOPICS) for number in range(PARTITIONS)}
        admin.alter_group_offsets(GROUP, offsets).check()
        yield admin


def _sum(samples: Samples, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(value for (of, its), value in samples.items() if of == name and wanted <= set(its))


def _looked(metrics: LagMetrics) -> Samples:
    metrics.refresh()
    return parsed("".join(metrics.page()))


def test_metrics_keep_the_last_figures_of_a_silent_broker(
    cluster: SimulatedCluster, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = LagMetrics(admin, [GROUP])
    whole = _looked(metrics)
    lag = TOPICS * PARTITIONS * (RECORDS - READ)
    assert _sum(whole, "klog_group_lag_records") == _sum(whole, "klog_group_topic_lag_records") == lag
    assert _sum(whole, "klog_group_lag_stale_partitions", group=GROUP) == 0
    cluster.tell("slow", node=SILENT, seconds=1000)
    cluster.tell("append", every=1, records=10)
    with caplog.at_level(logging.WARNING, "spark_klog.groups.lag"):
        samples = [_looked(metrics) for _ in range(2)][1]
    grown = (TOPICS * PARTITIONS - LED) * 10
    assert _sum(samples, "klog_group_lag_records") == _sum(samples, "klog_group_topic_lag_records") == lag + grown
    assert _sum(samples, "klog_topic_latest_offset") == TOPICS * PARTITIONS * RECORDS + grown
    assert _sum(samples, "klog_group_lag_stale_partitions", group=GROUP) == LED
    assert _sum(samples, "klog_group_lag_unanswered", what="partitions") == LED
    (told,) = [record.getMessage() for record in caplog.records]
    assert "t00000-3" in told
    assert f":{cluster.ports[SILENT]} did not answer" in told
    cluster.tell("slow", node=SILENT)
    samples = _looked(metrics)
    assert _sum(samples, "klog_group_lag_records") == lag + TOPICS * PARTITIONS * 10
    assert _sum(samples, "klog_group_lag_unanswered") == 0


def test_metrics_keep_the_last_figures_of_a_group_with_a_silent_coordinator(
    cluster: SimulatedCluster, admin: Admin
) -> None:
    admin.alter_group_offsets(OTHER, {("t00000", 0): READ}).check()
    metrics = LagMetrics(admin, [])
    whole = _looked(metrics)
    cluster.tell("slow", node=admin.describe_group(OTHER).coordinator, seconds=1000)
    samples = _looked(metrics)
    assert _sum(samples, "klog_group_lag_unanswered", what="groups") == 1
    assert _sum(samples, "klog_group_lag_unanswered", what="brokers") == 1
    for name in ("klog_group_lag_records", "klog_group_topic_lag_records", "klog_group_offset"):
        assert _sum(samples, name, group=OTHER) == _sum(whole, name, group=OTHER) > 0
    assert _sum(samples, "klog_group_lag_stale_partitions", group=OTHER) == 1


def test_a_coordinator_that_falls_silent_during_a_look_is_waited_for_once(
    cluster: SimulatedCluster, admin: Admin
) -> None:
    """Not for the offsets of each of its groups."""
    groups = [chr(ord(OTHER) + BROKERS * number) for number in range(4)]
    for group in groups:
        admin.alter_group_offsets(group, {("t00000", 0): READ}).check()
    metrics = LagMetrics(admin, [])
    whole = _looked(metrics)
    cluster.tell("slow", node=admin.describe_group(OTHER).coordinator, seconds=1000, apis=["OffsetFetch"])
    begin = time.monotonic()
    samples = _looked(metrics)
    assert time.monotonic() - begin < 2 * look._ANSWER_SECONDS
    assert _sum(samples, "klog_group_lag_unanswered", what="groups") == len(groups)
    for group in groups:
        assert _sum(samples, "klog_group_lag_records", group=group) == _sum(
            whole, "klog_group_lag_records", group=group
        )


def test_sums_by_topic_are_complete(cluster: SimulatedCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_klog.groups.lag._MAX_SERIES", 3)
    metrics = LagMetrics(admin, [GROUP])
    metrics.refresh()
    samples = parsed("".join(metrics.page()))
    assert sum(name == "klog_group_lag_records" for name, _ in samples) == 3
    for topic in range(TOPICS):
        labels = {"group": GROUP, "topic": topic_name(topic), "store": "kafka"}
        assert samples["klog_group_topic_lag_records", frozenset(labels.items())] == PARTITIONS * (RECORDS - READ)
        assert samples["klog_group_topic_lag_seconds", frozenset(labels.items())] > 0


def test_the_command_shows_the_rest(cluster: SimulatedCluster, admin: Admin, tmp_path: Path) -> None:
    cluster.tell("slow", node=SILENT, seconds=1000, apis=["ListOffsets"])
    config = tmp_path / "client.properties"
    config.write_text("request.timeout.ms=1500\n")
    ran = klog("groups", "lag", GROUP, "-b", cluster.bootstrap_servers, "--command-config", str(config))
    assert ran.returncode == 1
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert len([line for line in lines if line[0].startswith("t0") and line[5] == "5"]) == TOPICS * PARTITIONS - LED
    assert len([line for line in lines if line[0].startswith("t0") and line[5] == "-"]) == LED
    assert lines[-1][5] == f">={(TOPICS * PARTITIONS - LED) * (RECORDS - READ)}"
    assert "no answer about partition t00000-3, t00001-2" in ran.stderr
    assert f"broker 127.0.0.1:{cluster.ports[SILENT]} did not answer" in ran.stderr


def test_the_command_asks_about_many_groups_by_the_same_connections(cluster: SimulatedCluster, admin: Admin) -> None:
    """Two for each broker and group would be more than the open files of a process, of six groups at 100 brokers."""
    admin.alter_group_offsets(OTHER, {("t00000", 0): READ}).check()
    opened = []
    for groups in ([GROUP], [GROUP, OTHER]):
        cluster.tell("forget")
        assert klog("groups", "lag", *groups, "-b", cluster.bootstrap_servers).returncode == 0
        opened.append(cluster.figures()["opened"])
    assert opened[1] <= opened[0] + 1


def test_the_page_shows_the_rest(cluster: SimulatedCluster, admin: Admin) -> None:
    cluster.tell("slow", node=SILENT, seconds=1000)
    overview = views.overview(admin)
    assert sum(topic["records"] for topic in overview["topics"]) == (TOPICS * PARTITIONS - LED) * RECORDS
    assert sum(topic["unanswered"] for topic in overview["topics"]) == LED
    assert [topic["latest"] for topic in overview["topics"] if topic["unanswered"]] == [None] * LED
    shown = views.groups(admin)
    (group,) = shown["groups"]
    assert (group["lag"], group["unanswered"]) == ((TOPICS * PARTITIONS - LED) * (RECORDS - READ), LED)
    assert [line.split(":")[0] for line in shown["missing"]] == [
        f"no answer about the groups of broker {SILENT}",
        "no answer about partition t00000-3, t00001-2, t00002-1, t00003-0, t00004-3",
    ]
    topic = views.topic(admin, "t00000")
    assert [part["latest"] for part in topic["partitions"]] == [RECORDS] * (PARTITIONS - 1) + [None]
    assert "t00000-3" in topic["missing"][0]
    assert [row["unanswered"] for row in views.readers(admin, "t00000")] == [1]
    assert "t00000-3" in views.group(admin, GROUP, [], [], {})["missing"][0]
