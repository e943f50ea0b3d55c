"""Fixtures for the tests of loads."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.journal import lease
from tests.load.support import send_batch
from tests.spark.support import create_topic, produce, values
from tests.support.batches import walk
from tests.support.kafka import free_port

#: Records per batch, number of batches, index of the corrupt batch.
EACH, COUNT, CORRUPT = 20, 6, 2
_HOST, _SECONDS = "127.0.0.1", 60


@pytest.fixture(scope="module")
def s3_process() -> Iterator[str]:
    """The address of an S3 server in a process of its own: deltalake holds Python's lock while it reads a history."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + _SECONDS
            while not _answers(port):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"{_HOST}:{port}"
        finally:
            server.kill()


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of loads in object stores that end soon, and are renewed often."""
    for name, seconds in (("RENEW", 0.2), ("LEASE", 2.0), ("MARGIN", 1.0), ("_LOOK", 0.05)):
        monkeypatch.setattr(lease, f"{name}_SECONDS", seconds)


@pytest.fixture
def corrupt(cluster: EmbeddedCluster, topic: str) -> str:
    """A topic with two partitions; in partition 0 the third of six batches of twenty records has a flipped bit."""
    create_topic(cluster.bootstrap_servers, topic, 2)
    for number in range(COUNT):
        send_batch(cluster.bootstrap_servers, topic, EACH, number * EACH)
    produce(cluster.bootstrap_servers, topic, [item._replace(partition=1) for item in values(50)])
    [segment] = cluster.data_dir.glob(f"**/{topic}-0/*.log")
    batch = next(item for item in walk(segment.read_bytes()) if item.base_offset == CORRUPT * EACH)
    with segment.open("r+b") as file:
        file.seek(batch.position + batch.size - 3)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x20]))
    return topic


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((_HOST, port)) == 0
