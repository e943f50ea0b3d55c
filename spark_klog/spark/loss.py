"""What can't be read any more, said in exact words; what becomes of the query is the option failOnDataLoss."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spark_klog.errors import DataLossError
from spark_klog.spark.planning import UNSUBSCRIBED, Lost

_log = logging.getLogger(__name__)

#: The checkpoint keeps no offset of a partition that a query goes on without.
_NAMED_AGAIN = "if it is named again later, it is read from its first record on"


class LossReporter:
    """Tells of lost ranges: "fail" raises, "warn" logs, "report" logs and keeps those of the batch for its progress."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._batch: list[Lost] = []
        self._is_shown = False

    def begin_batch(self) -> None:
        """Forget the ranges that have been shown: Spark shows none of a batch that a restart runs again."""
        if self._is_shown:
            self._batch.clear()

    def report(self, lost: Sequence[Lost]) -> None:
        """`DataLossError` that lists the ranges where the query is to fail; else they are logged, one line each."""
        if not lost:
            return
        if self._mode == "fail":
            causes = {item.cause for item in lost}
            advice = "set failOnDataLoss=false or report to go on without them"
            if UNSUBSCRIBED in causes:
                advice = f"name it again to go on with it, or {advice}: {_NAMED_AGAIN}"
            raise DataLossError(
                f"records can't be read: {'; '.join(map(str, lost))}; {advice}",
                lost[0].cause if len(causes) == 1 else "",
            )
        for item in lost:
            told = f"{item}; {_NAMED_AGAIN}" if item.cause == UNSUBSCRIBED else item
            _log.warning("records can't be read (failOnDataLoss is not true): %s", told)
        if self._mode == "report":
            self._batch += [item for item in lost if item not in self._batch]
            self._is_shown = False

    def show(self) -> list[dict[str, object]]:
        """The lost ranges of the batch, for the progress record."""
        self._is_shown = True
        return [item._asdict() for item in self._batch]
