"""Partitions that open transactions hold up: where a read_committed stream ends (the last stable offset) stands still
behind the high watermark."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from spark_klog.base.names import TopicPartition
from spark_klog.client.admin.admin import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import offsets_of_led
from spark_klog.client.places import Offsets
from spark_klog.client.retry import Lasting
from spark_klog.errors import KlogError
from spark_klog.protocol.tables.records import LATEST, READ_UNCOMMITTED

_log = logging.getLogger(__name__)
#: Seconds between two requests for high watermarks: an idle stream asks for its end many times a second.
_INTERVAL = 1.0
#: Seconds after which a partition counts as held up: most transactions have ended by then.
_PATIENCE = 5.0
#: Seconds until the first warning, unless half of the transaction's timeout is over earlier.
_FIRST_WARNING = 60.0
_LONGEST_PAUSE = 3600.0
#: How long the look-up of a transaction may take, and how many times as long none follows: the stream waits for it.
_LOOK_UP_MS = 5_000
_LOOK_UP_PAUSE = 20


class _Still(NamedTuple):
    """An end that stands still, the offsets behind it, and when it was first seen, by the clock and since 1970."""

    offset: int
    behind: int
    since: float
    since_time: float


class _Holder(NamedTuple):
    """What is known of the transaction: a text, and the seconds after which to warn of it."""

    text: str
    due: float


class OpenTransactions:
    """Tracks which partitions are held up, by how many offsets and since when, and logs a warning of the oldest.

    The first one comes before the transaction's timeout.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._still: dict[TopicPartition, _Still] = {}
        self._looked_at = -_INTERVAL
        #: Of the oldest one: its partition and offset, what holds it up, when to warn again.
        self._oldest: tuple[TopicPartition, int] | None = None
        self._holder: _Holder | None = None
        self._look_up_at = -math.inf
        self._warnings: Lasting | None = None

    def look(self, cluster: Cluster, stable: Offsets) -> None:
        """Compare last stable offsets with high watermarks, at most once a second. No error of a broker fails it."""
        now = self._clock()
        self._still = {key: still for key, still in self._still.items() if stable.get(key) == still.offset}
        if now - self._looked_at < _INTERVAL:
            return
        self._looked_at = now
        try:
            high, _ = offsets_of_led(cluster, dict.fromkeys(stable, LATEST), READ_UNCOMMITTED)
        except (KlogError, OSError) as error:
            _log.info("can't look for open transactions: %s", error)
            return
        self.compare(stable, high)
        self._warn(cluster)

    def compare(self, stable: Offsets, high: Offsets) -> None:
        """Note the partitions whose last stable offset is behind the high watermark."""
        now = self._clock()
        still = {}
        for key, offset in stable.items():
            behind = high.get(key, offset) - offset
            if behind <= 0:
                continue
            known = self._still.get(key)
            since = (now, time.time()) if known is None or known.offset != offset else known[2:]
            still[key] = _Still(offset, behind, *since)
        self._still = still

    def held_up(self) -> dict[TopicPartition, _Still]:
        """The partitions that have been held up for some seconds."""
        now = self._clock()
        return {key: still for key, still in self._still.items() if now - still.since >= _PATIENCE}

    def to_json(self) -> list[dict[str, Any]]:
        """[{"topic": ..., "partition": ..., "records": ..., "sinceMs": since 1970}]; records are offsets."""
        return [
            {"topic": topic, "partition": partition, "records": still.behind, "sinceMs": int(1000 * still.since_time)}
            for (topic, partition), still in sorted(self.held_up().items())
        ]

    def _warn(self, cluster: Cluster) -> None:
        held_up = self.held_up()
        if not held_up:
            return
        key = min(held_up, key=lambda still: held_up[still].since)
        oldest, now = held_up[key], self._clock()
        if self._oldest != (key, oldest.offset) or self._holder is None:
            if now < self._look_up_at:
                return
            self._oldest, self._holder = (key, oldest.offset), self._look_up(cluster, key)
            self._warnings = Lasting(oldest.since + self._holder.due, _FIRST_WARNING, _LONGEST_PAUSE)
        if self._warnings is not None and self._warnings.is_due(now):
            more = f" (and of {len(held_up) - 1} more partitions)" if len(held_up) > 1 else ""
            if now >= self._look_up_at:
                self._holder = self._look_up(cluster, key)
            _log.warning(
                "%d offsets of %s-%d%s wait behind an open transaction at offset %d for %.0f s, and so does this "
                "read_committed query: %s",
                *(oldest.behind, *key, more, oldest.offset, now - oldest.since, self._holder.text),
            )

    def _look_up(self, cluster: Cluster, key: TopicPartition) -> _Holder:
        begin = self._clock()
        holder, end = _holder_of(cluster, key), self._clock()
        self._look_up_at = end + _LOOK_UP_PAUSE * (end - begin)
        return holder


def _holder_of(cluster: Cluster, key: TopicPartition) -> _Holder:
    """What holds the first open transaction of a partition, if the brokers tell this user."""
    try:
        with cluster.within(_LOOK_UP_MS):
            return _described(Admin(cluster), key)
    except (KlogError, OSError) as error:
        _log.info("can't look up the open transaction in %s-%d: %s", *key, error)
        return _Holder("klog transactions hanging and klog transactions list tell whose it is", _FIRST_WARNING)


def _described(admin: Admin, key: TopicPartition) -> _Holder:
    states = [state for state in admin.describe_producers([key]).check()[key] if state.transaction_start is not None]
    if not states:
        return _Holder("it has ended by now", _FIRST_WARNING)
    first = min(states, key=lambda state: state.transaction_start or 0)
    listed = admin.list_transactions(producer_ids=[first.producer_id])
    if not listed:
        place = f"--topic {key[0]} --partition {key[1]} --start-offset {first.transaction_start}"
        text = (
            f"it is of producer {first.producer_id}, and no coordinator knows it. If klog transactions hanging says so "
            f"too: klog transactions abort {place}"
        )
        return _Holder(text, _FIRST_WARNING)
    name = listed[0].transactional_id
    now = admin.describe_transactions([name]).check()[name]
    timeout = now.timeout_ms / 1000
    text = f"it is of transactional.id {name}, which is {now.state}, and aborted {timeout:g} s after it began"
    return _Holder(
        f"{text}; see klog transactions describe --transactional-id {name}", min(_FIRST_WARNING, timeout / 2)
    )
