"""Named clusters: the settings of a cluster from a file, so that programs say "prod" and neither hosts nor secrets.

~/.config/klog/clusters.toml, or the file that KLOG_CONFIG names; a table for each cluster, with Kafka's names:

    [prod]
    bootstrap.servers = ["kafka-1:9093", "kafka-2:9093"]
    security.protocol = "SASL_SSL"
    sasl.mechanism = "SCRAM-SHA-512"
    sasl.username = "loader"
    sasl.password = "env:KAFKA_PASSWORD"        # or "file:/run/secrets/kafka"

A reference to a secret stays one until a connection is made (`security/settings/references.py`).
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spark_klog.client.security.settings.secrets import Settings
from spark_klog.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VARIABLE = "KLOG_CONFIG"


def named_cluster(name: str) -> Settings:
    """The settings of a cluster by Kafka's names; `ConfigError` if the file or the cluster is not there, or malformed.

    Secrets may still be references, which `client_config` resolves.
    """
    path = _path()
    clusters = _read(path)
    if name not in clusters:
        close = difflib.get_close_matches(name, clusters, 1)
        there = f"it has {', '.join(sorted(clusters))}" if clusters else "it has none"
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"no cluster {name!r} in {path}: {there}{hint}")
    table = clusters[name]
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} must be a table of settings: [{name}]")
    return Settings(_flat(table, f"{path}: cluster {name}: "))


def _path() -> Path:
    given = os.environ.get(_VARIABLE)
    if given:
        return Path(given).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path("~/.config").expanduser()) / "klog" / "clusters.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return found
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}, which defines clusters: write it, or set the environment variable {_VARIABLE} to "
            "another file, before Spark starts"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}, which defines clusters, can't be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not TOML: it is not UTF-8") from None


def _flat(table: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a table; TOML reads `sasl.password` without quotes as tables within tables."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _flat(value, where, f"{name}.")
        elif isinstance(value, bool):
            yield name, str(value).lower()
        elif isinstance(value, str | int):
            yield name, str(value)
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            yield name, ",".join(value)
        else:
            raise ConfigError(f"{where}{name} must be a text, a whole number, true, false or a list of texts")
