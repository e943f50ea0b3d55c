"""A broker of either kind for tests that any broker must pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spark_klog.embedded import EmbeddedCluster
from tests.support.kafka import Kafka

OURS = "ours"


@contextmanager
def serving(which: str, folder: Path, properties: Mapping[str, object] | None = None) -> Iterator[str]:
    """The bootstrap servers of our broker (`OURS`), or of the version of Kafka that `which` names.

    `properties` are Kafka's alone.
    """
    if which == OURS:
        with EmbeddedCluster(data_dir=folder / which) as cluster:
            yield cluster.bootstrap_servers
        return
    with Kafka(which, folder / which, properties) as kafka:
        yield kafka.bootstrap_servers
