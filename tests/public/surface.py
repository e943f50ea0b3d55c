"""The lines of the text files: what users may depend on, as the code has it now.

Tables of settings, commands and metrics are those of docs/generate.py without their texts, which may change.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import click
import pytest

from spark_klog import errors, pytest_plugin
from spark_klog.base.names import OF_REGISTRY, ROW_FORMATS
from spark_klog.base.settings import settings_of
from spark_klog.classic import settings as classic_settings
from spark_klog.classic.settings import ProducerConfig
from spark_klog.cli.main import main
from spark_klog.cli.output import INTERRUPTED
from spark_klog.client import serialization, settings as client_settings
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.settings import ClientConfig
from spark_klog.schemas.registry import settings as registry_settings
from spark_klog.security.config import is_secret
from spark_klog.spark.option_table import OPTIONS, Use
from spark_klog.spark.read import ranges
from spark_klog.spark.read.source import KlogDataSource
from tests.support.papers.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import generate

#: Modules that users import from: the names in their `__all__`.
MODULES = (
    "spark_klog",
    "spark_klog.aio",
    "spark_klog.broker.faults",
    "spark_klog.classic",
    "spark_klog.client",
    "spark_klog.embedded",
    "spark_klog.load",
    "spark_klog.schema_registry",
    "spark_klog.schemas",
    "spark_klog.schemas.registry.client",
    "spark_klog.schemas.registry.settings",
    "spark_klog.spark.decisions",
    "spark_klog.spark.lineage",
    "spark_klog.spark.listener",
    "spark_klog.spark.tracing",
    "spark_klog.tables",
    "spark_klog.tracing",
    "spark_klog.testing",
)
#: Members of public classes that other rooms of the package call: they are not for users.
_OF_ROOMS = {
    "Admin": "exclusive make same_coordinators",
    "Consumer": "expect make poll_chunk",
    "ErrorAnswer": "number",
    "Fault": "is_about waits_for_records",
    "KafkaStream": "consumed drop_released fail is_full put",
    "LineageListener": "onQueryIdle onQueryProgress onQueryStarted onQueryTerminated",
    "Producer": "abort finish_at_exit of_cluster record_rows refresh send_rows transaction_under_way unknown",
    "ProgressListener": "onQueryIdle onQueryProgress onQueryStarted onQueryTerminated",
    "TracingListener": "onQueryIdle onQueryProgress onQueryStarted onQueryTerminated",
    "RegistryClient": "begin or_before",
}
#: Programs that stand beside `klog`, by the files that hold them.
JOBS = ("batch_load", "mirror", "restore")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_ROW = re.compile(r"(?<!\\)\|")


# Names


def python_lines() -> Iterator[str]:
    """Names with their signatures: functions, classes and what those have, errors, and pytest's."""
    for name in MODULES:
        module = importlib.import_module(name)
        for public in sorted(module.__all__):
            yield from _of_value(f"{name}.{public}", getattr(module, public))
    for kind in generate.public_errors():
        if kind.__module__ not in MODULES:
            yield from _of_value(f"{kind.__module__}.{kind.__name__}", kind)
    causes = (ranges.RETENTION, ranges.TRUNCATED, ranges.RECREATED, ranges.DELETED, ranges.NOT_YET, ranges.UNSUBSCRIBED)
    for cause in causes:
        yield f"spark_klog.errors.DataLossError: condition {errors.DataLossError('', cause).condition}"
    yield f'format("{KlogDataSource.name()}")'
    plugin = _PytestNames()
    pytest_plugin.pytest_addoption(plugin)  # type: ignore[arg-type]
    pytest_plugin.pytest_configure(plugin)  # type: ignore[arg-type]
    yield from plugin.lines
    yield from (f"pytest fixture {name}" for name in sorted(pytest_plugin._FIXTURES))


def _of_value(name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield f"{name} = {value!r}"
        return
    if not isinstance(value, type):
        yield f"{name}{_signature(value)}"
        return
    is_error = issubclass(value, errors.KlogError)
    bases = "".join(f" < {base.__name__}" for base in value.__bases__ if base is not object)
    has_own = not is_error or "__init__" in vars(value)
    condition = f", condition {value.condition}" if is_error and value.condition else ""
    yield f"{name}{_signature(value) if has_own else ''}{bases}{condition}"
    if issubclass(value, Enum):
        yield from (f"{name}.{each.name} = {each.value!r}" for each in value)
    internal = {"condition", "is_by_broker", "is_unsent", *_OF_ROOMS.get(value.__name__, "").split()}
    members = (each for kind in value.__mro__ if kind.__module__.startswith("spark_klog") for each in vars(kind))
    internal |= inspect.signature(value).parameters.keys() if has_own and _signature(value) else set()
    for member in sorted({each for each in members if not each.startswith("_")} - internal):
        yield _member(f"{name}.{member}", inspect.getattr_static(value, member))


def _member(name: str, value: Any) -> str:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if inspect.isfunction(value):
        return f"{name}{_signature(value)}"
    return name  # a property, or a field


def _signature(value: Any) -> str:
    """The parameters with the types that the code gives them, and what a function returns."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a subclass of dict
        return ""
    parameters = [
        each.replace(annotation=_Plain(each.annotation))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    returns = inspect.Signature.empty if isinstance(value, type) else _Plain(signature.return_annotation)
    return _ADDRESS.sub("", str(inspect.Signature(parameters, return_annotation=returns)))


class _Plain:
    """A type that is shown as the code has it, without quotes."""

    def __init__(self, annotation: Any) -> None:
        self._text = getattr(annotation, "__forward_arg__", annotation)

    def __repr__(self) -> str:
        return str(self._text)


class _PytestNames:
    """Stands for pytest's parser and configuration, and notes what the plugin adds to them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stash = pytest.Stash()

    def getgroup(self, *_: str) -> _PytestNames:
        return self

    def addoption(self, name: str, **_: Any) -> None:
        self.lines.append(f"pytest option {name}")

    def addini(self, name: str, _text: str, kind: str = "string", default: str | None = None) -> None:
        self.lines.append(f"pytest setting {name}, {kind}, default {default}")

    def addinivalue_line(self, _: str, line: str) -> None:
        self.lines.append(f"pytest marker {line.partition(':')[0]}")


# Options and settings


def option_lines() -> Iterator[str]:
    """The connector's own options: what each is for, its default, its other names."""
    for row in OPTIONS.values():
        uses = ", ".join(str(use.name).lower() for use in Use if use & row.uses and use.value.bit_count() == 1)
        more = (f"; {what} {', '.join(names)}" for what, names in (("only", row.of), ("also", row.others)) if names)
        yield f"{row.name}: {row.kind.name}, default {row.default}; for {uses}{''.join(more)}"


def settings_lines() -> Iterator[str]:
    yield from _client_lines()
    yield from _other_clients()
    names = (*client_settings._NAMES, *(f"{OF_REGISTRY}{name}" for name in registry_settings.NAMES))
    for name in sorted(filter(is_secret, names)):
        yield f"{name}: may be env:NAME, an environment variable, or file:PATH, a file, which each process reads"


def _other_clients() -> Iterator[str]:
    """Settings of clients that the page of clients' settings has in words, or not at all: other pages have them."""
    for name in sorted(client_settings._ELSEWHERE | {"security.protocol"}):
        yield f"Connections and groups: {name}"
    values = ", ".join((*ROW_FORMATS, *serialization.PLAIN))
    for name in sorted(client_settings.SERIALIZERS):
        yield f"Keys and values: {name} is {values}, a Java class, a function or an object of others"
    for name in sorted(client_settings.OF_ROWS):
        yield f"Keys and values: {name}"
    for name in sorted(client_settings.OF_WRITTEN_ROWS):
        yield f"Keys and values of producers: {name}"
    defaults = {name: field.default for name, field in settings_of(registry_settings.RegistryConfig).items()}
    for name in sorted(registry_settings.NAMES):
        default = f" | {defaults[name]}" if name in defaults else ""
        short = ", also without the prefix" if name.startswith(client_settings.REGISTRY_LOGINS) else ""
        yield f"Schema registry: {OF_REGISTRY}{name}{default}{short}"
    for title, config in (("ConsumerConnector", classic_settings.ConnectorConfig), ("Producer", ProducerConfig)):
        for name, field in sorted(settings_of(config).items()):
            default = field.default if isinstance(field.default, str | int | float | None) else ""
            yield f"{title} of spark_klog.classic: {name} | {field.metadata['kind'].name} | {default}".rstrip("| ")


def _client_lines() -> Iterator[str]:
    for config in (ClientConfig, ConsumerConfig):
        for name, field in settings_of(config).items():
            if field.metadata["kind"].name in ("isolation", "acks", "reset", "assignors"):  # as pages say in words
                yield f"{name} is {field.default} by default"
    for page in (generate.client_settings_page(), generate.broker_settings_page()):
        yield from _rows(page)
    for line in generate.client_settings_page().splitlines():
        if line.startswith("`"):
            yield f"Accepted without effect: {line}"


def metric_lines() -> Iterator[str]:
    return _rows(generate.metrics())


def _rows(page: str) -> Iterator[str]:
    """The rows of a page's tables without their last cell, the text; each names the heading above it."""
    heading = ""
    lines = page.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| ") and not any(each.startswith("| ---") for each in lines[number : number + 2]):
            cells = [cell.strip().replace("\\|", "|").strip("`") for cell in _ROW.split(line)[1:-1]]
            yield f"{heading}: " + " | ".join(cells[:-1] if len(cells) > 2 else cells).rstrip(" |")


# Commands


def command_lines() -> Iterator[str]:
    """Each command with its arguments, options and exit codes."""
    yield f"klog: exits with 0 (done), 1 (an error), 2 (wrong arguments or configuration), {INTERRUPTED} (Ctrl-C)"
    yield from _options(main, "klog")
    for path, command in commands().items():
        yield from _options(command, path)


def commands() -> dict[str, click.Command]:
    """The commands that do something, by how they are called; the jobs, too."""
    jobs = {f"{name}.py": _job(name) for name in JOBS}
    return dict(_below(main, "klog")) | jobs


def _below(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        yield from _below(below, f"{path} {name}")


def _job(name: str) -> click.Command:
    spec = spec_from_file_location(f"job_{name}", ROOT / "jobs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    command: click.Command = module.main
    return command


def _options(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"{path}: {' '.join(command.collect_usage_pieces(context))}"
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            name, default, _ = generate._option(option)
            name, default = name.strip("`"), default.strip("`")
            yield f"{path}: {name}{default and f', default {default}'}{', repeatable' if option.multiple else ''}"
    if codes := sorted(_exit_codes(command.callback) - {0, 1, 2, INTERRUPTED}):
        yield f"{path}: exits also with {', '.join(map(str, codes))}"


def _exit_codes(function: Any) -> set[int]:
    """The codes that a command ends with by its own code, or those of a job: of all its module."""
    function = inspect.unwrap(function)
    known = function.__globals__
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    codes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "SystemExit"):
            for value in node.args:
                if isinstance(value, ast.Call):  # `exit_code` of a job
                    codes |= {known[name] for name in ("DONE_WITH_BAD", "NOTHING_NEW") if name in known}
                else:
                    codes.add(eval(ast.unparse(value), known))
    return codes
