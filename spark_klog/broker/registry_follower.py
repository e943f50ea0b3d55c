"""Keeps the registry in line with the tree, and the logs in line with the registry.

Other brokers and tools change the tree; `watch` follows them. Changes of this broker go through `change`. There is one
read or change of the tree at a time: an older view must never replace a newer one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar
from uuid import UUID

from spark_klog.broker.event_loop import BackgroundTasks, Rounds, within
from spark_klog.broker.logs.topic_logs import TopicLogs
from spark_klog.broker.metadata.controller import Controller
from spark_klog.broker.metadata.registry import Registry, Topic
from spark_klog.broker.metadata.topics_07 import Topics07
from spark_klog.errors import DirectoryError

_log = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 0.05
_SETTLE_SECONDS = 5.0
#: One round gives ids to topics and to requests for their deletion, the next one ends deletions.
_MOST_ROUNDS = 3
_T = TypeVar("_T")


class RegistryFollower:
    """See the module. `drop` is called with a topic that no longer exists."""

    def __init__(
        self,
        registry: Registry,
        topic_logs: TopicLogs,
        changes: BackgroundTasks,
        drop: Callable[[Topic], None],
        controller: Controller | None,
        topics_07: Topics07 | None,
    ) -> None:
        self._registry, self._topic_logs, self._changes, self._drop = registry, topic_logs, changes, drop
        self._controller, self._topics_07 = controller, topics_07
        self._tree_lock = asyncio.Lock()
        self._looked_again_at = -_LOOK_AGAIN_SECONDS
        #: Why the last reading of the tree failed.
        self._failure: str | None = None
        #: The topics as they were when `drop_gone` was last called.
        self.seen: Mapping[str, Topic] = registry.topics

    def start(self) -> None:
        """Read the tree and create the logs; blocks during the requests to the tree."""
        self._registry.refresh()
        for _ in range(_MOST_ROUNDS):
            if not self._work():  # nothing is served yet
                break
        self._topic_logs.follow_now()

    def watch(self) -> None:
        """Follow changes of the tree by other brokers and tools."""
        loop = asyncio.get_running_loop()
        is_due, rounds = False, Rounds()

        async def follow() -> None:
            nonlocal is_due
            await rounds.rest()  # limits the rate, for example while many topics are created one by one
            async with self._tree_lock:
                is_due = False  # later changes need another round
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

        self._registry.watch(changed)
        if self._controller is not None:
            changed_in_loop()  # the shared tree may have changed since `start` read it

    async def refresh(self) -> None:
        """Read the tree again, create logs of new partitions, and remove those of deleted topics."""
        await self._changes.finish(self._refresh_and_follow())

    async def look_again(self) -> None:
        """Refresh because a name is unknown; limited in rate, since a request may have many unknown names."""
        now = time.monotonic()
        if now - self._looked_again_at >= _LOOK_AGAIN_SECONDS:
            self._looked_again_at = now
            await self._changes.finish(self._refresh_and_follow(waits=False))

    async def settle(self) -> None:
        """Wait for the change of topics under way, and then of their logs, at most a few seconds."""
        with suppress(asyncio.TimeoutError):  # the same as the builtin TimeoutError only since Python 3.11
            await within(_SETTLE_SECONDS, self._settle())

    async def _settle(self) -> None:
        async with self._tree_lock:
            pass
        await self._topic_logs.settle()

    async def retry(self) -> None:
        """Begin to read the tree again if that failed: there need be no later change, and others may wait for this."""
        if self._failure is not None and not self._tree_lock.locked():
            self._changes.start(self._refresh_and_follow())

    async def change(self, work: Callable[[], _T]) -> _T:
        """Read or change the tree in a thread, then drop topics that are gone. The caller makes the logs follow."""
        async with self._tree_lock:
            return await self._in_tree(work)

    async def delete_topic(self, name: str, topic_id: UUID | None) -> bool:
        """Drop a topic's logs, and then delete it in the tree; False if it is not known here. The caller follows.

        If there are other live brokers, it is only `pending` in the registry's `deletions` after that.
        Raises `UnknownTopic` if `topic_id` is given and the topic has another id by now.
        """
        async with self._tree_lock:
            if name not in self._registry.topics:
                return False
            if await self._in_tree(partial(self._registry.begin_deletion, name, topic_id)):
                await self._in_tree(partial(self._registry.deletions.finish, name))
            return True

    async def _refresh_and_follow(self, *, waits: bool = True) -> None:
        async with self._tree_lock:
            await self._refresh()
        if waits or not self._topic_logs.is_busy:
            await self._topic_logs.follow()
        else:
            self._changes.start(self._topic_logs.follow())

    async def _refresh(self) -> None:
        try:
            await self._in_tree(self._registry.refresh)
            for _ in range(_MOST_ROUNDS):
                if not await self._in_tree(self._work):
                    break
            self._failure = None
        except Exception as error:
            before, self._failure = self._failure, str(error)
            if self._failure != before:
                text = "following the directories failed; answering from the last view of them, trying again: %s"
                _log.error(text, error, exc_info=not isinstance(error, DirectoryError))

    async def _in_tree(self, work: Callable[[], _T]) -> _T:
        self.drop_gone()
        try:
            return await asyncio.to_thread(work)
        finally:
            self.drop_gone()

    def drop_gone(self) -> None:
        """Drop the topics that are gone. The registry changes in a thread: call this before new state gets a name."""
        now = self._registry.topics
        if now is not self.seen:
            before, self.seen = self.seen, now
            for name, topic in before.items():
                if name not in now or now[name].topic_id != topic.topic_id:
                    self._drop(topic)

    def current_id(self, name: str) -> UUID | None:
        """The id of the topic of that name, None if there is none. An earlier topic of the name has been dropped."""
        self.drop_gone()
        topic = self.seen.get(name)
        return None if topic is None else topic.topic_id

    def _work(self) -> bool:
        """What this broker does for others in the tree; whether it changed topics, so that it must be called again.

        Call it when the topics that are gone have been dropped: other brokers count on that.
        """
        changed = self._controller is not None and self._controller.work()
        self._registry.deletions.acknowledge()
        if changed:
            self._registry.refresh()
        elif self._topics_07 is not None:
            self._topics_07.follow(self._registry.topics)
        return changed
