"""Settings of a mirror."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_klog.client.settings import of_bytes
from spark_klog.errors import ConfigError
from spark_klog.security.config import Settings

#: Topics that a pattern leaves out: Kafka's internal ones, and those of MirrorMaker 2.
INTERNAL = re.compile(r"__.*|.*[.-]internal|mm2-.*")
#: Topics with the progress of mirrors, which are never mirrored.
PROGRESS = re.compile(r"klog-mirror\..*\.internal")
#: A topic's name as a whole alternative of a pattern, with or without a backslash before dots.
_LITERAL = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)+")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
#: Settings of consumer groups and transactions in shared files of settings: the mirror has its own.
_OWN = ("group.id", "group.instance.id", "transactional.id", "enable.auto.commit", "auto.offset.reset")
_ALL = re.compile(".*")


@dataclass(frozen=True)
class MirrorSettings:
    """Settings of a mirror.

    `source` and `target` are client settings by Kafka's names, security included. `name` tells mirrors into one target
    apart: progress and transactions belong to it; None: the id of the source's cluster, and the prefix. Patterns match
    whole names.
    """

    source: Mapping[str, str] = field(repr=False)
    target: Mapping[str, str] = field(repr=False)
    name: str | None = None
    topics: re.Pattern[str] = _ALL
    exclude: re.Pattern[str] | None = None
    #: Put before the names of topics at the target.
    prefix: str = ""
    exactly_once: bool = False
    #: The consumer groups whose offsets are translated; None: none.
    groups: re.Pattern[str] | None = None
    #: Where to begin with a topic that exists when the mirror starts for the first time; later ones: the beginning.
    start: Literal["earliest", "latest"] = "earliest"
    #: What to do about a topic that was deleted and created again at the source: raise `DataLossError`, or mirror the
    #: new one from its beginning, behind what was copied of the old one. Brokers before 2.8 do not tell.
    recreated: Literal["fail", "begin"] = "fail"
    #: Topics to copy from their beginning if their copies were deleted: what was mirrored of them is forgotten.
    copy_again: frozenset[str] = frozenset()
    #: Seconds between commits of progress, looks for new topics and partitions, and translations of groups.
    commit_seconds: float = 1.0
    refresh_seconds: float = 30.0
    group_seconds: float = 60.0
    #: Copies of new topics; None: as many as at the source, at most one for each broker of the target.
    replication_factor: int | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name)
        for topic in sorted(self.copy_again):
            if not self.wants(topic):
                raise ConfigError(f"topic {topic} is to be copied again, but the mirror leaves it out")
        acks = self.target.get("acks", "all").strip()
        if acks == "0" or (self.exactly_once and acks not in ("all", "-1")):
            raise ConfigError(f"acks={acks} of the target could lose records: remove it, the mirror uses acks=all")

    def wants(self, topic: str) -> bool:
        """Whether a topic is mirrored; one that the pattern names, and does not only match, also if it is internal."""
        return self._matches(topic) and (self.names(topic) or not INTERNAL.fullmatch(topic))

    def leaves_out(self, topic: str) -> bool:
        """Whether a topic that the pattern matches is not mirrored, as it is internal."""
        return self._matches(topic) and not self.names(topic) and INTERNAL.fullmatch(topic) is not None

    def names(self, topic: str) -> bool:
        return topic in {
            part.replace("\\", "") for part in self.topics.pattern.split("|") if _LITERAL.fullmatch(part)
        }  # fmt: skip

    def _matches(self, topic: str) -> bool:
        is_excluded = self.exclude is not None and self.exclude.fullmatch(topic) is not None
        return self.topics.fullmatch(topic) is not None and not PROGRESS.fullmatch(topic) and not is_excluded

    def source_consumer(self) -> dict[str, str]:
        defaults = {"isolation.level": "read_committed", "max.partition.fetch.bytes": str(4 * 1024 * 1024)}
        own = {"enable.auto.commit": "false", "auto.offset.reset": "none"}
        return Settings({**defaults, **_shared(self.source), **own})

    def source_admin(self) -> dict[str, str]:
        """Settings for metadata and offsets at the source."""
        level = {"isolation.level": self.source_consumer()["isolation.level"]}
        return Settings({**_shared(self.source), **level})

    def target_client(self) -> dict[str, str]:
        """Settings of all clients at the target."""
        return Settings(_shared(self.target))


def check_name(name: str) -> str:
    """Check a mirror's name; `ConfigError`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the name {name!r} of a mirror: use 1 to 200 of a-z A-Z 0-9 . _ -")
    return name


def _shared(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in of_bytes(settings).items() if name not in _OWN}
