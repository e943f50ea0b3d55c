"""Options of kcat and of Kafka's own tools that klog's commands do not have: the error says what klog has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

_TOPIC = "the topic is an argument, as in {command} TOPIC"
_GROUP = "the group is an argument, as in {command} GROUP"
#: Of a command that takes no names, and of one about the other kind of names.
_LISTED = {"--topic": "klog topics describe TOPIC shows one", "--group": "klog groups describe GROUP shows one"}
_OF_OTHERS = {
    "--topic": "a group is meant with all its topics; klog offsets show and klog offsets set have --topic, and "
    "Admin.delete_group_offsets of spark_klog.client deletes the offsets of single partitions",
    "--group": "this is about topics; klog groups and klog offsets are about groups",
}
_IN_DESCRIBE = "klog topics describe --json has leader, replicas and inSync of each partition"
_IN_GROUP = "klog groups describe GROUP shows state, members and offsets at once"
#: Options of kafka-topics and kafka-consumer-groups.
_ARGUMENTS = {
    "--topic": _TOPIC,
    "--group": _GROUP,
    "--at-min-isr-partitions": _IN_DESCRIBE,
    "--under-min-isr-partitions": _IN_DESCRIBE,
    "--under-replicated-partitions": _IN_DESCRIBE,
    "--unavailable-partitions": _IN_DESCRIBE,
    "--topics-with-overrides": "klog topics describe shows the settings that differ from the defaults",
    "--topic-id": "klog topics describe shows the ids of topics, and takes names",
    "--exclude-internal": "internal topics are left out; klog topics list --all has them",
    "--replica-assignment": "use NewTopic(assignments=...) of spark_klog.client",
    "--force": "use --yes",
    "--zookeeper": "use --bootstrap-server: this asks the brokers",
    "--all-groups": "klog groups list has all groups; klog groups lag --metrics HOST:PORT serves the lag of all",
    "--members": _IN_GROUP,
    "--offsets": _IN_GROUP,
    "--state": "klog groups list and klog groups describe show states",
    "--type": "klog groups list and klog groups describe show the types of groups",
    "--verbose": "klog groups describe GROUP shows what each member reads",
    "--timeout": "use --command-config FILE, with request.timeout.ms=MS in the file",
    "--delete-offsets": "use Admin.delete_group_offsets of spark_klog.client",
    "--all-topics": "all topics of the group are meant, unless --topic names some",
    "--execute": "the offsets are changed, unless --dry-run is given",
    "--export": "use klog offsets show",
    "--to-datetime": "use --to-time",
    "--by-duration": "use --to-time -1h",
    "--to-current": "use klog offsets show: it changes nothing",
}
_HINTS = {
    "-t": _TOPIC,
    "--topic": _TOPIC,
    "-C": "klog consume is a command of its own; leave the option out",
    "-P": "klog produce is a command of its own; leave the option out",
    "-J": "use --json",
    "-O": "use --format '%o %s\\n'",
    "-m": "use --set request.timeout.ms=MS",
    "-d": "use klog --log-level DEBUG before the command",
    "-T": "use tee before klog produce",
    "-L": "use klog topics describe",
    "-Q": "use klog topics offsets",
    "-u": "output is not held back; leave the option out",
    "--timeout-ms": "reading ends at the end of the topic, unless --follow says otherwise",
    "--from-beginning": "reading begins at the first record, unless --from says another place",
    "--max-messages": "use --count",
    "--offset": "use --from",
    "--include": "use a topic that begins with ^ as a pattern",
    "--whitelist": "use a topic that begins with ^ as a pattern",
    "--isolation-level": "use --isolation",
    "--broker-list": "use --bootstrap-server",
    "--consumer.config": "use --command-config",
    "--producer.config": "use --command-config",
    "--consumer-property": "use --set",
    "--producer-property": "use --set",
    "--command-property": "use --set",
    "--property": "use --format, --key-separator or --json; -s and -r for a schema registry",
    "--formatter-property": "use --format, --key-separator or --json",
    "--reader-property": "use --key-separator, --header or --json",
}
#: kcat's modes, and the commands for them.
_MODES = {"-C": "consume", "-P": "produce", "-L": "topics", "-Q": "topics"}
_MOVES = "klog offsets set moves a group's offsets"
#: What people try as commands, of one group where the group is named.
FOREIGN_COMMANDS = {
    "reset": _MOVES,
    "reset-offsets": _MOVES,
    "delete-offsets": "use Admin.delete_group_offsets of spark_klog.client",
    "configs": "klog topics describe and klog topics alter have the settings of topics",
    "groups alter": "use Admin.alter_configs of spark_klog.client, or kafka-configs --entity-type groups",
    "transactions find-hanging": "use klog transactions hanging",
    "transactions forceTerminateTransaction": "use klog transactions abort --transactional-id ID",
    "acls": "use Admin.describe_acls and Admin.create_acls of spark_klog.client",
}


class _HintingCommand(click.Command):
    hints: ClassVar[Mapping[str, str]] = _ARGUMENTS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = self._hint(ctx, error.option_name)
            if hint is None:
                raise
            text = f"No such option {error.option_name!r}: {hint.format(command=ctx.command_path)}."
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None

    def _hint(self, ctx: click.Context, option: str) -> str | None:
        return self.hints.get(option)


class _NamesCommand(_HintingCommand):
    """A command about topics or groups, whose names are its arguments."""

    def _hint(self, ctx: click.Context, option: str) -> str | None:
        room = None if ctx.parent is None else ctx.parent.info_name
        if room in ("topics", "groups") and option in _LISTED:
            if option != f"--{room.removesuffix('s')}":
                return _OF_OTHERS[option]
            if not any(isinstance(parameter, click.Argument) for parameter in self.params):
                return _LISTED[option]
        return super()._hint(ctx, option)


class RecordsCommand(_HintingCommand):
    """A command beside which people know kcat, kafka-console-consumer and kafka-console-producer."""

    hints = _HINTS


class TransactionsCommand(_HintingCommand):
    """A command of kafka-transactions."""

    hints: ClassVar[Mapping[str, str]] = {"--broker-id": "the leader of the partition is asked; leave the option out"}


class CommandGroup(click.Group):
    """A group of commands that are options of Kafka's tools: `kafka-topics --list` is `klog topics list`."""

    command_class: type[click.Command] = _NamesCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = list(args)  # parsing empties the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if "--reset-offsets" in rest:
                text = f"No such option '--reset-offsets': {_MOVES}."
                raise click.NoSuchOption("--reset-offsets", text, ctx=ctx) from None
            commands = self.list_commands(ctx)
            known = {f"--{name}": name for name in commands} | {
                mode: name for mode, name in _MODES.items() if name in commands
            }
            name = next((known[word] for word in rest if word in known), "COMMAND")
            text = f"No such option {error.option_name!r}: options follow the command, {ctx.command_path} {name} ..."
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args:
            hint = FOREIGN_COMMANDS.get(args[0], FOREIGN_COMMANDS.get(f"{ctx.info_name} {args[0]}"))
            if hint is not None and self.get_command(ctx, args[0]) is None:
                ctx.fail(f"No such command {args[0]!r}: {hint}.")
        return super().resolve_command(ctx, args)
