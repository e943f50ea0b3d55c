"""OpenLineage's client, by the settings of the Spark session or else by those of all programs that use the client.

Before others come those of OpenLineage's agent for Spark, which Airflow passes on: `spark.openlineage.disabled`, and
`spark.openlineage.transport.type`, `.url` and others of the transport. Then the client's own: OPENLINEAGE_DISABLED,
OPENLINEAGE__TRANSPORT__TYPE and others, the file `openlineage.yml`, OPENLINEAGE_URL.

A transport that Spark's settings name is used alone: a key that the environment has for another server is not sent to
this one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from openlineage.client import OpenLineageClient
from openlineage.client.transport import NoopTransport, Transport, get_default_factory
from openlineage.client.transport.noop import NoopConfig

from spark_klog.base.addresses import without_user
from spark_klog.errors import ConfigError, MissingPackage

_log = logging.getLogger(__name__)
_SETTINGS = "spark.openlineage."
_TRANSPORT = f"{_SETTINGS}transport."
#: The package by the module that a transport needs; the client brings the others.
_PACKAGES = {
    "confluent_kafka": "confluent-kafka",
    "boto3": "boto3",
    "google": "google-cloud-datacatalog-lineage",
}
#: What the agent calls otherwise than the client, by type.
_NAMES = {
    "http": {"headers": "custom_headers"},
    "kafka": {"topicName": "topic", "properties": "config"},
    "file": {"location": "log_file_path"},
    "composite": {"continueOnFailure": "continue_on_failure"},
    "console": {},
    "noop": {},
}


def open_client(conf: Mapping[str, str]) -> OpenLineageClient:
    """The client of a program with these Spark settings.

    Warns if nothing says where events go, as they go to a logger that shows none by default. `ConfigError` if settings
    are wrong, `MissingPackage` if the transport needs a package more.
    """
    if is_disabled(conf):
        return OpenLineageClient(transport=NoopTransport(NoopConfig()))
    try:
        names = [name for name in conf if name.startswith(_TRANSPORT)]
        if names:
            return OpenLineageClient(transport=_transport(conf, names))
        if os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() != "true":
            _check(_file())
        client = OpenLineageClient()
    except ConfigError:
        raise
    except Exception as error:  # of many kinds; its text may show settings
        _raise_if_missing(error)
        raise ConfigError(
            f"OpenLineage's client refuses its settings ({type(error).__name__}): check OPENLINEAGE_URL, "
            f"openlineage.yml, the variables that begin with OPENLINEAGE__ and the settings {_TRANSPORT}*"
        ) from None
    if client.transport.kind == "console" and not (client.config.transport or {}).get("type"):
        _log.warning(
            "nothing says where OpenLineage events go: they go to the logger openlineage.client.transport.console, at "
            "level INFO. Set OPENLINEAGE_URL, OPENLINEAGE_CONFIG, or %stype and %surl",
            *(_TRANSPORT, _TRANSPORT),
        )
    return client


def is_disabled(conf: Mapping[str, str]) -> bool:
    """Whether the session's settings switch lineage off."""
    return conf.get(f"{_SETTINGS}disabled", "").strip().lower() == "true"


def _file() -> Path | None:
    """The file that the client reads; `ConfigError` if OPENLINEAGE_CONFIG names none that can be read."""
    named = os.environ.get("OPENLINEAGE_CONFIG")
    if named:
        if not os.path.isfile(named) or not os.access(named, os.R_OK):
            raise ConfigError(f"OPENLINEAGE_CONFIG is {named}, which is no file that can be read")
        return Path(named)
    places = (Path("openlineage.yml"), Path("~/.openlineage/openlineage.yml").expanduser())
    return next((path for path in places if path.is_file() and os.access(path, os.R_OK)), None)


def _check(path: Path | None) -> None:
    """`ConfigError` if the file is no YAML, or the type or address of the transport is none."""
    if path is not None:
        _check_file(path)
    # with a transport that is given it only reads the settings
    transport = OpenLineageClient(transport=NoopTransport(NoopConfig())).config.transport or {}
    kind = transport.get("type")
    if kind is not None:
        _check_type(_origin("TYPE", path), kind)
    if kind in ("http", "async_http"):
        if transport.get("url"):
            _check_url(_origin("URL", path), transport["url"])
    elif kind is None and os.environ.get("OPENLINEAGE_URL"):
        _check_url("OPENLINEAGE_URL", os.environ["OPENLINEAGE_URL"])


def _check_file(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's text shows the line, which may have a secret
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(f"{path} is OpenLineage's settings, but no YAML{where}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is OpenLineage's settings, but can't be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} is OpenLineage's settings, but has no mapping: write 'transport:' and below it 'type:'"
        )


def _origin(name: str, path: Path | None) -> str:
    """What says a setting of the transport: variables come before the file."""
    for variable in (f"OPENLINEAGE__TRANSPORT__{name}", "OPENLINEAGE__TRANSPORT"):
        if variable in os.environ:
            suffix = "" if variable.endswith(name) else f", {name.lower()},"
            return f"{variable}{suffix}"
    return f"transport.{name.lower()} in {path}"


def _check_type(origin: str, kind: Any) -> None:
    known = getattr(get_default_factory(), "transports", {})
    if not isinstance(kind, str) or (kind not in known and "." not in kind):  # with dots it is a class
        raise ConfigError(f"{origin} is {kind!r}, which is no transport of OpenLineage: {', '.join(sorted(known))}")


def _check_url(origin: str, url: Any) -> None:
    scheme, separator, rest = str(url).strip().partition("://")
    if not scheme or not separator or not rest.strip("/"):
        raise ConfigError(f"{origin} is {without_user(str(url))!r}: write http://HOST:PORT")


def _transport(conf: Mapping[str, str], names: list[str]) -> Transport:
    """The transport that the agent's settings describe."""
    tree: dict[str, Any] = {}
    for name in sorted(names):
        *path, last = name.removeprefix(_TRANSPORT).split(".")
        if path[:1] == ["properties"]:  # of a Kafka producer, whose names have dots
            path, last = path[:1], ".".join([*path[1:], last])
        elif path[:1] == ["transports"] and path[2:3] == ["properties"]:
            path, last = path[:3], ".".join([*path[3:], last])
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{name} is set beside another setting that is its beginning")
        node[last] = conf[name]
    return get_default_factory().create(_config(tree, _TRANSPORT))


def _config(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Settings of the agent as the client has them."""
    kind = tree.get("type")
    names = _NAMES.get(str(kind))
    if names is None:
        given = f"is {kind!r}" if kind else "is missing"
        raise ConfigError(
            f"{prefix}type {given}: of Spark's settings klog takes {', '.join(sorted(_NAMES))}; for another transport "
            "give the listener a client"
        )
    config = {names.get(name, name): value for name, value in tree.items()}
    if kind == "http":
        if "url" not in config:
            raise ConfigError(f"{prefix}url is missing: write http://HOST:PORT")
        _check_url(f"{prefix}url", config["url"])
        timeout = config.pop("timeoutInMillis", None)
        if timeout is not None:
            config["timeout"] = _milliseconds(f"{prefix}timeoutInMillis", timeout) / 1000
    elif kind == "file":
        config["append"] = True
    elif kind == "kafka":
        producer = config.get("config") or {}
        config["config"] = {name: value for name, value in producer.items() if not name.endswith(".serializer")}
    elif kind == "composite":
        below = config.get("transports")
        if not isinstance(below, dict):
            raise ConfigError(f"{prefix}transports.NAME.type is missing")
        config["transports"] = {
            name: _config(inner, f"{prefix}transports.{name}.")
            for name, inner in below.items()
            if isinstance(inner, dict)
        }
        if "continue_on_failure" in config:
            config["continue_on_failure"] = str(config["continue_on_failure"]).strip().lower() == "true"
    return config


def _milliseconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: write a number of milliseconds") from None


def _raise_if_missing(error: BaseException) -> None:
    """`MissingPackage` if the transport has found a module missing."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            package = _PACKAGES.get(cause.name.partition(".")[0])
            if package is not None:
                raise MissingPackage(
                    f"OpenLineage's transport needs {package}, which is not installed: pip install {package}"
                ) from None
        cause = cause.__cause__ or cause.__context__
