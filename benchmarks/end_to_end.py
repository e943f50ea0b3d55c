"""Latency from a producer to a consumer, through our broker and through Kafka."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.broker_pair import KAFKA, broker_pair, topic
from benchmarks.broker_process import Broker
from benchmarks.compiler import compile_java
from benchmarks.data import run_java
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, recorded
from benchmarks.work import Bench, Work
from tests.support.kafka import kafka_libs

log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("EndToEnd.java")
_TOOL = "org.apache.kafka.tools.EndToEndLatency"
_TOOL_FIGURES = re.compile(r"Avg latency: ([\d.]+) ms\s+Percentiles: 50th = \d+, 99th = (\d+)")
_RATE = 1000
_SIZE = 100


def _end_to_end(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("end-to-end")
    class_path = compile_java(kafka_libs("3.9.1"), _PROGRAM, folder)
    is_full = bench.records >= 1_000_000
    warm_up, messages, one_by_one = (5_000, 20_000, 10_000) if is_full else (1_000, 2_000, 1_000)
    properties = folder / "client.properties"
    properties.write_text("")

    def at_rate(broker: Broker, name: str) -> list[float]:
        arguments = map(str, (broker.bootstrap_servers, name, _RATE, warm_up, messages))
        return [float(word) for word in run_java(class_path, _PROGRAM.stem, *arguments).split()[-2:]]

    def by_tool(broker: Broker, name: str) -> list[float]:
        arguments = map(str, (broker.bootstrap_servers, name, one_by_one, 1, _SIZE, properties))
        output = run_java(class_path, _TOOL, *arguments)
        found = _TOOL_FIGURES.search(output)
        if found is None:
            raise SideFailed(f"{_TOOL} printed no figures: {output[-1000:]}")
        return [float(found[1]), float(found[2])]

    with broker_pair(folder) as brokers:
        for work, run, figures in (
            (f"{messages:,} messages at {_RATE:,}/s, acks=1, to a consumer", at_rate, ("p50", "p99")),
            (f"EndToEndLatency, {one_by_one:,} messages one by one, acks=1", by_tool, ("average", "p99, whole ms")),
        ):
            for figure, sides in zip(figures, _pairs(brokers, bench.repeat, run), strict=True):
                yield Result(f"{work}, {figure}", "ms", *sides, bench.command, higher_is_better=False)


def _pairs(
    brokers: tuple[Broker, Broker], repeat: int, run: Callable[[Broker, str], list[float]]
) -> list[tuple[Side, Side]]:
    """Run both brokers in turn, a warm-up and `repeat` runs; return both sides of each of the two figures of `run`."""
    pairs = [(Side("klog"), Side(KAFKA)) for _ in range(2)]
    for number, place in itertools.product(range(repeat + 1), range(2)):
        sides = [pair[place] for pair in pairs]
        if sides[0].failed is not None:
            continue
        with recorded(*sides):
            with topic(brokers[place].bootstrap_servers, f"{run.__name__}-{number}", 1) as name:
                figures = run(brokers[place], name)
            log.info("%s: %s: %s ms", sides[0].name, run.__name__, figures)
            for side, figure in zip(sides, figures, strict=True):
                if number == 0:
                    side.cold = figure
                else:
                    side.samples.append(figure)
    return pairs


END_TO_END = Work(
    "end-to-end",
    _end_to_end,
    (
        "End to end: one topic of one partition, messages of 100 B, one JVM that produces and consumes with an "
        "assigned partition, the clients' defaults. At the fixed rate latency is from the time at "
        "which a message was to be sent to the return of the poll that brings it; the first messages warm the JVM and "
        "do not count. Kafka's EndToEndLatency sends a message when the one before has come, polls with "
        "fetch.max.wait.ms 0 and counts from its first message on. Wanted: a 99th percentile not above Kafka's.",
    ),
)
