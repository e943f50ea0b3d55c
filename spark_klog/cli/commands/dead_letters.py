"""`klog dead-letters`: show the records of a dead-letter topic with what was wrong, and send them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from itertools import islice
from typing import Any

import click

from spark_klog.cli.clusters import ChosenCluster, cluster_options
from spark_klog.cli.foreign import CommandGroup
from spark_klog.cli.output import print_lines, reading_arguments, say
from spark_klog.client.letter_topics import Choice, Letter, LetterTopic

_Command = Callable[..., Any]
#: Characters of a value or a reason in a table.
_MOST = 60


@click.group("dead-letters", cls=CommandGroup)
def dead_letters() -> None:
    """Show and replay dead letters in a topic, of this package's programs and of Kafka Connect's sinks."""


def _choice_options(function: _Command) -> _Command:
    reason = click.option("--reason", metavar="REGEX", default="", help='Only those whose "ERROR: REASON" has a match.')
    source = click.option("--from-topic", "source", metavar="TOPIC", default="", help="Only records of this topic.")
    return reason(source(function))


@dead_letters.command(
    epilog="""\b
Examples:
  klog dead-letters show orders-dlq -b broker:9092
  klog dead-letters show orders-dlq --reason 'ValueError|timeout' --json | jq -r .reason
""",
)
@click.argument("topic")
@_choice_options
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@cluster_options
def show(topic: str, reason: str, source: str, limit: int | None, cluster: ChosenCluster, as_json: bool) -> None:
    """Show the letters in TOPIC: where their records are from, and what was wrong."""
    with reading_arguments():
        choice = Choice(reason, source)
        letters = LetterTopic(cluster.local_settings(), topic)
    columns = {
        "partition": "partition",
        "offset": "offset",
        "from": "from",
        "time": "time",
        "group or query": "reader",
        "attempts": "attempts",
        "error": "error",
        "reason": "reason",
        "replayed": "isReplayed",
        "value": "value",
    }
    print_lines(as_json, _lines(islice(letters.letters(choice), limit), as_json), columns)


def _lines(letters: Iterator[Letter], as_json: bool) -> Iterator[dict[str, Any]]:
    for record, said, _, is_replayed in letters:
        line: dict[str, Any] = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
        for name in ("time", "reader", "stage", "error", "reason", "attempts"):
            given = None if said is None else getattr(said, name)
            line[name] = None if given in ("", -1) else given
        line["time"] = None if line["time"] is None else _time(line["time"])
        line["from"] = None if said is None else f"{said.topic}-{said.partition}@{said.offset}"
        line["isReplayed"] = is_replayed
        for name in ("key", "value"):
            data = getattr(record, name)
            line[name] = None if data is None else data.decode(errors="backslashreplace")
        if as_json and said is not None:
            place = {"sourceTopic": said.topic, "sourcePartition": said.partition, "sourceOffset": said.offset}
            line |= {**place, "trace": said.trace or None}
        for name in () if as_json else ("value", "reason"):
            line[name] = line[name] and line[name][:_MOST]
        yield line


def _time(ms: int) -> str | None:
    with suppress(ValueError, OverflowError, OSError):  # a header may say any number
        return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    return None


@dead_letters.command(
    epilog="""\b
Examples:
  klog dead-letters replay orders-dlq -b broker:9092
  klog dead-letters replay orders-dlq --reason ConnectionError
""",
)
@click.argument("topic")
@_choice_options
@cluster_options
def replay(topic: str, reason: str, source: str, cluster: ChosenCluster, as_json: bool) -> None:
    """Send the letters in TOPIC to the topics that their records came from, each once.

    They are written as they were, without the headers that made them letters. A call that was killed is continued by
    the next one, and what was sent is not sent again: the group klog-dead-letters.TOPIC has the progress. Brokers
    forget it offsets.retention.minutes (a week by default) after the last replay that has sent something.

    The exit code is 3 if there was nothing to send, and 4 if some can't be: records that are no letters, and the bytes
    of corrupt batches.
    """
    with reading_arguments():
        choice = Choice(reason, source)
        letters = LetterTopic(cluster.local_settings(), topic)
    done = letters.replay(choice)
    text = f"sent {done.sent:,} records; {done.others:,} can't be sent"
    line = {"topic": topic, "records": done.sent, "others": done.others}
    say(as_json, line, text)
    if done.others:
        raise SystemExit(4)
    if not done.sent:
        raise SystemExit(3)
