"""Fixtures for mirror tests: two brokers, which all tests of the folder share, as each has its own topics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.conftest import kept_on_failure


@pytest.fixture(scope="session")
def both_sides(request: pytest.FixtureRequest) -> Iterator[tuple[EmbeddedCluster, EmbeddedCluster]]:
    for folder in kept_on_failure(request, "tests/mirror"):
        with (
            EmbeddedCluster(data_dir=folder / "mirror-source") as source,
            EmbeddedCluster(data_dir=folder / "mirror-target") as target,
        ):
            yield source, target


@pytest.fixture
def cluster(both_sides: tuple[EmbeddedCluster, EmbeddedCluster]) -> EmbeddedCluster:
    """A broker of ours, the source."""
    return both_sides[0]


@pytest.fixture
def target(both_sides: tuple[EmbeddedCluster, EmbeddedCluster]) -> EmbeddedCluster:
    """A second broker of ours."""
    return both_sides[1]
