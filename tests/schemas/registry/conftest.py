"""A schema registry that the tests of a module share: each uses subjects of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.schema_registry import SchemaRegistry


@pytest.fixture(scope="module")
def registry(cluster: EmbeddedCluster) -> Iterator[str]:
    """The registry's URL."""
    with SchemaRegistry({"bootstrap.servers": cluster.bootstrap_servers}, "0") as running:
        yield running.url
