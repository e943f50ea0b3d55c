"""References in place of secrets: "env:NAME", an environment variable, and "file:PATH", a file's content.

They are resolved where a connection is made, on executors too: plans, options and what Spark ships have the reference.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from spark_klog.client.security.settings.secrets import Settings, is_secret
from spark_klog.errors import ConfigError

_VARIABLE, _FILE = "env:", "file:"


def resolved(settings: Mapping[str, str], prefix: str = "") -> Settings:
    """The settings with the values of secrets; `ConfigError` names a reference to nothing. `prefix` is for messages."""
    return Settings(
        {name: dereferenced(prefix + name, value) if is_secret(name) else value for name, value in settings.items()}
    )


def dereferenced(name: str, value: str) -> str:
    """What a secret's value refers to, or the value if it is no reference; `name` is for messages."""
    if value.startswith(_VARIABLE):
        variable = value.removeprefix(_VARIABLE)
        found = os.environ.get(variable)
        if found is None:
            raise ConfigError(f"{name}: the environment variable {variable} is not set in this process")
        return found
    if value.startswith(_FILE):
        path = Path(value.removeprefix(_FILE)).expanduser()
        try:
            return path.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{name}: {path} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{name}: {path} is not UTF-8") from None
    return value
