"""Run the benchmarks and write `results.md`, from `results.json` with the figures of this run and of those before it.

    python -m benchmarks.run [--quick] [--records N] [--repeat N] [--only WORK...] [--output FILE]

Each work is a section of both files, which is replaced as soon as the work is done; `--only` keeps the other sections.
The exit code is 1 if a side failed; the report says why.
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

from benchmarks import figures
from benchmarks.beside_kafka import BROKER, CONSUME, END_TO_END, PRODUCE
from benchmarks.broker_at_size import AT_SIZE
from benchmarks.broker_inside import EVENT_LOOP, GROUPS, LOG
from benchmarks.clients import COMMANDS, CONNECTOR, CONSUMER, PRODUCER, TLS
from benchmarks.connections import CONNECTIONS
from benchmarks.dataframes import DATAFRAMES
from benchmarks.figures import Bench, Result, Side, Work, failures, render
from benchmarks.followed import FOLLOWED, FOLLOWED_LIVE
from benchmarks.inference import LOAD_JSON
from benchmarks.installs import INSTALLS
from benchmarks.kernels import BREAKDOWN, CODECS, CONVERT, DECODE, ENCODE
from benchmarks.loading import LOAD, WORKER_MEMORY
from benchmarks.machine import code_state, commit, describe
from benchmarks.memory import MEMORY
from benchmarks.mirror import MIRROR
from benchmarks.on_loop import ON_LOOP
from benchmarks.protobuf import PROTOBUF
from benchmarks.scale import SCALE
from benchmarks.schemas import AVRO, FUNCTIONS, JSON_RECORDS
from benchmarks.spark_reads import BATCH_READ, DIRECTORY_READ, LATENCY, READS, SHORT_READS
from benchmarks.spark_writes import WRITE, WRITE_GUARANTEES, WRITE_LATENCY
from benchmarks.switches import SWITCHES
from benchmarks.tables import TABLES
from benchmarks.topics import LOAD_TOPICS
from benchmarks.typed import TYPED
from benchmarks.upserts import UPSERTS
from benchmarks.validation import VALIDATION

log = logging.getLogger(__name__)

#: All work, in the order of the report. To add work, write a module with a `Work` in it and list it here.
WORK: tuple[Work, ...] = (
    BATCH_READ,
    DIRECTORY_READ,
    READS,
    SHORT_READS,
    LATENCY,
    WRITE,
    WRITE_GUARANTEES,
    WRITE_LATENCY,
    TYPED,
    SWITCHES,
    LOAD,
    TABLES,
    UPSERTS,
    LOAD_TOPICS,
    FOLLOWED,
    FOLLOWED_LIVE,
    LOAD_JSON,
    WORKER_MEMORY,
    BREAKDOWN,
    DECODE,
    ENCODE,
    CONVERT,
    AVRO,
    PROTOBUF,
    FUNCTIONS,
    JSON_RECORDS,
    MEMORY,
    CODECS,
    LOG,
    BROKER,
    PRODUCE,
    CONSUME,
    CONSUMER,
    ON_LOOP,
    DATAFRAMES,
    CONNECTOR,
    TLS,
    COMMANDS,
    PRODUCER,
    MIRROR,
    END_TO_END,
    CONNECTIONS,
    GROUPS,
    EVENT_LOOP,
    AT_SIZE,
    VALIDATION,
    SCALE,
    INSTALLS,
)

_DESCRIPTION = "Measure klog beside its peers and write the report."

RESULTS = Path(__file__).with_name("results.md")
QUICK_RESULTS = Path(__file__).with_name("results-quick.md")
_QUICK = "**A quick run, to see that everything works: its figures mean nothing.**"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes started here end, too
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figures.load(_kept(arguments.output))  # report an unreadable file before the work, not after it
    load = os.getloadavg()[0]
    code = code_state()
    made = figures.Circumstances(_command(arguments, arguments.only), *commit(), describe(), load)
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="spark-klog-bench-", ignore_cleanup_errors=True) as folder:
        for work in WORK:
            if work.name not in arguments.only if arguments.only else not work.is_of_all:
                continue
            bench = Bench(arguments.records, arguments.repeat, Path(folder), _command(arguments, [work.name]))
            results = _run(work, bench)
            if code_state() != code:
                reason = "the project's files changed during the run: its figures are of no one version"
                log.error(reason)
                results.append(_stopped(f"{work.name} as a whole", reason, bench))
            notes = (_QUICK, *work.notes) if arguments.quick else work.notes
            _keep(figures.Section(work.name, figures.now(), made, notes, tuple(results)), arguments.output)
            has_failed |= bool(failures(results))
    return 1 if has_failed else 0


def _keep(section: figures.Section, output: Path) -> None:
    """Replace the section of that name, and write the report of all sections."""
    there = figures.load(_kept(output)) | {section.name: section}
    names = [work.name for work in WORK if work.name in there]
    names += [name for name in there if name not in names]
    ordered = {name: there[name] for name in names}
    figures.save(_kept(output), ordered)
    figures.replace(output, render(list(ordered.values()), _kept(output).name))
    log.info("%s is in %s", section.name, output)


def _kept(output: Path) -> Path:
    """The file that stores the figures of a report."""
    return output.with_suffix(".json")


def _run(work: Work, bench: Bench) -> list[Result]:
    """The results of a work; if it stops with an error, the last result says so."""
    results: list[Result] = []
    log.info("%s", work.name)
    try:
        results.extend(work.run(bench))
    except Exception as error:
        log.exception("%s stopped", work.name)
        reason = f"stopped, the rest was not measured: {type(error).__name__}: {error}"[:2000]
        results.append(_stopped(work.name, reason, bench))
    return results


def _stopped(work: str, reason: str, bench: Bench) -> Result:
    """A line of the report for work that was not measured, or not well."""
    return Result(work, "-", Side("both sides", failed=reason), None, bench.command)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=_DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="a short run that only shows that it works")
    parser.add_argument("--records", type=_positive, help="records of each topic (4,000,000; quick: 100,000)")
    parser.add_argument("--repeat", type=_positive, help="runs of each side after its warm-up (5; quick: 2)")
    parser.add_argument("--only", nargs="+", choices=[work.name for work in WORK], help="renew these sections only")
    output_help = "the report, its figures beside it in .json (benchmarks/results.md; quick: results-quick.md)"
    parser.add_argument("--output", type=Path, help=output_help)
    arguments = parser.parse_args(argv)
    arguments.output = arguments.output or (QUICK_RESULTS if arguments.quick else RESULTS)
    if arguments.output.suffix == ".json":
        parser.error("--output names the report; its figures go into the .json beside it")
    if arguments.quick and _kept(arguments.output).resolve() == _kept(RESULTS).resolve():
        parser.error("a quick run's figures mean nothing and don't go into benchmarks/results.md")
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
