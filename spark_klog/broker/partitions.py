"""The partitions that this broker serves now: which log is that of a topic, and whether it may still be used.

A broker can stand still between any two steps, lose its session, or learn that a topic was deleted and created again.
So a log is asked for by its topic's name, checked before each append, and again before the acknowledgement.
"""

from __future__ import annotations

import asyncio
import logging
import time
from uuid import UUID

from spark_klog.broker.event_loop import Turns
from spark_klog.broker.fetches import Purgatory
from spark_klog.broker.log_flushes import LogFlushes
from spark_klog.broker.metadata.registry import Registry, Topic
from spark_klog.broker.registry_follower import RegistryFollower
from spark_klog.errors import ErrorCode
from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import PartitionLog

_log = logging.getLogger(__name__)
#: The client did not send a leader epoch.
ANY_EPOCH = -1
#: How long requests wait for a broker that registers again, and how often they look.
RENEWAL_SECONDS, RENEWAL_POLL_SECONDS = 5.0, 0.02


class ServedPartitions:
    """The registry's topics, and the logs here, for all that reads and writes records. For one event loop."""

    def __init__(
        self,
        registry: Registry,
        logs: LogDirectory,
        follower: RegistryFollower,
        flushes: LogFlushes,
        purgatory: Purgatory,
        turns: Turns,
    ) -> None:
        self.registry, self.logs, self.follower = registry, logs, follower
        self.flushes, self.purgatory, self.turns = flushes, purgatory, turns
        #: Since when the session may have ended, as far as requests have seen; None if it is known to live.
        self._lapsed_at: float | None = None

    async def topic(self, name: str) -> Topic | None:
        """The topic of that name, None if it does not exist; an unknown name causes a refresh."""
        await self.turns.take()
        if name not in self.registry.topics:
            await self.follower.look_again()
        return self.registry.topics.get(name)

    async def topic_by_id(self, topic_id: UUID) -> Topic | None:
        """The topic with that id, None if it does not exist; an unknown id causes a refresh."""
        await self.turns.take()
        if topic_id not in self.registry.names:
            await self.follower.look_again()
        name = self.registry.names.get(topic_id)
        return None if name is None else self.registry.topics.get(name)

    async def is_current(self, *, for_reading: bool = False) -> bool:
        """Whether this broker may act on the topics it knows, see `Registry.holds`.

        After its session has ended it waits a moment: it registers again and reads the topics. If that takes longer,
        requests do not wait any more: one of many partitions would wait for each.
        """
        while not self._holds(for_reading=for_reading):
            is_over = self._lapsed_at is not None and time.monotonic() - self._lapsed_at >= RENEWAL_SECONDS
            if is_over or self.registry.is_cut_off:
                return False
            await asyncio.sleep(RENEWAL_POLL_SECONDS)
        return True

    def _holds(self, *, for_reading: bool) -> bool:
        """`Registry.holds`; logs when it ends, and when it begins again."""
        holds = self.registry.holds()
        if holds and self._lapsed_at is not None:
            self._lapsed_at = None
            _log.info("the session with ZooKeeper lives, and its topics have been read: records are taken again")
        elif not holds and self._lapsed_at is None:
            self._lapsed_at = time.monotonic()
            _log.warning("the session with ZooKeeper may have ended: no records are taken until it is known to live")
        return holds or (for_reading and self.registry.holds(for_reading=True))

    def serves(self, log: PartitionLog) -> bool:
        """Whether `log` is, this moment, the log of the current topic of its name: check it before an append.

        A broker can stand still between any two steps, and a topic be deleted and created again meanwhile.
        """
        is_current = self.registry.holds()
        if self.registry.topics is not self.follower.seen:
            self.follower.drop_gone()
        topic = self.registry.topics.get(log.topic)
        if topic is None or not is_current or self.logs.logs.get((log.topic, log.partition)) is not log:
            return False
        return log.topic_id is topic.topic_id or self._is_of_topic(log)

    async def confirms(self, log: PartitionLog) -> bool:
        """Whether what has been appended to `log` may be acknowledged: the topic is still there."""
        return self.serves(log) or (await self.is_current() and self.serves(log))

    async def leader_log(
        self, topic: str, partition: int, epoch: int = ANY_EPOCH, *, for_reading: bool = False
    ) -> PartitionLog | ErrorCode:
        """The log of a partition that this broker leads, or the error if it can't be served.

        `epoch` is the leader epoch that the client knows (KIP-320).
        """
        if self.turns.is_over():
            await self.turns.take()
        if (self._lapsed_at is not None or not self.registry.holds()) and not await self.is_current(
            for_reading=for_reading
        ):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if self.registry.topics is not self.follower.seen:
            self.follower.drop_gone()
        log = self.logs.logs.get((topic, partition))
        if log is not None and self.registry.leads(topic, partition) and self._is_of_topic(log):
            if epoch == ANY_EPOCH or epoch == log.leader_epoch:
                return log
            is_older = epoch < log.leader_epoch
            return ErrorCode.FENCED_LEADER_EPOCH if is_older else ErrorCode.UNKNOWN_LEADER_EPOCH
        if self.registry.leads(topic, partition) is None:
            await self.follower.look_again()
        leads = self.registry.leads(topic, partition)
        if leads is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if not leads:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER
        if (topic, partition) in self.logs.offline:
            return ErrorCode.KAFKA_STORAGE_ERROR
        log = self.logs.get(topic, partition)
        return log if log is not None and self._is_of_topic(log) else ErrorCode.LEADER_NOT_AVAILABLE

    def _is_of_topic(self, log: PartitionLog) -> bool:
        """Whether the log belongs to the current topic of its name, not to an earlier one."""
        topic_id = self.registry.topics[log.topic].topic_id
        if log.topic_id is topic_id or log.topic_id is None:
            return True
        if log.topic_id != topic_id:
            return False
        log.topic_id = topic_id  # the same object from now on: UUID compares in Python
        return True
