"""Reads, offsets and admin calls under random faults and moves of leaders; a failure names its seed.

SPARK_KLOG_FAULT_SECONDS (default 3) is the duration, SPARK_KLOG_FAULT_SEED (default 0) the first seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import GroupOffsets, list_offsets
from spark_klog.client.settings import client_config
from spark_klog.errors import ErrorCode, KlogError
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from tests.support.brokers import faults
from tests.support.brokers.kafka_python_wire import read_records
from tests.support.brokers.scripted_broker import ScriptedCluster

pytestmark = pytest.mark.usefixtures("driver")

_APIS = (
    "ApiVersions",
    "Metadata",
    "ListOffsets",
    "Fetch",
    "Fetch",
    "FindCoordinator",
    "OffsetCommit",
    "OffsetFetch",
    "ListGroups",
    "CreateTopics",
    "DeleteTopics",
    "CreatePartitions",
)
_CODES = [int(code) for code in ErrorCode if code] + [999]
_PARTITIONS, _RECORDS, _NODES = 3, 60, 3
_TIMEOUT_MS = 1000
#: Seconds beyond the timeout that a loaded machine may take.
_SLACK = 20


def _values(partition: int) -> list[bytes]:
    return [b"%d-%d" % (partition, number) for number in range(_RECORDS)]


def _timed(action: Callable[[], Any], calls: int = 1) -> Any:
    """Return a call's result, or its error; it must end in time."""
    begin = time.monotonic()
    try:
        return action()
    except KlogError as error:
        return error
    finally:
        assert time.monotonic() - begin < calls * _TIMEOUT_MS / 1000 + _SLACK


def _step(read: Iterator[Any], found: list[bytes]) -> bool:
    """Take the next records of a read; False at its end."""
    fetched = next(read, None)
    if fetched is not None:
        found += [value for _, _, value in read_records(bytes(fetched.data))]
    return fetched is not None


def _read(cluster: Cluster, choose: random.Random) -> dict[int, KlogError]:
    """Read all partitions in random turns; return the errors of those that failed."""
    reads = {partition: fetch_range(cluster, "t", partition, 0, _RECORDS) for partition in range(_PARTITIONS)}
    found: dict[int, list[bytes]] = {partition: [] for partition in reads}
    failed: dict[int, KlogError] = {}
    while reads:
        partition = choose.choice(list(reads))
        more = _timed(lambda: _step(reads[partition], found[partition]))  # noqa: B023
        assert found[partition] == _values(partition)[: len(found[partition])]
        if more is not True:
            del reads[partition]
            if isinstance(more, KlogError):
                failed[partition] = more
            else:
                assert found[partition] == _values(partition)
    return failed


def _offsets(cluster: Cluster, brokers: ScriptedCluster, choose: random.Random) -> None:
    partitions = [("t", partition) for partition in range(_PARTITIONS)]
    for place, offset in ((EARLIEST, 0), (LATEST, _RECORDS)):
        found = _timed(lambda: list_offsets(cluster, dict.fromkeys(partitions, place)))  # noqa: B023
        assert isinstance(found, KlogError) or found.keys() == set(partitions)
        # -1: the answer of a broker without timestamps, which is a possible fault
        assert isinstance(found, KlogError) or set(found.values()) <= {offset, -1}
    group = GroupOffsets(cluster, "g")
    wanted = {key: choose.randrange(1000) for key in partitions}
    before = dict(brokers.offsets.get("g", {}))
    committed = _timed(lambda: group.commit(wanted))
    there = brokers.offsets.get("g", {})
    assert there == wanted if committed is None else all(there[key] in (wanted[key], before.get(key)) for key in there)
    known = _timed(lambda: group.fetch(partitions))
    there = brokers.offsets.get("g", {})  # a commit that timed out may have taken effect since
    assert isinstance(known, KlogError) or known.items() <= there.items()
    _timed(lambda: Admin(cluster).list_groups())


def _topics(cluster: Cluster, brokers: ScriptedCluster) -> None:
    def size() -> int:
        return sum(topic == "n" for topic, _ in list(brokers.logs))

    possible = set()

    def create(cluster: Cluster, count: int) -> None:
        Admin(cluster).create_topic("n", count, replication_factor=1)

    def grow(cluster: Cluster, count: int) -> None:
        Admin(cluster).create_partitions({"n": count}).check()

    for change, after in ((create, 2), (grow, 4)):
        possible.add(size())
        if size() == after:
            continue
        done = _timed(lambda: change(cluster, after), calls=2)  # noqa: B023
        possible.add(after)  # a change that timed out may still take effect
        found = size()
        assert found == after if done is None else found in possible, (change.__name__, done, found, possible)
    if size():
        done = _timed(lambda: Admin(cluster).delete_topic("n"))
        assert done is not None or not size()


def _run(seed: int) -> None:
    choose = random.Random(seed)
    with ScriptedCluster.filled(choose, [_values(number) for number in range(_PARTITIONS)], _NODES) as brokers:
        settings = {
            "bootstrap.servers": brokers.bootstrap_servers,
            "request.timeout.ms": str(_TIMEOUT_MS),
            "retry.backoff.ms": "2",
            "max.partition.fetch.bytes": str(choose.choice([100, 500, 1 << 20])),
        }
        with Cluster(client_config(settings)) as cluster:
            for _ in range(3):
                for _ in range(choose.randrange(12)):
                    brokers.on(choose.choice(_APIS), faults.chosen(choose, _CODES))
                brokers.leaders["t", choose.randrange(_PARTITIONS)] = choose.randrange(-1, _NODES)
                brokers.coordinator, brokers.controller = choose.randrange(_NODES), choose.randrange(_NODES)
                for work in choose.sample(
                    [
                        lambda: _read(cluster, choose),
                        lambda: _offsets(cluster, brokers, choose),
                        lambda: _topics(cluster, brokers),
                    ],
                    3,
                ):
                    work()
            brokers.clear()
            for partition in range(_PARTITIONS):
                brokers.leaders["t", partition] = choose.randrange(_NODES)
            _timed(lambda: cluster.metadata(["t"]))  # a late answer to an earlier request may still arrive
            assert _read_again(cluster, choose) == {}


def _read_again(cluster: Cluster, choose: random.Random) -> dict[int, KlogError]:
    """Read without faults: earlier ones leave nothing, but a stray response may cost one attempt."""
    failed = _read(cluster, choose)
    return _read(cluster, choose) if failed else failed


def test_one_seed() -> None:
    _run(1)


@pytest.mark.test_all("long")
def test_random_faults() -> None:
    faults.run_seeds(_run)
