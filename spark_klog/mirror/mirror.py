"""The mirror: sessions, one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_klog.client.producer.transactions import NEVER_COMMITTED
from spark_klog.errors import KlogError, ProducerFenced, is_retriable
from spark_klog.mirror.session import Session, Totals
from spark_klog.mirror.settings import MirrorSettings
from spark_klog.mirror.target import Ownership

_log = logging.getLogger(__name__)
#: Seconds before the first attempt after a failure, and the most; each pause is twice the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
#: With `until_end`, failures in a row after which the mirror gives up.
_MOST_FAILURES = 3


class Mirror:
    """Copies topics of one cluster into another, with the same partitions and the same order.

        settings = MirrorSettings({"bootstrap.servers": "a:9092"}, {"bootstrap.servers": "b:9092"}, exactly_once=True)
        totals = Mirror(settings).run(until_end=True)

    Record batches are copied as they are where both sides allow it (see batches.py). Progress is kept at the target
    (see progress.py): a mirror that was stopped or killed goes on where it was. With exactly-once each record is
    written once; otherwise what was not noted yet is written again after a crash.

    A mirror of several tasks gives each a `slot` of `slots`, which has its own share of the partitions.
    """

    def __init__(self, settings: MirrorSettings, *, slot: int = 0, slots: int | None = 1) -> None:
        self._settings, self._slot, self._slots = settings, slot, slots
        self._stopped = threading.Event()
        self._ownership = Ownership(settings)
        self.totals = Totals()

    def stop(self) -> None:
        """Make `run` commit and return; any thread or signal handler may call it."""
        self._stopped.set()

    def run(self, *, until_end: bool = False, on_progress: Callable[[Totals], None] = lambda _: None) -> Totals:
        """Mirror until `stop` is called, or with `until_end` until the offsets that the source has at the beginning.

        Failures that may pass are retried from the last commit, with pauses of up to 30 s; with `until_end` for three
        times in a row. So is a transaction that the target has aborted because it lasted too long. Raises
        `ConfigError`, `MirrorFenced` if another mirror of this name has begun since, or `ProducerFenced` if both run
        with exactly-once, `DataLossError` if the source's log is another one now (see `MirrorSettings.recreated`), or
        the copy is (`MirrorSettings.copy_again`), `DecodeError` for corrupt batches,
        `AuthenticationError`, and any `ProtocolError` that can't be retried.
        """
        failures = 0
        while not self._stopped.is_set():
            before, session = self.totals.records, None
            try:
                with Session(self._settings, self._slot, self._slots, self._ownership, self.totals) as session:
                    session.run(self._stopped.is_set, on_progress, until_end=until_end)
                break
            except KlogError as error:
                failures = 1 if self.totals.records > before else failures + 1
                # A broker that aborts a transaction for its age fences the producer, although there is no other one.
                is_expired = session is not None and session.target.has_expired
                is_abort = isinstance(error, ProducerFenced) or getattr(error, "code", None) in NEVER_COMMITTED
                is_lasting = until_end and failures >= _MOST_FAILURES
                if is_lasting or not (is_retriable(error) or (is_expired and is_abort)):
                    raise
                pause = min(_LAST_PAUSE, _FIRST_PAUSE * 2 ** min(failures - 1, 10))
                _log.warning("the mirror begins again in %.1f s: %s", pause, error)
                self.totals.restarts += 1
                self._stopped.wait(pause)
        return self.totals
