"""`klog schemas`: the schemas of any registry with Confluent's REST API."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from difflib import unified_diff
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from spark_klog.base.names import OF_REGISTRY, ROW_FORMATS, Format
from spark_klog.cli.clusters import ChosenCluster, client_options
from spark_klog.cli.foreign import CommandGroup
from spark_klog.cli.output import WrongArguments, escaped, print_lines, say
from spark_klog.cli.schema_registry import ChosenRegistry, registry_options
from spark_klog.errors import ConfigError, MissingPackage, RegistryError, SchemaError
from spark_klog.schemas.registry.schemas import LEVELS

if TYPE_CHECKING:
    from spark_klog.schemas.registry.client import RegistryClient
    from spark_klog.schemas.registry.schemas import Reference, Schema, Version

_DEFAULT_URL = "http://127.0.0.1:8081"
#: A person waits.
_DEADLINE_MS = "15000"
_ENDINGS = {".avsc": "avro", ".proto": "protobuf", ".json": "json-schema"}


def _registry_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands of the group; the function gets `registry` and `as_json`."""

    @registry_options
    @client_options
    @click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
    @wraps(function)
    def command(*args: Any, registry: ChosenRegistry, cluster: ChosenCluster, **others: Any) -> Any:
        from spark_klog.schemas.registry.client import RegistryClient
        from spark_klog.schemas.registry.settings import registry_config

        client = cluster.client_settings()
        chosen = registry.settings(cluster, client) or ChosenRegistry(_DEFAULT_URL).settings(cluster, client)
        assert chosen is not None  # it has a URL
        settings = {"retries.deadline.ms": _DEADLINE_MS} | chosen.settings
        with RegistryClient(registry_config(settings, OF_REGISTRY, client)) as asked:
            return function(*args, registry=asked, **others)

    return command


@click.group(cls=CommandGroup)
def schemas() -> None:
    """List, show, register, check, compare and delete the schemas of a registry.

    Any with Confluent's REST API; klog schema-registry is one. By default that at http://127.0.0.1:8081.
    """


@schemas.command(
    "list",
    epilog="""\b
Examples:
  klog schemas list -r http://registry:8081
  klog schemas list orders- --long
  klog schemas list --json | jq -r .subject
""",
)
@click.argument("prefix", default="")
@click.option("--long", "-l", "is_long", is_flag=True, help="Ask for the latest version of each, its id and format.")
@click.option("--deleted", is_flag=True, help="Include subjects that are deleted, and not for good.")
@_registry_options
def list_(prefix: str, is_long: bool, deleted: bool, registry: RegistryClient, as_json: bool) -> None:
    """List subjects: all, or those that begin with PREFIX."""
    subjects = sorted(registry.subjects(prefix, deleted=deleted))
    if not is_long:
        for subject in subjects:
            say(as_json, {"subject": subject}, escaped(subject))
        return
    lines = []
    for subject in subjects:
        try:
            latest = registry.latest(subject)
        except RegistryError as error:
            if error.status != 404:
                raise
            lines.append({"subject": subject, "version": None, "id": None, "type": None, "compatibility": None})
            continue  # deleted, maybe just now
        level = registry.compatibility(subject)
        lines.append({**_line(latest), "compatibility": level})
    print_lines(as_json, lines, ("subject", "version", "id", "type", "compatibility"))


@schemas.command(
    epilog="""\b
Examples:
  klog schemas versions orders-value
"""
)
@click.argument("subject")
@_registry_options
def versions(subject: str, registry: RegistryClient, as_json: bool) -> None:
    """List the versions of SUBJECT, their ids and formats."""
    lines = [_line(registry.version(subject, number)) for number in registry.versions(subject)]
    print_lines(as_json, lines, ("version", "id", "type"))


def _version(text: str) -> int | None:
    """A version's number, None of the latest."""
    if text == "latest":
        return None
    if not text.isdecimal() or not 0 < int(text[:10]) < 1 << 31:
        raise click.BadParameter(f"{text!r} is neither a version from 1 on nor latest")
    return int(text)


@schemas.command(
    epilog="""\b
Examples:
  klog schemas show orders-value > order.avsc      the latest version
  klog schemas show orders-value 3 --json          with its id, references and compatibility level
  klog schemas show --id 42 --json | jq .versions
"""
)
@click.argument("subject", required=False)
@click.argument("version", type=_version, required=False)
@click.option("--id", "schema_id", type=click.IntRange(0), help="The schema with this id.")
@_registry_options
def show(
    subject: str | None, version: int | None, schema_id: int | None, registry: RegistryClient, as_json: bool
) -> None:
    """Print the schema of SUBJECT, its latest version or VERSION: a number, or latest."""
    if (subject is None) == (schema_id is None):
        raise click.UsageError("give SUBJECT, or --id")
    if schema_id is not None:
        try:
            schema = registry.schema(schema_id)
        except SchemaError as error:
            raise SchemaError(f"schema id {schema_id}: {error}") from None
        line: dict[str, Any] = {"id": schema_id, **_schema_fields(schema)}
        if as_json:
            uses = registry.uses(schema_id)
            line["versions"] = [{"subject": name, "version": number} for name, number in uses]
    else:
        assert subject is not None
        registered = registry.latest(subject) if version is None else registry.version(subject, version)
        schema = registered.schema
        line = {**_line(registered), **_schema_fields(schema)}
        if as_json:
            line |= {"guid": registered.guid and str(registered.guid), "compatibility": registry.compatibility(subject)}
    say(as_json, line, escaped(_pretty(schema), has_lines=True))


def _not_empty(_: click.Context, option: click.Parameter, value: str) -> str:
    if not value:
        raise click.BadParameter("it is empty: name a subject, such as TOPIC-value", param=option)
    return value


_subject_option = click.option(
    "--subject",
    required=True,
    metavar="SUBJECT",
    callback=_not_empty,
    help="Of a topic's values: TOPIC-value.",
)


def _schema_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add FILE, --type, --reference and --normalize; the function gets `schema` and `normalize`."""

    @click.argument("file", type=click.File("r", encoding="utf-8"), default="-")
    @click.option(
        "--type",
        "-t",
        "kind",
        type=click.Choice(ROW_FORMATS),
        help="Default: by the file's name, .avsc, .proto or .json; else avro.",
    )
    @click.option(
        "--reference",
        "references",
        multiple=True,
        metavar="NAME=SUBJECT:VERSION",
        help="A schema that this one uses, by the name that it has here; repeatable.",
    )
    @click.option("--normalize", is_flag=True, help="Make two schemas one that differ in order and notation only.")
    @wraps(function)
    def command(*args: Any, file: Any, kind: Format | None, references: tuple[str, ...], **others: Any) -> Any:
        from spark_klog.schemas.registry.schemas import Schema

        used = tuple(map(_reference, references))
        ending = Path(file.name).suffix if isinstance(file.name, str) else ""
        try:
            text = file.read()
        except UnicodeDecodeError:
            raise WrongArguments(f"{file.name} is not UTF-8") from None
        if not text.strip():
            raise WrongArguments(f"{file.name} is empty: it must hold a schema")
        schema = Schema(text, kind or cast("Format", _ENDINGS.get(ending, "avro")), used)
        return function(*args, schema=schema, **others)

    return command


@schemas.command(
    epilog="""\b
Examples:
  klog schemas register order.avsc --subject orders-value
  klog schemas register order.proto --subject orders-value --reference money.proto=money:1
  klog schemas show orders-value -r http://old:8081 | klog schemas register --subject orders-value
"""
)
@_schema_options
@_subject_option
@_registry_options
def register(schema: Schema, subject: str, normalize: bool, registry: RegistryClient, as_json: bool) -> None:
    """Make the schema in FILE, or stdin, a version of a subject, if it is none yet."""
    schema_id = registry.register(subject, schema, normalize=normalize)
    version = registry.version_of(subject, schema, normalize=normalize)
    line = {"subject": subject, "version": version, "id": schema_id}
    say(as_json, line, f"{escaped(subject)} version {version} has id {schema_id}")


@schemas.command(
    epilog="""\b
Examples:
  klog schemas check order.avsc --subject orders-value
  klog schemas check order.avsc --subject orders-value --version 1 --json | jq -r '.reasons[]'
"""
)
@_schema_options
@_subject_option
@click.option("--version", type=click.IntRange(1), help="Compare with this one, not with those that the level names.")
@_registry_options
def check(
    schema: Schema, subject: str, version: int | None, normalize: bool, registry: RegistryClient, as_json: bool
) -> None:
    """Check whether the schema in FILE, or stdin, may be a subject's next version: exit code 1 if not.

    By the subject's compatibility level, as when it is registered. Nothing is registered.
    """
    from spark_klog.registry.differences import in_words
    from spark_klog.schemas.registry.client import NOT_THERE

    number = None if version is None else str(version)
    is_new = False
    try:
        reasons = registry.incompatibilities(subject, schema, number, normalize=normalize)
        is_new = not reasons and version is None and not _has_versions(registry, subject)
    except RegistryError as error:
        if error.code not in NOT_THERE or version is not None:
            raise
        reasons, is_new = [], True
    level = registry.compatibility(None if is_new else subject)
    line = {"subject": subject, "level": level, "compatible": not reasons, "new": is_new, "reasons": reasons}
    if is_new:
        text = f"{subject} has no version yet: this may be its first"
    elif not reasons:
        text = f"compatible with {subject} ({level})"
    else:
        # what else there is names the version that it was compared with
        told = [in_words(reason) for reason in reasons if reason.startswith("{errorType")] or reasons
        text = "\n  ".join([f"not compatible with {subject} ({level}):", *told])
    say(as_json, line, escaped(text, has_lines=True))
    if reasons:
        sys.exit(1)


def _has_versions(registry: RegistryClient, subject: str) -> bool:
    from spark_klog.schemas.registry.client import NOT_THERE

    try:
        return bool(registry.versions(subject))
    except RegistryError as error:
        if error.code not in NOT_THERE:
            raise
        return False


@schemas.command(
    epilog="""\b
Examples:
  klog schemas diff orders-value                   the latest version and the one before it
  klog schemas diff orders-value 2                 version 2 and the latest
  klog schemas diff orders-value 1 3 --json | jq '.changes[]'
"""
)
@click.argument("subject")
@click.argument("first", metavar="[V1]", type=click.IntRange(1), required=False)
@click.argument("second", metavar="[V2]", type=click.IntRange(1), required=False)
@_registry_options
def diff(subject: str, first: int | None, second: int | None, registry: RegistryClient, as_json: bool) -> None:
    """Print what changed in SUBJECT from version V1 to V2.

    Which fields came, went and changed; which levels of compatibility hold, those that are transitive against all
    versions up to V1; and the two texts, line by line.
    """
    from spark_klog.registry.differences import changes, in_words

    numbers = sorted(registry.versions(subject))
    second = second or numbers[-1]
    if first is None:
        earlier = [number for number in numbers if number < second]
        if not earlier:
            raise ConfigError(f"{subject} has no version before {second}: there is nothing to compare")
        first = earlier[-1]
    old, new = registry.version(subject, first), registry.version(subject, second)
    references = registry.references(old.schema), registry.references(new.schema)
    names = [f"{subject} version {side.version} (id {side.id})" for side in (old, new)]
    before, after = (_pretty(side.schema).splitlines() for side in (old, new))
    lines = list(unified_diff(before, after, names[0], names[1], lineterm=""))
    changed = None
    levels: dict[str, list[str]] | None = None
    unknown = None
    if old.schema.format != new.schema.format:
        unknown = f"version {first} is {old.schema.format}, version {second} is {new.schema.format}"
    else:
        try:
            changed = changes(new.schema.format, old.schema.text, new.schema.text, *references)
            levels = _levels(registry, subject, old, new, [number for number in numbers if number < first])
        except MissingPackage as error:
            unknown = str(error)
        except ValueError as error:  # of a schema that the registry took before there were rules
            unknown = str(error)
    if as_json:
        line = {
            "subject": subject,
            "from": first,
            "to": second,
            "changes": None if changed is None else [change._asdict() for change in changed],
            "compatibility": None if levels is None else {level: not why for level, why in levels.items()},
            "reasons": levels,
            "diff": lines,
        }
        click.echo(json.dumps(line))
        return
    head = [f"{names[0]} -> version {second} (id {new.id})"]
    if unknown is not None:
        head.append(f"not compared: {unknown}")
    if changed is not None:
        head += [f"  {one}" for one in changed] or ["  no field is another one"]
    for level, reasons in (levels or {}).items():
        why = f"no: {in_words(reasons[0])}" if reasons else "yes"
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        head.append(f"{level:20} {why}{more}")
    click.echo(escaped("\n".join([*head, "", *lines]) if lines else "\n".join(head), has_lines=True))


def _levels(
    registry: RegistryClient, subject: str, old: Version, new: Version, before: list[int]
) -> dict[str, list[str]]:
    """Why each level does not hold between two versions, and those before the first."""
    from spark_klog.registry.differences import incompatibilities

    earlier = [old.schema]
    for number in reversed(before):
        schema = registry.version(subject, number).schema
        if schema.format == new.schema.format:
            earlier.append(schema)
    texts = [(schema.text, registry.references(schema)) for schema in earlier]
    return incompatibilities(new.schema.format, texts, new.schema.text, registry.references(new.schema))


@schemas.command(
    epilog="""\b
Examples:
  klog schemas delete orders-value --version 3 --yes
  klog schemas delete orders-value --yes && klog schemas delete orders-value --permanent --yes
"""
)
@click.argument("subject")
@click.option("--version", type=click.IntRange(1), help="Only this version.")
@click.option(
    "--permanent", is_flag=True, help="For good: of what was deleted before, so that no id is known any more."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_registry_options
def delete(
    subject: str, version: int | None, permanent: bool, yes: bool, registry: RegistryClient, as_json: bool
) -> None:
    """Delete SUBJECT, or a version of it. Records of these schemas can be read until they are deleted for good."""
    what = subject if version is None else f"version {version} of {subject}"
    if not yes:
        end = " for good: records of it can't be read any more" if permanent else ""
        click.confirm(f"Delete {escaped(what)}{end}?", abort=True, err=True)
    numbers = registry.delete(subject, None if version is None else str(version), permanent=permanent)
    versions = f"version{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    line = {"subject": subject, "versions": numbers, "permanent": permanent}
    say(as_json, line, f"{escaped(subject)}: {versions} deleted{' for good' if permanent else ''}")


@schemas.command(
    epilog="""\b
Examples:
  klog schemas config                              the level of subjects without one of their own
  klog schemas config orders-value --compatibility FULL_TRANSITIVE
  klog schemas config orders-value --reset
"""
)
@click.argument("subject", required=False)
@click.option("--compatibility", "level", type=click.Choice(LEVELS, case_sensitive=False), help="Set the level.")
@click.option("--reset", is_flag=True, help="Take back what was set.")
@_registry_options
def config(subject: str | None, level: str | None, reset: bool, registry: RegistryClient, as_json: bool) -> None:
    """Print or set the compatibility level of SUBJECT, or of all subjects without one of their own."""
    if level is not None and reset:
        raise click.UsageError("give only one of --compatibility and --reset")
    if level is not None:
        registry.set_compatibility(subject, level)
    elif reset:
        registry.reset_compatibility(subject)
    held = registry.compatibility(subject)
    name = "all other subjects" if subject is None else escaped(subject)
    say(as_json, {"subject": subject, "compatibility": held}, f"{name}: {held}")


def _line(version: Version) -> dict[str, Any]:
    return {
        "subject": version.subject,
        "version": version.version,
        "id": version.id,
        "type": version.schema.format,
    }


def _schema_fields(schema: Schema) -> dict[str, Any]:
    return {
        "type": schema.format,
        "references": [reference._asdict() for reference in schema.references],
        "schema": schema.text,
    }


def _pretty(schema: Schema) -> str:
    """The text in lines, without a line break at its end."""
    if schema.format != "protobuf":
        try:
            return json.dumps(json.loads(schema.text), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # what the registry has may be anything
    return schema.text.rstrip("\n")


def _reference(text: str) -> Reference:
    from spark_klog.schemas.registry.schemas import Reference

    name, _, rest = text.rpartition("=")
    subject, _, version = rest.rpartition(":")
    if not name or not subject or not (version.isascii() and version.isdecimal()):
        raise click.UsageError(f"--reference {text}: must be NAME=SUBJECT:VERSION")
    return Reference(name, subject, int(version))
