"""Make the reference from the code's own definitions: `python docs/generate.py docs/reference/generated`.

The build calls it. The pages are committed, so that links to them work in a clone and on a forge.
What the code does not say is in reference_texts.py.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from reference_texts import CURES, OPTIONS, SETTINGS

import spark_klog
from spark_klog import errors
from spark_klog.base.settings import settings_of
from spark_klog.broker import metrics_page
from spark_klog.broker.security.config import SECURITY_SETTINGS
from spark_klog.broker.settings.config import BROKER_SETTINGS, PLACES
from spark_klog.broker.settings.described_settings import DOCUMENTATION
from spark_klog.broker.settings.log_settings import BROKER_LOG_SETTINGS, broker_name, setting_texts
from spark_klog.cli.main import main
from spark_klog.client import settings as client_settings
from spark_klog.client.consumer import settings as consumer_settings
from spark_klog.client.net.connection import LAST
from spark_klog.client.settings import LIBRDKAFKAS
from spark_klog.errors import ErrorCode, Remedy
from spark_klog.groups import lag
from spark_klog.load import follow
from spark_klog.log.config import LogConfig
from spark_klog.protocol import apis
from spark_klog.protocol.apis import END_TXN, FETCH, OFFSET_COMMIT, OFFSET_FETCH, TXN_OFFSET_COMMIT
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import OFFSETS_WITH_TOPIC_IDS
from spark_klog.protocol.tables.records import FETCH_WITH_TOPIC_IDS
from spark_klog.protocol.tables.transactions import FIRST_END_OF_TRANSACTIONS_2, FIRST_OF_TRANSACTIONS_2
from spark_klog.schemas.registry.settings import BROKER_URL
from spark_klog.security import settings as security_settings
from spark_klog.security.config import is_secret
from spark_klog.spark import listener, option_table
from spark_klog.spark.option_table import Use

_PACKAGE = Path(spark_klog.__file__).parent
#: Modules with errors of their own that users may see.
_WITH_ERRORS = (
    "spark_klog.embedded",
    "spark_klog.spark.write.exactly_once",
    "spark_klog.spark.write.exactly_once_driver",
    "spark_klog.spark.write.exactly_once_batch",
)
_ROOTS = (errors.KlogError, errors.ErrorWithFields)
#: Rooms that talk to brokers.
_CLIENTS = ("client", "classic", "mirror", "spark", "groups", "cli", "load", "restore", "ui")
#: Modules whose docstrings have a table of metrics, by what serves them.
METRICS = {
    "klog broker --metrics HOST:PORT": metrics_page,
    "klog groups lag --metrics HOST:PORT": lag,
    "ProgressListener(metrics=...)": listener,
    "jobs/batch_load.py --follow --metrics HOST:PORT": follow,
}
#: Defaults beyond which nothing is limited.
_UNLIMITED = {str((1 << 63) - 1), str((1 << 31) - 1)}
_REMEDIES = {
    Remedy.RETRY: "tries again",
    Remedy.REFRESH: "asks for fresh metadata and tries again",
    Remedy.FAIL: "raises it",
}


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *(part.strip("\n") for part in parts)]) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


def _default(value: object) -> str:
    if value is None or value is MISSING or value == "":
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "no limit" if text in _UNLIMITED else _code(text)


def _plain(text: str) -> str:
    """A docstring as Markdown in one line."""
    return re.sub(r"\s+", " ", inspect.cleandoc(text)).replace("<", "&lt;").replace("[", "\\[")


# Commands


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[str]:
    """A section for each command below this one."""
    context = click.Context(command, info_name=path[-1])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(found, (*path, name))
        return
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    yield f"## {' '.join(path)}"
    yield f"```\n{usage}\n```"
    yield _help(command.help or "")
    if command.epilog:
        yield _help(command.epilog)
    rows = [_option(option) for option in command.params if isinstance(option, click.Option) and not option.hidden]
    if rows:
        yield _table(("option", "default", ""), rows)


def _help(text: str) -> str:
    """click's help in Markdown: paragraphs after a line of \\b are kept as they are."""
    parts = []
    for part in inspect.cleandoc(text).split("\f")[0].split("\n\n"):
        literal = part.startswith("\b\n")
        parts.append(f"```\n{part[2:]}\n```" if literal else part.replace("<", "&lt;").replace("[", "\\["))
    return "\n\n".join(parts)


def _option(option: click.Option) -> tuple[str, ...]:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag or option.count else f" {option.make_metavar(click.Context(click.Command('klog')))}"
    default = option.default
    is_shown = not callable(default) and default not in (None, (), False) and type(default).__name__ != "Sentinel"
    return _code(names + value), _default(default) if is_shown else "", _plain(option.help or "")


def commands() -> str:
    return _page("Commands", "Every command has `--help`. " + _plain(main.help or ""), *_commands(main, ("klog",)))


# Settings


def _client_rows(items: Iterable[Field[Any]]) -> Iterator[tuple[str, ...]]:
    for item in sorted(items, key=lambda one: str(one.metadata["name"])):
        name, kind = item.metadata["name"], item.metadata["kind"].name
        default = item.default if kind not in ("isolation", "acks", "reset", "assignors") else None
        yield _code(name), kind, _default(default), SETTINGS.get(name, "")


def client_setting_names() -> list[str]:
    """Settings that all clients share."""
    return list(settings_of(client_settings.ClientConfig))


def client_settings_page() -> str:
    shared, own = settings_of(client_settings.ClientConfig), settings_of(consumer_settings.ConsumerConfig)
    names = (security_settings.SASL, security_settings.TLS, security_settings.TLS_DEFAULTS)
    security: dict[str, list[str]] = {one: [] for each in names for one in sorted(each)}
    for other, one in security_settings.OTHER_NAMES.items():
        security[one].append(other)
    ignored = sorted(client_settings._WITHOUT_EFFECT - own.keys() - client_settings.SERIALIZERS)
    refused = {**client_settings._REFUSED, **security_settings.REFUSED}
    head = ("setting", "type", "default", "")
    return _page(
        "Client settings",
        "Settings by Kafka's names. In Spark they have the prefix `kafka.`. Times are in milliseconds, sizes in bytes. "
        "A misspelt name is refused, with the nearest one. Those of keys and values, such as `value.deserializer`, are "
        "in [Consumer](../consumer.md#keys-and-values) and [Producer](../producer.md#keys-and-values); elsewhere they "
        "have no effect.",
        "## Of every client",
        _table(head, _client_rows(shared.values())),
        "## Of consumers",
        "In Spark they have no effect: a query's options say what to read.",
        _table(head, _client_rows(own.values())),
        "## TLS and SASL",
        "[Secure clusters](../../recipes/security/index.md) says what to set for which mechanism. A secret may be "
        "`env:NAME`, an environment variable, or `file:PATH`, a file's content, which each process reads by itself: "
        + ", ".join(map(_code, filter(is_secret, [*security, *security_settings.OTHER_NAMES])))
        + ".",
        _table(("setting", "other names"), ((_code(one), ", ".join(map(_code, security[one]))) for one in security)),
        "## Names of librdkafka",
        _table(("librdkafka's name", "is"), ((_code(one), _code(LIBRDKAFKAS[one])) for one in sorted(LIBRDKAFKAS))),
        "## Accepted without effect",
        "Settings of Kafka's clients that mean nothing here. A warning names those that are set.",
        ", ".join(map(_code, ignored)) + ".",
        "## Refused",
        _table(("setting, or how its name begins", "why"), ((_code(one), refused[one]) for one in sorted(refused))),
    )


def options_table(uses: Use) -> str:
    """The connector's options for these uses; neighbours that differ by their names alone share a row."""
    rows: list[list[str]] = []
    for name in option_table.names_for(uses):
        text, default = OPTIONS[name]
        shown = default if default is not None else _default(option_table.OPTIONS[name].default).strip("`")
        if rows and rows[-1][1:] == [shown, text]:
            rows[-1][0] += f", {name}"
        else:
            rows.append([name, shown, text])
    return _table(("option", "default", ""), ((name, shown.replace("_", r"\_"), text) for name, shown, text in rows))


def broker_settings_page() -> str:
    defaults = {name: item.default for name, item in BROKER_SETTINGS.items()}
    log_texts = setting_texts(LogConfig())
    of_logs = {broker_name(name): text for name, text in log_texts.items()}
    names = sorted({*defaults, *BROKER_LOG_SETTINGS, *SECURITY_SETTINGS, *PLACES, BROKER_URL})
    rows = ((_code(one), _default(defaults.get(one, of_logs.get(one))), DOCUMENTATION[one]) for one in names)
    topics = (
        (_code(one), _default(text), _code(broker_name(one) or ""), DOCUMENTATION[one])
        for one, text in log_texts.items()
    )
    return _page(
        "Settings of brokers and topics",
        "By Kafka's names, for `klog broker --set NAME=VALUE` and `--config FILE`. An embedded cluster keeps records "
        "for ever, and its groups do not wait for more members.",
        "## Brokers",
        "Names that end with `.minutes` and `.hours` are other units of the same setting in `.ms`.",
        _table(("setting", "default", ""), rows),
        "## Topics",
        "For `klog topics create --config NAME=VALUE` and `klog topics alter`. Without its own setting a topic has the "
        "broker's.",
        _table(("setting", "default", "broker's name", ""), topics),
    )


# Metrics, errors, protocol


def metrics() -> str:
    parts = []
    for title, module in METRICS.items():
        table = (inspect.getdoc(module) or "").partition("\n\n")[2]
        parts += [f"## {title}", table]
    return _page("Metrics", "Each of these serves `/metrics` for Prometheus.", *parts)


def public_errors() -> Iterator[type[errors.KlogError]]:
    """The errors that users may see, without the roots of the tree."""
    for module in (errors, *map(import_module, _WITH_ERRORS)):
        for value in vars(module).values():
            is_error = isinstance(value, type) and issubclass(value, errors.KlogError)
            if is_error and value.__module__ == module.__name__ and value not in _ROOTS:
                yield value


def error_rows() -> Iterator[tuple[str, ...]]:
    for kind in public_errors():
        where = "" if kind.__module__ == errors.__name__ else f" ({_code(kind.__module__)})"
        cause = _plain((kind.__doc__ or "").partition("\n\n")[0])
        yield _code(kind.__name__) + where, _code(kind.condition), cause, CURES.get(kind.__name__, "")


def errors_page() -> str:
    codes = ((str(code.value), code.name, _REMEDIES[code.remedy]) for code in ErrorCode if code)
    return _page(
        "Errors",
        "Exceptions are in `spark_klog.errors` unless said otherwise. Text names what is wrong, where, and what to do; "
        "[Troubleshooting](../../troubleshooting.md) goes by what Spark and commands print. In Spark the "
        "text begins with the condition.",
        _table(("class", "condition", "cause", "cure"), error_rows()),
        "## Error codes of the protocol",
        "A code that the client does not meet with another attempt becomes a `ProtocolError`, whose `code` it is.",
        _table(("code", "name", "the client"), codes),
    )


def _spoken() -> set[str]:
    """Names of the APIs' constants that the client's rooms use."""
    constants = {name for name, value in vars(apis).items() if isinstance(value, Api)}
    used = set()
    for room in _CLIENTS:
        for path in (_PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name | ast.Attribute):
                    used.add(node.id if isinstance(node, ast.Name) else node.attr)
    return constants & used


#: Versions that callers of the client ask for, beyond those that it takes otherwise.
_ASKED_FOR = {
    FETCH.key: FETCH_WITH_TOPIC_IDS,
    OFFSET_COMMIT.key: OFFSETS_WITH_TOPIC_IDS,
    OFFSET_FETCH.key: OFFSETS_WITH_TOPIC_IDS,
    END_TXN.key: FIRST_END_OF_TRANSACTIONS_2,
    TXN_OFFSET_COMMIT.key: FIRST_OF_TRANSACTIONS_2,
}


def protocol() -> str:
    constants = {value.key: name for name, value in vars(apis).items() if isinstance(value, Api)}
    spoken = _spoken()
    rows = []
    for key, api in apis.BY_KEY.items():
        first, last = api.versions.first, api.versions.last
        own = f"{first}-{max(LAST.get(key, last), _ASKED_FOR.get(key, 0))}" if constants[key] in spoken else ""
        rows.append((str(key), api.name, f"{first}-{last}", own))
    return _page(
        "The protocol: APIs and versions",
        "The broker serves all versions of the tables in `spark_klog/protocol/tables/`. The client asks the broker "
        "(ApiVersions) and takes the highest version that both speak: it has no use for the last ones of some APIs.",
        _table(("key", "API", "versions served", "versions spoken"), rows),
        "## KIPs that the code names",
        _table(("KIP", "where"), _kips()),
    )


def _kips() -> Iterator[tuple[str, ...]]:
    where: dict[int, list[str]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        for number in sorted({int(one) for one in re.findall(r"KIP-(\d+)", path.read_text())}):
            where.setdefault(number, []).append(_code(path.relative_to(_PACKAGE)))
    for number in sorted(where):
        more = len(where[number]) - 3
        yield f"KIP-{number}", ", ".join(where[number][:3]) + (f" and {more} more" if more > 0 else "")


#: What makes each page, by its name.
PAGES: dict[str, Callable[[], str]] = {
    "broker-settings.md": broker_settings_page,
    "client-settings.md": client_settings_page,
    "commands.md": commands,
    "errors.md": errors_page,
    "metrics.md": metrics,
    "protocol.md": protocol,
}

#: Pages with a table of options between two comments, and the options' uses.
TABLES = {"reading.md": Use.READ, "writing.md": Use.WRITE}
_MADE = re.compile("(?<=<!-- made by docs/generate.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_table(page: str, text: str) -> str:
    """The text of a page with its table of options as it is now."""
    return _MADE.sub(lambda _: f"\n{options_table(TABLES[page])}\n\n", text, count=1)


def generate(folder: Path) -> None:
    """Write the pages into `folder`, and the tables of options into the pages above it that have one.

    Pages that have not changed are left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {folder / name: make() for name, make in PAGES.items()}
    made |= {
        path: with_table(path.name, path.read_text()) for name in TABLES if (path := folder.parent / name).exists()
    }
    for path, text in made.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
