"""Where the decisions of a stream are: in its checkpoint, or in a topic of the target cluster.

The option decisionLog says which; `auto` is the checkpoint if it is a folder of this machine with hard links, or has a
decision log already, and else the topic. A checkpoint that this machine can read says so itself once its decisions are
in a topic: a restart with other options finds them there.

Of any other checkpoint only the address is known. It is the key of the log in the topic, so it must not change.
"""

from __future__ import annotations

import json
import math
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from spark_klog.base.addresses import local_path, without_user
from spark_klog.base.names import DECISION_TOPIC
from spark_klog.errors import ConfigError
from spark_klog.spark.write.decisions.decision_log import DecisionLog, Identity
from spark_klog.spark.write.decisions.hard_link_log import (
    METADATA,
    HardLinkLog,
    checkpoint_folder,
    has_hard_links,
    is_checkpoint,
)
from spark_klog.spark.write.decisions.topic_log import TopicDecisionLog

Kind: TypeAlias = Literal["auto", "checkpoint", "topic"]
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://([^/]*))?(.*)", re.DOTALL)
#: Names of one store: a checkpoint stays the same if the job's file system is another implementation of it.
_SAME_STORE = {"s3": "s3a", "s3n": "s3a", "abfs": "abfss", "wasb": "wasbs"}


@dataclass(frozen=True)
class DecisionPlace:
    """A decision log: in the `topic` by its `key`, or, without a topic, in the checkpoint `folder`.

    `folder` is the query's checkpoint if this machine can read it.
    """

    folder: Path | None = None
    topic: str = ""
    key: str = ""

    @property
    def told(self) -> str:
        """The topic and the key for messages; empty for a checkpoint."""
        return f"topic {self.topic} ({self.key})" if self.topic else ""

    def open(
        self,
        settings: Mapping[str, str],
        identity: Identity,
        *,
        is_claimed: bool = False,
        decide_by: float = math.inf,
    ) -> DecisionLog:
        """The log; raises what `HardLinkLog` and `TopicDecisionLog` raise, of which `settings` and `decide_by` are."""
        if self.topic:
            return TopicDecisionLog(
                settings, self.topic, self.key, identity, is_claimed=is_claimed, decide_by=decide_by
            )
        assert self.folder is not None, "a log without a topic is in a folder"
        return HardLinkLog(self.folder, identity, is_claimed=is_claimed)


def stream_key(location: str) -> str:
    """The key of a stream's log: its option checkpointLocation in one spelling, without user and password.

    Raises `ConfigError` if it is a malformed `file:` address.
    """
    local = local_path(location)
    if local is not None:
        return f"stream/file:{os.path.abspath(local)}"
    # not by the authority: a secret may contain a slash
    match = _URI.fullmatch(without_user(location).replace("***@", "", 1))
    assert match is not None, "an address that is not local has a scheme"
    scheme, authority, path = match[1].lower(), match[2] or "", match[3]
    scheme = _SAME_STORE.get(scheme, scheme)
    path = posixpath.normpath(re.sub("/+", "/", f"/{path}")).rstrip("/")
    return f"stream/{scheme}://{authority}{path}"


def decision_place(location: str, kind: str, topic: str | None) -> DecisionPlace:
    """The place by the options checkpointLocation, decisionLog and decisionTopic; Spark has made the checkpoint by now.

    Raises `ConfigError` if the checkpoint has to be a local one and is not, or if its decisions are in another topic.
    """
    if cast("Kind", kind) == "checkpoint":
        return DecisionPlace(checkpoint_folder(location))
    local = local_path(location)
    folder = None if local is None or not is_checkpoint(Path(local)) else Path(local)
    if folder is not None:
        log = HardLinkLog(folder, Identity(), is_any=True)
        moved = log.moved()
        if moved is not None:
            if topic is not None and topic != moved.topic:
                raise ConfigError(
                    f"option decisionTopic is {topic}, but the decisions of checkpoint {folder} are in topic "
                    f"{moved.topic}: set decisionTopic={moved.topic}, or leave it out"
                )
            return DecisionPlace(folder, moved.topic, moved.key)
        if cast("Kind", kind) == "auto" and (log.is_there or has_hard_links(folder)):
            return DecisionPlace(folder)
    key = stream_key(location) if folder is None else query_key(folder) or stream_key(location)
    return DecisionPlace(folder, topic or DECISION_TOPIC, key)


def query_key(folder: Path) -> str:
    """The key of a log by Spark's id of the query: machines may have checkpoints of the same path. Empty without it."""
    try:
        return f"stream/{uuid.UUID(json.loads((folder / METADATA).read_bytes())['id'])}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
