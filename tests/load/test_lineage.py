"""OpenLineage events of loads: offsets that were loaded, failures, and settings from the environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError
from spark_klog.lineage.datasets import kafka_namespace
from spark_klog.lineage.events import job_name
from spark_klog.load.by_topic import Loads, output_of
from spark_klog.load.driving import Steps
from spark_klog.load.lineage import LoadEvents
from spark_klog.load.run import Loaded, LoadOptions, load
from tests.load.support import InProcess, by_pyarrow
from tests.spark.support import create_topic, produce, values
from tests.support.servers.openlineage import LineageServer, check_event, lineage_server

Event = dict[str, Any]
CONF = {"spark.app.name": "klog batch load"}


def _done(options: LoadOptions, work: Callable[[], Loaded]) -> Loaded:
    """Do the work as the steps of a load with events."""

    def steps() -> Steps[Loaded]:
        yield from ()
        return work()

    events = LoadEvents(CONF)
    try:
        with pytest.raises(StopIteration) as end:
            next(events.around(options, steps()))
    finally:
        events.close()
    loaded: Loaded = end.value.value
    return loaded


def load_with_lineage(options: LoadOptions, server: LineageServer, work: Callable[[], Loaded]) -> list[Event]:
    """The events of a call, which must be valid; what `work` raises is raised."""
    server.events.clear()
    try:
        _done(options, work)
    finally:
        for event in server.events:
            check_event(event)
            assert event["job"]["facets"]["jobType"]["processingType"] == "BATCH"
    return list(server.events)


def test_a_load(cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, output = cluster.bootstrap_servers, tmp_path / "Output"
    create_topic(servers, topic, 2)
    create_topic(servers, f"{topic}-empty")
    produce(servers, topic, values(100, partitions=2))
    options = LoadOptions({"bootstrap.servers": servers}, [topic, f"{topic}-empty"], str(output))
    run = partial(load, options, InProcess())
    namespace = kafka_namespace(servers)
    with lineage_server() as server:
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps({"type": "http", "url": server.url}))
        monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "loads")
        start, complete = load_with_lineage(options, server, run)
        assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
        assert start["run"]["runId"] == complete["run"]["runId"]
        assert start["job"]["namespace"] == "loads"
        assert start["job"]["name"] == complete["job"]["name"]
        assert start["job"]["name"] == job_name("klog batch load", str(output).strip("/"))
        for event in (start, complete):
            assert [(item["namespace"], item["name"]) for item in event["inputs"]] == [
                (namespace, topic),
                (namespace, f"{topic}-empty"),
            ]
            assert [(item["namespace"], item["name"]) for item in event["outputs"]] == [("file", str(output))]
        read, empty = (item["inputFacets"] for item in complete["inputs"])
        assert read["klog_offsetRanges"]["partitions"] == [
            {"partition": number, "start": 0, "end": 50} for number in range(2)
        ]
        assert (read["inputStatistics"]["rowCount"], empty["inputStatistics"]["rowCount"]) == (100, 0)
        assert "klog_offsetRanges" not in empty
        rows = by_pyarrow(output / topic)
        assert complete["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == len(rows) == 100

        produce(servers, topic, values(10))
        _, complete = load_with_lineage(options, server, run)
        (read, _) = (item["inputFacets"] for item in complete["inputs"])
        assert read["klog_offsetRanges"]["partitions"] == [{"partition": 0, "start": 50, "end": 60}]
        _, complete = load_with_lineage(options, server, run)  # nothing new
        assert "klog_offsetRanges" not in complete["inputs"][0]["inputFacets"]

        missing = LoadOptions(options.client, [f"{topic}-missing"], str(tmp_path / "missing"))
        with pytest.raises(KlogError) as caught:
            load_with_lineage(missing, server, partial(load, missing, InProcess()))
        assert [event["eventType"] for event in server.events] == ["START", "FAIL"]
        message = server.events[-1]["run"]["facets"]["errorMessage"]["message"]
        assert message == f"{type(caught.value).__name__}: {caught.value}"

        def interrupt() -> Loaded:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            load_with_lineage(options, server, interrupt)
        assert [event["eventType"] for event in server.events] == ["START", "ABORT"]
        server.status = 500
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", json.dumps({"total": 0}))
        produce(servers, topic, values(5))
        assert _done(options, run).partitions[0].records == 5


def _no_progress(_total: int, _done: Callable[[], int]) -> AbstractContextManager[None]:
    return nullcontext()


def test_each_topic_is_a_run(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, output = cluster.bootstrap_servers, f"delta:{tmp_path}/{{topic}}"
    names = [f"{topic}.{number}" for number in range(3)]
    for name in names:
        create_topic(servers, name)
        produce(servers, name, values(10))
    (tmp_path / names[2]).mkdir()
    (tmp_path / names[2] / "_klog").write_text("x")
    options = LoadOptions({"bootstrap.servers": servers}, names[:1], output_of(output, names[0]))
    with lineage_server() as server:
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps({"type": "http", "url": server.url}))
        events = LoadEvents(CONF)
        Loads(
            options, names, None, output, InProcess(), lambda _total, _done: nullcontext(), around=events.around
        ).round()
        events.close()
        told = {name: [event for event in server.events if event["inputs"][0]["name"] == name] for name in names}
    assert sum(map(len, told.values())) == len(server.events) == 6
    for name, (start, end) in told.items():
        assert start["run"]["runId"] == end["run"]["runId"]
        assert (
            start["job"]["name"] == end["job"]["name"] == job_name("klog batch load", f"{tmp_path}/{name}".strip("/"))
        )
        assert end["eventType"] == ("FAIL" if name == names[2] else "COMPLETE")
        assert [(each["name"], len(end["inputs"])) for each in end["outputs"]] == [(str(tmp_path / name), 1)]
    assert len({event["run"]["runId"] for event in server.events}) == 3
