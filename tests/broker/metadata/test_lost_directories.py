"""Requests that need the brokers' shared directories while these are unusable: an answer, and no failure in the log."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker import partitions
from spark_klog.errors import ErrorCode
from spark_klog.protocol import apis
from tests.support.brokers.batches import make_batch
from tests.support.brokers.loop_broker import running
from tests.support.brokers.raw_client import RawClient, error_codes
from tests.support.servers.broker import KlogBroker

_TOPIC = {"name": "there", "num_partitions": 1, "replication_factor": 1}
_OFFSET = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}


@pytest.mark.parametrize("other", [False, True])
def test_directories_that_are_empty_or_of_others_delete_no_logs(tmp_path: Path, other: bool) -> None:
    """As if a disk is not mounted: a topic that the tree lacks need not have been deleted."""
    tree = tmp_path / "tree"
    with KlogBroker(tmp_path, "--directories", str(tree)) as broker, RawClient(broker.port) as client:
        assert error_codes(client.request(apis.CREATE_TOPICS, 2, {"topics": [_TOPIC], "timeout_ms": 1000})) == [0]
        assert client.produce("there", bytes(make_batch([(b"k", b"v")], [1])), 7)[0] == 0
        tree.rename(tmp_path / "away")
        if other:
            with KlogBroker(tmp_path / "other", "--directories", str(tree), "--broker-id", "9"):
                broker.wait_for_log("this broker belongs to")
        else:
            tree.mkdir()
            client.request(apis.METADATA, 4, {"topics": [{"name": "unknown"}]})
            broker.wait_for_log("names no cluster")
        assert client.produce("there", bytes(make_batch([(b"k", b"w")], [2])), 7) == (0, 1)
        assert (broker.data_dir / "there-0" / f"{0:020d}.log").stat().st_size
        shutil.rmtree(tree)
        (tmp_path / "away").rename(tree)
        another = {"topics": [_TOPIC | {"name": "next"}], "timeout_ms": 1000}
        assert error_codes(client.request(apis.CREATE_TOPICS, 2, another)) == [0]
    with KlogBroker(tmp_path, "--directories", str(tree)) as broker, RawClient(broker.port) as client:
        assert client.produce("there", bytes(make_batch([(b"k", b"x")], [3])), 7) == (0, 2)


def test_what_needs_the_directories(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    with (
        KlogBroker(tmp_path, "--directories", str(tree), "--set", "offsets.topic.num.partitions=1") as broker,
        RawClient(broker.port) as client,
    ):

        def codes(api: Any, version: int, message: dict[str, Any]) -> list[int]:
            return error_codes(client.request(api, version, message))

        assert codes(apis.CREATE_TOPICS, 2, {"topics": [_TOPIC], "timeout_ms": 1000}) == [0]
        tree.rename(tmp_path / "away")
        tree.write_text("no folder")
        partitions = {"topics": [{"name": "there", "partitions": [_OFFSET]}]}
        commit = {"group_id": "g", "generation_id_or_member_epoch": -1} | partitions
        fetch = {"group_id": "g", "topics": [{"name": "there", "partition_indexes": [0]}]}
        not_available = ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert codes(apis.FIND_COORDINATOR, 1, {"key": "g"}) == [not_available]
        assert codes(apis.OFFSET_COMMIT, 5, commit) == [not_available]
        assert not_available in codes(apis.OFFSET_FETCH, 5, fetch)
        assert codes(apis.HEARTBEAT, 1, {"group_id": "g", "generation_id": 1, "member_id": "m"}) == [not_available]
        of_id = {"transactional_id": "i", "producer_id": 1, "producer_epoch": 0}
        init = {"transactional_id": "i", "transaction_timeout_ms": 1000}
        assert codes(apis.FIND_COORDINATOR, 1, {"key": "i", "key_type": 1}) == [not_available]
        assert codes(apis.INIT_PRODUCER_ID, 1, init) == [not_available]
        assert codes(apis.ADD_OFFSETS_TO_TXN, 1, of_id | {"group_id": "g"}) == [not_available]
        assert codes(apis.END_TXN, 1, of_id | {"committed": True}) == [not_available]
        new = {"topics": [_TOPIC | {"name": "new"}], "timeout_ms": 1000}
        assert codes(apis.CREATE_TOPICS, 2, new) == [ErrorCode.UNKNOWN_SERVER_ERROR]
        assert codes(apis.METADATA, 4, {"topics": [{"name": "new"}]}) == [0, ErrorCode.LEADER_NOT_AVAILABLE]
        assert codes(apis.METADATA, 4, {"topics": [{"name": "there"}]}) == [0, 0, 0]  # known topics are served
        tree.unlink()
        (tmp_path / "away").rename(tree)
        assert codes(apis.FIND_COORDINATOR, 1, {"key": "g"}) == [0]
        log = broker.log.read_text()
    assert "a request failed" not in log


def test_requests_wait_once_for_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for each partition of a request, if the broker can't register again; the log says when it can."""
    caplog.set_level(logging.INFO, logger="spark_klog.broker")
    monkeypatch.setattr(partitions, "RENEWAL_SECONDS", 0.1)

    async def run() -> None:
        async with running(tmp_path) as broker:
            await broker.changes.create_topic("t", 1)
            looks: list[bool] = []
            for _ in range(2):
                with monkeypatch.context() as patch:

                    def holds(*, for_reading: bool = False) -> bool:
                        looks.append(for_reading)
                        return False

                    patch.setattr(broker.registry, "holds", holds)
                    assert await broker.partitions.leader_log("t", 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER
                    assert len(looks) > 1
                    looks.clear()
                    assert await broker.partitions.leader_log("t", 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER
                    assert len(looks) == 1
                assert not isinstance(await broker.partitions.leader_log("t", 0), ErrorCode)

    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if "the session with ZooKeeper" in record.getMessage()]
    assert ["may have ended" in line for line in lines] == [True, False, True, False]
