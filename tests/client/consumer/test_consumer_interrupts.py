"""An interrupt (Ctrl-C) anywhere in a poll loses no record and returns none twice."""

from __future__ import annotations

import sys
import time

import pytest

from spark_klog.client import Consumer
from tests.support.brokers.scripted_broker import ScriptedCluster
from tests.support.checker.interrupts import Interrupt
from tests.support.clients.consumers import SECONDS

_MODULES = tuple(f"consumer/{name}.py" for name in ("consumer", "core", "fetches", "decoding", "positions"))
#: Functions where a call begins or ends: it has not touched the records, or the caller has them.
_OUTSIDE = ("poll", "poll_arrow", "used", "_next", "begin")
#: Each round interrupts this many lines later than the one before.
_STEP = 7


@pytest.mark.parametrize("is_arrow", [False, True])
def test_an_interrupt_at_many_lines(is_arrow: bool) -> None:
    values = [b"%d" % number for number in range(12)]
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, values, size=6)
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "max.poll.records": 5, "fetch.max.wait.ms": 10}
        with Consumer({**settings, "max.partition.fetch.bytes": 100}) as consumer:
            consumer.assign([("t", 0)])
            at, is_over = 0, False
            while not is_over:
                at += _STEP
                consumer.seek("t", 0, 0)
                interrupt = Interrupt(at, _MODULES, outside=_OUTSIDE)
                assert _read(consumer, is_arrow, interrupt, len(values)) == list(enumerate(values)), at
                is_over = interrupt.is_over
    assert at > 100, at


def _read(consumer: Consumer, is_arrow: bool, interrupt: Interrupt, count: int) -> list[tuple[int, bytes | None]]:
    found: list[tuple[int, bytes | None]] = []
    before = sys.gettrace()
    deadline = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < deadline:
        try:
            if interrupt.is_over:
                sys.settrace(interrupt)
            found += _poll(consumer, is_arrow)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    return found


def _poll(consumer: Consumer, is_arrow: bool) -> list[tuple[int, bytes | None]]:
    if not is_arrow:
        return [(record.offset, record.value) for record in consumer.poll(SECONDS)]
    batch = consumer.poll_arrow(SECONDS)
    return [] if batch is None else [(row["offset"], row["value"]) for row in batch.to_pylist()]


@pytest.mark.parametrize("fails", [False, True])
def test_an_exception_in_the_block_commits_nothing(fails: bool) -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        brokers.append("t", 0, [b"a"])
        settings = {"bootstrap.servers": brokers.bootstrap_servers, "group.id": "g", "auto.offset.reset": "earliest"}

        def process() -> None:
            with Consumer({**settings, "auto.commit.interval.ms": 600_000}) as consumer:
                consumer.assign([("t", 0)])
                assert len(consumer.poll(SECONDS)) == 1
                if fails:
                    raise LookupError

        if fails:
            with pytest.raises(LookupError):
                process()
        else:
            process()
        assert brokers.count("OffsetCommit") == (0 if fails else 1)


def test_a_poll_of_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedCluster({"t": 1}) as brokers:
        with Consumer({"bootstrap.servers": brokers.bootstrap_servers}) as consumer:
            assert [consumer.poll(0), consumer.poll(0)] == [[], []]
    assert [
        record.getMessage() for record in caplog.records if "no partitions are assigned" in record.getMessage()
    ] == ["poll returns nothing: no partitions are assigned, call assign or subscribe first"]
