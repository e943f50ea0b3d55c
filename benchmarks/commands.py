"""`klog consume` to a pipe and kcat, and the page's overview of 1,000 topics."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.consumer import in_turn, rate_of
from benchmarks.data import PARTITIONS, RECORD_SIZE, produce
from benchmarks.figures import Result, Side
from benchmarks.sides import SideFailed, recorded
from benchmarks.work import Bench, Work
from spark_klog.client import Admin
from spark_klog.client.admin.topics import NewTopic
from tests.support.broker import KlogBroker
from tests.support.kafka import Kafka
from tests.support.klog import klog_command
from tests.support.tools import kcat_path
from tests.ui.browser import Browser, chromium
from tests.ui.support import Page, serving

_TOPIC = "bench"
_TOPICS = 1000
_SECONDS = 600.0


def _run(bench: Bench) -> Iterator[Result]:
    folder = bench.folder("commands")
    with Kafka("3.9.1", folder / "kafka", full_speed=True) as kafka:
        servers = kafka.bootstrap_servers
        for codec in ("lz4", "none"):
            topic = f"{_TOPIC}-{codec}"
            kafka.create_topic(topic, partitions=PARTITIONS)
            produce(kafka.libs, servers, topic, bench.records, codec, folder)
            for form, ours, theirs in (("", (), ()), (" as JSON", ("--json",), ("-J",))):
                commands = {
                    "klog": klog_command("consume", "-b", servers, topic, "-q", *ours),
                    "kcat": [kcat_path(), "-C", "-q", "-b", servers, "-t", topic, "-o", "beginning", "-e", *theirs],
                }
                runs: dict[str, Callable[[], float]] = {
                    name: lambda command=command: rate_of(lambda: _lines(command), bench.records)
                    for name, command in commands.items()
                }
                sides = in_turn(bench, runs)
                work = f"klog consume{form} to a pipe, {bench.records:,} records of {RECORD_SIZE} B, {codec}"
                yield Result(work, "M records/s", sides["klog"], sides["kcat"], bench.command)
        yield from _overview(bench, servers, "Kafka 3.9.1")
    with KlogBroker(folder / "klog") as broker:
        yield from _overview(bench, broker.bootstrap_servers, "a broker of klog's")


def _lines(command: Sequence[str]) -> int:
    """The number of lines that a command writes to a pipe."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            counted = subprocess.run(["wc", "-l"], stdin=process.stdout, capture_output=True, timeout=_SECONDS)
        if process.returncode:
            errors.seek(0)
            raise SideFailed(f"{command[0]} ended with {process.returncode}: {errors.read()[-1000:]!r}")
    return int(counted.stdout)


def _overview(bench: Bench, servers: str, where: str) -> Iterator[Result]:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(f"topic-{number}", 1, 1) for number in range(_TOPICS)]).check()
    with serving("-b", servers) as page, chromium() as driver:
        browser = Browser(driver, page)
        for name, look in (
            ("answered", lambda: _answered(page)),
            ("shown in Chromium", lambda: _shown(browser)),
        ):
            side = Side("klog")
            with recorded(side):
                for number in range(bench.repeat + 1):
                    seconds = look()
                    if number:
                        side.samples.append(seconds)
                    else:
                        side.cold = seconds
            work = f"the page's overview of {_TOPICS:,} topics at {where}, {name}"
            yield Result(work, "s", side, None, bench.command, higher_is_better=False)


def _answered(page: Page) -> float:
    started = time.perf_counter()
    found = page.get("overview")
    seconds = time.perf_counter() - started
    if len(found["topics"]) < _TOPICS:
        raise SideFailed(f"{len(found['topics'])} topics, not {_TOPICS}")
    return seconds


def _shown(browser: Browser) -> float:
    started = time.perf_counter()
    browser.open("overview")
    seconds = time.perf_counter() - started
    rows = browser.js("return document.querySelectorAll('#main tbody a[aria-label]').length")
    if rows < _TOPICS:
        raise SideFailed(f"{rows} topics, not {_TOPICS}")
    return seconds


COMMANDS = Work(
    "commands",
    _run,
    (
        f"Commands: a topic of {PARTITIONS} partitions at Kafka 3.9.1, read from the page cache; from the start of the "
        "command, Python's included, to the end of its output, which `wc -l` reads from a pipe and counts. The sides "
        "take turns. Wanted: 1.0 of kcat.",
        f"The page: from a request to its answer, and from the opening of the page's address to the table of "
        f"{_TOPICS:,} topics; the cold figure is the first since the start of the server. Wanted: 1 s.",
    ),
)
