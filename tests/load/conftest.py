"""Fixtures for the tests of loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.journal import lease
from tests.load.support import send_batch
from tests.spark.support import create_topic, produce, values
from tests.support.brokers.batches import walk
from tests.support.servers.s3_server import serving_s3

if TYPE_CHECKING:
    from tests.load.real_lakes import RealLakes

#: Records per batch, number of batches, index of the corrupt batch.
EACH, COUNT, CORRUPT = 20, 6, 2


@pytest.fixture(scope="module")
def s3_process() -> Iterator[str]:
    """The address of an S3 server in a process of its own: deltalake holds Python's lock while it reads a history."""
    with serving_s3() as address:
        yield address


@pytest.fixture(scope="module")
def real_lakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealLakes]:
    """Catalogs and stores, each of which starts when a test first has a table in it."""
    from tests.load.real_lakes import RealLakes  # imports readers of tables

    with RealLakes(tmp_path_factory.mktemp("lakes")) as lakes:
        yield lakes


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
