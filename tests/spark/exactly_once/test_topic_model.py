"""A decision log in a compacted topic: all interleavings write each row once; and the model finds planted faults.

`SPARK_KLOG_EXACTLY_ONCE=full` (make soak) searches with more restarts, runs and compactions.
"""

from __future__ import annotations

import os

import pytest

from tests.support.runs.figures import count

from .model import Violation
from .topic_model import LastWins, NotLower, TopicDesign, TopicSearch, TopicWorld

full = pytest.mark.skipif(os.environ.get("SPARK_KLOG_EXACTLY_ONCE") != "full", reason="part of make soak")


def world(
    restarts: int = 1, twins: int = 0, *, copies: int = 0, lags: int = 0, parts: int = 0, compactions: int = 0
) -> TopicWorld:
    return TopicWorld(
        restarts_left=restarts,
        twins_left=twins,
        copies_left=copies,
        lags_left=lags,
        parts_left=parts,
        compactions_left=compactions,
    )


@pytest.mark.parametrize(
    ("start", "batches"),
    [
        pytest.param(world(), 2, id="late-appends"),
        pytest.param(world(1, 1), 1, id="two-runs"),
        pytest.param(world(1, 1, compactions=1), 2, id="compaction-beside-two-runs", marks=full),
        pytest.param(world(lags=1, compactions=2), 2, id="compaction-and-an-old-leader", marks=full),
        pytest.param(world(1, 1, lags=1), 1, id="two-runs-and-an-old-leader", marks=full),
        pytest.param(world(1, 1, parts=1, compactions=1), 1, id="reads-in-parts", marks=full),
        pytest.param(world(1, 1, lags=1, compactions=1), 1, id="two-runs-an-old-leader-and-compaction", marks=full),
        pytest.param(world(2, 1), 1, id="two-runs-and-a-restart", marks=full),
        pytest.param(world(2), 2, id="two-restarts", marks=full),
        pytest.param(world(1, copies=1), 1, id="copy", marks=full),
    ],
)
def test_every_row_is_there_once(start: TopicWorld, batches: int) -> None:
    search = TopicSearch(TopicDesign(), batches=batches)
    search.run(start)
    count("states", search.seen)
    assert search.finished


@pytest.mark.parametrize(
    ("design", "start", "message"),
    [
        pytest.param(TopicDesign(rule=LastWins), world(1, 1), "none timed out", id="last-wins"),
        pytest.param(TopicDesign(rule=NotLower), world(1, 1), "none timed out", id="not-lower-instead-of-higher"),
        pytest.param(TopicDesign(has_unique_keys=False), world(compactions=2), "a reader sees", id="keys-without-uuid"),
        pytest.param(TopicDesign(reads_back=False), world(1, 1), "a reader sees", id="no-read-back"),
        pytest.param(TopicDesign(keeps_decision=False), world(compactions=1), "a reader sees", id="no-decision-kept"),
        pytest.param(
            TopicDesign(keeps_claims=False),
            world(1, 1, compactions=1),
            "is missing",
            id="no-claims-kept",
            marks=[pytest.mark.test_all("long"), full],
        ),
        pytest.param(TopicDesign(checks_lag=False), world(1, 1, lags=1), "none timed out", id="sweep-by-an-old-leader"),
        pytest.param(
            TopicDesign(reads_on=False),
            world(1, 1, compactions=3),
            "written twice",
            id="gaps-are-not-read-beyond",
            marks=[pytest.mark.test_all("long"), full],
        ),
        pytest.param(
            TopicDesign(is_idempotent=False),
            TopicWorld(restarts_left=1, copies_left=0, doubles_left=1, compactions_left=1),
            "entry . is missing",
            id="appends-that-come-twice",
            marks=[pytest.mark.test_all("long"), full],
        ),
    ],
)
def test_planted_faults_are_found(design: TopicDesign, start: TopicWorld, message: str) -> None:
    with pytest.raises(Violation, match=message):
        TopicSearch(design, batches=2).run(start)
