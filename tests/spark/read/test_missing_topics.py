"""Topics of a stream are missing for a while, or for good: it reads the others, and what is lost is reported."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from spark_klog.spark.read import stream
from spark_klog.spark.read.broker_source import BrokerSource
from spark_klog.spark.read.stream import RangePartition
from spark_klog.spark.versions import JsonOffsets, ReadAllAvailable
from tests.spark.read.test_first_batch import stream_reader
from tests.spark.support import create_topic, delete_topic, needs_admission_control, produce, values

pytestmark = needs_admission_control


class Model:
    """A stream of two topics, of which one comes and goes, and what it has to read and to report.

    Time passes only when the model says so, and while a plan waits.
    """

    def __init__(self, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers, self.topic = servers, topic
        self.steady, self.other = f"{topic}-1", f"{topic}-2"
        self.now = self.waited = 0.0
        #: Until when no broker knows the other topic, although it is there.
        self.hidden_until = -1.0
        self.records = {self.steady: 0, self.other: 0}
        self.is_there = True
        #: Which topic of the other's name is there, and up to where the stream has read each of them.
        self.generation = 0
        self.read = {0: 0}
        #: What the checkpoint has: the generation; None if it has no offset of the other topic.
        self.kept: int | None = None
        #: What the process has seen: the generation, and those that it continues when they come back.
        self.seen: int | None = None
        self.left: set[int] = set()
        self.missing_since: float | None = None
        self.planned_at: float | None = None
        self.is_available_now = False
        self.end: JsonOffsets = {}
        for name in (self.steady, self.other):
            create_topic(servers, name)
        look_up = BrokerSource.partitions

        def partitions(source: BrokerSource, **options: Any) -> list[tuple[str, int]]:
            there = look_up(source, **options)
            return [key for key in there if key[0] != self.other or self.is_visible()]

        monkeypatch.setattr(BrokerSource, "partitions", partitions)
        monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        self.begin()

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.02
        self.now += seconds
        self.waited += seconds

    def begin(self) -> None:
        options = {"startingOffsets": "earliest", "failOnDataLoss": "report"}
        self.reader = stream_reader(self.servers, "", subscribePattern=f"{self.topic}-.", **options)
        self.seen, self.left, self.missing_since, self.planned_at = None, set(), None, None
        self.is_available_now = False

    def is_visible(self) -> bool:
        return self.is_there and self.now >= self.hidden_until

    def produce(self, name: str, count: int) -> None:
        produce(self.servers, name, values(count))
        self.records[name] += count

    def plan(self) -> None:
        """Plan a micro-batch, and compare it with what it has to be."""
        first = self.end.get(self.steady, {}).get("0", 0)
        can_wait = self.is_available_now or self.planned_at is None or self.now - self.planned_at >= 20
        self.waited, begin = 0.0, self.end
        self.end = self.reader.latestOffset(begin, ReadAllAvailable())
        planned = self.reader.partitions(begin, self.end) if self.end != begin else []
        ranges = [span for task in planned if isinstance(task, RangePartition) for span in task.ranges]
        found = self.reader.reportLatestOffset().get("lost ranges", [])
        self.planned_at = self.now
        steady = self.records[self.steady]
        assert [span for span in ranges if span.topic == self.steady] == (
            [(self.steady, 0, first, steady)] if first < steady else []
        )
        is_wait = can_wait and self.kept is not None
        assert not self.waited or is_wait
        assert self.waited < 23
        expected: list[tuple[str, int, int, int]] = []
        lost = []
        if self.is_visible():
            is_new = self.kept is not None and self.kept != self.generation
            if is_new:
                lost.append("recreated")
            if self.kept is None and self.generation not in self.left:
                self.read[self.generation] = 0  # a partition that is new to the checkpoint
            if self.read[self.generation] < self.records[self.other]:
                expected = [(self.other, 0, self.read[self.generation], self.records[self.other])]
            self.read[self.generation] = self.records[self.other]
            self.kept = self.seen = self.generation
            self.left.discard(self.generation)
            self.missing_since = None
        elif self.kept is not None:
            self.missing_since = self.now if self.missing_since is None else self.missing_since
            if is_wait or self.now - self.missing_since >= 20:
                assert not is_wait or self.waited >= 20
                lost.append("deleted")
                self.left |= {self.kept} if self.seen == self.kept else set()
                self.kept = self.missing_since = None
        assert [span for span in ranges if span.topic == self.other] == expected
        assert [(item["topic"], item["cause"]) for item in found] == [(self.other, cause) for cause in lost]
        assert (self.other in self.end) == (self.kept is not None)

    def steps(self, rng: random.Random) -> Iterator[str]:
        """Do something; yield its name."""
        while True:
            what = rng.choice(["hide", "pass", "pass", "records", "delete", "create", "create", "restart"])
            if what == "hide":
                self.hidden_until = self.now + rng.choice([3, 12, 30])
            elif what == "pass":
                self.now += rng.choice([1, 9, 9, 21])
            elif what == "records":
                self.produce(self.steady, rng.randint(1, 3))
                if self.is_there:
                    self.produce(self.other, rng.randint(1, 3))
            elif what == "delete" and self.is_there and self.seen == self.generation:
                delete_topic(self.servers, self.other)
                self.is_there, self.records[self.other] = False, 0
            elif what == "create" and not self.is_there:
                create_topic(self.servers, self.other)
                self.is_there, self.generation = True, self.generation + 1
                self.read[self.generation] = 0
                if rng.random() < 0.5:
                    self.produce(self.other, rng.randint(1, 9))
            elif what == "restart" and self.is_there and self.kept in (None, self.generation):
                # checkpoints have no ids: a process that begins later can't tell topics of one name apart
                self.reader.stop()
                self.begin()
                if rng.random() < 0.3:
                    self.reader.prepareForTriggerAvailableNow()
                    self.is_available_now = True
                    yield "available now"
                    self.reader.stop()
                    self.begin()
                    continue
            else:
                continue
            yield what


@pytest.mark.parametrize("seed", [0, 3, 5, 8])
def test_a_topic_that_comes_and_goes(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The other topic is read by each plan, records of one topic once, and a loss is reported after 20 s."""
    model, done = Model(servers, topic, monkeypatch), []
    model.produce(model.steady, 2)
    model.plan()
    for step, _ in zip(model.steps(random.Random(seed)), range(40), strict=False):
        done.append(step)
        try:
            model.plan()
        except AssertionError as error:
            raise AssertionError(f"after {done}: {error}") from error
    model.reader.stop()


def test_a_topic_that_a_broker_does_not_know_is_logged_once(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(servers, topic, monkeypatch)
    model.produce(model.other, 2)
    model.plan()
    model.hidden_until = model.now + 5
    with closing(SimpleNamespace(close=model.reader.stop)), caplog.at_level(logging.WARNING, "spark_klog"):
        for _ in range(3):
            model.now += 1
            model.plan()
    [told] = caplog.messages
    assert f"no broker knows {model.other}-0; the query continues with the other partitions" in told
