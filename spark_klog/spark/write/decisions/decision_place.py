"""Where the decisions of a stream are in the target cluster: a topic, and the key of the stream's log in it.

The key of a checkpoint that this machine can read is Spark's id of the query. Of any other checkpoint only the address
is known, so it must not change.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_klog.base.addresses import local_path, without_user
from spark_klog.base.names import DECISION_TOPIC
from spark_klog.spark.write.decisions.decision_log import DecisionLog
from spark_klog.spark.write.decisions.entries import Identity

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://([^/]*))?(.*)", re.DOTALL)
#: Names of one store: a checkpoint stays the same if the job's file system is another implementation of it.
_SAME_STORE = {"s3": "s3a", "s3n": "s3a", "abfs": "abfss", "wasb": "wasbs"}


@dataclass(frozen=True)
class DecisionPlace:
    """A decision log: in the `topic` by its `key`. `folder` is the query's checkpoint if this machine can read it."""

    topic: str
    key: str
    folder: Path | None = None

    @property
    def told(self) -> str:
        """The topic and the key for messages."""
        return f"topic {self.topic} ({self.key})"

    def open(
        self,
        settings: Mapping[str, str],
        identity: Identity,
        *,
        is_claimed: bool = False,
        decide_by: float = math.inf,
    ) -> DecisionLog:
        """The log; see `DecisionLog` for the arguments and errors."""
        return DecisionLog(settings, self.topic, self.key, identity, is_claimed=is_claimed, decide_by=decide_by)


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


def decision_place(location: str, topic: str | None) -> DecisionPlace:
    """The place by the options checkpointLocation and decisionTopic; Spark has made the checkpoint by now."""
    local = local_path(location)
    by_id = "" if local is None else query_key(Path(local))
    folder = Path(local) if local is not None and by_id else None
    return DecisionPlace(topic or DECISION_TOPIC, by_id or stream_key(location), folder)


def query_key(folder: Path) -> str:
    """The key of a log by Spark's id of the query: machines may have checkpoints of the same path.

    Empty unless Spark has begun a checkpoint in this folder, so that it is the one that Spark means by its path.
    """
    try:
        return f"stream/{uuid.UUID(json.loads((folder / 'metadata').read_bytes())['id'])}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def planned(checkpoint: Path | None, batch: int) -> str:
    """`hash_of_plan` of Spark's file offsets/BATCH; empty if the file is missing or unreadable."""
    if checkpoint is None:
        return ""
    try:
        return hash_of_plan((checkpoint / "offsets" / str(batch)).read_bytes())
    except OSError:
        return ""


def hash_of_plan(data: bytes) -> str:
    """A hash of what a micro-batch reads, as Spark writes it into `offsets`; empty if it reads nothing.

    The first two lines are a version, and the time and watermark of the plan.
    """
    lines = data.splitlines()
    return hashlib.sha256(b"\n".join(lines[2:])).hexdigest() if len(lines) > 2 else ""
