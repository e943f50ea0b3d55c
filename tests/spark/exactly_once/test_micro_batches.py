"""Which micro-batch calls `write_updates`, and whether it may write, without Spark.

A model: the checkpoint of a query is copied, restored, and loses its last plan; runs stop between the decision and
Spark's commit. After every sequence of steps each checkpoint has only done what is written, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.sql.types import StructType

from spark_klog.errors import ConfigError
from spark_klog.spark.write.decisions.decision_place import hash_of_plan
from spark_klog.spark.write.exactly_once_batch import EarlierWrite, ExactlyOnceBatchWriter, ReplannedWrite
from spark_klog.spark.write.sink_options import NamedWrite, sink_options
from spark_klog.spark.write.updates import _MicroBatch

_OPTIONS = sink_options({"kafka.bootstrap.servers": "a:9092", "topic": "to"})


@dataclass(frozen=True)
class _Checkpoint:
    """The ends of its planned micro-batches, and how many of them are done."""

    plans: tuple[int, ...] = ()
    done: int = 0


@dataclass(frozen=True)
class _World:
    end: int = 0
    checkpoints: tuple[_Checkpoint, ...] = (_Checkpoint(),)
    decided: int = -1
    planned: str = ""
    written: tuple[int, ...] = ()


def _steps(world: _World, has_plan: bool) -> Iterator[_World]:
    yield replace(world, end=world.end + 1)
    first = world.checkpoints[0]
    if len(world.checkpoints) == 1:
        yield replace(world, checkpoints=(first, first))
    else:
        yield replace(world, checkpoints=world.checkpoints[1:])  # restored
    for place, now in enumerate(world.checkpoints):
        if len(now.plans) > now.done:
            yield _with(world, place, replace(now, plans=now.plans[: now.done]))
        yield from _runs(world, place, now, has_plan)


def _runs(world: _World, place: int, now: _Checkpoint, has_plan: bool) -> Iterator[_World]:
    start = now.plans[now.done - 1] if now.done else 0
    if len(now.plans) == now.done:
        if start == world.end:
            return
        now = replace(now, plans=(*now.plans, world.end))
        world = _with(world, place, now)
    number, end = now.done, now.plans[now.done]
    writer = _writer(number, str(end) if has_plan else None)
    try:
        writer._check(world.decided, world.planned)
    except (EarlierWrite, ReplannedWrite):
        yield world
        return
    if number > world.decided:
        rows = (*world.written, *range(start, end))
        world = replace(world, decided=number, planned=writer._planned, written=rows)
        yield world  # killed
    done = _with(world, place, replace(now, done=number + 1))
    times = Counter(world.written)
    assert max(times.values()) == 1, f"written twice: {done}"
    assert all(times[row] for row in range(end)), f"rows are missing: {done}"
    yield done


def _with(world: _World, place: int, checkpoint: _Checkpoint) -> _World:
    return replace(world, checkpoints=(*world.checkpoints[:place], checkpoint, *world.checkpoints[place + 1 :]))


def _writer(version: int, plan: str | None) -> ExactlyOnceBatchWriter:
    return ExactlyOnceBatchWriter(_OPTIONS, NamedWrite("q/rows", version, plan), StructType().add("value", "string"))


def _search(has_plan: bool, steps: int) -> int:
    seen = {_World()}
    last = seen
    for _ in range(steps):
        last = {after for world in last for after in _steps(world, has_plan)} - seen
        seen |= last
    return len(seen)


def test_checkpoints_that_are_copied_restored_or_lose_a_plan() -> None:
    assert _search(True, 9) > 500


def test_the_model_finds_versions_that_are_compared_by_number_only() -> None:
    with pytest.raises(AssertionError, match="rows are missing"):
        _search(False, 9)


class _Spark:
    """The JVM of an application, with a query in it, and another one."""

    def __init__(self) -> None:
        self.numbers = count()
        self.queries: dict[str, Any] = {}
        self.properties: dict[str, str] = {}
        self.is_denied = False
        self.start("other")
        self.outer = self.session("outer")

    def start(self, query: str) -> Any:
        """Start a query, again if it has run; a DataFrame of its micro-batches."""
        run = f"run {next(self.numbers)}"
        session = self.session(f"of {run}")
        self.queries[query] = _jvm(id=_text(query), runId=_text(run), sparkSessionForStream=session._jsparkSession)
        self.queries[query].offsetLog = lambda: SimpleNamespace(
            get=lambda batch: _jvm(isEmpty=batch > 5, get=f"v1\n{{}}\n{{{batch}}}".encode()),
            serialize=lambda plan, out: out.extend(plan),
        )
        return self.rows(session)

    def session(self, name: str) -> Any:
        shared = _jvm(activeStreamingQueries=self.queries)

        def shared_state() -> Any:
            if self.is_denied:
                raise Py4JError("denied")
            return shared

        return SimpleNamespace(
            sparkContext=SimpleNamespace(getLocalProperty=self.properties.get),
            _jsparkSession=SimpleNamespace(sharedState=shared_state, sessionUUID=lambda: name),
            _jvm=SimpleNamespace(java=SimpleNamespace(io=SimpleNamespace(ByteArrayOutputStream=_Bytes))),
        )

    def in_function(self, query: str, group: str, batch: int = 5) -> None:
        """What Spark tells the thread that calls the function; nothing in a thread that the function starts."""
        keys = ("sql.streaming.queryId", "spark.jobGroup.id", "streaming.sql.batchId")
        self.properties.update(zip(keys, (query, group, str(batch)), strict=True))

    def rows(self, session: Any) -> Any:
        return SimpleNamespace(isStreaming=False, sparkSession=session)


class _Bytes(bytearray):
    def toByteArray(self) -> bytes:
        return bytes(self)


def _jvm(**values: Any) -> Any:
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


def _text(value: str) -> Any:
    return _jvm(toString=value)


@pytest.mark.parametrize("where", ["in the function", "in a thread", "without a JVM"])
def test_two_calls_with_one_name(where: str, request: pytest.FixtureRequest) -> None:
    """Refused whatever session their rows are of; a run after a failed one may call again."""
    spark, query_id = _Spark(), f"{request.node.name}"
    spark.is_denied = where == "without a JVM"
    given = query_id if where == "in a thread" else None
    for _ in range(2):
        rows = spark.start("q")
        if given is None:
            # the function may set a group of its own
            spark.in_function(query_id, "mine" if not spark.is_denied else str(next(spark.numbers)))
            spark.queries[query_id] = spark.queries["q"]
            spark.queries[query_id].id = lambda: _text(query_id)
        _MicroBatch.of(rows, 5, given).begin("rows")
        for again in (rows, spark.rows(spark.outer)):
            with pytest.raises(ConfigError, match="was called twice with name='rows' for micro-batch 5"):
                _MicroBatch.of(again, 5, given).begin("rows")
        _MicroBatch.of(rows, 5, given).begin("other rows")


def test_the_plan_is_that_of_spark() -> None:
    spark = _Spark()
    rows = spark.start("plans")
    expected = hash_of_plan(b"v1\n{}\n{5}\n")
    assert _MicroBatch.of(rows, 5, "a text").plan == expected  # by the session
    assert _MicroBatch.of(spark.rows(spark.outer), 5, "plans").plan == expected
    assert _MicroBatch.of(spark.rows(spark.outer), 5, "another text").plan == ""
    assert _MicroBatch.of(rows, 6, "a text").plan == ""
    spark.in_function("plans", "mine")
    assert _MicroBatch.of(spark.rows(spark.outer), 5, "one more text").plan == expected
    connect = SimpleNamespace(isStreaming=False, sparkSession=SimpleNamespace())
    assert _MicroBatch.of(connect, 5, "connect").plan == ""  # type: ignore[arg-type]


def test_names_and_queries_do_not_meet() -> None:
    """ "orders" and "eu/clicks" would be "orders/eu" and "clicks"."""
    spark = _Spark()
    with pytest.raises(ConfigError, match="query_id='orders/eu' must be without '/'"):
        _MicroBatch.of(spark.rows(spark.outer), 0, "orders/eu")
