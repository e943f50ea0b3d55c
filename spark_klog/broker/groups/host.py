"""The parts of a broker that its group coordinator uses."""

from __future__ import annotations

from typing import Protocol

from spark_klog.broker.logs.log_flushes import LogFlushes
from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import PartitionLog


class GroupHost(Protocol):
    """A broker, as its group coordinator sees it."""

    @property
    def config(self) -> BrokerConfig: ...

    @property
    def registry(self) -> Registry: ...

    @property
    def logs(self) -> LogDirectory: ...

    @property
    def flushes(self) -> LogFlushes: ...

    async def is_current(self, *, for_reading: bool = False) -> bool:
        """Whether the broker may act on the topics it knows; waits a moment while it registers again."""

    def serves(self, log: PartitionLog) -> bool:
        """Whether `log` is, this moment, the log of the current topic of its name: check it before an append."""

    async def confirms(self, log: PartitionLog) -> bool:
        """Whether what has been appended to `log` may be acknowledged: the topic is still there."""

    async def coordinator_of(self, key: str, name: str) -> tuple[int, int]:
        """(broker id, partition) that keep the group or transactional id `key` in the internal topic `name`."""

    def internal_log(self, name: str, key: str) -> PartitionLog | None:
        """The log of the internal topic `name` that keeps `key`, if it is on this broker."""
