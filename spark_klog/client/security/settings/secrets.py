"""Keep secret settings out of logs, errors and reprs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from spark_klog.errors import ConfigError

_SECRETS = frozenset({"sasl.jaas.config", "ssl.keystore.key", "ssl.key.pem"})
_SECRET_ENDS = ("password", "secret")
_HIDDEN = "[hidden]"
_NOT_SHOWN = "something that is not shown, as the secret is part of it"
_NAME = re.compile(r"[a-z0-9._-]{1,100}")
#: A secret's setting, or an option of a JAAS line, in the midst of other text; not a topic in JSON, such as
#: {"secret": {"0": 5}}.
_ASSIGNED = re.compile(
    r"(?:^|[\s;,\"'])[\w.]*(?:password|secret|sasl\.jaas\.config)[\"']?\s*(?:=|:(?!\s*[{\[]))", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a setting's value must not be shown; `name` may have the prefix `kafka.`."""
    name = name.lower().removeprefix("kafka.")
    return name in _SECRETS or name.endswith(_SECRET_ENDS)


def check_holds_no_secret(shown_name: str, name: str, value: str) -> None:
    """Raise `ConfigError` for a value that other settings were pasted into, a secret among them: errors show values."""
    if not is_secret(name) and _ASSIGNED.search(value):
        raise ConfigError(
            f"{shown_name} is not shown, as a password or another secret is in its value: set each setting by its own "
            "name, one at a time"
        )


def is_plain_name(name: str) -> bool:
    """Whether a setting's name may be shown: others may be lines of a key without backslashes in a properties file."""
    return _NAME.fullmatch(name) is not None


class Settings(dict[str, str]):
    """Settings by name, with a repr that hides secrets."""

    def __or__(self, other: Mapping[str, str]) -> Settings:  # type: ignore[override]
        return Settings({**self, **other})

    def __repr__(self) -> str:
        return repr(
            {
                name if is_plain_name(name) else _HIDDEN: value
                if is_plain_name(name) and not is_secret(name)
                else _HIDDEN
                for name, value in self.items()
            }
        )


def without_secrets(text: str, secrets: tuple[str, ...], longest: int = 300) -> str:
    """A peer's text made safe to show: on one line, at most `longest` characters, and not at all if it holds a secret.

    A secret may be a word of the peer's own sentence: what is left around it would tell which.
    """
    if any(secret and secret in text for secret in secrets):
        return _NOT_SHOWN
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable if len(printable) <= longest else printable[:longest] + "..."
