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
        return any(one == target and topic.startswith(prefix) for prefix, one in self._clusters.items())

    @property
    def of_copies(self) -> Mapping[str, str]:
        """The same for the topics that this mirror makes at the target; none without a prefix."""
        cluster, prefix = self._source.cluster.cluster_id, self._settings.prefix
        if cluster is None or not prefix:
            return {}
        return {prefix: cluster} | {prefix + more: one for more, one in self._clusters.items()}
