"""Options of kcat and of Kafka's own tools that klog's commands do not have: the error says what klog has for them."""

from __future__ import annotations

import click

_TOPIC = "the topic is an argument, as in klog {command} TOPIC"
_HINTS = {
    "-t": _TOPIC,
    "--topic": _TOPIC,
    "-C": "klog consume is a command of its own; leave the option out",
    "-P": "klog produce is a command of its own; leave the option out",
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
    "--property": "use --format, --key-separator or --json",
}


class RecordsCommand(click.Command):
    """A command beside which people know kcat, kafka-console-consumer and kafka-console-producer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = _HINTS.get(error.option_name)
            if hint is None:
                raise
            text = f"No such option {error.option_name!r}: {hint.format(command=ctx.info_name)}."
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None


class CommandGroup(click.Group):
    """A group of commands that are options of Kafka's tools: `kafka-topics --list` is `klog topics list`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = list(args)  # parsing empties the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = {f"--{name}" for name in self.list_commands(ctx)}
            name = next((word[2:] for word in rest if word in names), "COMMAND")
            text = f"No such option {error.option_name!r}: options follow the command, {ctx.command_path} {name} ..."
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None
