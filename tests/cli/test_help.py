"""`--help`: every command has examples, and their commands and options exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from spark_klog.cli.main import main
from tests.support.clients.klog import klog, klog_refusal

#: The end of a command within a line: an operator of the shell, or the gap before a description.
_END = re.compile(r"\s[|>&;<]|\s{3,}")


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """All commands except groups."""
    if not isinstance(command, click.Group):
        yield command, context
        return
    for name in command.list_commands(context):
        one = command.get_command(context, name)
        assert one is not None
        yield from commands(one, click.Context(one, context, name))


COMMANDS = {context.command_path: (one, context) for one, context in commands(main, click.Context(main, None, "klog"))}


def examples(text: str) -> list[str]:
    """The command lines that a help shows, without what they are piped to."""
    found = re.findall(r"^ *(?:[^`]*[|;] )?(klog .*)", text.replace("\\\n", " "), re.MULTILINE)
    return [_END.split(line, maxsplit=1)[0] for line in found]


@pytest.mark.parametrize("path", COMMANDS)
def test_examples(path: str) -> None:
    command, _ = COMMANDS[path]
    shown = examples(f"{command.help or ''}\n{command.epilog or ''}")
    own = [line for line in shown if line.startswith(path)]
    assert own, "no example"
    for line in shown:
        words = shlex.split(line)
        matching = [known for known in COMMANDS if words[: len(known.split())] == known.split()]
        assert matching, f"{line}: no such command"
        known = max(matching, key=len)
        used, place = COMMANDS[known]
        used.make_parser(place).parse_args(words[len(known.split()) :])


@pytest.mark.parametrize("path", COMMANDS)
def test_options_have_a_text(path: str) -> None:
    command, _ = COMMANDS[path]
    assert [one.opts for one in command.params if isinstance(one, click.Option) and not one.help] == []


def test_a_mistyped_command_is_suggested() -> None:
    # topics and consume have modules of their own
    for typed, meant in (("topic", "'topics'"), ("consme", "'consume'"), ("brokr", "'broker'")):
        done = klog(typed)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (
            2,
            f"Error: No such command {typed!r}. Did you mean {meant}?",
        )
    assert klog("xyzzy").stderr.splitlines()[-1] == "Error: No such command 'xyzzy'."


def test_a_log_level_that_does_not_exist() -> None:
    told = klog_refusal("--log-level", "foo", "topics", "list", code=2)
    assert "Invalid value for '--log-level': 'foo' is not one of " in told


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("consume -C -t clicks -e", "'-C': klog consume is a command of its own; leave the option out."),
        ("consume -t clicks", "'-t': the topic is an argument, as in klog consume TOPIC."),
        ("produce --topic clicks", "'--topic': the topic is an argument, as in klog produce TOPIC."),
        ("consume clicks --from-beginning", "'--from-beginning': reading begins at the first record, unless --from"),
        ("topics --bootstrap-server h:1 --list", "'--bootstrap-server': options follow the command, klog topics list"),
        ("groups --describe --group g", "'--describe': options follow the command, klog groups describe"),
        ("-b h:1 topics list", "'-b': options follow the command, klog COMMAND"),
        ("-b h:1 -L", "'-b': options follow the command, klog topics ..."),
        ("-C -b h:1 -t clicks", "'-C': options follow the command, klog consume ..."),
        ("consume clicks -J", "'-J': use --json."),
        ("consume clicks -O", r"'-O': use --format '%o %s\n'."),
        ("topics describe --topic clicks", "'--topic': the topic is an argument, as in klog topics describe TOPIC."),
        ("groups lag --group g", "'--group': the group is an argument, as in klog groups lag GROUP."),
        ("groups delete --group g", "'--group': the group is an argument, as in klog groups delete GROUP."),
        ("groups --delete --group g", "'--delete': options follow the command, klog groups delete ..."),
        ("groups describe --all-groups", "'--all-groups': klog groups list has all groups;"),
        ("groups describe g --members", "'--members': klog groups describe GROUP shows state, members and offsets"),
        ("topics describe --unavailable-partitions", "'--unavailable-partitions': klog topics describe --json has"),
        ("topics list --exclude-internal", "'--exclude-internal': internal topics are left out;"),
        ("topics delete t --force", "'--force': use --yes."),
        ("topics list --zookeeper z:2181", "'--zookeeper': use --bootstrap-server: this asks the brokers."),
        ("offsets set --group g --execute", "'--execute': the offsets are changed, unless --dry-run is given."),
        ("offsets set --group g --to-datetime 1", "'--to-datetime': use --to-time."),
        ("groups delete g --topic t", "'--topic': a group is meant with all its topics; klog offsets show and"),
        ("groups list --group g", "'--group': klog groups describe GROUP shows one."),
        ("topics list --topic t", "'--topic': klog topics describe TOPIC shows one."),
        ("topics delete t --group g", "'--group': this is about topics; klog groups and klog offsets are about"),
        ("consume t --formatter-property print.key=true", "'--formatter-property': use --format, --key-separator or"),
        ("produce t --reader-property parse.key=true", "'--reader-property': use --key-separator, --header or --json."),
        ("produce t --command-property acks=1", "'--command-property': use --set."),
        ("consume clicks -d all", "'-d': use klog --log-level DEBUG before the command."),
        ("groups --group g --reset-offsets", "'--reset-offsets': klog offsets set moves a group's offsets."),
    ],
)
def test_options_of_other_tools(typed: str, hint: str) -> None:
    done = klog(*typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Error: No such option {hint}" in done.stderr


def test_commands_of_other_tools() -> None:
    for typed in ("reset", "reset-offsets"):
        told = klog_refusal("groups", typed, "g", code=2)
        assert told == f"Error: No such command {typed!r}: klog offsets set moves a group's offsets."
    for words, hint in (
        ("groups delete-offsets g", "'delete-offsets': use Admin.delete_group_offsets of spark_klog.client."),
        (
            "groups alter g",
            "'alter': use Admin.alter_configs of spark_klog.client, or kafka-configs --entity-type groups.",
        ),
        ("configs --describe", "'configs': klog topics describe and klog topics alter have the settings of topics."),
        ("acls list", "'acls': use Admin.describe_acls and Admin.create_acls of spark_klog.client."),
    ):
        assert klog_refusal(*words.split(), code=2) == f"Error: No such command {hint}"
    told = klog_refusal("consume", "t", "-b", "h:1", "-o", "s@1700000000123", code=2)
    assert told == "klog: --from s@1700000000123: klog takes times as 2023-11-14T22:13:20.123Z, or -1h"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("consume t -X auto.offset.reset=latest", "--set auto.offset.reset=latest has no effect here: use --from"),
        ("consume t -X group.id=g", "--set group.id=g has no effect here: use --group"),
        ("consume t -G a -X group.id=g", "--set group.id=g has no effect here: use --group"),
        ("consume t -b h:1 -X bootstrap.servers=i:1", "--set bootstrap.servers=i:1 differ: remove one of them"),
        ("produce t -X transactional.id=x", "--set transactional.id has no effect here: use --transaction ID"),
        ("produce t -b h:1 -X bootstrap.servers=i:1", "--set bootstrap.servers=i:1 differ: remove one of them"),
        ("bench -b h:1 -X bootstrap.servers=i:1", "--set bootstrap.servers=i:1 differ: remove one of them"),
    ],
)
def test_settings_without_effect_are_refused(typed: str, hint: str) -> None:
    done = klog(*typed.split())
    assert done.returncode == 2
    assert hint in done.stderr
