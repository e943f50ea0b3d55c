"""A klog or Kafka broker, for tests that any broker must pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from spark_klog.embedded import EmbeddedCluster
from tests.support.servers.kafka import Version
from tests.support.servers.shared_kafka import SharedKafkas

#: As of the shared Kafkas: tests wait until a transaction has timed out.
_SETTINGS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}


@contextmanager
def serving(which: Version | Literal["ours"], folder: Path, kafkas: SharedKafkas) -> Iterator[str]:
    """Yield the bootstrap servers of an embedded klog broker in `folder`, or of the shared Kafka of a version."""
    if which == "ours":
        with EmbeddedCluster(data_dir=folder / which, settings=_SETTINGS) as cluster:
            yield cluster.bootstrap_servers
        return
    yield kafkas.get(which).bootstrap_servers
