"""The broker: puts its parts together, and offers the handlers operations that need several of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from uuid import UUID

from spark_klog.base.names import check_topic_name
from spark_klog.broker.decompression import Decompression
from spark_klog.broker.event_loop import BackgroundTasks, Turns
from spark_klog.broker.fetches import FetchSessions, Purgatory
from spark_klog.broker.groups.coordinator import GroupCoordinator
from spark_klog.broker.log_flushes import LogFlushes
from spark_klog.broker.metadata.controller import Controller, Topics07
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS, with_internal_settings
from spark_klog.broker.metadata.nodes import InvalidPartitions, TopicExists, UnknownTopic
from spark_klog.broker.metadata.registry import MAX_PARTITIONS, Alter, Registry, Topic
from spark_klog.broker.metrics import Metrics
from spark_klog.broker.registry_follower import RegistryFollower, register_logs
from spark_klog.broker.security.authorizer import Authorizer
from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import Users
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.settings.group_settings import check_group_settings
from spark_klog.broker.settings.log_settings import topic_settings
from spark_klog.broker.transactions.coordinator import (
    PRODUCER_IDS,
    TransactionCoordinator,
    claim_in_file,
    claim_in_tree,
)
from spark_klog.broker.transactions.verification import TransactionVerifier
from spark_klog.errors import DecodeError, DirectoryError, ErrorCode
from spark_klog.log.directory import LogDirectory
from spark_klog.log.file_system import FileSystem
from spark_klog.log.layout import check_alone
from spark_klog.log.partition_log import PartitionLog
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.opening import open_tree
from spark_klog.trees.paths import Endpoint

_log = logging.getLogger(__name__)
#: The client did not send a leader epoch.
ANY_EPOCH = -1
_DELETION_POLL_SECONDS = 0.01
#: The file with the settings of groups, in the data directory of a standalone broker.
_GROUP_SETTINGS = "group-settings"
#: How long requests wait for a broker that registers again, and how often they look.
_RENEWAL_SECONDS, _RENEWAL_POLL_SECONDS = 5.0, 0.02


class Request(NamedTuple):
    """A request's context, which a handler gets beside its message."""

    version: int
    client_id: str | None
    session: Session

    @property
    def peer(self) -> str:
        """The client's address and, unless anonymous, its user: for the log."""
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
        try:
            session_seconds = config.zookeeper_session_timeout_ms / 1000
            tree = open_tree(config.directories, session_seconds) if config.directories is not None else MemoryTree()
            self.registry = Registry(tree, config.broker_id, session_seconds)
            is_shared = config.directories is not None
            controller = Controller(tree, self.registry, self._id_in_logs) if is_shared else None
            has_07 = config.paths_07 and (config.directories or "").startswith("zookeeper:")
            topics_07 = Topics07(tree, config.broker_id) if has_07 else None
            #: Since when the session may have ended, as far as requests have seen; None if it is known to live.
            self._lapsed_at: float | None = None
            self.purgatory = Purgatory()
            self.turns = Turns()
            self.decompression = Decompression()
            self._changes = BackgroundTasks()
            self.follower = RegistryFollower(self, self._changes, controller, topics_07)
            self.flushes = LogFlushes(self._changes)
            self.fetch_sessions = FetchSessions(config.fetch_session_slots, config.fetch_session_eviction_ms / 1000)
            self.metrics = Metrics()
            self.coordinator = GroupCoordinator(self, self._changes)
            self.groups, self.offsets = self.coordinator.groups, self.coordinator.offsets
            claim = (
                partial(claim_in_tree, tree, config.broker_id)
                if is_shared
                else partial(claim_in_file, config.data_dir / PRODUCER_IDS, config.broker_id)
            )
            self.transactions = TransactionCoordinator(self, claim)
            self.verifier = TransactionVerifier(self, self.transactions)
            self.logs.set_cluster_id(self.registry.cluster_id(self.logs.cluster_id))
        except BaseException:
            self.logs.close()
            raise

    @property
    def cluster_id(self) -> str:
        assert self.logs.cluster_id is not None
        return self.logs.cluster_id

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Join the cluster with these addresses; blocks during the requests to the tree."""
        if self.config.directories is None:
            self._restore_group_settings()
            register_logs(self.logs, self.registry)
        self.registry.registration.register(endpoints, self.config.transaction_version)
        self.follower.start()
        deadline = time.monotonic() + _RENEWAL_SECONDS
        while not self.registry.holds() and time.monotonic() < deadline:
            time.sleep(_RENEWAL_POLL_SECONDS)

    def _id_in_logs(self, name: str, assignment: Mapping[int, Sequence[int]]) -> UUID | None:
        for partition in sorted(assignment):
            log = self.logs.get(name, partition)
            is_led = assignment[partition][:1] == [self.config.broker_id]
            if log is not None and log.topic_id is not None and is_led:
                return log.topic_id
        return None

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
            is_over = self._lapsed_at is not None and time.monotonic() - self._lapsed_at >= _RENEWAL_SECONDS
            if is_over or self.registry.is_cut_off:
                return False
            await asyncio.sleep(_RENEWAL_POLL_SECONDS)
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
        return self._is_of_topic(log)

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

    async def create_topic(
        self,
        name: str,
        partitions: int,
        settings: dict[str, str] | None = None,
        assignment: dict[int, list[int]] | None = None,
        *,
        validate_only: bool = False,
    ) -> UUID:
        """Create a topic and return its id; with `validate_only` nothing is changed.

        Raises `TopicRefused`, `ConfigError` for a bad name or setting, `DirectoryError` if its logs can't be created.
        """
        check_topic_name(name)
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise InvalidPartitions(f"{partitions} partitions, but 1 to {MAX_PARTITIONS} are allowed")
        chosen = assignment or self.registry.assign(partitions)
        self.registry.check_collision(name)
        settings = dict(with_internal_settings(name, settings or {}))
        topic_settings(settings)
        if validate_only:
            return UUID(int=0)
        return await self._changes.finish(self._create_topic(name, chosen, settings))

    async def _create_topic(self, name: str, assignment: dict[int, list[int]], settings: dict[str, str]) -> UUID:
        topic = await self.follower.change(name, partial(self._register, name, assignment, settings))
        assert topic is not None
        try:
            self.follower.check(topic)
        except DirectoryError:
            with suppress(UnknownTopic):  # it was deleted, and another topic of its name was created
                await self.follower.delete_topic(name, topic.topic_id)
            raise
        _log.info("created topic %s with %d partitions", name, len(assignment))
        return topic.topic_id

    def _register(self, name: str, assignment: dict[int, list[int]], settings: dict[str, str]) -> None:
        self.registry.check_collision(name)
        if not self.registry.create_topic(name, assignment, settings):
            if name in self.registry.deletions.pending:
                raise TopicExists(f"topic {name} is being deleted; create it when that is over")
            raise TopicExists(f"topic {name} exists")

    async def create_partitions(
        self,
        name: str,
        count: int,
        assignment: Sequence[Sequence[int]] | None = None,
        *,
        validate_only: bool = False,
    ) -> None:
        """Raise a topic's number of partitions to `count`; `assignment` has the replicas of each new partition.

        With `validate_only` nothing is changed. Raises `UnknownTopic`, `InvalidPartitions` or `InvalidAssignment` (all
        of them `ConfigError`).
        """
        if name in INTERNAL_TOPICS:
            raise InvalidPartitions(
                f"the number of partitions of {name} can't be changed: it decides the partition of each group "
                "or transactional id. Set it before the topic is created, or delete the topic to start over"
            )
        change = partial(self.registry.add_partitions, name, count, assignment, validate_only=validate_only)
        await self._changes.finish(self._change_topic(name, change))
        if not validate_only:
            _log.info("topic %s now has %d partitions", name, count)

    async def _change_topic(self, name: str, change: Callable[[], None]) -> None:
        topic = await self.follower.change(name, change)
        if topic is not None:
            self.follower.check(topic)

    async def alter_topic_settings(self, name: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace a topic's own settings by `alter` of them. The other brokers follow the tree.

        With `validate_only` nothing is changed. Raises `UnknownTopic`; raises `ConfigError` for an unknown name or a
        bad value, except settings that `alter` keeps as they are: a foreign tool may have registered them.
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

    async def alter_group_settings(self, group: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace a group's own settings by `alter` of them; the other brokers follow the tree.

        With `validate_only` nothing is changed. Raises `ConfigError`, and `DirectoryError` if they can't be stored.
        """

        def checked(before: Mapping[str, str]) -> Mapping[str, str]:
            settings = alter(before)
            check_group_settings(self.config, settings)
            return settings

        change = partial(
            self.registry.alter_group_settings, group, checked, self._keep_group_settings, validate_only=validate_only
        )
        await self._changes.finish(self.follower.change_in_tree(change))

    def _keep_group_settings(self, payload: bytes) -> None:
        """Store all groups' settings, which a standalone broker has in no tree that lasts."""
        if self.config.directories is None:
            try:
                FileSystem().replace(self.config.data_dir / _GROUP_SETTINGS, payload)
            except OSError as error:
                raise DirectoryError(f"settings of groups can't be stored: {error}") from error

    def _restore_group_settings(self) -> None:
        path = self.config.data_dir / _GROUP_SETTINGS
        try:
            self.registry.restore_group_settings(FileSystem().read(path))
        except FileNotFoundError:
            pass
        except (OSError, DecodeError) as error:
            _log.error("settings of groups are lost: %s: %s", path, error)

    async def delete_topic(self, name: str, topic_id: UUID | None = None) -> None:
        """Delete a topic and its logs here; the other brokers follow the tree, see `deletion`.

        Raises `UnknownTopic` if `topic_id` is given and the topic has another id by now.
        """
        await self._changes.finish(self._delete_topic(name, topic_id))

    async def _delete_topic(self, name: str, topic_id: UUID | None) -> None:
        if await self.follower.delete_topic(name, topic_id):
            _log.info("deleted topic %s", name)

    async def deletion(self, name: str, deadline: float) -> list[int] | None:
        """Wait until a topic's deletion is over; the other brokers that have not dropped it after `deadline`.

        None if it is over. `deadline` is in the time of `time.monotonic`. Raises `DirectoryError`.
        """
        deletions = self.registry.deletions
        topic_id = deletions.pending.get(name)
        while topic_id is not None and deletions.pending.get(name) == topic_id:
            if time.monotonic() >= deadline:
                return await asyncio.to_thread(deletions.waits_for, name)
            await asyncio.sleep(_DELETION_POLL_SECONDS)
        return None

    async def changes_ended(self) -> None:
        """Wait for changes of topics under way: an interrupted one would leave half a topic."""
        await self._changes.ended()
        await self.follower.ended()

    def note_answered(self, api: Api, response: Message | None, seconds: float) -> None:
        """Count a request and the records fetched by it."""
        self.metrics.answered(api, response, seconds)
        if api is FETCH and response is not None:
            for topic in response.get("responses", ()):
                for entry in topic["partitions"]:
                    if entry["records"]:
                        key = self.registry.key(topic["topic"], topic["topic_id"], entry["partition_index"])
                        self.metrics.fetched(*key, entry["records"], self.logs)

    def close(self) -> None:
        """Close the logs, and leave the cluster."""
        self.decompression.close()
        try:
            self.logs.close()
        finally:
            try:
                self.registry.registration.unregister()
                self.registry.close()
            except DirectoryError as error:
                _log.warning("leaving the directories failed; this broker's entry ends with its session: %s", error)
            except Exception:
                _log.exception("leaving the directories failed")
