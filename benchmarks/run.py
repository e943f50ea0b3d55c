"""Run the benchmarks and write `results.md`.

    python -m benchmarks.run [--quick] [--records N] [--repeat N] [--only WORK...] [--output FILE]

The exit code is 1 when a side failed; the report says why.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.batch_read import BATCH_READ
from benchmarks.breakdown import BREAKDOWN
from benchmarks.broker_side import BROKER
from benchmarks.codecs import CODECS
from benchmarks.connections import CONNECTIONS
from benchmarks.consuming import CONSUME
from benchmarks.decode import DECODE
from benchmarks.directory_read import DIRECTORY_READ
from benchmarks.encode import ENCODE
from benchmarks.end_to_end import END_TO_END
from benchmarks.groups import GROUPS
from benchmarks.latency import LATENCY
from benchmarks.log import LOG
from benchmarks.machine import code_state
from benchmarks.memory import MEMORY
from benchmarks.producing import PRODUCE
from benchmarks.reads import READS
from benchmarks.report import Result, Side, failures, render
from benchmarks.work import Bench, Work
from benchmarks.worker_memory import WORKER_MEMORY

log = logging.getLogger(__name__)

#: All work, in the order of the report. Further work is a module with a `Work` in it, and a name here.
WORK: tuple[Work, ...] = (
    BATCH_READ,
    DIRECTORY_READ,
    READS,
    LATENCY,
    WORKER_MEMORY,
    BREAKDOWN,
    DECODE,
    ENCODE,
    MEMORY,
    CODECS,
    LOG,
    BROKER,
    PRODUCE,
    CONSUME,
    END_TO_END,
    CONNECTIONS,
    GROUPS,
)

_DESCRIPTION = "Measure klog beside its peers and write the report."

RESULTS = Path(__file__).with_name("results.md")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes started here end, too
    chosen = [work for work in WORK if not arguments.only or work.name in arguments.only]
    code = code_state()
    load = os.getloadavg()[0]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="spark-klog-bench-", ignore_cleanup_errors=True) as folder:
        for work in chosen:
            command = _command(arguments, [work.name])
            results += _run(work, Bench(arguments.records, arguments.repeat, Path(folder), command))
    if code_state() != code:
        reason = "the project's files changed during the run: its figures are of no one version"
        log.error(reason)
        whole = _command(arguments, arguments.only)
        results.append(Result("the run as a whole", "-", Side("both sides", failed=reason), None, whole))
    notes = [note for work in chosen for note in work.notes]
    notes.append(f"The machine's load average was {load:.2f} before the run; above 0.5 it was not idle.")
    if arguments.quick:
        notes.insert(0, "**A quick run, to see that everything works: its figures mean nothing.**")
    arguments.output.write_text(render(results, notes, _command(arguments, arguments.only)))
    log.info("wrote %s", arguments.output)
    return 1 if failures(results) else 0


def _run(work: Work, bench: Bench) -> list[Result]:
    """The results of one piece of work; what stops it becomes the last of them."""
    results: list[Result] = []
    log.info("%s", work.name)
    try:
        results.extend(work.run(bench))
    except Exception as error:
        log.exception("%s stopped", work.name)
        reason = f"stopped, the rest was not measured: {type(error).__name__}: {error}"[:2000]
        results.append(Result(work.name, "-", Side("both sides", failed=reason), None, bench.command))
    return results


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=_DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="a short run that only shows that it works")
    parser.add_argument("--records", type=_positive, help="records of each topic (4,000,000; quick: 100,000)")
    parser.add_argument("--repeat", type=_positive, help="runs of each side after its warm-up (5; quick: 2)")
    parser.add_argument("--only", nargs="+", choices=[work.name for work in WORK], help="some of the work")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the report (benchmarks/results.md)")
    arguments = parser.parse_args(argv)
    arguments.records = arguments.records or (100_000 if arguments.quick else 4_000_000)
    arguments.repeat = arguments.repeat or (2 if arguments.quick else 5)
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _command(arguments: argparse.Namespace, only: Sequence[str] | None) -> str:
    words = ["python", "-m", "benchmarks.run"]
    if arguments.quick:
        words.append("--quick")
    words += ["--records", str(arguments.records), "--repeat", str(arguments.repeat)]
    return shlex.join(words + (["--only", *only] if only else []))


if __name__ == "__main__":
    sys.exit(main())
