"""Checkpoints in a bucket, by Hadoop's S3A: runs one after the other, and copies and backups, which are refused.

Without `make soak` a copy of them alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow.fs import S3FileSystem, copy_files

from spark_klog.embedded import EmbeddedCluster
from spark_klog.spark.decisions import continue_at
from tests.jobs.support import Ran, Running
from tests.spark.support import create_topic
from tests.support.runs.soak import SOAK
from tests.support.servers.s3_server import serving_s3
from tests.support.spark.s3a import s3a_settings

from .support import PARTITIONS, fill, once, read

pytestmark = [pytest.mark.peer, pytest.mark.test_all("long"), pytest.mark.timeout(0)]
_PROGRAM = Path(__file__).with_name("copy_program.py")
_SECONDS = 400.0


class Bucket:
    def __init__(self, address: str) -> None:
        self.address = address
        self.files = S3FileSystem(
            access_key="key", secret_key="secret", endpoint_override=address, scheme="http", allow_bucket_creation=True
        )
        self.files.create_dir("bucket")

    def copy(self, source: str, target: str) -> None:
        if self.files.get_file_info(f"bucket/{target}/metadata").is_file:
            self.files.delete_dir(f"bucket/{target}")
        copy_files(
            f"bucket/{source}", f"bucket/{target}", source_filesystem=self.files, destination_filesystem=self.files
        )


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with serving_s3() as address:
        yield Bucket(address)


def test_copies_and_backups(cluster: EmbeddedCluster, topic: str, bucket: Bucket, tmp_path: Path) -> None:
    servers, runs = cluster.bootstrap_servers, 0
    create_topic(servers, f"{topic}-from", PARTITIONS)
    create_topic(servers, topic, PARTITIONS)

    def run(checkpoint: str) -> Ran:
        nonlocal runs
        runs += 1
        given = {"servers": servers, "from": f"{topic}-from", "to": topic, "tasks": 2, "records": 30}
        given |= {"checkpoint": f"s3a://bucket/{checkpoint}", "to_the_end": True}
        given |= {"confs": s3a_settings(bucket.address)}
        return Running([sys.executable, str(_PROGRAM), json.dumps(given)], tmp_path, runs).result(_SECONDS)

    written = 60
    fill(servers, topic, 0, written)
    assert run("a").code == 0
    assert read(servers, topic) == once(written)
    if SOAK:
        bucket.copy("a", "backup")
        fill(servers, topic, written, 120)
        written = 120
        assert run("a").code == 0
        assert read(servers, topic) == once(written)

    bucket.copy("a", "copy")
    fill(servers, topic, written, written + 30)
    refused = run("copy")
    assert refused.code
    assert (
        f"CheckpointMismatch: Spark runs micro-batch {written // 30}, "
        "but topic __klog_decisions (stream/s3a://bucket/copy) has no"
    ) in refused.stderr
    if SOAK:
        bucket.copy("backup", "a")
        refused = run("a")
        assert refused.code
        assert (
            "CheckpointMismatch: Spark runs micro-batch 2, but the last decision in topic __klog_decisions "
            in refused.stderr
        )
    assert read(servers, topic) == read(servers, topic, committed=False) == once(written)

    options = {"kafka.bootstrap.servers": servers, "deliveryGuarantee": "exactly-once"}
    continue_at({**options, "checkpointLocation": "s3a://bucket/copy"}, written // 30)  # as the error says
    assert run("copy").code == 0
    assert read(servers, topic) == once(written + 30)
