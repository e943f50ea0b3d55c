"""The target's side of a mirror: batches and offsets are written, with exactly-once in transactions; and by whom."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict

from spark_klog.base.clock import system_ms
from spark_klog.base.names import TopicPartition
from spark_klog.client.cluster import Cluster
from spark_klog.client.producer.receipts import Receipt
from spark_klog.client.producer.sender import Sender
from spark_klog.client.producer.transactions import Transactions
from spark_klog.client.requests import run
from spark_klog.errors import ConfigError, MirrorFenced, RequestTimedOut
from spark_klog.mirror.batches import OutBatch
from spark_klog.mirror.progress import (
    OWNER,
    RELEASE,
    VERSION,
    Owner,
    Progress,
    ProgressReader,
    note_record,
    progress_topic,
)
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.records.building.assignment import own_batch
from spark_klog.security.config import Settings

_log = logging.getLogger(__name__)
#: Seconds between two looks, each of which may need the next one to see a record.
LOOK_SECONDS = 1.0
_MARGIN = 2.0
_PAUSE = 0.1
_CLAIM_SECONDS = 60.0
#: Records of a batch of progress: less than half a megabyte, whatever the topics' names.
_ROWS = 1_500


class Target:
    """Writes to the target. Not thread-safe; it works only during calls.

    With exactly-once the constructor fences an earlier process of this name and slot, and waits until its last
    transaction has ended. Raises what `Cluster.connect`, `Sender` and `Transactions` raise; make a new one then.
    """

    def __init__(self, settings: MirrorSettings, name: str, slot: int) -> None:
        self._prefix = settings.prefix
        self._progress = progress_topic(name), slot
        own = settings.target_client()
        if settings.exactly_once:
            own = Settings({**own, "transactional.id": f"{progress_topic(name)}-{slot}"})
        self._cluster = Cluster.connect(own)
        self._timeout_seconds = self._cluster.config.transaction_timeout_ms / 1000
        self.is_transactional = settings.exactly_once
        self._transactions: Transactions | None = None
        #: When the open transaction began, a reading of `time.monotonic`.
        self._began_at: float | None = None
        try:
            if settings.exactly_once and settings.commit_seconds >= self._timeout_seconds:
                raise ConfigError(
                    f"--commit-interval {settings.commit_seconds:g} needs a transaction.timeout.ms of the target above "
                    f"it, not {1000 * self._timeout_seconds:.0f}: the broker would abort the transactions"
                )
            if self._cluster.config.transactional_id is not None:
                self._transactions = Transactions(self._cluster, self._cluster.config.transactional_id)
                run(self._transactions.init())
        except BaseException:
            self._cluster.close()
            raise
        self.sender = Sender(self._cluster, self._transactions)

    @property
    def has_expired(self) -> bool:
        """Whether the open transaction is older than transaction.timeout.ms: the broker aborts and fences it then."""
        return self._began_at is not None and time.monotonic() - self._began_at >= self._timeout_seconds

    def send(self, key: TopicPartition, batch: OutBatch) -> Receipt:
        """Queue a batch for a partition, named as at the source; waits while too much is queued."""
        return self._send((self._prefix + key[0], key[1]), batch.data, batch.count)

    def send_progress(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Queue records (key, value) of the mirror's topic, in order."""
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            self._send(self._progress, own_batch(part, system_ms()), len(part))

    def _send(self, key: TopicPartition, data: bytearray, count: int) -> Receipt:
        if self._transactions is not None and self._began_at is None:
            self._transactions.begin()
            self._began_at = time.monotonic()
        receipt = self.sender.receipts.new(key)
        self.sender.add_batch(key, data, count, receipt)
        self.sender.make_room()
        return receipt

    def commit(self) -> None:
        """Wait until all records are confirmed, and commit the transaction, if any."""
        self.sender.flush()
        if self._transactions is not None and self._began_at is not None:
            run(self._transactions.commit())
            self._began_at = None

    def close(self) -> None:
        """Close the connections. An open transaction stays: the next process of this name aborts it."""
        self.sender.stop()
        self._cluster.close()


class Ownership:
    """The claim of one process on a mirror's slot, for all of its sessions: the slot is the last one's that has begun.

    A process writes its id to the mirror's topic, waits until the one before it has ended, and reads the progress then.
    The one before sees the id within a second, commits what is confirmed, notes that it has ended, and fails with
    `MirrorFenced`: no record is copied twice. If it was killed, the next one waits for some seconds. With exactly-once
    both have transactions, which fence the one before at once.
    """

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        between = settings.commit_seconds if settings.exactly_once else LOOK_SECONDS
        self._me = Owner(uuid.uuid4().hex, 2 * between + _MARGIN, settings.exactly_once)
        self._has_claimed = False

    def claim(self, name: str, reader: ProgressReader, target: Target) -> Progress:
        """Make the slot this process's, and return its progress; `MirrorFenced` if another has taken it since."""
        progress = reader.load()
        if self._has_claimed:
            self.check(name, reader)
            return progress
        if self._me not in progress.owners:  # a session that has failed may have claimed
            target.send_progress([note_record(OWNER, json.dumps({"version": VERSION, **asdict(self._me)}))])
            target.commit()
        before = self._before_claim(name, reader)
        if before is not None and not (before.is_transactional and self._me.is_transactional):
            until = time.monotonic() + before.seconds
            while reader.load().released != before.id and time.monotonic() < until:
                time.sleep(_PAUSE)
            if progress.released != before.id:
                _log.warning("the process of the mirror %s before this one has not ended in order", name)
        self._has_claimed = True
        self.check(name, reader)
        return progress

    def _before_claim(self, name: str, reader: ProgressReader) -> Owner | None:
        """The process before this one, which may have begun at the same moment; `MirrorFenced` if another follows.

        Waits until the claim is readable, which may be later than its commit.
        """
        until = time.monotonic() + _CLAIM_SECONDS
        while self._me not in (owners := reader.load().owners):
            if time.monotonic() > until:
                raise RequestTimedOut(f"what the mirror {name} has written could not be read for {_CLAIM_SECONDS:g} s")
            time.sleep(_PAUSE)
        if owners[-1] != self._me:
            raise MirrorFenced(name)
        return owners[-2] if len(owners) > 1 else None

    def check(self, name: str, reader: ProgressReader) -> None:
        """Raise `MirrorFenced` if another process has begun, as far as the reader knows."""
        reader.look()
        if reader.progress.owners[-1:] != [self._me]:
            raise MirrorFenced(name)

    def release(self, target: Target) -> None:
        """Note that this process has ended, after its last commit."""
        target.send_progress([note_record(RELEASE, self._me.id)])
        target.commit()
