"""The file of users: their SCRAM credentials, and what they may do.

    [user alice]
    SCRAM-SHA-256 = salt=BASE64,stored_key=BASE64,server_key=BASE64,iterations=4096
    SCRAM-SHA-512 = ...
    admin = true                      may do everything, and creates, deletes and alters topics
    read = clicks*, orders            topics by name, or by prefix before a star
    write = clicks*

    [user ANONYMOUS]                  who comes by a listener without authentication
    read = *

`klog users add|list|remove` writes it, with mode 0600; rules are written by hand. As long as no user has a rule, all
may do everything. A section may also name the subject of a client's certificate, as [user CN=reader,O=Example]. The
credentials are as Kafka keeps them in ZooKeeper. A broker reads the file again when it has changed; one that can't be
read then is told in the log, and what was read before holds.
"""

from __future__ import annotations

import binascii
import logging
import os
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spark_klog.broker.security.mechanisms import HASHES, Credential
from spark_klog.errors import ConfigError

if TYPE_CHECKING:
    import configparser

_log = logging.getLogger(__name__)
_SECTION = "user "
_NAME = re.compile(r"[^\s\[\]\x00-\x1f][^\[\]\x00-\x1f]{0,254}")
_LOOK_AGAIN_SECONDS = 1.0
_TRUTH = {"true": True, "false": False}


@dataclass
class User:
    """One section of the file. `read` and `write` are names, or prefixes with a star at their end."""

    credentials: dict[str, Credential] = field(default_factory=dict)
    admin: bool = False
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()

    @property
    def has_rules(self) -> bool:
        return self.admin or bool(self.read or self.write)


def check_user_name(name: str) -> None:
    """`ConfigError` for a name that the file can't hold."""
    if not _NAME.fullmatch(name) or name != name.strip():
        raise ConfigError(f"user name {name!r}: give 1 to 255 characters without brackets and control characters")


def _parser() -> configparser.ConfigParser:
    import configparser  # a broker without users starts without it

    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"), default_section="\0", strict=True
    )
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    return parser


def _open(path: Path) -> configparser.ConfigParser:
    import configparser

    parser = _parser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except configparser.Error as error:
        # Its text may quote a line, and so a key of somebody.
        line = getattr(error, "lineno", None) or "?"
        raise ConfigError(f"users file {path} line {line}: {type(error).__name__}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"users file {path} is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"users file {path}: {error.strerror}; `klog users add` makes one") from None
    return parser


def read_users(path: Path) -> dict[str, User]:
    """Users by name; `ConfigError` names file and section, and quotes no credential."""
    users = {}
    for section, values in _open(path).items():
        if section == "\0":
            continue
        where = f"users file {path}, section [{section}]"
        name = section.removeprefix(_SECTION)
        if not section.startswith(_SECTION) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: sections are [user NAME]")
        users[name] = _user(where, values)
    return users


def _user(where: str, values: Mapping[str, str]) -> User:
    user = User()
    for key, value in values.items():
        if key in HASHES:
            user.credentials[key] = _parse_credential(f"{where}: {key}", value)
        elif key == "admin":
            if value.lower() not in _TRUTH:
                raise ConfigError(f"{where}: admin is true or false")
            user.admin = _TRUTH[value.lower()]
        elif key in ("read", "write"):
            topics = tuple(item.strip() for item in value.split(",") if item.strip())
            if any("*" in topic[:-1] for topic in topics):
                raise ConfigError(f"{where}: {key}: a star stands at the end of a prefix only")
            setattr(user, key, topics)
        else:
            raise ConfigError(f"{where}: unknown {key!r}; known are {', '.join((*HASHES, 'admin', 'read', 'write'))}")
    return user


def _parse_credential(where: str, text: str) -> Credential:
    parts = dict(item.partition("=")[::2] for item in text.split(","))
    try:
        salt, stored, server = (b64decode(parts[key], validate=True) for key in ("salt", "stored_key", "server_key"))
        iterations = int(parts["iterations"])
    except (KeyError, ValueError, binascii.Error):
        raise ConfigError(f"{where} is not salt=...,stored_key=...,server_key=...,iterations=...") from None
    if not salt or not stored or not server or not 1 <= iterations <= 1_000_000:
        raise ConfigError(f"{where}: empty keys, or iterations out of their range")
    return Credential(salt, stored, server, iterations)


def _credential_text(credential: Credential) -> str:
    salt, stored, server = (b64encode(part).decode() for part in credential[:3])
    return f"salt={salt},stored_key={stored},server_key={server},iterations={credential.iterations}"


def set_credentials(path: Path, name: str, credentials: Mapping[str, Credential]) -> None:
    """Add a user, or give one other credentials; rules stay. `ConfigError`."""
    check_user_name(name)

    def change(parser: configparser.ConfigParser) -> None:
        section = _SECTION + name
        if not parser.has_section(section):
            parser.add_section(section)
        for mechanism in HASHES:
            parser.remove_option(section, mechanism)
        for mechanism, credential in credentials.items():
            parser.set(section, mechanism, _credential_text(credential))

    _change(path, change)


def remove_user(path: Path, name: str) -> None:
    """`ConfigError` where there is no such user."""

    def change(parser: configparser.ConfigParser) -> None:
        if not parser.remove_section(_SECTION + name):
            raise ConfigError(f"users file {path} has no user {name!r}")

    _change(path, change)


def _change(path: Path, change: Callable[[configparser.ConfigParser], None]) -> None:
    """Write the whole file anew beside the old one, so that no reader sees half of it. Comments are lost."""
    if path.exists():
        read_users(path)
    parser = _open(path) if path.exists() else _parser()
    change(parser)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            parser.write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"users file {path} can't be written: {error.strerror}") from None


class Users:
    """The file as a broker sees it; None is a file without users. Safe to ask from any thread."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._users: dict[str, User] = {}
        self._has_rules = False
        self._looked_at = 0.0
        self._seen: tuple[int, int, int] | None = None
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        """`ConfigError`."""
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"users file {path}: {error.strerror}; `klog users add` makes one") from None
        self._looked_at = time.monotonic()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return
        self._seen = seen
        if status.st_mode & 0o077:
            _log.warning("users file %s can be read by others; chmod 600 it", path)
        users = read_users(path)
        self._users, self._has_rules = users, any(user.has_rules for user in users.values())
        _log.info("%d users in %s", len(users), path)

    def _look_again(self) -> None:
        if self._path is None or time.monotonic() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return
        self._looked_at = time.monotonic()
        try:
            self._read(self._path)
        except ConfigError as error:
            _log.error("%s; what was read before holds", error)

    def credential(self, name: str, mechanism: str) -> Credential | None:
        """The user's credential for a SCRAM mechanism."""
        self._look_again()
        user = self._users.get(name)
        return user.credentials.get(mechanism) if user is not None else None

    def rules(self, name: str) -> User | None:
        """What the user may do; None where nobody has a rule and so all may do everything."""
        if self._path is None:
            return None
        self._look_again()
        return self._users.get(name, User()) if self._has_rules else None
