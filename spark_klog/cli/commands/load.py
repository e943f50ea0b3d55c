"""`klog load`: what loads have done, and how their files are kept in order."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from spark_klog.base.addresses import without_user
from spark_klog.base.extras import packages_at, require
from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.output import Bar, duration, escaped, print_table, reading_arguments, say, table_lines
from spark_klog.client.cluster import Cluster
from spark_klog.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spark_klog.base.names import TopicPartition
    from spark_klog.load.audit import Completeness, Status
    from spark_klog.load.journal.model import Progress
    from spark_klog.load.verify import Verified

_RUNS_SHOWN = 20
#: Exit codes of a command for several loads, from the worst one on.
_CODES = (1, 4, 0, 3)


class _Done(NamedTuple):
    """What a command has done with a load: a line of JSON, the same as text, and the exit code."""

    line: Mapping[str, Any]
    text: str
    code: int = 0


def _report(output: str, as_json: bool, work: Callable[[str], _Done]) -> int:
    """Print what `work` does with the load in an output, or with each one of an output by topic, one after the other;
    return the worst exit code."""
    from spark_klog.load.by_topic import is_by_topic, of_each

    by_topic, codes, lines = is_by_topic(output), set(), []
    for place, done in of_each(output, work):
        named = {"output": without_user(place)} if by_topic else {}
        if isinstance(done, str):
            _complain(place, done)
            done = _Done({"error": done}, "", 1)
        elif not as_json:
            click.echo(f"{named['output']}: {done.text}" if by_topic else done.text)
        codes.add(done.code)
        lines.append({**named, **done.line})
    if as_json:
        click.echo(json.dumps({"loads": lines} if by_topic else lines[0]))
    return next(code for code in _CODES if code in codes)


def _complain(place: str, error: str) -> None:
    """Say on stderr which load has failed, and why."""
    click.echo(f"klog: {_named(place, error)}", err=True)


def _named(place: str, error: str) -> str:
    """The error of a load, after its address, unless it names that itself."""
    from spark_klog.tables.opening import kind_and_folder

    text, address = escaped(error, has_lines=True), without_user(place)
    return text if kind_and_folder(address)[1] in error else f"{address}: {text}"


def _checked(context: click.Context, _: click.Parameter, output: str, *, of_table: bool = False) -> str:
    """The output that is given; `WrongArguments` if it can't be one, or is no table of a command `of_table`."""
    if context.resilient_parsing:
        return output
    require("klog load", *packages_at(output))
    from spark_klog.load.by_topic import example_of, is_by_topic
    from spark_klog.load.journal.store import open_store
    from spark_klog.tables.opening import check_address, is_table

    with reading_arguments():
        example = example_of(output) if is_by_topic(output) else output
        if of_table or is_table(output):
            check_address(example if is_table(output) else output)
        else:
            with suppress(LoadError):  # a store that can't be reached, which is no wrong argument
                open_store(example)
    return output


@click.group()
def load() -> None:
    """Look at loads of topics into files, and compact them.

    An OUTPUT with {topic} in it, as --output or --table of the load, is that of several loads: a command goes over all
    of them, and its exit code is the worst one.
    """


@load.command(
    "status",
    epilog="""\b
Examples:
  klog load status /data/clicks --bars
  klog load status /data/clicks -b broker:9092 --hours 48    compare with the log
  klog load status 'delta:/lake/{topic}'                     the loads of all topics, in a list
""",
)
@click.argument("output", callback=_checked)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the records by hour as a PNG.")
@click.option("--bars", "with_bars", is_flag=True, help="Draw the records by hour in the terminal.")
@click.option(
    "--hours", default=24, show_default=True, type=click.IntRange(1, 24 * 31), help="How many to compare with the log."
)
@click.option(
    "--runs", default=_RUNS_SHOWN, show_default=True, type=click.IntRange(0), help="How many of the last runs to list."
)
@cluster_options
def status_command(
    output: str, plot: Path | None, with_bars: bool, hours: int, runs: int, cluster: ChosenCluster, as_json: bool
) -> None:
    """Show the runs of the load in OUTPUT, its partitions, and what is missing.

    With {topic} in it, as in --output of the load, the loads that are there are shown as a list. With a cluster
    (-b, --cluster or --command-config) the last hours are compared with the log, as it is now. The exit code is 1 if
    something is missing in what a load has.
    """
    from spark_klog.load.audit import compare, plot_hours, status, status_json, statuses_json
    from spark_klog.load.by_topic import is_by_topic, of_each
    from spark_klog.load.driving import STEPS_AT_ONCE

    settings = cluster.settings()
    by_topic = is_by_topic(output)
    listed = list(of_each(output, status, STEPS_AT_ONCE))
    shown = [state for _, state in listed]
    states = [state for state in shown if not isinstance(state, str)]
    if plot is not None:
        plot_hours({topic: each for state in states for topic, each in state.hours.items()}, plot)
    compared = None
    if "bootstrap.servers" in settings:
        with Cluster.connect(settings) as connected:
            compared = compare(connected, [part for state in states for part in state.partitions], hours)
    if as_json:
        line: dict[str, Any] = {"loads": statuses_json(listed)} if by_topic else status_json(states[0])
        if compared is not None:
            lag = [{"topic": topic, "partition": number, "lag": lag} for (topic, number), lag in compared.lag.items()]
            gone = [f"{topic}-{number}" for topic, number in compared.gone]
            line["log"] = {"hours": [vars(hour) for hour in compared.hours], "lag": lag, "gone": gone}
        click.echo(json.dumps(line))
    elif by_topic:
        _print_list(states, compared, with_bars)
        for place, error in listed:
            if isinstance(error, str):
                click.echo(f"can't be shown: {_named(place, error)}")
    else:
        _print_status(states[0], compared, with_bars, runs)
    if len(states) < len(shown) or any(state.findings for state in states):
        raise SystemExit(1)


def _print_list(states: Sequence[Status], compared: Completeness | None, with_bars: bool) -> None:
    """A line for each of several loads, and what is missing in them."""
    from spark_klog.load.audit import bars

    lines = []
    for state in states:
        last = state.runs[-1] if state.runs else {"run": "-", "finished": "-"}
        topics = ", ".join(sorted({part["topic"] for part in state.partitions}))
        sums = (sum(part[name] for part in state.partitions) for name in ("records", "lag"))
        rest = "unfinished" if state.unfinished else f"{len(state.findings):,} missing" if state.findings else ""
        lines.append((topics, last["run"], last["finished"], *(f"{each:,}" for each in sums), state.output, rest))
    names = ("topic", "run", "finished", "records", "lag", "output", "")
    print_table(names, lines, right={"records", "lag"})
    if with_bars:
        click.echo("".join(f"{text}\n" for state in states for text in bars(state.hours)))
    if compared is not None:
        _print_compared(compared)
    for state in states:
        for finding in state.findings:
            place = f"{finding.topic}-{finding.partition} " if finding.partition >= 0 else ""
            click.echo(f"missing: {state.output}: {place}{finding.what}")


def _print_status(state: Status, compared: Completeness | None, with_bars: bool, most_runs: int) -> None:
    from spark_klog.load.audit import bars

    names = ("records", "files", "bad", "lag")
    shown = state.runs[max(0, len(state.runs) - most_runs) :]
    lines = [
        (run["run"], run["kind"], run["finished"], *("-" if run[name] is None else f"{run[name]:,}" for name in names))
        for run in shown
    ]
    print_table(("run", "kind", "finished", *names), lines)
    if len(shown) < len(state.runs):
        click.echo(f"and {len(state.runs) - len(shown):,} runs before: --runs {len(state.runs)} lists all")
    click.echo()
    names = ("partition", "from", "until", "records")
    lines = [
        (
            part["topic"],
            *(f"{part[name]:,}" for name in names),
            ", ".join(f"{count:,} {cause}" for cause, count in part["gaps"].items()) or "-",
        )
        for part in state.partitions
    ]
    print_table(("topic", *names, "gaps"), lines)
    click.echo()
    if with_bars:
        click.echo("".join(f"{text}\n" for text in bars(state.hours)))
    if compared is not None:
        _print_compared(compared)
    for schema in state.schemas:
        of = "" if schema["subject"] is None else f", subject {schema['subject']}, version {schema['version']}"
        by_id = "" if schema["id"] is None else f", id {schema['id']}"
        click.echo(f"{schema['column']} of {schema['topic']} is {schema['format']}{of}{by_id}")
    if state.idle:
        click.echo(f"nothing new at {state.idle}")
    if state.unfinished:
        click.echo(f"run {state.unfinished} failed, was killed, or is under way; the next run finishes it")
    for finding in state.findings:
        place = f"{finding.topic}-{finding.partition} " if finding.partition >= 0 else ""
        click.echo(f"missing: {place}{finding.what}")
    if not state.findings:
        click.echo("nothing is missing" if state.runs or state.idle else "no run has finished yet")


def _print_compared(compared: Completeness) -> None:
    rows = [
        (hour.topic, hour.hour, f"{hour.in_log:,}", f"{hour.loaded:,}", f"{100 * hour.loaded / hour.in_log:.1f}%")
        for hour in compared.hours
    ]
    print_table(("topic", "hour", "in the log", "loaded", "complete"), rows)
    click.echo(f"lag: {sum(compared.lag.values()):,} offsets of {len(compared.lag):,} partitions")
    for topic, number in compared.gone:
        click.echo(f"{topic}-{number} is no longer in the cluster")


@load.command(
    "verify",
    epilog="""\b
Examples:
  klog load verify /data/clicks
  klog load verify delta:s3://lake/clicks -b broker:9092 --hash
  klog load verify 'delta:/lake/{topic}'                     the loads of all topics, a line each
""",
)
@click.argument("output", callback=_checked)
@click.option("--hash", "with_hash", is_flag=True, help="Read all records of files and log, and compare them.")
@cluster_options
def verify_command(output: str, with_hash: bool, cluster: ChosenCluster, as_json: bool) -> None:
    """Compare the runs of the load in OUTPUT, or of a table, with its files, and name what is missing or double.

    With a cluster (-b, --cluster or --command-config) also with the log, as it is now. The exit code is 1 if something
    is missing, double or different.
    """
    from spark_klog.load.by_topic import is_by_topic
    from spark_klog.load.verify import verify

    settings = cluster.settings()
    client = dict(settings) if "bootstrap.servers" in settings else None
    if with_hash and client is None:
        raise click.UsageError("--hash needs a cluster: give -b HOST:PORT")

    if client is not None and is_by_topic(output):  # else each load waits for a cluster that does not answer
        Cluster.connect(client).close()

    def verified(place: str) -> _Done:
        outcome = verify(place, client, with_hash=with_hash)
        text = _verified_text(outcome, in_a_line=is_by_topic(output))
        return _Done(asdict(outcome), text, 1 if outcome.findings else 0)

    if _report(output, as_json, verified):
        raise SystemExit(1)


def _verified_text(outcome: Verified, *, in_a_line: bool) -> str:
    """What verification has found: a table and lines, or the partitions in the first line."""
    lines = [f"{name}: offsets of the old topic and the new one can't be told apart" for name in outcome.unknown]
    for finding in outcome.findings:
        place = f"{finding.topic}-{finding.partition} " if finding.partition >= 0 else ""
        lines.append(f"wrong: {place}{finding.what}")
    if not outcome.findings:
        lines.append("all records are there once" if outcome.partitions else "nothing loaded yet")
    if in_a_line:
        records = sum(part.in_files for part in outcome.partitions)
        return "\n  ".join([f"{records:,} records of {len(outcome.partitions):,} partitions", *lines])
    names = ("partition", "start", "until", "records", "in_files", "lag", "compared", "gone")
    rows = [
        (part.topic, *("-" if (number := getattr(part, name)) is None else f"{number:,}" for name in names))
        for part in outcome.partitions
    ]
    return "\n".join([*table_lines(("topic", *(name.replace("_", " ") for name in names)), rows), *lines])


@load.command(
    "compact",
    epilog="""\b
Examples:
  klog load compact /data/clicks
  klog load compact delta:s3://lake/clicks --target-bytes 536870912 --json
""",
)
@click.argument("output", callback=_checked)
@click.option(
    "--target-bytes",
    default=256 * 1024 * 1024,
    show_default=True,
    type=click.IntRange(1),
    help="About the size of a file; smaller ones are merged.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON.")
def compact_command(output: str, target_bytes: int, as_json: bool) -> None:
    """Merge small Parquet files of OUTPUT into larger ones: a load's folder or URI, or a table.

    Records and offsets stay as they are, and those of a folder stay in order. While a step is under way no run of the
    load in a folder can begin; one of a table can. Killed, it goes on from its last step.
    """
    from spark_klog.load.compaction import compact
    from spark_klog.tables.opening import existing_table, is_table

    def compacted(place: str) -> _Done:
        if is_table(place):
            count = existing_table(place).compact(target_bytes)
            text = f"{count:,} files were merged into larger ones" if count else "there is nothing to compact"
            return _Done({"files_before": count}, text)
        done = compact(place, target_bytes)
        text = "there is nothing to compact"
        if done.runs:
            text = f"{done.files_before:,} files of {done.bytes_before:,} bytes are now "
            text += f"{done.files_after:,} files of {done.bytes_after:,} bytes"
        return _Done(vars(done), text)

    if _report(output, as_json, compacted):
        raise SystemExit(1)


@load.command(
    "expire",
    epilog="""\b
Examples:
  klog load expire iceberg:lake.web.clicks --dry-run
  klog load expire delta:s3://lake/clicks --older-than 2d --json
  klog load expire 'delta:/lake/{topic}'                     the tables of all topics
""",
)
@click.argument("output", metavar="TABLE", callback=partial(_checked, of_table=True))
@click.option(
    "--older-than",
    type=duration,
    metavar="DURATION",
    help="Keep what readers need of this time (12h, 7d). Default: as the table's properties say; Delta 7d, Iceberg 5d.",
)
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Keep at least the last N snapshots or versions.")
@click.option("--dry-run", "is_dry", is_flag=True, help="List the files, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON, and no progress.")
def expire_command(output: str, older_than: float | None, keep: int | None, is_dry: bool, as_json: bool) -> None:
    """Remove old snapshots or versions of a TABLE, the files that only they have, and files that no commit has.

    What the load needs to find its last run stays, as do files of a run in progress, and for a day all files that no
    commit has. Runs and readers may be at work: give --older-than longer than the longest of them takes.
    """
    from spark_klog.load.upkeep import expire, expired_json, expired_text
    from spark_klog.tables.upkeep import Kept

    def expired(place: str) -> _Done:
        with Bar("files", None, is_quiet=as_json) as bar:
            done = expire(place, Kept(older_than, keep), is_dry=is_dry, tell=bar.update_of)
        listed = list(done.files) if is_dry else []
        line = {"dry_run": is_dry, **expired_json(done), **({"paths": listed} if is_dry else {})}
        return _Done(line, "\n  ".join([expired_text(done, is_dry=is_dry), *map(escaped, listed)]))

    if _report(output, as_json, expired):
        raise SystemExit(1)


@load.command(
    "files",
    epilog="""\b
Examples:
  klog load files /data/clicks --topic clicks
  klog load files /data/clicks --json | jq -r .path
""",
)
@click.argument("output", callback=_checked)
@click.option("--topic", help="Only the files of this topic.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON with all that is known of a file.")
def files_command(output: str, topic: str | None, as_json: bool) -> None:
    """List the committed files of the load in OUTPUT."""
    from spark_klog.load import files
    from spark_klog.load.by_topic import of_each
    from spark_klog.load.driving import STEPS_AT_ONCE

    has_failed, is_empty = False, True
    for place, listed in of_each(output, partial(files, topic=topic), STEPS_AT_ONCE):
        if isinstance(listed, str):
            has_failed = True
            _complain(place, listed)
            continue
        for file in listed:
            is_empty = False
            say(as_json, vars(file), file.path)
    if topic is not None and is_empty:
        click.echo(f"klog: the load has no files of topic {topic}", err=True)
    if has_failed:
        raise SystemExit(1)


@load.command(
    "offsets",
    epilog="""\b
Examples:
  klog load offsets /data/clicks --run 3 > begin.json
  klog load offsets 'delta:/lake/{topic}' > begin.json       of the loads of all topics
""",
)
@click.argument("output", callback=_checked)
@click.option("--run", "run", metavar="RUN", help="Where this run has begun. Default: where the next one begins.")
def offsets_command(output: str, run: str | None) -> None:
    """Print offsets of the load in OUTPUT as JSON, which a load takes by --from-offsets and --until."""
    from spark_klog.load.by_topic import is_by_topic, of_each
    from spark_klog.load.driving import STEPS_AT_ONCE
    from spark_klog.load.journal.history import open_load
    from spark_klog.load.places import offsets_of_run, offsets_text, parse_run

    if run is not None and is_by_topic(output):
        raise click.UsageError("--run is a run of one load: with {topic} each topic has runs of its own")
    with reading_arguments():
        number = None if run is None else parse_run("--run", run).run

    def known(place: str) -> tuple[str, dict[TopicPartition, Progress]]:
        store, identity = open_load(place)
        return identity.cluster_id, offsets_of_run(store, number)

    has_failed, clusters = False, set()
    offsets: dict[TopicPartition, Progress] = {}
    for place, told in of_each(output, known, STEPS_AT_ONCE):
        if isinstance(told, str):
            has_failed = True
            _complain(place, told)
            continue
        cluster_id, of_load = told
        clusters.add(cluster_id)
        if len(clusters) > 1 or of_load.keys() & offsets.keys():
            raise LoadError(f"{without_user(place)} and the loads before it are not of one cluster and other topics")
        offsets |= of_load
    click.echo(json.dumps(offsets_text(next(iter(clusters), ""), number, offsets), indent=1))
    if has_failed:
        raise SystemExit(1)


@load.command(
    "replay",
    epilog="""\b
Examples:
  klog load replay /data/clicks --topic clicks-again -b broker:9092
""",
)
@click.argument("output", callback=_checked)
@click.option("--topic", required=True, help="Where to send the records to.")
@click.option("--from-topic", "source", help="Only the dead letters of this topic of the load.")
@cluster_options
def replay_command(output: str, topic: str, source: str | None, cluster: ChosenCluster, as_json: bool) -> None:
    """Send the values that did not parse in the load in OUTPUT to a topic, each once.

    A call that was interrupted is continued by the next one. After a complete one, all are sent again.

    Corrupt batches can't be sent; the exit code is 4 if there are some, and 3 if there is nothing to send.
    """
    from spark_klog.restore import replay

    client = cluster.local_settings()

    def sent(place: str) -> _Done:
        done = replay(place, client, topic, source)
        text = f"sent {done.records:,} records to {topic}; {done.batches:,} corrupt batches can't be sent"
        line = {"records": done.records, "batches": done.batches, "topic": topic}
        return _Done(line, text, 4 if done.batches else 0 if done.records else 3)

    match _report(output, as_json, sent):
        case 1:
            raise SystemExit(1)
        case 3:
            raise SystemExit(3)
        case 4:
            raise SystemExit(4)
