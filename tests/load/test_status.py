"""`klog load status`: hours compared with the log, runs that found nothing new, bars and pictures."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.files.folder import LocalFolder
from spark_klog.load.planning import Limits
from tests.load.support import Killed, failing, run
from tests.spark.support import Sent, create_topic, delete_records, delete_topic, produce
from tests.support.clients.klog import klog

_HOUR_MS = 3_600_000
_PNG = b"\x89PNG\r\n\x1a\n"


def _name(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, timezone.utc).strftime("%Y-%m-%dT%H")


def test_hours_beside_the_log(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Partition 0 is loaded up to half of an hour, partition 1 completely, and the load does not know partition 2."""
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 3)
    now = int(time.time() * 1000) // _HOUR_MS * _HOUR_MS
    times = [now - (5 - number // 20) * _HOUR_MS + number for number in range(100)]
    for start in (0, 50):  # separate batches for each hour, as the time index has at most one entry per batch
        for at in range(start, start + 50, 10):
            produce(servers, topic, [Sent(b"v", None, 0, when) for when in times[at : at + 10]])
        if start == 0:
            produce(servers, topic, [Sent(b"v", None, 1, times[0])] * 7)
            run(servers, tmp_path, topic, limits=Limits(max_records=1000))
    produce(servers, topic, [Sent(b"v", None, 2, times[99])] * 3)

    [line] = [
        json.loads(text) for text in klog("load", "status", str(tmp_path), "-b", servers, "--json").stdout.splitlines()
    ]
    in_log = Counter(_name(when) for when in times) + Counter({_name(times[0]): 7, _name(times[99]): 3})
    loaded = Counter(_name(when) for when in times[:50]) + Counter({_name(times[0]): 7})
    assert {item["hour"]: (item["in_log"], item["loaded"]) for item in line["log"]["hours"]} == {
        hour: (count, loaded[hour]) for hour, count in in_log.items()
    }
    assert {(item["partition"], item["lag"]) for item in line["log"]["lag"]} == {(0, 50), (1, 0), (2, 3)}
    assert line["missing"] == []
    shown = klog("load", "status", str(tmp_path), "-b", servers, "--hours", "6", "--bars")
    assert (shown.returncode, "50.0%" in shown.stdout, "lag: 53 offsets of 3 partitions" in shown.stdout) == (
        0,
        True,
        True,
    ), shown
    assert f"{_name(times[0])}  {'#' * 40}  27" in shown.stdout


def test_a_first_run_that_was_killed(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    create_topic(cluster.bootstrap_servers, topic, 1)
    produce(cluster.bootstrap_servers, topic, [Sent(b"v", None, 0, 1_700_000_000_000)] * 5)

    def die() -> None:
        raise Killed

    with pytest.raises(Killed), failing(LocalFolder, -2, die):  # after the plan
        run(cluster.bootstrap_servers, tmp_path, topic)
    shown = klog("load", "status", str(tmp_path)).stdout
    assert "run 00000001 failed, was killed, or is under way" in shown
    assert shown.endswith("no run has finished yet\n")
    run(cluster.bootstrap_servers, tmp_path, topic)
    assert klog("load", "status", str(tmp_path)).stdout.endswith("nothing is missing\n")


def test_runs_with_nothing_new(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    servers = cluster.bootstrap_servers
    create_topic(servers, topic, 2)
    assert run(servers, tmp_path, topic).runs == []
    first = json.loads(klog("load", "status", str(tmp_path), "--json").stdout)
    assert [(item["partition"], item["until"], item["lag"]) for item in first["partitions"]] == [(0, 0, 0), (1, 0, 0)]
    assert first["idle"]
    produce(servers, topic, [Sent(b"v", None, 0, 1_700_000_000_000)] * 5)
    run(servers, tmp_path, topic)
    assert json.loads(klog("load", "status", str(tmp_path), "--json").stdout)["idle"] == ""
    for _ in range(3):
        run(servers, tmp_path, topic)
    shown = klog("load", "status", str(tmp_path), "--plot", str(tmp_path / "hours.png"))
    assert "nothing new at " in shown.stdout
    assert (tmp_path / "hours.png").read_bytes().startswith(_PNG)
    assert [path.name for path in (tmp_path / "_klog" / "runs").iterdir()] == ["00000001"]
    assert len(list((tmp_path / "_klog").glob("idle*"))) == 1


def test_a_topic_that_was_created_again(cluster: EmbeddedCluster, topic: str, tmp_path: Path) -> None:
    """Files of the old topic do not count for the new one, neither before nor after the run that detects it."""
    servers, now = cluster.bootstrap_servers, int(time.time() * 1000)

    def compared() -> tuple[int, int, int]:
        line = json.loads(klog("load", "status", str(tmp_path), "-b", servers, "--json").stdout)
        hours = line["log"]["hours"]
        return (
            sum(item["in_log"] for item in hours),
            sum(item["loaded"] for item in hours),
            line["log"]["lag"][0]["lag"],
        )

    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"v", None, 0, now)] * 100)
    delete_records(servers, topic, {0: 60})
    run(servers, tmp_path, topic)
    assert compared() == (40, 40, 0)
    delete_topic(servers, topic)
    create_topic(servers, topic)
    produce(servers, topic, [Sent(b"v", None, 0, now)] * 50)
    assert compared() == (50, 0, 50)
    run(servers, tmp_path, topic, fail_on_loss=False)
    assert compared() == (50, 50, 0)
