"""The option failOnDataLoss: lost ranges fail the query, are logged, or are reported."""

from __future__ import annotations

import logging
import pickle

import pytest

from spark_klog.client.places import OffsetSpec, check_covers
from spark_klog.errors import DataLossError, PartitionsMismatch, StartAfterEnd
from spark_klog.spark.read.ranges import DELETED, RETENTION, LossReporter, Lost, check_ends

ONE, OTHER = Lost("t", 0, 2, 5, 5, 9, RETENTION), Lost("t", 1, 7, 7, -1, -1, DELETED)


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "spark_klog")


def test_fail_lists_all_ranges(caplog: pytest.LogCaptureFixture) -> None:
    losses = LossReporter("fail")
    with pytest.raises(DataLossError) as caught:
        losses.report([ONE, OTHER])
    assert str(caught.value) == (
        "[KLOG_DATA_LOSS] records can't be read: t-0: wanted [2, 5), available [5, 9) (retention); "
        "t-1 was deleted; the query has read it up to offset 7; "
        "set failOnDataLoss=false or report to continue without them"
    )
    assert losses.show() == []
    assert caplog.messages == []


@pytest.mark.parametrize("cause", ["retention", "truncated", "recreated", "deleted", "not there yet"])
def test_one_cause_is_part_of_the_condition(cause: str) -> None:
    lost = [ONE._replace(cause=cause), OTHER._replace(cause=cause)]
    with pytest.raises(DataLossError) as caught:
        LossReporter("fail").report(lost)
    assert str(pickle.loads(pickle.dumps(caught.value))).startswith(  # noqa: S301
        f"[KLOG_DATA_LOSS.{cause.upper().replace(' ', '_')}] records can't be read: t-0"
    )


@pytest.mark.parametrize("mode", ["fail", "warn", "report"])
def test_nothing_lost(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    losses = LossReporter(mode)
    losses.report([])
    assert (losses.show(), caplog.messages) == ([], [])


@pytest.mark.parametrize("mode", ["warn", "report"])
def test_each_range_is_a_line_of_the_log(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    LossReporter(mode).report([ONE, OTHER])
    assert caplog.messages == [f"records can't be read (failOnDataLoss is not true): {item}" for item in (ONE, OTHER)]


def test_many_ranges_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Messages stay short; the progress record has all of them."""
    many = [ONE._replace(partition=number) for number in range(5000)]
    with pytest.raises(DataLossError, match=r"t-9: .*\(retention\) and 4,990 more; set failOnDataLoss") as caught:
        LossReporter("fail").report(many)
    assert len(str(caught.value)) < 1000
    losses = LossReporter("report")
    losses.report(many)
    assert len(caplog.messages) == 11
    assert "4,990 ranges more" in caplog.messages[-1]
    assert len(losses.show()) == 5000
    keys = [("t", number) for number in range(5000)]
    with pytest.raises(StartAfterEnd) as order:
        check_ends(dict.fromkeys(keys, 2), dict.fromkeys(keys, 1), "startingOffsets", "endingOffsets")
    with pytest.raises(PartitionsMismatch) as covers:
        check_covers("startingOffsets", OffsetSpec(each=((("none", 0), 1),)), keys)
    for error in (order, covers):
        assert "4,990 more" in str(error.value)


def test_report_keeps_the_ranges_of_the_batch() -> None:
    losses = LossReporter("report")
    losses.report([ONE])
    losses.begin_micro_batch()  # no progress record has shown them yet
    losses.report([ONE, OTHER])
    assert losses.show() == [
        {
            "topic": "t",
            "partition": 0,
            "start": 2,
            "end": 5,
            "available_start": 5,
            "available_end": 9,
            "cause": "retention",
        },
        {
            "topic": "t",
            "partition": 1,
            "start": 7,
            "end": 7,
            "available_start": -1,
            "available_end": -1,
            "cause": "deleted",
        },
    ]
    losses.begin_micro_batch()
    assert losses.show() == []


def test_warn_keeps_nothing() -> None:
    losses = LossReporter("warn")
    losses.report([ONE])
    assert losses.show() == []
