"""What the leader of a partition does with the coordinator's answer about a batch, if a marker has come meanwhile."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from spark_klog.broker.transactions.transaction import ProducerIdAndEpoch
from spark_klog.broker.transactions.verification import Verification
from spark_klog.errors import ErrorCode
from spark_klog.log.config import LogConfig
from spark_klog.log.partition_log import PartitionLog
from spark_klog.records.reading.reader import ABORT, COMMIT
from tests.support.brokers.producer_batches import batch, marker

_ID = 7
_PRODUCER = ProducerIdAndEpoch(_ID, 0)


@pytest.mark.parametrize(
    ("of_offsets", "code"),
    [(False, ErrorCode.NOT_ENOUGH_REPLICAS), (True, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)],
)
@pytest.mark.parametrize("kind", [COMMIT, ABORT])
def test_a_marker_during_verification(tmp_path: Path, kind: int, of_offsets: bool, code: ErrorCode) -> None:
    """The answer is of the transaction that has ended, so the producer is told to send again."""
    with closing(PartitionLog(tmp_path / "t-0", LogConfig(), clean=True)) as log:
        for sequence in range(2):
            log.append(memoryview(batch(_ID, 0, sequence, 1)))
            before = Verification("id", _PRODUCER, log, of_offsets=of_offsets, adds=False)
            assert before.outcome() == (ErrorCode.NONE, "")
            log.append(memoryview(marker(_ID, 0, kind)))
            found, reason = before.outcome()
            assert (found, "'id' does not have t-0" in reason) == (code, True)
            after = Verification("id", _PRODUCER, log, of_offsets=of_offsets, adds=False)
            assert after.outcome() == (ErrorCode.NONE, "")
