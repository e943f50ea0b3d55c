"""Translation of consumer groups: their offsets at the source become offsets of the target."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spark_klog.client import Admin
from spark_klog.client.cluster import TopicPartition
from spark_klog.client.offsets import Committed, list_offsets
from spark_klog.errors import ErrorCode, KlogError, ProtocolError
from spark_klog.mirror.offset_map import PartitionMap
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.protocol.tables.list_offsets import EARLIEST

_log = logging.getLogger(__name__)


class GroupTranslation:
    """Commits translated offsets at the target, for groups that have no members there.

    Offsets only move forward, as with MirrorMaker 2: consumers that were moved to the target keep theirs.
    """

    def __init__(self, settings: MirrorSettings, source: Admin, target: Admin) -> None:
        self._settings, self._source, self._target = settings, source, target

    def translate(self, maps: Mapping[TopicPartition, PartitionMap]) -> int:
        """Translate all groups that the settings name; return the number of groups at the target that are up to date.

        A group that fails is logged as a warning, and tried again at the next call.
        """
        pattern = self._settings.groups
        if pattern is None:
            return 0
        names = [one.group for one in self._source.list_groups() if pattern.fullmatch(one.group)]
        return sum(self._translate(name, maps) for name in sorted(names))

    def _translate(self, group: str, maps: Mapping[TopicPartition, PartitionMap]) -> bool:
        try:
            offsets = self._translated(group, maps)
            there = self._target.list_group_offsets(group, list(offsets)) if offsets else {}
            ahead = {key: item for key, item in offsets.items() if key not in there or there[key].offset < item.offset}
            refused = self._target.alter_group_offsets(group, ahead).failures if ahead else {}
        except KlogError as error:
            _log.warning("group %s is not translated: %s", group, error)
            return False
        for key, refusal in refused.items():
            if isinstance(refusal, ProtocolError) and refusal.code == ErrorCode.UNKNOWN_MEMBER_ID:
                _log.info("group %s has members at the target, and keeps its offsets there", group)
                return False
            _log.warning("the offset of group %s in %s-%d is not translated: %s", group, *key, refusal)
        return bool(offsets) and not refused

    def _translated(self, group: str, maps: Mapping[TopicPartition, PartitionMap]) -> dict[TopicPartition, Committed]:
        committed = self._source.list_group_offsets(group, list(maps)) if maps else {}
        found = {
            (self._settings.prefix + key[0], key[1]): maps[key].translate(item.offset)
            for key, item in committed.items()
        }
        before = [key for key, offset in found.items() if offset is None]
        starts = list_offsets(self._target.cluster, dict.fromkeys(before, EARLIEST)) if before else {}
        return {
            key: Committed(starts[key] if offset is None else offset, metadata=item.metadata)
            for (key, offset), item in zip(found.items(), committed.values(), strict=True)
        }
