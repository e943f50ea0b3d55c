"""Fail a query for lost records, or log them, as the option failOnDataLoss says."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spark_klog.errors import DataLossError
from spark_klog.spark.planning.ranges import UNSUBSCRIBED, Lost

_log = logging.getLogger(__name__)

#: How a query goes on; jobs have options of their own.
OPTION_ADVICE = "set failOnDataLoss=false or report to continue without them"
#: The checkpoint keeps no offset of a partition that a query no longer reads.
_NAMED_AGAIN = "if it is named again later, the query reads it from its first record on"


class LossReporter:
    """Reports lost ranges by `mode`: "fail" raises, "warn" logs, "report" logs and adds them to the progress record.

    `advice` says how a query or job goes on without them; `explanation`, why the ranges may be older than the query.
    """

    def __init__(self, mode: str, advice: str = OPTION_ADVICE, explanation: str = "") -> None:
        self._mode, self._advice, self._explanation = mode, advice, explanation
        self._micro_batch: list[Lost] = []
        self._is_shown = False

    def begin_micro_batch(self) -> None:
        """Forget the ranges that are in a progress record.

        Others stay for the next one: a micro-batch that a restart repeats has no progress record of its own.
        """
        if self._is_shown:
            self._micro_batch.clear()

    def report(self, lost: Sequence[Lost]) -> None:
        """Raise `DataLossError` with all ranges if the mode is "fail", else log each range."""
        if not lost:
            return
        if self._mode == "fail":
            causes = {item.cause for item in lost}
            advice = self._advice
            if UNSUBSCRIBED in causes:
                advice = f"name it again to continue with it, or {advice}: {_NAMED_AGAIN}"
            explained = f". {self._explanation[0].upper()}{self._explanation[1:]}" if self._explanation else ""
            raise DataLossError(
                f"records can't be read: {'; '.join(map(str, lost))}; {advice}{explained}",
                lost[0].cause if len(causes) == 1 else "",
            )
        for item in lost:
            text = f"{item}; {_NAMED_AGAIN}" if item.cause == UNSUBSCRIBED else item
            _log.warning("records can't be read (failOnDataLoss is not true): %s", text)
        if self._mode == "report":
            self._micro_batch += [item for item in lost if item not in self._micro_batch]
            self._is_shown = False

    def show(self) -> list[dict[str, object]]:
        """The lost ranges of the micro-batch, for its progress record."""
        self._is_shown = True
        return [item._asdict() for item in self._micro_batch]
