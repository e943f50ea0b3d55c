"""The servers of the tests of groups and offsets."""

from __future__ import annotations

from typing import NamedTuple

import pytest

only_ours = pytest.mark.parametrize("place", ["ours"], indirect=True)


class Place(NamedTuple):
    """Addresses of a cluster and of a ZooKeeper, which Apache Kafka uses, too."""

    servers: str
    connect: str

    @property
    def coordinator(self) -> str:
        return f"kafka://{self.servers}"

    @property
    def zookeeper(self) -> str:
        return f"zookeeper://{self.connect}/klog"
