"""Where topics of the source come from: copies of the target's own topics must not go back there.

Each mirror notes in its topic at its target from which cluster the topics with its prefix come, and what was noted at
its source of those that it copies (see beginnings.py). So a mirror finds at its source which topics come from its
target, in a cycle of any length, as MirrorMaker 2 does by the names of clusters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from spark_klog.client import Admin
from spark_klog.errors import KlogError
from spark_klog.mirror.progress import ProgressReader
from spark_klog.mirror.settings import PROGRESS, MirrorSettings

_log = logging.getLogger(__name__)


class Origins:
    """The clusters that topics of the source come from, by the topics' prefix."""

    def __init__(self, settings: MirrorSettings, source: Admin, target: Admin) -> None:
        self._settings, self._source, self._target = settings, source, target
        self._clusters: dict[str, str] = {}
        #: Topics of mirrors whose notes are read.
        self._read: set[str] = set()

    def look(self, topics: Iterable[str]) -> None:
        """Read the notes of mirrors into the source, among its topics, that are not known yet."""
        for topic in topics:
            if topic in self._read or not PROGRESS.fullmatch(topic):
                continue
            try:
                with ProgressReader(self._settings.source_admin(), self._source, topic, 0) as reader:
                    found = reader.load().origins
            except KlogError as error:
                _log.warning("copies that the mirror of topic %s makes may go back and forth: %s", topic, error)
                self._read.add(topic)
                continue
            self._clusters |= found
            if found:  # else it has not begun to mirror
                self._read.add(topic)

    def is_from_target(self, topic: str) -> bool:
        """Whether a topic of the source is a copy of one of the target."""
        target = self._target.cluster.cluster_id
        if target is None:
            return False
        if self._source.cluster.cluster_id == target and topic.startswith(self._settings.prefix):
            return True
        return any(one == target and topic.startswith(prefix) for prefix, one in self._clusters.items())

    @property
    def of_copies(self) -> Mapping[str, str]:
        """The same for the topics that this mirror makes at the target; none without a prefix."""
        cluster, prefix = self._source.cluster.cluster_id, self._settings.prefix
        if cluster is None or not prefix:
            return {}
        return {prefix: cluster} | {prefix + more: one for more, one in self._clusters.items()}
