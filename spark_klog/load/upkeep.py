"""The upkeep of what loads have written: small files become larger ones, and what nobody needs any more goes.

The table says what it no longer needs (`Table.expire`). The load's journal says which files a run in progress, or one
that was killed and is to be finished, may be about to commit: those of attempts that have a marker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_klog.base.addresses import without_user
from spark_klog.load.compaction import TARGET_BYTES, compact
from spark_klog.load.journal import paths
from spark_klog.load.journal.store import open_store
from spark_klog.tables.opening import existing_table, is_table, open_table
from spark_klog.tables.upkeep import Expired, Kept

if TYPE_CHECKING:
    from spark_klog.load.by_topic import Outcome

_log = logging.getLogger(__name__)
#: Files that are removed at once.
_REMOVALS = 8


def expire(
    address: str,
    kept: Kept,
    *,
    is_dry: bool = False,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Expired:
    """Remove what a table, and its readers of the `kept` time, no longer need; if it `is_dry`, tell of it only.

    `tell` gets how many files of how many are removed. Another call, runs and other writers may be at work. After a
    call that was killed the next one removes the rest. `LoadError`.
    """
    table = existing_table(address)
    names = open_store(table.location, of_table=True).names(paths.ATTEMPTS)
    # before the table is read: a run that has committed its files since, and removed its markers, is in it
    tokens = {attempt[1] for attempt in map(paths.attempt_of, names) if attempt is not None}
    expired = table.expire(kept, lambda path: paths.token_of(path) in tokens, is_dry=is_dry)
    if expired.files and not is_dry:
        pool = ThreadPoolExecutor(_REMOVALS)
        try:
            for done, _ in enumerate(pool.map(table.remove, expired.files), 1):
                tell(done, len(expired.files))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt leaves the others to the next call
    return expired


def _numbers(expired: Expired) -> dict[str, int]:
    return {"states": expired.states, "files": len(expired.files), "bytes": sum(expired.files.values())}


def expired_json(expired: Expired) -> dict[str, Any]:
    """The numbers of states, files and bytes, and the table's properties that were set."""
    changes = [{"name": name, "from": each[0], "to": each[1]} for name, each in expired.properties.items()]
    return {**_numbers(expired), "properties": changes}


def expired_text(expired: Expired, *, is_dry: bool = False) -> str:
    """The same for people."""
    numbers = ", ".join(f"{number:,} {name}" for name, number in _numbers(expired).items())
    text = f"{numbers} {'would be' if is_dry else 'are'} removed"
    changes = [f"property {name}: {before} -> {after}" for name, (before, after) in expired.properties.items()]
    return "; ".join([text if expired.files or expired.states else "there is nothing to remove", *changes])


@dataclass(frozen=True)
class Kempt:
    """What the upkeep of an output has done, or the error that has ended it. `topic` is as of `Outcome`."""

    output: str
    topic: str
    merged: int = 0
    expired: Expired = field(default_factory=lambda: Expired(0, {}))
    error: Exception | None = None

    def text(self) -> str:
        if self.error is not None:
            return f"failed: {self.error}"
        return f"{self.merged:,} files were merged into larger ones; {expired_text(self.expired)}"

    def to_json(self) -> dict[str, Any]:
        line = {"output": without_user(self.output), "merged": self.merged, **expired_json(self.expired)}
        return line | ({} if self.error is None else {"error": str(self.error)})


@dataclass(frozen=True)
class Upkept:
    """An upkeep of outputs: when it began, in seconds since the epoch, and what it took."""

    began: float
    seconds: float
    outputs: list[Kempt]


class Upkeep:
    """Keeps the outputs of a job's loads, and their tables of dead letters, every so many seconds, from the first round
    on.

    An output without a run since the last time is left alone. What fails is tried again the next time.
    """

    def __init__(self, every: float, kept: Kept) -> None:
        self._every, self._kept = every, kept
        self._next = time.monotonic()
        #: Outputs that are to be kept the next time, with their topics, and all that there were.
        self._changed: dict[str, str] = {}
        self._known: set[str] = set()

    def after(self, outcomes: Iterable[Outcome], is_stopping: Callable[[], bool]) -> Upkept | None:
        """Do what is to be done after a round; None if it is not yet time, or nothing has changed."""
        for outcome in outcomes:
            if outcome.loaded is None:
                continue
            for output, has_changed in (
                (outcome.output, bool(outcome.loaded.runs)),
                (outcome.letters, bool(outcome.loaded.bad)),
            ):
                if output and (has_changed or output not in self._known):
                    self._changed[output] = outcome.topic
                    self._known.add(output)
        if not self._changed or time.monotonic() < self._next:
            return None
        began, start = time.time(), time.monotonic()
        self._next = start + self._every
        done: list[Kempt] = []
        for output, topic in list(self._changed.items()):
            if is_stopping():
                break
            done.append(self._kempt(output, topic))
            if done[-1].error is None:
                del self._changed[output]
        return Upkept(began, time.monotonic() - start, done)

    def _kempt(self, output: str, topic: str) -> Kempt:
        merged = 0
        try:
            if not is_table(output):
                return Kempt(output, topic, compact(output).files_before)
            if (table := open_table(output)).schema() is None:  # no run, or no dead letter, has made it yet
                return Kempt(output, topic)
            merged = table.compact(TARGET_BYTES)
            return Kempt(output, topic, merged, expire(output, self._kept))
        except Exception as error:  # of a catalog's or a store's package, too: the loads go on
            _log.debug("the upkeep of %s has failed", without_user(output), exc_info=True)
            return Kempt(output, topic, merged, error=error)
