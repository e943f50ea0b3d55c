"""Which process a mirror's slot belongs to: the one that has begun last.

A process writes its id to the mirror's topic, waits until the one before it has ended, and reads the progress then. The
one before sees the id within a second, commits what is confirmed, notes that it has ended, and fails with
`MirrorFenced`: no record is copied twice. If it was killed, the next one waits for some seconds. With exactly-once both
have transactions, which fence the one before at once.
"""

from __future__ import annotations

import logging
import time
import uuid

from spark_klog.errors import MirrorFenced, RequestTimedOut
from spark_klog.mirror.progress import Owner, Progress, ProgressReader, owner_record, release_record
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.target import Target

_log = logging.getLogger(__name__)
#: Seconds between two looks, each of which may need the next one to see a record.
LOOK_SECONDS = 1.0
_MARGIN = 2.0
_PAUSE = 0.1
_CLAIM_SECONDS = 60.0


class Ownership:
    """The claim of one process, for all of its sessions."""

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
            target.send_progress([owner_record(self._me)])
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
        if reader.progress.owner != self._me:
            raise MirrorFenced(name)

    def release(self, target: Target) -> None:
        """Note that this process has ended, after its last commit."""
        target.send_progress([release_record(self._me)])
        target.commit()
