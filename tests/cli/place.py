"""What the tests of groups and offsets talk to."""

from __future__ import annotations

from typing import NamedTuple

import pytest

only_ours = pytest.mark.parametrize("place", ["ours"], indirect=True)


class Place(NamedTuple):
    """A cluster and a ZooKeeper, which Kafka shares with us."""

    servers: str
    connect: str

    @property
    def coordinator(self) -> str:
        return f"kafka://{self.servers}"

    @property
    def zookeeper(self) -> str:
        return f"zookeeper://{self.connect}/klog"
