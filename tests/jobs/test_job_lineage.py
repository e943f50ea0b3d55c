"""jobs/batch_load.py --lineage, configured by openlineage.yml in its working directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.lineage.datasets import kafka_namespace
from spark_klog.lineage.events import job_name
from tests.jobs.support import DONE, NOTHING_NEW, Driver, Load
from tests.spark.support import create_topic, produce, values
from tests.support.servers.openlineage import check_event


def _events(path: Path) -> list[dict[str, Any]]:
    """The events of a run, which are removed."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    for event in events:
        check_event(event)
    return events


@pytest.mark.test_all("long")
def test_lineage_of_the_job(
    cluster: EmbeddedCluster, driver: Driver, topic: str, module_server_dir: Path, tmp_path: Path
) -> None:
    servers, path = cluster.bootstrap_servers, tmp_path / "events.jsonl"
    config = {"transport": {"type": "file", "log_file_path": str(path), "append": True}}
    folder = module_server_dir / "driver"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "openlineage.yml").write_text(json.dumps(config))  # JSON is YAML
    create_topic(servers, topic, 2)
    produce(servers, topic, values(100, partitions=2))
    load = Load(servers, topic, tmp_path / "load", driver)
    assert load.run().code == DONE
    assert not path.exists()
    produce(servers, topic, values(10))
    assert load.run("--lineage").code == DONE
    start, complete = _events(path)
    assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
    ranges = complete["inputs"][0]["inputFacets"]["klog_offsetRanges"]["partitions"]
    assert ranges == [{"partition": 0, "start": 50, "end": 60}]
    assert complete["outputs"][0]["name"] == str(load.output)
    assert complete["job"]["name"] == job_name("klog batch load", str(load.output).strip("/"))
    assert load.run("--lineage").code == NOTHING_NEW
    assert [event["eventType"] for event in _events(path)] == ["START", "COMPLETE"]
    # another format, by a stream of Spark's
    output, checkpoint = tmp_path / "orc", tmp_path / "checkpoint"
    ran = load.run("--lineage", format="orc", checkpoint=str(checkpoint), output=str(output))
    assert ran.code == DONE, ran.stdout + ran.stderr
    events = _events(path)
    assert [event["eventType"] for event in events] == ["START", "RUNNING", "COMPLETE"]
    ends = {
        item["partition"]: item["end"]
        for item in events[-1]["inputs"][0]["inputFacets"]["klog_offsetRanges"]["partitions"]
    }
    assert ends == {0: 60, 1: 50}
    assert events[-1]["inputs"][0]["namespace"] == kafka_namespace(servers)
    assert events[-1]["outputs"][0]["name"] == str(output)
    assert events[-1]["job"]["name"] == job_name("klog batch load", str(output).strip("/"))
