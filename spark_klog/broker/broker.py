"""The broker's state and what its handlers do with it: logs, registry, purgatory, offsets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from uuid import UUID

from spark_klog.broker.background import BackgroundTasks, Rounds
from spark_klog.broker.config import BrokerConfig
from spark_klog.broker.controller import Controller
from spark_klog.broker.coordinator.coordinator import GroupCoordinator
from spark_klog.broker.fetch_sessions import FetchSessions
from spark_klog.broker.internal_topics import INTERNAL_TOPICS, with_internal_settings
from spark_klog.broker.large_requests import Turns
from spark_klog.broker.log_flushes import LogFlushes
from spark_klog.broker.log_settings import topic_settings
from spark_klog.broker.metrics import Metrics
from spark_klog.broker.offset_manager import partition_for
from spark_klog.broker.purgatory import Purgatory
from spark_klog.broker.registry import (
    MAX_PARTITIONS,
    Alter,
    InvalidPartitions,
    Registry,
    Topic,
    TopicExists,
    UnknownTopic,
)
from spark_klog.broker.security.authorizer import Authorizer
from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import Users
from spark_klog.broker.topic_logs import TopicLogs, register_logs
from spark_klog.broker.topics_07 import Topics07
from spark_klog.broker.transactions.coordinator import TransactionCoordinator
from spark_klog.broker.transactions.producer_ids import PRODUCER_IDS, FileBlocks, ProducerIds, TreeBlocks
from spark_klog.directories.memory import MemoryTree
from spark_klog.directories.opening import open_tree
from spark_klog.directories.paths import Endpoint
from spark_klog.directories.tree import Tree
from spark_klog.errors import ConfigError, DirectoryError, ErrorCode
from spark_klog.log.directory import LogDirectory
from spark_klog.log.layout import check_alone
from spark_klog.log.names import check_topic_name
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api

_log = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 0.05
_T = TypeVar("_T")
#: The client does not say which leader epoch it knows.
ANY_EPOCH = -1


@dataclass(frozen=True)
class Request:
    """What a handler knows of a request beside its message."""

    version: int
    client_id: str | None
    session: Session

    @property
    def peer(self) -> str:
        """The client's address, and its user where there is one: for the log."""
        return self.session.peer


class Broker:
    """One broker. All methods run in the event loop's thread; those that change the tree are coroutines."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.users = Users(config.security.users_file)
        self.authorizer = Authorizer(self.users)
        if config.directories is None:
            check_alone(config.data_dir)
        self.logs = LogDirectory(config.data_dir, config.broker_id, config.log)
        # One change of the tree, or reading of it, at a time: an older view must never replace a newer one.
        self._tree_lock = asyncio.Lock()
        self._looked_again_at = -_LOOK_AGAIN_SECONDS
        try:
            session_seconds = config.zookeeper_session_timeout_ms / 1000
            tree = self._open_tree(session_seconds)
            self.registry = Registry(tree, config.broker_id, session_seconds)
            is_shared = config.directories is not None
            self._controller = Controller(tree, self.registry, self._id_in_logs) if is_shared else None
            has_07 = config.paths_07 and (config.directories or "").startswith("zookeeper:")
            self._topics_07 = Topics07(tree, config.broker_id) if has_07 else None
            self.purgatory = Purgatory()
            self.turns = Turns()
            self._topic_logs = TopicLogs(self.logs, self.registry, self.purgatory.wake, self._set_aside)
            self._changes = BackgroundTasks()
            self.flushes = LogFlushes(self._changes)
            self.fetch_sessions = FetchSessions(config.fetch_session_slots, config.fetch_session_eviction_ms / 1000)
            self.metrics = Metrics()
            self.coordinator = GroupCoordinator(self, self._changes)
            self.groups, self.offsets = self.coordinator.groups, self.coordinator.offsets
            blocks = (
                TreeBlocks(tree, config.broker_id)
                if is_shared
                else FileBlocks(config.data_dir / PRODUCER_IDS, config.broker_id)
            )
            self.transactions = TransactionCoordinator(self, ProducerIds(blocks, self._first_free_producer_id))
            self.logs.set_cluster_id(self.registry.cluster_id(self.logs.cluster_id))
        except BaseException:
            self.logs.close()
            raise

    def _open_tree(self, session_seconds: float) -> Tree:
        if self.config.directories is not None:
            return open_tree(self.config.directories, session_seconds)
        return MemoryTree()

    def _first_free_producer_id(self) -> int:
        """Above all that logs and transactions here know: they may come from another cluster."""
        in_logs = max((max(log.producers.producers, default=-1) for log in self.logs.logs.values()), default=-1)
        return max(in_logs, self.transactions.highest_producer_id()) + 1

    @property
    def cluster_id(self) -> str:
        assert self.logs.cluster_id is not None
        return self.logs.cluster_id

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Take part in the cluster at these addresses; blocks while the tree answers."""
        if self.config.directories is None:
            register_logs(self.logs, self.registry)
        self.registry.register(endpoints)
        self._read_tree()
        self._topic_logs.follow_now()

    def watch(self) -> None:
        """Follow the changes that other brokers and tools make to the tree."""
        loop = asyncio.get_running_loop()
        is_due, rounds = False, Rounds()

        async def follow() -> None:
            nonlocal is_due
            await rounds.rest()  # while topics are created one by one, say
            async with self._tree_lock:
                is_due = False  # what changes from now on asks for another look
                with rounds.measured():
                    await self._refresh()
            await self._topic_logs.follow()

        def changed_in_loop() -> None:
            nonlocal is_due
            if not is_due:
                is_due = True
                self._changes.start(follow())

        def changed() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed_in_loop)

        self.registry.watch(changed)
        if self.config.directories is not None:
            changed_in_loop()  # there may have been changes since the start's look

    async def refresh(self) -> None:
        """Read the tree again and follow it: new partitions get a log, those of deleted topics lose theirs."""
        await self._changes.finish(self._refresh_and_follow())

    async def _refresh_and_follow(self, *, waits: bool = True) -> None:
        async with self._tree_lock:
            await self._refresh()
        if waits or not self._topic_logs.is_busy:
            await self._topic_logs.follow()
        else:
            self._changes.start(self._topic_logs.follow())

    async def _refresh(self) -> None:
        try:
            await self._in_tree(self._follow_tree)
        except DirectoryError as error:
            _log.error("reading the directories failed; answering from what is known: %s", error)
        except Exception:
            _log.exception("reading the directories failed; answering from what is known")

    async def _in_tree(self, work: Callable[[], _T]) -> _T:
        """Read or change the tree in a thread; the caller holds the tree's lock. Topics that are gone are dropped."""
        before = self.registry.topics
        try:
            return await asyncio.to_thread(work)
        finally:
            for name, topic in before.items():
                now = self.registry.topics.get(name)
                if now is None or now.topic_id != topic.topic_id:
                    self._drop(name, len(topic.assignment))

    def _follow_tree(self) -> None:
        self._read_tree()
        if self._topics_07 is not None:
            self._topics_07.follow(self.registry.topics)

    def _read_tree(self) -> None:
        self.registry.refresh()
        if self._controller is not None and self._controller.work():
            self.registry.refresh()

    def _id_in_logs(self, name: str, assignment: Mapping[int, Sequence[int]]) -> UUID | None:
        for partition in sorted(assignment):
            log = self.logs.get(name, partition)
            is_led = assignment[partition][:1] == [self.config.broker_id]
            if log is not None and log.topic_id is not None and is_led:
                return log.topic_id
        return None

    def _drop(self, name: str, partitions: int) -> None:
        self._topic_logs.drop(name, partitions)
        self.coordinator.forget_topic(name)
        self.transactions.forget_logs_of(name)
        self.metrics.forget_topic(name)

    def _set_aside(self, name: str) -> None:
        """Logs of an earlier topic of that name are served no more: it was deleted while this broker was away."""
        self.coordinator.forget_logs_of(name)
        self.transactions.forget_logs_of(name)

    async def look_again(self) -> None:
        """Refresh for something that is not known; not for each name of a request that has many."""
        now = time.monotonic()
        if now - self._looked_again_at >= _LOOK_AGAIN_SECONDS:
            self._looked_again_at = now
            await self._changes.finish(self._refresh_and_follow(waits=False))

    async def topic(self, name: str) -> Topic | None:
        """The topic of that name; the tree is asked where none is known."""
        await self.turns.take()
        if name not in self.registry.topics:
            await self.look_again()
        return self.registry.topics.get(name)

    async def topic_by_id(self, topic_id: UUID) -> Topic | None:
        """The same by topic id."""
        await self.turns.take()
        if topic_id not in self.registry.names:
            await self.look_again()
        name = self.registry.names.get(topic_id)
        return None if name is None else self.registry.topics.get(name)

    async def leader_log(self, topic: str, partition: int, epoch: int = ANY_EPOCH) -> PartitionLog | ErrorCode:
        """The log of a partition that this broker leads, or why it can't serve it.

        `epoch` is the leader epoch that the client knows (KIP-320).
        """
        await self.turns.take()
        log = self.logs.get(topic, partition)
        if log is not None and self.registry.leads(topic, partition) and self._is_of_topic(log):
            if epoch == ANY_EPOCH or epoch == log.leader_epoch:
                return log
            is_older = epoch < log.leader_epoch
            return ErrorCode.FENCED_LEADER_EPOCH if is_older else ErrorCode.UNKNOWN_LEADER_EPOCH
        if self.registry.leads(topic, partition) is None:
            await self.look_again()
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
        """Whether it is not the log of an earlier topic of this name, which will be replaced."""
        return log.topic_id in (None, self.registry.topics[log.topic].topic_id)

    async def create_topic(
        self,
        name: str,
        partitions: int,
        settings: dict[str, str] | None = None,
        assignment: dict[int, list[int]] | None = None,
    ) -> UUID:
        """Create a topic and return its id.

        `TopicExists`, `TopicCollides`, or `ConfigError` for a bad name, count or setting.
        """
        check_topic_name(name)
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise ConfigError(f"topic {name}: {partitions} partitions, 1 to {MAX_PARTITIONS} are allowed")
        settings = dict(with_internal_settings(name, settings or {}))
        topic_settings(settings)
        chosen = assignment or self.registry.assign(partitions)
        return await self._changes.finish(self._create_topic(name, chosen, settings))

    async def _create_topic(self, name: str, assignment: dict[int, list[int]], settings: dict[str, str]) -> UUID:
        async with self._tree_lock:
            self.registry.check_collision(name)
            if not await self._in_tree(partial(self.registry.create_topic, name, assignment, settings)):
                raise TopicExists(f"topic {name} exists")
            topic = self.registry.topics[name]
        await self._topic_logs.follow()
        try:
            self._topic_logs.check(topic)
        except DirectoryError:
            await self._delete_topic(name)
            raise
        _log.info("created topic %s with %d partitions", name, len(assignment))
        return topic.topic_id

    async def create_partitions(
        self,
        name: str,
        count: int,
        assignment: Sequence[Sequence[int]] | None = None,
        *,
        validate_only: bool = False,
    ) -> None:
        """Give a topic `count` partitions in all; `assignment` has the replicas of each new one.

        `UnknownTopic`, `InvalidPartitions` or `InvalidAssignment` (all `ConfigError`); with `validate_only` nothing
        else happens.
        """
        if name in INTERNAL_TOPICS:
            raise InvalidPartitions(
                f"the number of partitions of {name} can't be changed: groups and transactional ids have their "
                "partition by it. Delete the topic to begin anew with another number, or choose it before it is made"
            )
        change = partial(self.registry.add_partitions, name, count, assignment, validate_only=validate_only)
        await self._changes.finish(self._change_topic(name, change))
        if not validate_only:
            _log.info("topic %s has %d partitions now", name, count)

    async def _change_topic(self, name: str, change: Callable[[], None]) -> None:
        async with self._tree_lock:
            await self._in_tree(change)
            topic = self.registry.topics.get(name)
        await self._topic_logs.follow()
        if topic is not None:
            self._topic_logs.check(topic)

    async def alter_topic_settings(self, name: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace a topic's own settings by what `alter` makes of them: for its logs here, by the tree elsewhere.

        `UnknownTopic`; `ConfigError` for an unknown name or a bad value, but not for what a tool of others has
        registered before and is left as it is. With `validate_only` nothing else happens.
        """
        change = partial(self._put_settings, name, alter, validate_only=validate_only)
        await self._changes.finish(self._change_topic(name, change))

    def _put_settings(self, name: str, alter: Alter, *, validate_only: bool) -> None:
        if name not in self.registry.topics:
            self.registry.refresh()
        if name not in self.registry.topics:
            raise UnknownTopic(f"there is no topic {name}")

        def checked(before: Mapping[str, str]) -> Mapping[str, str]:
            settings = alter(before)
            topic_settings({key: value for key, value in settings.items() if before.get(key) != value})
            return settings

        self.registry.alter_settings(name, checked, validate_only=validate_only)

    async def delete_topic(self, name: str, topic_id: UUID | None = None) -> None:
        """Delete a topic and its logs here; the other brokers follow the tree.

        `UnknownTopic` if it has another id than `topic_id` by now.
        """
        await self._changes.finish(self._delete_topic(name, topic_id))

    async def _delete_topic(self, name: str, topic_id: UUID | None = None) -> None:
        async with self._tree_lock:
            if name not in self.registry.topics:
                return
            await self._in_tree(partial(self.registry.delete_topic, name, topic_id))
        await self._topic_logs.follow()
        _log.info("deleted topic %s", name)

    async def care_for_topic_logs(self) -> None:
        """Try again what could not be made or changed."""
        if self._topic_logs.has_failed:
            await self._changes.finish(self._topic_logs.follow())

    async def changes_ended(self) -> None:
        """Wait for the changes of topics that are under way: what a stop interrupts would be half a topic."""
        await self._changes.ended()
        await self._topic_logs.ended()

    async def internal_topic(self, name: str) -> Topic:
        """A topic of this broker's own, made at first use; `DirectoryError` where it can't be."""
        if name not in self.registry.topics:
            try:
                await self.create_topic(name, self.config.default_partitions(name))
            except TopicExists:
                await self.refresh()
        topic = self.registry.topics.get(name)
        if topic is None:
            raise DirectoryError(f"{name} exists, but can't be read")
        return topic

    async def place_of(self, key: str, name: str) -> tuple[int, int]:
        """(broker id, partition) that keep a group or a transactional id in an internal topic; makes that at first use.

        `DirectoryError` where it can't be made.
        """
        await self.turns.take()
        topic = await self.internal_topic(name)
        partition = partition_for(key, len(topic.assignment))
        if self.logs.get(name, partition) is None and self.registry.leads(name, partition):
            await self._topic_logs.settle()  # the topic is registered before its log is made
        return self.registry.leader(topic, partition), partition

    def internal_log(self, name: str, key: str) -> PartitionLog | None:
        """The log of an internal topic that keeps a group or a transactional id, if it is here."""
        topic = self.registry.topics.get(name)
        if topic is None:
            return None
        return self.logs.get(name, partition_for(key, len(topic.assignment)))

    def note_answered(self, api: Api, response: Message | None, seconds: float) -> None:
        """Count a request that took that long, and what is fetched by it."""
        self.metrics.answered(api, response, seconds)
        if api is FETCH and response is not None:
            for topic in response.get("responses", ()):
                for entry in topic["partitions"]:
                    if entry["records"]:
                        key = self.registry.key(topic["topic"], topic["topic_id"], entry["partition_index"])
                        self.metrics.fetched(*key, entry["records"], self.logs)

    def close(self) -> None:
        """Close the logs, leave the cluster."""
        try:
            self.logs.close()
        finally:
            try:
                self.registry.unregister()
                self.registry.close()
            except DirectoryError as error:
                _log.warning("leaving the directories failed; this broker's entry ends with its session: %s", error)
            except Exception:
                _log.exception("leaving the directories failed")
