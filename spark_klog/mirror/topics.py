"""The topics of a mirror: which there are at the source, and topics like them at the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace
from uuid import UUID

from spark_klog.base.names import TopicPartition
from spark_klog.client import Admin, NewTopic
from spark_klog.client.admin.topics import ConfigEntry, TopicListing
from spark_klog.client.cluster import UNKNOWN_TOPIC
from spark_klog.errors import ConfigError, ErrorCode, KlogError, ProtocolError, UnsupportedVersionError
from spark_klog.mirror.progress import ProgressReader
from spark_klog.mirror.settings import PROGRESS, MirrorSettings

_log = logging.getLogger(__name__)
#: Settings that say something about the source's brokers. The type of timestamps is left out, too: copies keep the
#: times of the source, which with log append time the target's would replace.
_NOT_COPIED = frozenset(
    {
        "follower.replication.throttled.replicas",
        "leader.replication.throttled.replicas",
        "message.format.version",
        "message.timestamp.difference.max.ms",
        "message.timestamp.type",
        "min.insync.replicas",
        "unclean.leader.election.enable",
    }
)
#: Topics of one request, each of which may take a broker some time.
_MOST_CREATED = 100
_REFUSED = (ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST)


class Origins:
    """The clusters that topics of the source come from, by the topics' prefix: copies must not go back there.

    Each mirror notes in its topic at its target from which cluster the topics with its prefix come, and what was noted
    at its source of those that it copies (see progress.py). So a mirror finds at its source which topics come from its
    target, in a cycle of any length, as MirrorMaker 2 does by the names of clusters.
    """

    def __init__(self, settings: MirrorSettings, source: Admin, target: Admin) -> None:
        self._settings, self._source, self._target = settings, source, target
        self._clusters: dict[str, str] = {}
        #: Readers of the notes of mirrors into the source, by their topics; None for what can't be read.
        self._readers: dict[str, ProgressReader | None] = {}

    def look(self, topics: Iterable[str]) -> None:
        """Read what mirrors into the source, among its topics, have noted since the last call.

        A mirror notes more clusters when one begins to copy to its source.
        """
        for topic in topics:
            if not PROGRESS.fullmatch(topic):
                continue
            if topic not in self._readers:
                self._readers[topic] = ProgressReader(self._settings.source_admin(), self._source, topic, 0)
            reader = self._readers[topic]
            if reader is None:
                continue
            try:
                self._clusters |= reader.load(notes_only=True).origins
            except KlogError as error:
                _log.warning("copies that the mirror of topic %s makes may go back and forth: %s", topic, error)
                reader.close()
                self._readers[topic] = None

    def close(self) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()
        self._readers.clear()

    def is_from_target(self, topic: str) -> bool:
        """Whether a topic of the source is a copy of one of the target."""
        target = self._target.cluster.cluster_id
        if target is None:
            return False
        if self._source.cluster.cluster_id == target and topic.startswith(self._settings.prefix):
            return True
        return any(cluster == target and topic.startswith(prefix) for prefix, cluster in self._clusters.items())

    @property
    def of_copies(self) -> Mapping[str, str]:
        """The same for the topics that this mirror makes at the target; none without a prefix."""
        cluster, prefix = self._source.cluster.cluster_id, self._settings.prefix
        if cluster is None or not prefix:
            return {}
        return {prefix: cluster} | {prefix + more: other for more, other in self._clusters.items()}


class MirroredTopics:
    """Finds topics at the source and makes theirs at the target. Each call takes up to default.api.timeout.ms."""

    def __init__(self, settings: MirrorSettings, source: Admin, target: Admin) -> None:
        self._settings, self._source, self._target = settings, source, target
        #: Partitions of each topic that the target has, by the source's name.
        self._made: dict[str, int] = {}
        #: The ids of the source's topics at the last `refresh`, and of their copies; none from brokers before 2.8.
        self.ids: dict[str, UUID] = {}
        self.copy_ids: dict[str, UUID] = {}
        self.origins = Origins(settings, source, target)
        #: Topics that are left out, which was logged.
        self._logged: set[str] = set()
        #: Since when topics of earlier looks are missing at the source, readings of `time.monotonic`.
        self._missing_since: dict[str, float] = {}

    def refresh(self, patience: float = 0.0) -> list[TopicPartition]:
        """The source's partitions to mirror; each exists at the target when this returns.

        A topic of an earlier call counts as there until it has been missing for `patience` seconds: a broker that has
        just started may not know all topics yet.
        """
        there = {topic.name: topic for topic in self._source.list_topics()}
        self.origins.look(there)
        settings = self._settings
        listed = [
            topic
            for name, topic in there.items()
            if settings.wants(name) and (settings.names(name) or not self.origins.is_from_target(name))
        ]
        if new := sorted({name for name in there if self._settings.leaves_out(name)} - self._logged):
            self._logged |= set(new)
            _log.warning("left out as internal, unless --topics names them: %s", ", ".join(new))
        self.ids = {topic.name: topic.topic_id for topic in listed if topic.topic_id is not None}
        counts = {topic.name: topic.partitions for topic in listed}
        now = time.monotonic()
        missing = self._made.keys() - counts.keys()
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}
        counts |= {name: self._made[name] for name, since in self._missing_since.items() if now - since < patience}
        copies = self._listed_copies()
        changed = {
            name: count
            for name, count in counts.items()
            if self._made.get(name, 0) < count or self._settings.prefix + name not in copies
        }
        if changed:
            self._make(changed, {name: topic.partitions for name, topic in copies.items()})
            copies = self._listed_copies()
        of_copies = {name: copies.get(self._settings.prefix + name) for name in counts}
        self.copy_ids = {name: copy.topic_id for name, copy in of_copies.items() if copy and copy.topic_id is not None}
        made = {name: count for name, count in sorted(counts.items()) if self._made.get(name, 0) >= count}
        return [(name, number) for name, count in made.items() for number in range(count)]

    def _listed_copies(self) -> dict[str, TopicListing]:
        return {topic.name: topic for topic in self._target.list_topics(include_internal=True)}

    @property
    def missing(self) -> Set[str]:
        """Topics of earlier calls of `refresh` that the last one has not found at the source."""
        return self._missing_since.keys()

    def check_id(self, topic: str) -> None:
        """Raise a retriable error if a topic was created again since `refresh`: another look finds that."""
        before = self.ids.get(topic)
        self.refresh()
        if self.ids.get(topic) != before:
            raise ProtocolError(ErrorCode.UNKNOWN_TOPIC_ID, f"topic {topic}, which was created again at the source")

    def _make(self, counts: Mapping[str, int], there: Mapping[str, int]) -> None:
        missing = [name for name in counts if self._settings.prefix + name not in there]
        copies = self._copies(missing)
        configs = self._configs(copies)
        wanted = [
            NewTopic(self._settings.prefix + name, counts[name], number, configs.get(name, {}))
            for name, number in copies.items()
        ]
        for start in range(0, len(wanted), _MOST_CREATED):
            topics = {topic.name: topic for topic in wanted[start : start + _MOST_CREATED]}
            for name, failure in self._target.create_topics(list(topics.values())).failures.items():
                self._create_refused(topics[name], failure)
            _log.info("created at the target: %s", ", ".join(topics))
        for name, count in counts.items():
            target = self._settings.prefix + name
            if target in there:
                self._grow(target, there[target], count)
            if target in there or name in copies:
                self._made[name] = count

    def _configs(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """The settings that the source's topics have of their own; none from brokers before 0.11."""
        if not names:
            return {}
        try:
            described = self._source.describe_configs([("topic", name) for name in names])
        except (UnsupportedVersionError, ProtocolError) as error:
            _log.warning("topics are made with the target's default settings: %s", error)
            return {}
        for resource, failure in described.failures.items():
            _log.warning("topic %s is made with the target's default settings: %s", resource.name, failure)
        return {resource.name: _copied(entries.values()) for resource, entries in described.successes.items()}

    def _copies(self, names: Collection[str]) -> dict[str, int]:
        """The replication factors of new topics, without those that were deleted at the source meanwhile."""
        if self._settings.replication_factor is not None or not names:
            return dict.fromkeys(names, self._settings.replication_factor or 1)
        self._target.list_topics()  # for the brokers
        most = max(1, len(self._target.cluster.nodes))
        described = self._source.describe_topics(names)
        for failure in described.failures.values():
            if not (isinstance(failure, ProtocolError) and failure.code in UNKNOWN_TOPIC):
                raise failure
        return {
            name: min(most, max(len(part.replicas) for part in topic.partitions))
            for name, topic in described.successes.items()
        }

    def _create_refused(self, topic: NewTopic, failure: KlogError) -> None:
        """Create a topic without the settings that the target refuses, or let one grow that another has created."""
        code = failure.code if isinstance(failure, ProtocolError) else None
        count = topic.partitions or 1
        if code == ErrorCode.TOPIC_ALREADY_EXISTS:
            self._grow(topic.name, len(self._target.cluster.partitions([topic.name])[topic.name]), count)
        elif code in _REFUSED and topic.configs:
            taken = self._taken(topic)
            refused = ", ".join(sorted(topic.configs.keys() - taken.keys()))
            _log.warning("topic %s is made without settings that the target refuses: %s", topic.name, refused)
            self._target.create_topics([replace(topic, configs=taken)]).check()
        else:
            raise failure

    def _taken(self, topic: NewTopic) -> dict[str, str]:
        """The settings that the target takes, each tried by itself."""
        taken: dict[str, str] = {}
        for setting, value in topic.configs.items():
            single = {setting: value}
            try:
                self._target.create_topics([replace(topic, configs=single)], validate_only=True).check()
            except UnsupportedVersionError:
                return {}
            except ProtocolError as error:
                if error.code not in _REFUSED:
                    raise
            else:
                taken |= single
        return taken

    def _grow(self, name: str, there: int, partitions: int) -> None:
        if there >= partitions:
            return
        try:
            self._target.create_partitions({name: partitions}).check()
        except UnsupportedVersionError as error:
            raise ConfigError(
                f"topic {name} has {there} partitions at the target and needs {partitions}: add them by the target's "
                f"own tools ({error})"
            ) from None
        _log.info("topic %s has %d partitions at the target now", name, partitions)


def _copied(entries: Iterable[ConfigEntry]) -> dict[str, str]:
    """The settings to copy: the topic's own that are not secrets."""
    return {
        entry.name: entry.value
        for entry in entries
        if (entry.source == "topic" or (not entry.source and not entry.is_default))
        and entry.value is not None
        and entry.name not in _NOT_COPIED
    }
