"""Keeps the registry in line with the tree, and the logs in line with the registry.

Other brokers and tools change the tree; `watch` follows them. Changes of this broker go through `change`. There is one
read or change of the tree at a time: an older view must never replace a newer one.

There is a log for each partition that this broker leads, with the topic's settings. Folders are created, written,
renamed and removed in threads while requests are served. Which log is served changes in the event loop only. Only one
change of folders runs at a time: if a topic is deleted and created again, its old folders are renamed before the new
ones are created. A failure is logged with the folder's name, and housekeeping retries it; the other logs are not
affected.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

from spark_klog.base.cache import Newest
from spark_klog.base.memory import uncollected
from spark_klog.broker.event_loop import BackgroundTasks, within
from spark_klog.broker.fetches import Purgatory
from spark_klog.broker.metadata.controller import Controller, Topics07
from spark_klog.broker.metadata.registry import Asked, Registry, Topic
from spark_klog.broker.settings.log_settings import known_topic_settings, topic_settings_of
from spark_klog.errors import DataDirectoryError, DirectoryError, LogCorrupted
from spark_klog.log.directory import LogDirectory
from spark_klog.log.layout import usable
from spark_klog.log.partition_log import PartitionLog
from spark_klog.log.topic_journal import JOURNAL, KeptTopic

_log = logging.getLogger(__name__)
#: How long clients may not know of a deletion, and how many are remembered.
_JUST_SECONDS, _MOST_REMEMBERED = 30.0, 1000
_LOOK_AGAIN_SECONDS = 0.05
_SETTLE_SECONDS = 5.0
#: One round gives ids to topics and to requests for their deletion, the next one ends deletions.
_MOST_ROUNDS = 3
#: Between two rounds that follow the tree: so many times as long as the last round took, but no longer than this.
_REST_FACTOR, _LONGEST_REST_SECONDS = 3, 1.0
#: Partitions changed in one call of a thread; after each call the new logs are served.
_AT_ONCE = 64
_MOST_LOGGED = 1000
_T = TypeVar("_T")
_Overrides = Mapping[str, Any]
#: (topic, partition), and the function that renames its folder, if there is one.
_Dropped = tuple[tuple[str, int], Callable[[], Path | None]]
#: A change of files; returns the log to serve, if it is a new one.
_Work = Callable[[], PartitionLog | None]


class RegistryFollower:
    """See the module."""

    def __init__(
        self,
        registry: Registry,
        logs: LogDirectory,
        purgatory: Purgatory,
        changes: BackgroundTasks,
        controller: Controller | None,
        topics_07: Topics07 | None,
    ) -> None:
        self._registry, self._logs, self._purgatory = registry, logs, purgatory
        self._changes, self._controller, self._topics_07 = changes, controller, topics_07
        #: Called with the name of a topic that is gone, and of one whose logs here are no longer served: what others
        #: know of them by name, or have read in them, is to be forgotten at once.
        self.on_dropped: list[Callable[[str], None]] = []
        self.on_set_aside: list[Callable[[str], None]] = []
        #: Removes what others keep durably of dropped topics; waited for before a deletion ends.
        self.forgotten: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._tree_lock = asyncio.Lock()
        self._looked_again_at = -_LOOK_AGAIN_SECONDS
        #: Why the last reading of the tree failed.
        self._failure: str | None = None
        #: The topics as they were when `drop_gone` was last called.
        self.seen: Mapping[str, Topic] = registry.topics
        self._folders_lock = asyncio.Lock()
        #: Topics that the logs are in line with.
        self._followed: dict[str, Topic] = {}
        #: By topic: its settings, and those of them that apply to logs.
        self._overrides: dict[str, tuple[Mapping[str, str], _Overrides]] = {}
        #: Renames due for folders of dropped logs; failed ones are retried until a new topic has the folder.
        self._dropped: list[_Dropped] = []
        self._not_renamed: list[_Dropped] = []
        #: When topics were dropped, by `time.monotonic`; the newest are last.
        self._dropped_at: Newest[str, float] = Newest(_MOST_REMEMBERED)
        self._failures: dict[tuple[str, int], str] = {}
        #: Failures that were logged, by partition, until its log is made: clients and housekeeping retry every second.
        self._logged: dict[tuple[str, int], str] = {}
        self._removals, self._removing = BackgroundTasks(), asyncio.Lock()

    def start(self) -> None:
        """Read the tree and create the logs; blocks during the requests to the tree."""
        self._registry.refresh()
        for _ in range(_MOST_ROUNDS):
            if not self._work():  # nothing is served yet
                break
        self._update_logs_now()

    def watch(self) -> None:
        """Follow changes of the tree by other brokers and tools."""
        loop = asyncio.get_running_loop()
        is_due, next_at = False, 0.0

        async def follow() -> None:
            nonlocal is_due, next_at
            await asyncio.sleep(next_at - time.monotonic())  # limits the rate, as while many topics are created
            async with self._tree_lock:
                is_due, started = False, time.monotonic()  # later changes need another round
                await self._refresh()
                ended = time.monotonic()
                next_at = ended + min(_LONGEST_REST_SECONDS, _REST_FACTOR * (ended - started))
            await self.update_logs()

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
        async with self._folders_lock:
            pass

    async def retry(self) -> None:
        """Begin to read the tree again if that failed: there need be no later change, and others may wait for this.

        Write what the journal of topics lacks: until then a kill brings deleted topics back.
        """
        if self._failure is not None and not self._tree_lock.locked():
            self._changes.start(self._refresh_and_follow())
        if self._logs.journal.is_behind and not self._tree_lock.locked():
            with suppress(DirectoryError):  # the journal has logged the first one
                await self.change_in_tree(partial(self._registry.keep_topics, {}))

    async def change(self, work: Callable[[], _T]) -> _T:
        """Change the tree in a thread, and the logs after that; return what `work` returns."""
        async with self._tree_lock:
            outcome = await self._in_tree(work)
        await self.update_logs()
        return outcome

    async def change_in_tree(self, work: Callable[[], None]) -> None:
        """Change what no log depends on, in a thread."""
        async with self._tree_lock:
            await self._in_tree(work)

    async def delete_topics(self, topics: Mapping[str, UUID | None]) -> dict[str, Asked]:
        """Drop the logs of topics, given by name, and then delete them in the tree; those not known here are left out.

        If there are other live brokers, they are only `pending` in the registry's `deletions` after that.
        Returns what `Registry.begin_deletions` does, and raises what it raises.
        """
        async with self._tree_lock:
            known = {name: topic_id for name, topic_id in topics.items() if name in self._registry.topics}
            asked = await self._in_tree(partial(self._registry.begin_deletions, known))
            await self._forget()
            await self._in_tree(partial(self._finish, asked))
        await self.update_logs()
        return asked

    def _finish(self, asked: dict[str, Asked]) -> None:
        failure: DirectoryError | None = None
        for name in [name for name, outcome in asked.items() if isinstance(outcome, UUID)]:
            try:
                if failure is None:  # in an outage each would wait as long
                    self._registry.deletions.finish(name)
            except DirectoryError as error:
                failure = error
            asked[name] = failure or asked[name]

    async def _refresh_and_follow(self, *, waits: bool = True) -> None:
        async with self._tree_lock:
            await self._refresh()
        if waits or not self.is_busy:
            await self.update_logs()
        else:
            self._changes.start(self.update_logs())

    async def _refresh(self) -> None:
        try:
            await self._in_tree(self._registry.refresh, lasts=False)  # nothing is changed
            for _ in range(_MOST_ROUNDS):
                await self._forget()
                if not await self._in_tree(self._work):
                    break
            self._failure = None
        except Exception as error:
            before, self._failure = self._failure, str(error)
            if self._failure != before:
                text = "following the directories failed; answering from the last view of them, trying again: %s"
                _log.error(text, error, exc_info=not isinstance(error, DirectoryError))

    async def _in_tree(self, work: Callable[[], _T], *, lasts: bool = True) -> _T:
        self.drop_gone()
        try:
            return await asyncio.to_thread(partial(self._lasting, work) if lasts else work)
        finally:
            self.drop_gone()

    def _lasting(self, work: Callable[[], _T]) -> _T:
        outcome = work()
        try:
            self._registry.sync()  # once for all topics of a request
        except DirectoryError:
            self._failure = self._failure or ""  # makes `retry` follow what is done all the same
            raise
        return outcome

    async def _forget(self) -> None:
        """Wait a few seconds until nothing is left that a later topic of the name would get after a kill."""
        if self.forgotten is not None:
            await asyncio.wait({self._changes.start(self.forgotten())}, timeout=_SETTLE_SECONDS)

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

    @property
    def is_busy(self) -> bool:
        """Whether folders are being changed."""
        return self._folders_lock.locked()

    async def retry_logs(self) -> None:
        """Retry failed changes of logs. A retry under way counts: it may fail again."""
        if self.is_busy or self._failures or self._not_renamed:
            await self._changes.finish(self.update_logs())

    def check(self, topic: Topic) -> None:
        """Raise `DirectoryError` if the topic's logs could not be created or changed."""
        for partition in topic.assignment:
            reason = self._failures.get((topic.name, partition))
            if reason is not None:
                raise DirectoryError(f"the log of {topic.name}-{partition} can't be created or changed: {reason}")

    def has_just_dropped(self, name: str) -> bool:
        """Whether a topic of this name was deleted within the last seconds."""
        return time.monotonic() - self._dropped_at.get(name, -math.inf) < _JUST_SECONDS

    def _drop(self, topic: Topic) -> None:
        """Stop serving a deleted topic; `update_logs` removes its folders, but no logs of a later topic."""
        name, was_served = topic.name, False
        self._dropped_at[name] = time.monotonic()
        for partition in topic.assignment:  # of a folder of a cluster's broker some are missing
            log = self._logs.get(name, partition)
            if log is not None and log.topic_id not in (topic.topic_id, None):  # mostly the same object
                continue  # `update_logs` has seen the new topic before its deletion was noticed here
            rename: Callable[[], Path | None] | None = self._logs.take(name, partition)
            has_failed = self._failures.pop((name, partition), None) is not None
            if rename is not None:
                was_served = True
            elif has_failed:
                rename = partial(self._logs.rename_unmade, name, partition, topic.topic_id)
            if rename is not None:
                self._dropped.append(((name, partition), rename))
            self._purgatory.wake((name, partition))
        self._followed.pop(name, None)
        self._overrides.pop(name, None)
        if was_served:
            self._set_aside(name)
        for forget_topic in self.on_dropped:
            forget_topic(name)

    def _set_aside(self, name: str) -> None:
        """Forget state from the logs of a topic of that name, which are no longer served."""
        for forget_logs_of in self.on_set_aside:
            forget_logs_of(name)

    async def update_logs(self) -> None:
        """Rename and remove dropped folders, then create and change logs as the registry says."""
        async with self._folders_lock:
            self._dropped, self._not_renamed = self._not_renamed + self._dropped, []
            await self._rename_dropped()
            for pieces in _slices(self._changed()):
                await self._rename_dropped()  # a topic dropped meanwhile may have had these folders
                pieces = [(topic, partitions) for topic, partitions in pieces if self._is_current(topic)]
                works = [work for topic, partitions in pieces for work in self._works(topic, partitions)]
                await self._run(works)
                made = {(topic.name, partition) for topic, partition, _ in works}
                self._not_renamed = [drop for drop in self._not_renamed if drop[0] not in made]
                for topic, partitions in pieces:
                    if partitions[-1:] == [*topic.assignment][-1:]:
                        self._note_followed(topic)
            await self._rename_dropped()

    def _update_logs_now(self) -> None:
        """Do the same before the event loop runs."""
        for topic in self._changed():
            for _, partition, work in self._works(topic, [*topic.assignment]):
                self._note(topic, partition, self._done(topic, partition, work))
            self._note_followed(topic)
        if unknown := sorted({topic for topic, _ in self._logs.logs} - self._registry.topics.keys()):
            _log.warning(
                "%s has logs of topics that the cluster does not know, which are not served: %s",
                *(self._logs.path, ", ".join(unknown)),
            )

    async def ended(self) -> None:
        """Retry the removal of deleted topics a last time, and wait for background work."""
        if self.is_busy or self._not_renamed:
            await self.update_logs()
        await self._removals.ended()

    def _changed(self) -> Iterator[Topic]:
        for topic in list(self._registry.topics.values()):
            if self._followed.get(topic.name) is not topic and self._is_current(topic):
                yield topic

    def _is_current(self, topic: Topic) -> bool:
        now = self._registry.topics.get(topic.name)
        return now is not None and now.topic_id == topic.topic_id

    def _note_followed(self, topic: Topic) -> None:
        has_failed = any((topic.name, partition) in self._failures for partition in topic.assignment)
        if self._is_current(topic) and not has_failed:
            self._followed[topic.name] = topic

    def _works(self, topic: Topic, partitions: Iterable[int]) -> list[tuple[Topic, int, _Work]]:
        """The changes of files due for those of the partitions that this broker leads."""
        overrides = self._overrides_of(topic)
        works: list[tuple[Topic, int, _Work]] = []
        is_earlier = False
        for partition in partitions:
            key = topic.name, partition
            if not self._registry.leads(*key):
                continue
            log = self._logs.get(*key)
            if log is not None and log.topic_id not in (None, topic.topic_id):
                del self._logs.logs[key]
                is_earlier = True
                works.append((topic, partition, partial(self._replace, log, topic, overrides)))
            elif log is None:
                if key not in self._logs.offline:
                    works.append((topic, partition, partial(self._make, topic, partition, overrides)))
            elif log.topic_id is None or log.overrides != overrides:
                works.append((topic, partition, partial(_change, log, topic, overrides)))
        if is_earlier:
            self._set_aside(topic.name)
        return works

    def _overrides_of(self, topic: Topic) -> _Overrides:
        settings, overrides = self._overrides.get(topic.name, (None, {}))
        if settings != topic.settings:
            overrides = known_topic_settings(topic.name, topic.settings)
            self._overrides[topic.name] = topic.settings, overrides
        return overrides

    def _make(self, topic: Topic, partition: int, overrides: _Overrides) -> PartitionLog:
        log = self._logs.make(topic.name, partition, topic.topic_id, overrides)
        return log if log.topic_id == topic.topic_id else self._replace(log, topic, overrides)

    def _replace(self, log: PartitionLog, topic: Topic, overrides: _Overrides) -> PartitionLog:
        """Set aside the log of an earlier topic of this name, as Kafka does: rename it and serve it no more."""
        _log.warning("%s belongs to an earlier topic of that name: kept as %s", log.directory.name, log.retire("stray"))
        return self._logs.make(topic.name, log.partition, topic.topic_id, overrides)

    async def _run(self, works: list[tuple[Topic, int, _Work]]) -> None:
        if works:
            done = await asyncio.to_thread(self._all_done, works)
            for (topic, partition, _), result in zip(works, done, strict=True):
                self._note(topic, partition, result)

    def _all_done(self, works: list[tuple[Topic, int, _Work]]) -> list[PartitionLog | Exception | None]:
        with uncollected(freezes=len(works) == _AT_ONCE):  # else collections look at the new logs again and again
            return [self._done(*work) for work in works]

    def _done(self, topic: Topic, partition: int, work: _Work) -> PartitionLog | Exception | None:
        try:
            return work()
        except Exception as error:
            key = topic.name, partition
            if self._logged.get(key) != str(error):
                if len(self._logged) >= _MOST_LOGGED:
                    self._logged.clear()
                self._logged[key] = str(error)
                text = "the log of %s-%d can't be created or changed in %s, trying again without another line: %s"
                is_expected = isinstance(error, (OSError, LogCorrupted))
                _log.error(text, *key, self._logs.path, error, exc_info=not is_expected)
            return error

    def _note(self, topic: Topic, partition: int, result: PartitionLog | Exception | None) -> None:
        key = topic.name, partition
        self._failures.pop(key, None)
        if not isinstance(result, Exception):
            self._logged.pop(key, None)
        if isinstance(result, PartitionLog):
            if self._is_current(topic):
                self._logs.logs[key] = result
            else:  # the topic was deleted meanwhile
                self._dropped.append((key, partial(result.retire, "delete")))
        elif isinstance(result, LogCorrupted):
            self._logs.offline[key] = result
            if not self._is_current(topic) and (rename := self._logs.take(*key)) is not None:
                self._dropped.append((key, rename))  # the topic was deleted meanwhile
        elif result is not None and self._is_current(topic):
            self._failures[key] = str(result)
        elif result is not None:
            self._dropped.append((key, partial(self._logs.rename_unmade, *key, topic.topic_id)))

    async def _rename_dropped(self) -> None:
        while self._dropped:
            now, self._dropped = self._dropped[:_AT_ONCE], self._dropped[_AT_ONCE:]
            renamed, failed = await asyncio.to_thread(self._renamed, now)
            self._not_renamed += failed
            # the new names are unique: nothing needs to wait for the removal
            self._removals.start(self._remove_later(renamed))

    async def _remove_later(self, paths: list[Path]) -> None:
        async with self._removing:  # several threads would keep the event loop from the interpreter
            await asyncio.to_thread(_remove, paths)

    def _renamed(self, dropped: list[_Dropped]) -> tuple[list[Path], list[_Dropped]]:
        """(new paths, entries that could not be renamed)."""
        paths, failed = [], []
        for drop in dropped:
            (name, partition), rename = drop
            try:
                if (path := rename()) is not None:
                    paths.append(path)
            except FileNotFoundError as error:
                text = "the folder of the deleted partition %s-%d was missing already: %s"
                _log.warning(text, name, partition, error)
            except OSError as error:
                text = "the folder of the deleted partition %s-%d can't be renamed, will retry: %s"
                _log.error(text, name, partition, error)
                failed.append(drop)
                self._mark_deleted(name, partition)
        return paths, failed

    def _mark_deleted(self, name: str, partition: int) -> None:
        try:
            self._logs.mark_deleted(name, partition)
        except OSError as error:
            text = "%s-%d can't be marked as deleted either: if it is left, a start without --directories serves it: %s"
            _log.error(text, name, partition, error)


def _slices(topics: Iterable[Topic]) -> Iterator[list[tuple[Topic, list[int]]]]:
    """The topics, each with its partitions, in slices of `_AT_ONCE` partitions; a large topic is in several."""
    pieces: list[tuple[Topic, list[int]]] = []
    room = _AT_ONCE
    for topic in topics:
        partitions = [*topic.assignment]
        while partitions:
            pieces.append((topic, partitions[:room]))
            partitions, room = partitions[room:], room - len(pieces[-1][1])
            if not room:
                yield pieces
                pieces, room = [], _AT_ONCE
    if pieces:
        yield pieces


def _restore(logs: LogDirectory, topics: dict[str, list[int]]) -> dict[str, KeptTopic]:
    """After an unclean stop finish the journal's changes: add missing partitions to `topics`, remove deleted logs.

    Returns the journal's topics, but for those whose folders are of others, which it does not know: Kafka's.
    """
    journal, kept = logs.journal, {}
    for name in {*journal.deleted.values()} & topics.keys():
        gone: list[int] = []
        left: list[int] = []
        for partition in topics[name]:
            topic_id = logs.topic_id(name, partition)
            is_gone = topic_id in journal.deleted or (topic_id is None and name not in journal.topics)
            (gone if is_gone else left).append(partition)
        if gone:  # what the deletion left; a copy that was put back since looks the same
            text = "topic %s was deleted, says %s: removing its folders in %s, %d of them, with their records"
            _log.warning(text, name, JOURNAL, logs.path, len(gone))
        for partition in gone:
            _remove_deleted(logs, name, partition)
        topics[name] = left
        if not left:
            del topics[name]
    for name, topic in journal.topics.items():
        there = topics.get(name, [])
        if {logs.topic_id(name, partition) for partition in there} <= {None, topic.topic_id}:
            topics[name] = sorted({*there, *topic.partitions})
            kept[name] = topic
    journal.topics = kept
    return kept


def _remove_deleted(logs: LogDirectory, name: str, partition: int) -> None:
    rename = logs.take(name, partition)
    try:
        _remove([rename()] if rename is not None else [])
    except OSError as error:  # it is not served, and the next start tries again
        _log.error("the folder of the deleted partition %s-%d can't be renamed: %s", name, partition, error)


def register_logs(logs: LogDirectory, registry: Registry) -> None:
    """Register the topics of the logs, for a broker without a shared tree: its folders are its only registry."""
    topics = _partitions(logs)
    kept = _restore(logs, topics)
    registered = []
    for topic, partitions in topics.items():
        served = [partition for partition in partitions if (topic, partition) not in logs.offline]
        ids = (logs.topic_id(topic, partition) for partition in served or partitions)
        topic_id = kept[topic].topic_id if topic in kept else next(filter(None, ids), None)
        assignment = {partition: [registry.broker_id] for partition in partitions}
        log = logs.get(topic, served[0]) if served else None
        settings = topic_settings_of(log.overrides) if log is not None else {}
        new = topic, assignment, kept[topic].settings if topic in kept else settings
        registered.append((new, topic_id or uuid4()))
    registry.register(registered)
    registry.keep_topics, logs.journal.is_settled = logs.journal.note, True


def settle_logs(logs: LogDirectory) -> None:
    """For a broker of a cluster: make the folders what the journal of a time without a cluster says, and remove it.

    Nobody writes it from now on: a later start without the cluster goes by the folders. `DataDirectoryError`.
    """
    topics = _partitions(logs)
    with usable(logs.path):
        for name, kept in _restore(logs, topics).items():
            overrides = known_topic_settings(name, kept.settings)
            for key in ((name, partition) for partition in topics[name]):
                if key not in logs.logs and key not in logs.offline:
                    logs.logs[key] = logs.make(*key, kept.topic_id, overrides)
                if (log := logs.get(*key)) is not None:
                    log.set_overrides(overrides)
                    log.flush()
        if left := logs.journal.left():
            raise DataDirectoryError(f"{logs.path} has folders of deleted topics: remove those of {set(left.values())}")
        logs.journal.clear()


def _partitions(logs: LogDirectory) -> dict[str, list[int]]:
    """The partitions of the topics that have folders."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted({*logs.logs, *logs.offline}):
        topics.setdefault(topic, []).append(partition)
    return topics


def _change(log: PartitionLog, topic: Topic, overrides: _Overrides) -> None:
    if log.topic_id is None:
        log.set_topic_id(topic.topic_id)
    log.set_overrides(overrides)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
