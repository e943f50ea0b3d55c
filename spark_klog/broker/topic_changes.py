"""Changes of topics by clients of this broker: create, grow, alter, delete; and of the settings of groups.

All go through the follower, which changes the tree and then the logs here; the other brokers follow the tree. A change
that has begun is finished even if its client has gone, as an interrupted one would leave half a topic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from uuid import UUID

from spark_klog.base.names import check_topic_name
from spark_klog.broker.event_loop import BackgroundTasks
from spark_klog.broker.metadata.internal_topics import INTERNAL_TOPICS, with_internal_settings
from spark_klog.broker.metadata.nodes import InvalidPartitions, UnknownTopic
from spark_klog.broker.metadata.registry import MAX_PARTITIONS, Alter, Asked, NewTopic, Registry, Topic
from spark_klog.broker.registry_follower import RegistryFollower
from spark_klog.broker.schema_validation import check_validation
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.settings.group_settings import check_group_settings
from spark_klog.broker.settings.log_settings import topic_settings
from spark_klog.errors import ConfigError, DecodeError, DirectoryError
from spark_klog.log.config import LogConfig
from spark_klog.log.file_system import FileSystem

_log = logging.getLogger(__name__)
_DELETION_POLL_SECONDS = 0.01
#: Topics that are created or deleted in one change of the tree, while other changes wait.
_AT_ONCE = 64
#: The file with the settings of groups, in the data directory of a standalone broker.
_GROUP_SETTINGS = "group-settings"


class TopicChanges:
    """For one event loop; `tasks` finishes what has begun."""

    def __init__(
        self, config: BrokerConfig, registry: Registry, follower: RegistryFollower, tasks: BackgroundTasks
    ) -> None:
        self._config, self._registry, self._follower, self._tasks = config, registry, follower, tasks

    async def create_topic(
        self,
        name: str,
        partitions: int,
        settings: Mapping[str, str] | None = None,
        assignment: dict[int, list[int]] | None = None,
    ) -> UUID:
        """Create a topic and return its id.

        Raises `TopicRefused`, `ConfigError` for a bad name or setting, `DirectoryError` if its logs can't be created.
        """
        (outcome,) = await self.create_topics([self.new_topic(name, partitions, settings, assignment)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def new_topic(
        self,
        name: str,
        partitions: int,
        settings: Mapping[str, str] | None = None,
        assignment: dict[int, list[int]] | None = None,
        ahead: int = 0,
    ) -> NewTopic:
        """Check and complete a topic for `create_topics`, that is to be created after `ahead` others; changes nothing.

        Raises `TopicRefused`, `ConfigError` for a bad name or setting.
        """
        check_topic_name(name)
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise InvalidPartitions(f"{partitions} partitions, but 1 to {MAX_PARTITIONS} are allowed")
        chosen = assignment or self._registry.assign(partitions, ahead)
        self._registry.check_collision(name)
        settings = dict(with_internal_settings(name, settings or {}))
        self._check(settings)
        return name, chosen, settings

    async def create_topics(self, topics: Sequence[NewTopic]) -> list[UUID | ConfigError | DirectoryError]:
        """Create topics, and return the id of each, or why it was not created."""
        outcomes: list[UUID | ConfigError | DirectoryError] = []
        for start in range(0, len(topics), _AT_ONCE):
            outcomes += await self._tasks.finish(self._create_topics(topics[start : start + _AT_ONCE]))
        return outcomes

    def _check(self, settings: Mapping[str, str]) -> None:
        check_validation(LogConfig(**topic_settings(settings)), self._config.schema_registry)

    async def _create_topics(self, topics: Sequence[NewTopic]) -> list[UUID | ConfigError | DirectoryError]:
        try:
            made = await self._follower.change(partial(self._registry.create_topics, topics))
        except DirectoryError as error:
            return [error] * len(topics)
        return [await self._created(topic) if isinstance(topic, Topic) else topic for topic in made]

    async def _created(self, topic: Topic) -> UUID | DirectoryError:
        try:
            self._follower.check(topic)
        except DirectoryError as error:
            with suppress(DirectoryError):  # the other one says more
                await self._follower.delete_topics({topic.name: topic.topic_id})
            return error
        _log.info("created topic %s with %d partitions", topic.name, len(topic.assignment))
        return topic.topic_id

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
        change = partial(self._registry.add_partitions, name, count, assignment, validate_only=validate_only)
        await self._tasks.finish(self._change_topic(name, change))
        if not validate_only:
            _log.info("topic %s now has %d partitions", name, count)

    async def _change_topic(self, name: str, change: Callable[[], None]) -> None:
        def work() -> Topic | None:
            change()
            return self._registry.topics.get(name)

        topic = await self._follower.change(work)
        if topic is not None:
            self._follower.check(topic)

    async def alter_topic_settings(self, name: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace a topic's own settings by `alter` of them. The other brokers follow the tree.

        With `validate_only` nothing is changed. Raises `UnknownTopic`; raises `ConfigError` for an unknown name or a
        bad value, except settings that `alter` keeps as they are: a foreign tool may have registered them.
        """
        change = partial(self._put_settings, name, alter, validate_only=validate_only)
        await self._tasks.finish(self._change_topic(name, change))

    def _put_settings(self, name: str, alter: Alter, *, validate_only: bool) -> None:
        if name not in self._registry.topics:
            self._registry.refresh()
        if name not in self._registry.topics:
            raise UnknownTopic(f"there is no topic {name}")

        def checked(before: Mapping[str, str]) -> Mapping[str, str]:
            settings = alter(before)
            self._check({key: value for key, value in settings.items() if before.get(key) != value})
            return settings

        self._registry.alter_settings(name, checked, validate_only=validate_only)

    async def alter_group_settings(self, group: str, alter: Alter, *, validate_only: bool = False) -> None:
        """Replace a group's own settings by `alter` of them; the other brokers follow the tree.

        With `validate_only` nothing is changed. Raises `ConfigError`, and `DirectoryError` if they can't be stored.
        """

        def checked(before: Mapping[str, str]) -> Mapping[str, str]:
            settings = alter(before)
            check_group_settings(self._config, settings)
            return settings

        change = partial(
            self._registry.alter_group_settings, group, checked, self._keep_group_settings, validate_only=validate_only
        )
        await self._tasks.finish(self._follower.change_in_tree(change))

    def _keep_group_settings(self, payload: bytes) -> None:
        """Store all groups' settings, which a standalone broker has in no tree that lasts."""
        if self._config.directories is None:
            try:
                FileSystem().replace(self._config.data_dir / _GROUP_SETTINGS, payload)
            except OSError as error:
                raise DirectoryError(f"settings of groups can't be stored: {error}") from error

    def restore_group_settings(self) -> None:
        """Read the groups' settings of a standalone broker, which are in no tree that lasts."""
        path = self._config.data_dir / _GROUP_SETTINGS
        try:
            self._registry.restore_group_settings(FileSystem().read(path))
        except FileNotFoundError:
            pass
        except (OSError, DecodeError) as error:
            _log.error("settings of groups are lost: %s: %s", path, error)

    async def delete_topics(self, topics: Mapping[str, UUID | None]) -> dict[str, Asked]:
        """Delete topics, given by name, and their logs here; the other brokers follow the tree, see `deletion`.

        Returns what became of those that exist: `UnknownTopic` if an id is given and the topic has another by now.
        """
        outcomes: dict[str, Asked] = {}
        names = list(topics)
        for start in range(0, len(names), _AT_ONCE):
            some = {name: topics[name] for name in names[start : start + _AT_ONCE]}
            outcomes |= await self._tasks.finish(self._delete_topics(some))
        return outcomes

    async def _delete_topics(self, topics: Mapping[str, UUID | None]) -> Mapping[str, Asked]:
        try:
            outcomes = await self._follower.delete_topics(topics)
        except DirectoryError as error:
            return dict.fromkeys(topics, error)
        for name, outcome in outcomes.items():
            if not isinstance(outcome, Exception):
                _log.info("deleted topic %s", name)
        return outcomes

    async def deletion(self, name: str, deadline: float) -> list[int] | None:
        """Wait until a topic's deletion is over; the other brokers that have not dropped it after `deadline`.

        None if it is over. `deadline` is in the time of `time.monotonic`. Raises `DirectoryError`.
        """
        deletions = self._registry.deletions
        topic_id = deletions.pending.get(name)
        while topic_id is not None and deletions.pending.get(name) == topic_id:
            if time.monotonic() >= deadline:
                return await asyncio.to_thread(deletions.waits_for, name)
            await asyncio.sleep(_DELETION_POLL_SECONDS)
        return None

    async def ended(self) -> None:
        """Wait for changes of topics under way: an interrupted one would leave half a topic."""
        await self._tasks.ended()
        await self._follower.ended()
