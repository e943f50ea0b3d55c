"""The servers of the tests of groups and offsets."""

from __future__ import annotations

from typing import NamedTuple

import pytest

#: Arguments of a broker on which a group begins with its first member, as with the tests' Kafka.
NO_DELAY = ("--set", "group.initial.rebalance.delay.ms=0")

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
