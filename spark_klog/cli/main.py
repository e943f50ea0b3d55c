"""The `klog` command. Subcommands import their modules when they run, so that the broker starts fast."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from spark_klog.base.names import VERSION
from spark_klog.base.settings import parse_settings
from spark_klog.cli.foreign import FOREIGN_COMMANDS, CommandGroup
from spark_klog.cli.output import (
    FORMATS,
    INTERRUPTED,
    JSON,
    LEVELS,
    TEXT,
    WrongArguments,
    escaped,
    log_to_stderr,
    os_error_text,
    reading_arguments,
)
from spark_klog.errors import ConfigError, KlogError

if TYPE_CHECKING:
    from spark_klog.broker.broker import Broker
    from spark_klog.broker.net.server import Server
    from spark_klog.broker.settings.config import BrokerConfig
    from spark_klog.embedded import EmbeddedCluster

#: How often to check the processes of a cluster.
_WATCH_SECONDS = 0.5
#: Where a process reaches what listens on all addresses.
_OWN_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
#: Seconds that a broker's end waits for that of its schema registry.
_REGISTRY_SECONDS = 10.0
#: Seconds if it has not started yet: most starts take less.
_REGISTRY_START_SECONDS = 2.0
#: Subcommands with modules of their own.
_MODULES = (
    {
        name: f"spark_klog.cli.commands.{name}"
        for name in (
            *("checkpoint", "groups", "load", "log", "mirror", "offsets", "schemas", "topics", "transactions", "ui"),
            "users",
        )
    }
    | {name: f"spark_klog.cli.records.{name}" for name in ("bench", "consume", "produce")}
    | {
        "doctor": "spark_klog.cli.doctor",
        "dead-letters": "spark_klog.cli.commands.dead_letters",
        "demo": "spark_klog.cli.jobs.demo",
        "schema-registry": "spark_klog.cli.commands.schema_registry",
    }
)
_log_format_option = click.option(
    "--log-format", default=TEXT, show_default=True, type=click.Choice(FORMATS), help="Format of the log on stderr."
)


def versions() -> dict[str, str | None]:
    """Versions of klog, Python and pyspark (None if it is not installed), and the kernel in use."""
    import platform

    from spark_klog.records import kernels

    try:
        kernel = kernels.load().name
    except ConfigError as error:
        kernel = f"none ({error})"
    return {"klog": VERSION, "python": platform.python_version(), "pyspark": _pyspark_version(), "kernel": kernel}


def _pyspark_version() -> str | None:
    """The version in pyspark's own file: a platform's pyspark may have no metadata, and its import takes long."""
    from importlib.util import find_spec

    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    try:
        match = re.search(r"""__version__[^=]*= *["'](.+)["']""", Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        match = None
    return "of an unknown version" if match is None else match[1]


def version_line() -> str:
    known = versions()
    pyspark = "no pyspark" if known["pyspark"] is None else f"pyspark {known['pyspark']}"
    return f"klog {known['klog']}, Python {known['python']}, {pyspark}, kernel {known['kernel']}"


@click.command(
    epilog="""\b
Examples:
  klog version
  klog version --json | jq -r .kernel              native, or reference: in Python, many times slower
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON.")
def version(as_json: bool) -> None:
    """Print the versions of klog, Python and pyspark, and the kernel in use."""
    click.echo(json.dumps(versions()) if as_json else version_line())


class _Group(CommandGroup):
    """Prints the package's errors as a line on stderr, without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_MODULES])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return super().get_command(ctx, name)
        command: click.Command = getattr(import_module(_MODULES[name]), name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click would suggest those of its own commands only
        mistyped = not ctx.resilient_parsing and args and args[0].isidentifier() and args[0] not in FOREIGN_COMMANDS
        if mistyped and self.get_command(ctx, args[0]) is None:
            near = get_close_matches(args[0], self.list_commands(ctx))
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KlogError as error:
            click.echo(f"klog: {escaped(str(error), has_lines=True)}", err=True)
            sys.exit(2 if isinstance(error, WrongArguments) else 1)
        except KeyboardInterrupt:
            click.echo("klog: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of stdout has closed it: click ends the command
                raise
            click.echo(f"klog: {os_error_text(error)}", err=True)
            sys.exit(1)
        finally:
            # Python ends by SIGINT, whatever the exit code, if Ctrl-C came while it executed a string (an import's
            # named tuple, say); executing another one takes that back
            exec("")


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(cls=_Group)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions in use, and exit.",
)
@click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(LEVELS, case_sensitive=False),
    help="Level of the log on stderr.",
)
@click.pass_context
def main(ctx: click.Context, log_level: str) -> None:
    """The Kafka commit log for PySpark."""
    log_to_stderr(log_level, TEXT)
    if ctx.get_parameter_source("log_level") is ParameterSource.DEFAULT:
        # retries that succeed interest nobody
        logging.getLogger("spark_klog.client").setLevel(logging.WARNING)
        logging.getLogger("pyiceberg.io").setLevel(logging.WARNING)  # which package reads files, for each table
        # files for --command-config are often shared with producers and consumers
        logging.getLogger("spark_klog.client.admin.calls").setLevel(logging.ERROR)


main.add_command(version)


@main.command(
    epilog="""\b
Examples:
  klog broker --data-dir /var/klog
  klog broker --config server.properties --metrics 127.0.0.1:9400
  klog broker --data-dir /var/klog --listen 0.0.0.0:9092 --set log.retention.hours=24
  klog broker --data-dir /var/klog --schema-registry 127.0.0.1:8081
"""
)
@click.option(
    "--config",
    "properties",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A server.properties with Kafka's names; options and --set override it.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="A listener without security; port 0 picks a free port. Default: the setting listeners, else 127.0.0.1:9092.",
)
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Default: the setting log.dirs.")
@click.option("--broker-id", type=click.IntRange(0), help="Default: the setting broker.id, else 0.")
@click.option("--zookeeper", metavar="CONNECT", help="HOST:PORT[,HOST:PORT...][/CHROOT] of a ZooKeeper to register in.")
@click.option("--directories", metavar="DIR", help="A folder to register in, shared by the brokers of one machine.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting by Kafka's name; repeatable.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus at http://HOST:PORT/metrics.")
@click.option(
    "--schema-registry",
    metavar="HOST:PORT",
    help="Serve a schema registry, with Confluent's REST API, at http://HOST:PORT (a port alone is one of 127.0.0.1). "
    "Its state is the topic _schemas. In a cluster, one broker only.",
)
@click.option(
    "--control",
    metavar="HOST:PORT",
    help="For tests: script faults by HTTP at http://HOST:PORT/faults (a port alone is one of 127.0.0.1).",
)
@click.option("--allow-remote-control", is_flag=True, help="Let --control listen on a host that is not loopback.")
@_log_format_option
@click.option("--stop-with-stdin", is_flag=True, hidden=True, help="Stop when stdin ends, as the parent has exited.")
@click.option("--faults", is_flag=True, hidden=True, help="Read faults from stdin, and stop when it ends.")
@click.pass_context
def broker(
    ctx: click.Context,
    properties: Path | None,
    listen: str | None,
    data_dir: Path | None,
    broker_id: int | None,
    zookeeper: str | None,
    directories: str | None,
    settings: tuple[str, ...],
    metrics: str | None,
    schema_registry: str | None,
    control: str | None,
    allow_remote_control: bool,
    log_format: str,
    stop_with_stdin: bool,
    faults: bool,
) -> None:
    """Run a broker until SIGTERM."""
    from spark_klog.base.properties import parse_properties
    from spark_klog.broker.net.server import Server, run
    from spark_klog.broker.settings.config import broker_config

    if zookeeper and directories:
        raise click.UsageError("give only one of --zookeeper and --directories")
    with reading_arguments():
        chosen = parse_settings(settings)
        if listen and "listeners" in chosen:
            raise click.UsageError("give only one of --listen and the setting listeners")
        _log_as(ctx, log_format)
        config = broker_config(
            _own_registry_url(schema_registry)
            | (parse_properties(properties.read_bytes(), str(properties)) if properties else {}),
            chosen,
            listen=listen,
            data_dir=data_dir,
            broker_id=broker_id,
            directories=f"zookeeper://{zookeeper}" if zookeeper else directories,
            metrics=metrics,
        )
    make_server: Callable[[Broker], Server] = Server
    addresses: list[str] = []
    if faults or control is not None:
        from spark_klog.broker.faults.control import first_script, follow, lines_of, serve_control
        from spark_klog.broker.faults.faulty_server import FaultyServer

        lines = lines_of(0) if faults else iter(())
        script = first_script(lines)
        make_server = partial(FaultyServer, script=script)
        if control is not None:
            with reading_arguments():
                served = serve_control(script, control, allow_remote_control)
            addresses.append(f"faults at http://{served.address}/faults")
        if faults:
            _stop_after(lambda: follow(script, lines, click.echo))
    if stop_with_stdin and not faults:
        _stop_after(_read_stdin)
    registry = None
    if schema_registry is not None:
        first = next(iter(config.security.listeners), None)
        if first is not None and first.protocol != "PLAINTEXT":
            raise click.UsageError(
                f"--schema-registry can't log in to the first listener, {first.name} ({first.protocol}): run "
                "klog schema-registry with --command-config"
            )
        with reading_arguments():
            registry = _OwnRegistry(schema_registry)

    def ready(line: str) -> None:
        click.echo("\n".join([line, *addresses]))
        if registry is not None:
            registry.start(_reach_oneself(config, line.rsplit(" ", 1)[1]))

    try:
        with reading_arguments():  # files that the configuration names, and addresses: read as it starts
            run(config, ready, make_server, None if registry is None else registry.close)
    finally:
        if registry is not None:
            registry.close()
    if registry is not None and registry.error is not None:
        raise registry.error


def _reach_oneself(config: BrokerConfig, bound: str) -> str:
    """HOST:PORT at which this process reaches its broker, whose first listener is bound to `bound`.

    Clients of this process then find the broker there, too, whatever address it tells others.
    """
    from spark_klog.base.in_a_thread import own_addresses
    from spark_klog.base.names import PLAINTEXT
    from spark_klog.broker.security.config import Listener
    from spark_klog.trees.paths import host_and_port
    from spark_klog.wire.listening import parse_listen

    host, port = parse_listen(bound, "--listen")
    listener = next(iter(config.security.listeners), Listener(PLAINTEXT, PLAINTEXT, host, port))
    (told,) = config.security.endpoints([listener._replace(port=port)])
    own = _OWN_HOSTS.get(host, host), port
    if own != (told.host, told.port):
        own_addresses[told.host, told.port] = own
    return host_and_port(*own)


def _own_registry_url(listen: str | None) -> dict[str, str]:
    """The setting by which a broker validates schemas at its own registry, unless the port is any free one."""
    from spark_klog.schemas.registry.settings import BROKER_URL
    from spark_klog.trees.paths import host_and_port
    from spark_klog.wire.listening import parse_listen

    host, port = parse_listen(listen, "--schema-registry", "127.0.0.1") if listen is not None else ("", 0)
    return {BROKER_URL: f"http://{host_and_port(_OWN_HOSTS.get(host, host), port)}"} if port else {}


class _OwnRegistry:
    """The schema registry of a broker, in the broker's process; if it does not start, the broker stops."""

    def __init__(self, listen: str) -> None:
        """`ConfigError` if it could not listen, before the broker starts."""
        from spark_klog.wire.listening import bind, parse_listen

        bind(*parse_listen(listen, "--schema-registry", "127.0.0.1"), "--schema-registry").close()
        self._listen = listen
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.error: KlogError | None = None

    def start(self, broker: str) -> None:
        """Start it without waiting: the broker answers it from the thread that calls this."""
        self._thread = threading.Thread(target=self._serve, args=(broker,), name="klog-schema-registry", daemon=True)
        self._thread.start()

    def _serve(self, broker: str) -> None:
        from spark_klog.schema_registry import SchemaRegistry

        try:
            with SchemaRegistry({"bootstrap.servers": broker}, self._listen) as registry:
                self._started.set()
                click.echo(f"klog schema registry ready on {registry.url}")
                self._ended.wait()
        except KlogError as error:
            if not self._ended.is_set():
                self.error = error
                os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Stop it; a start that hangs ends with the process. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_REGISTRY_SECONDS if self._started.is_set() else _REGISTRY_START_SECONDS)


def _log_as(ctx: click.Context, log_format: str) -> None:
    if log_format == JSON:
        log_to_stderr(ctx.find_root().params["log_level"], log_format)


def _stop_after(task: Callable[[], None]) -> None:
    """Run a task, which reads stdin, in a thread, and stop this process when it ends."""

    def work() -> None:
        try:
            task()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=work, daemon=True).start()


def _read_stdin() -> None:
    while os.read(0, 4096):
        pass


@main.command(
    epilog="""\b
Examples:
  klog cluster --data-dir /tmp/klog --brokers 3
  klog cluster --data-dir /tmp/klog --zookeeper --listen 127.0.0.1:9092
  klog cluster --data-dir /tmp/klog --schema-registry 8081
"""
)
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the cluster: new, or that of an earlier one, which goes on.",
)
@click.option("--brokers", default=1, show_default=True, type=click.IntRange(1), help="Number of brokers.")
@click.option("--listen", metavar="HOST:PORT", help="Address of broker 0; the others use free ports of that host.")
@click.option("--zookeeper", is_flag=True, help="Start a ZooKeeper, too, from pyspark's jars.")
@click.option("--zookeeper-port", type=click.IntRange(1, 65535), help="Its port on 127.0.0.1; default: a free port.")
@click.option(
    "--schema-registry", metavar="HOST:PORT", help="Serve a schema registry, too (a port alone is one of 127.0.0.1)."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A broker setting; repeatable.")
@_log_format_option
@click.pass_context
def cluster(
    ctx: click.Context,
    data_dir: Path,
    brokers: int,
    listen: str | None,
    zookeeper: bool,
    zookeeper_port: int | None,
    schema_registry: str | None,
    settings: tuple[str, ...],
    log_format: str,
) -> None:
    """Run a cluster on this machine until SIGTERM or Ctrl-C."""
    from spark_klog.embedded import ClusterStartError, EmbeddedCluster

    if zookeeper_port is not None and not zookeeper:
        raise click.UsageError("--zookeeper-port needs --zookeeper")
    _log_as(ctx, log_format)
    with reading_arguments():
        made = EmbeddedCluster(
            *(brokers, zookeeper, data_dir, parse_settings(settings)),
            log_format=log_format,
            listen=listen,
            zookeeper_port=zookeeper_port,
            schema_registry=schema_registry or False,
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt), made as running:
            click.echo(f"klog cluster ready on {running.bootstrap_servers}")
            if running.zookeeper_connect:
                click.echo(f"zookeeper ready on {running.zookeeper_connect}")
            if running.schema_registry_url:
                click.echo(f"schema registry ready on {running.schema_registry_url}")
            _watch(running)
    except ClusterStartError as error:
        raise (WrongArguments(str(error)) if error._exit_code == 2 else error) from None


def _watch(cluster: EmbeddedCluster) -> None:
    """Report each process of the cluster that ends; never returns."""
    reported: set[str] = set()
    while True:
        for name, code in cluster.ended().items():
            if name not in reported:
                reported.add(name)
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                log = cluster.data_dir / f"{name.lower().replace(' ', '-')}.log"
                click.echo(f"klog: {name} ended with {how}; see {log}, and restart the cluster", err=True)
        time.sleep(_WATCH_SECONDS)


@main.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print what makes SHELL complete klog's commands and options.

    \b
    klog completion bash >> ~/.bashrc
    klog completion zsh >> ~/.zshrc
    klog completion fish > ~/.config/fish/completions/klog.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    try:
        click.echo(made(main, {}, "klog", "_KLOG_COMPLETE").source())
    except RuntimeError as error:  # of a bash that is too old
        raise ConfigError(str(error)) from None
