"""Fixtures for mirror tests: the second of two brokers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster


@pytest.fixture(scope="module")
def target(module_server_dir: Path) -> Iterator[EmbeddedCluster]:
    """A second broker of ours, besides `cluster`."""
    with EmbeddedCluster(data_dir=module_server_dir / "target") as running:
        yield running
