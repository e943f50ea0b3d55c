"""The parts of a broker that its transaction coordinator uses."""

from __future__ import annotations

from typing import Protocol

from spark_klog.broker.event_loop.large_requests import Turns
from spark_klog.broker.fetches.purgatory import Purgatory
from spark_klog.broker.groups.coordinator import GroupCoordinator
from spark_klog.broker.groups.host import GroupHost


class TransactionHost(GroupHost, Protocol):
    """A broker, as its transaction coordinator sees it; markers also end transactional offset commits."""

    @property
    def coordinator(self) -> GroupCoordinator: ...

    @property
    def purgatory(self) -> Purgatory: ...

    @property
    def turns(self) -> Turns: ...
