"""Keeps the broker's logs in line with its registry: a log for each partition that it leads, with the topic's settings.

Folders are created, written, renamed and removed in threads while requests are served. Which log is served changes in
the event loop only. Only one change of folders runs at a time: if a topic is deleted and created again, its old folders
are renamed before the new ones are created. A failure is logged with the folder's name, and housekeeping retries it;
the other logs are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spark_klog.broker.event_loop import BackgroundTasks
from spark_klog.broker.metadata.registry import Registry, Topic
from spark_klog.broker.settings.log_settings import known_topic_settings, topic_settings_of
from spark_klog.errors import DirectoryError, LogCorrupted
from spark_klog.log.directory import LogDirectory
from spark_klog.log.partition_log import PartitionLog

_log = logging.getLogger(__name__)
#: Partitions changed in one call of a thread; after each call the new logs are served.
_AT_ONCE = 64
_MOST_LOGGED = 1000
_Overrides = Mapping[str, Any]
#: (topic, partition), and the function that renames its folder.
_Dropped = tuple[tuple[str, int], Callable[[], Path]]
#: A change of files; returns the log to serve, if it is a new one.
_Work = Callable[[], PartitionLog | None]


class TopicLogs:
    """See the module.

    `wake` is called with a partition that is no longer served as before. `set_aside` is called with the name of a topic
    if logs of an earlier topic of that name were served until now.
    """

    def __init__(
        self,
        logs: LogDirectory,
        registry: Registry,
        wake: Callable[[tuple[str, int]], None],
        set_aside: Callable[[str], None],
    ) -> None:
        self._logs, self._registry, self._wake, self._set_aside = logs, registry, wake, set_aside
        self._lock = asyncio.Lock()
        #: Topics that the logs are in line with.
        self._followed: dict[str, Topic] = {}
        #: By topic: its settings, and those of them that apply to logs.
        self._overrides: dict[str, tuple[Mapping[str, str], _Overrides]] = {}
        #: Renames due for folders of dropped logs; failed ones are retried until a new topic has the folder.
        self._dropped: list[_Dropped] = []
        self._not_renamed: list[_Dropped] = []
        self._failures: dict[tuple[str, int], str] = {}
        #: Failures that were logged, by partition, until its log is made: clients and housekeeping retry every second.
        self._logged: dict[tuple[str, int], str] = {}
        self._tasks = BackgroundTasks()

    @property
    def is_busy(self) -> bool:
        """Whether folders are being changed."""
        return self._lock.locked()

    @property
    def has_failed(self) -> bool:
        """Whether something must be retried. A retry under way counts: it may fail again."""
        return bool(self.is_busy or self._failures or self._not_renamed)

    async def settle(self) -> None:
        """Wait for the change of folders under way."""
        async with self._lock:
            pass

    def check(self, topic: Topic) -> None:
        """Raise `DirectoryError` if the topic's logs could not be created or changed."""
        for partition in topic.assignment:
            reason = self._failures.get((topic.name, partition))
            if reason is not None:
                raise DirectoryError(f"the log of {topic.name}-{partition} can't be created or changed: {reason}")

    def drop(self, topic: Topic) -> bool:
        """Stop serving a deleted topic; `follow` removes its folders. Logs of a later topic of its name are kept.

        Returns whether logs of it were served until now.
        """
        name, was_served = topic.name, False
        for partition in range(len(topic.assignment)):
            log = self._logs.get(name, partition)
            if log is not None and log.topic_id not in (None, topic.topic_id):
                continue  # `follow` has seen the new topic before its deletion was noticed here
            rename = self._logs.take(name, partition)
            if rename is not None:
                was_served = True
                self._dropped.append(((name, partition), rename))
            self._wake((name, partition))
            self._failures.pop((name, partition), None)
        self._followed.pop(name, None)
        self._overrides.pop(name, None)
        return was_served

    async def follow(self) -> None:
        """Rename and remove dropped folders, then create and change logs as the registry says."""
        async with self._lock:
            self._dropped, self._not_renamed = self._not_renamed + self._dropped, []
            await self._rename_dropped()
            for topic in self._changed():
                await self._rename_dropped()  # a topic dropped meanwhile may have had this one's folders
                if not self._is_current(topic):
                    continue
                works = self._works(topic)
                for start in range(0, len(works), _AT_ONCE):
                    await self._run(topic, works[start : start + _AT_ONCE])
                made = {(topic.name, partition) for partition, _ in works}
                self._not_renamed = [item for item in self._not_renamed if item[0] not in made]
                self._note_followed(topic)
            await self._rename_dropped()

    def follow_now(self) -> None:
        """Do the same before the event loop runs."""
        for topic in self._changed():
            for partition, work in self._works(topic):
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
            await self.follow()
        await self._tasks.ended()

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

    def _works(self, topic: Topic) -> list[tuple[int, _Work]]:
        """The changes of files due for partitions that this broker leads."""
        overrides = self._overrides_of(topic)
        works: list[tuple[int, _Work]] = []
        is_earlier = False
        for partition in topic.assignment:
            key = topic.name, partition
            if not self._registry.leads(*key):
                continue
            log = self._logs.get(*key)
            if log is not None and log.topic_id not in (None, topic.topic_id):
                del self._logs.logs[key]
                is_earlier = True
                works.append((partition, partial(self._replace, log, topic, overrides)))
            elif log is None:
                if key not in self._logs.offline:
                    works.append((partition, partial(self._make, topic, partition, overrides)))
            elif log.topic_id is None or log.overrides != overrides:
                works.append((partition, partial(_change, log, topic, overrides)))
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

    async def _run(self, topic: Topic, works: list[tuple[int, _Work]]) -> None:
        if self._is_current(topic):
            done = await asyncio.to_thread(
                lambda: [(partition, self._done(topic, partition, work)) for partition, work in works]
            )
            for partition, result in done:
                self._note(topic, partition, result)

    def _done(self, topic: Topic, partition: int, work: _Work) -> PartitionLog | Exception | None:
        try:
            return work()
        except Exception as error:
            self._log_failure((topic.name, partition), error)
            return error

    def _log_failure(self, key: tuple[str, int], error: Exception) -> None:
        if self._logged.get(key) == str(error):
            return
        if len(self._logged) >= _MOST_LOGGED:
            self._logged.clear()
        self._logged[key] = str(error)
        text = "the log of %s-%d can't be created or changed in %s, trying again without another line: %s"
        is_expected = isinstance(error, (OSError, LogCorrupted))
        _log.error(text, *key, self._logs.path, error, exc_info=not is_expected)

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

    async def _rename_dropped(self) -> None:
        while self._dropped:
            now, self._dropped = self._dropped[:_AT_ONCE], self._dropped[_AT_ONCE:]
            renamed, failed = await asyncio.to_thread(self._renamed, now)
            self._not_renamed += failed
            # the new names are unique: nothing needs to wait for the removal
            self._tasks.start(asyncio.to_thread(_remove, renamed))

    def _renamed(self, dropped: list[_Dropped]) -> tuple[list[Path], list[_Dropped]]:
        """(new paths, entries that could not be renamed)."""
        paths, failed = [], []
        for item in dropped:
            (name, partition), rename = item
            try:
                paths.append(rename())
            except FileNotFoundError as error:
                text = "the folder of the deleted partition %s-%d was missing already: %s"
                _log.warning(text, name, partition, error)
            except OSError as error:
                text = "the folder of the deleted partition %s-%d can't be renamed, will retry: %s"
                _log.error(text, name, partition, error)
                failed.append(item)
                self._mark_deleted(name, partition)
        return paths, failed

    def _mark_deleted(self, name: str, partition: int) -> None:
        try:
            self._logs.mark_deleted(name, partition)
        except OSError as error:
            text = "%s-%d can't be marked as deleted either: if it is left, a start without --directories serves it: %s"
            _log.error(text, name, partition, error)


def register_logs(logs: LogDirectory, registry: Registry) -> None:
    """Register the topics of the logs, for a broker without a shared tree: its folders are its only registry."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted({*logs.logs, *logs.offline}):
        topics.setdefault(topic, []).append(partition)
    for topic, partitions in topics.items():
        served = [partition for partition in partitions if (topic, partition) not in logs.offline]
        ids = (logs.topic_id(topic, partition) for partition in served or partitions)
        topic_id = next(filter(None, ids), None)
        assignment = {partition: [registry.broker_id] for partition in partitions}
        log = logs.get(topic, served[0]) if served else None
        settings = topic_settings_of(log.overrides) if log is not None else {}
        registry.create_topic(topic, assignment, settings, topic_id)


def _change(log: PartitionLog, topic: Topic, overrides: _Overrides) -> None:
    if log.topic_id is None:
        log.set_topic_id(topic.topic_id)
    log.set_overrides(overrides)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
