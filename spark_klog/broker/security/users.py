"""The users file: SCRAM credentials and permissions of users.

    [user alice]
    SCRAM-SHA-256 = salt=BASE64,stored_key=BASE64,server_key=BASE64,iterations=4096
    SCRAM-SHA-512 = ...
    admin = true                      may do everything, including topic administration
    read = clicks*, orders            topics by name, or by prefix with a star
    write = clicks*

    [user ANONYMOUS]                  clients of a listener without authentication
    read = *

`klog users add|remove` writes the file, with mode 0600. A broker writes it when a client alters credentials (KIP-554)
or rules (as ACLs, see `acls`). `admin` is edited by hand. Until a user has a rule, everybody may do everything. A
section may also name the subject of a client's certificate: [user CN=reader,O=Example]. Credentials have the format
that Kafka uses in ZooKeeper. A broker reloads the file when it changes; if it can't be read, the broker logs that and
keeps the previous contents.
"""

from __future__ import annotations

import binascii
import copy
import logging
import os
import re
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from spark_klog.base.durable import locked, replace_file
from spark_klog.base.names import SCRAM_HASHES
from spark_klog.base.settings import BOOLEAN, items, value_of
from spark_klog.broker.security.mechanisms import Credential
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
_SECTION = "user "
_NAME = re.compile(r"[^\s\[\]\x00-\x1f][^\[\]\x00-\x1f]{0,254}")
_HEADER = re.compile(r"\[(.+)\]", re.ASCII)
#: Where sections begin, and indented lines that may begin one or continue the value before.
_SECTIONS = re.compile(r"^(?=\[)", re.MULTILINE)
_INDENTED = re.compile(r"^[^\S\n]+\[", re.MULTILINE)
_LOCK_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 1.0
#: A file modified so recently may change again with the same time and size: file systems store times in ticks of up to
#: two seconds.
_TICK_NS = 2_000_000_000


@dataclass
class User:
    """One section of the file. `read` and `write` are topic names, or prefixes that end with a star."""

    credentials: dict[str, Credential] = field(default_factory=dict, repr=False)
    admin: bool = False
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()

    @property
    def has_rules(self) -> bool:
        return self.admin or bool(self.read or self.write)


def check_user_name(name: str) -> None:
    """Raise `ConfigError` if the file can't hold the name."""
    if not _NAME.fullmatch(name) or name != name.strip():
        raise ConfigError(f"user name {name!r}: give 1 to 255 characters without brackets and control characters")


def read_users(path: Path) -> dict[str, User]:
    """Read users by name; `ConfigError` names file and section, and quotes no credential."""
    return _parse(path, _read_text(path))


class UsersReader:
    """Reads a file many times, and parses only the sections whose text has changed. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Name and user of each section, by its text.
        self._sections: dict[str, tuple[str, User]] = {}

    def read(self) -> dict[str, User]:
        """The same as `read_users`."""
        text = _read_text(self._path)
        if _INDENTED.search(text):
            return _parse(self._path, text)
        before, *sections = _SECTIONS.split(text)
        try:
            changed = _parse(self._path, before + "".join(part for part in sections if part not in self._sections))
        except ConfigError:
            return _parse(self._path, text)  # names the line in the file
        users: dict[str, User] = {}
        parsed: dict[str, tuple[str, User]] = {}
        for section in sections:
            user = self._sections.get(section) or _named(section, changed)
            if user is None or user[0] in users:
                return _parse(self._path, text)
            users[user[0]] = user[1]
            parsed[section] = user
        self._sections = parsed
        return users


def _named(section: str, users: Mapping[str, User]) -> tuple[str, User] | None:
    header = _HEADER.match(section)
    name = header[1].removeprefix(_SECTION) if header else ""
    return (name, users[name]) if name in users else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"users file {path} is not UTF-8") from None
    except OSError as error:
        raise ConfigError(f"users file {path}: {error.strerror}; `klog users add` creates one") from None


def _parse(path: Path, text: str) -> dict[str, User]:
    import configparser  # imported late, to keep the start of a broker without users short

    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#", ";"), default_section="\0", strict=True
    )
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise ConfigError(f"users file {path}{_what_is_wrong(error)}") from None
    users = {}
    for section, values in parser.items():
        if section == "\0":
            continue
        where = f"users file {path}, section [{section}]"
        name = section.removeprefix(_SECTION)
        if not section.startswith(_SECTION) or not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: sections are [user NAME]")
        users[name] = _user(where, values)
    return users


def _what_is_wrong(error: Exception) -> str:
    """Line and reason of a syntax error. The parser's own text may quote a line, and so a key."""
    import configparser

    line = getattr(error, "lineno", None)
    if isinstance(error, configparser.MissingSectionHeaderError):
        reason = "it is before the first section; sections are [user NAME]"
    elif isinstance(error, configparser.DuplicateSectionError):
        reason = "the section is there twice"
    elif isinstance(error, configparser.DuplicateOptionError):
        reason = f"{error.option!r} is there twice in its section"
    else:
        line = line or next((number for number, _ in getattr(error, "errors", ())), None)
        reason = "it is neither [user NAME] nor NAME = VALUE"
    return f" line {line}: {reason}" if line else f": {reason}"


def _user(where: str, values: Mapping[str, str]) -> User:
    user = User()
    for key, value in values.items():
        if key in SCRAM_HASHES:
            user.credentials[key] = _parse_credential(f"{where}: {key}", value)
        elif key == "admin":
            user.admin = value_of(BOOLEAN, f"{where}: admin", value, "{0} must be {2}")
        elif key in ("read", "write"):
            topics = tuple(items(value))
            if any("*" in topic[:-1] for topic in topics):
                raise ConfigError(f"{where}: {key}: * is only allowed at the end of a prefix")
            setattr(user, key, topics)
        else:
            raise ConfigError(
                f"{where}: unknown {key!r}; the known ones are {', '.join((*SCRAM_HASHES, 'admin', 'read', 'write'))}"
            )
    return user


def _parse_credential(where: str, text: str) -> Credential:
    parts = dict(part.partition("=")[::2] for part in text.split(","))
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


def set_credentials(path: Path, name: str, credentials: Mapping[str, Credential]) -> list[str]:
    """Add a user, or replace a user's credentials of some mechanisms; rules are kept. Raises `ConfigError`.

    Returns the user's other mechanisms, whose credentials stay as they were.
    """
    check_user_name(name)
    others: list[str] = []

    def change(users: dict[str, User]) -> None:
        user = users.setdefault(name, User())
        others[:] = sorted(user.credentials.keys() - credentials.keys())
        user.credentials = {**user.credentials, **credentials}

    change_users(path, change, may_create=True)
    return others


def remove_user(path: Path, name: str) -> None:
    """Remove a user; `ConfigError` if there is none of that name."""

    def change(users: dict[str, User]) -> None:
        if users.pop(name, None) is None:
            raise ConfigError(f"users file {path} has no user {name!r}")

    change_users(path, change)


def change_users(path: Path, change: Callable[[dict[str, User]], None], *, may_create: bool = False) -> None:
    """Apply `change`, which may raise, to the users of the file, and write the file if they differ then.

    Only one process at a time changes the file. The new file, with mode 0600, replaces the old one atomically: readers
    see either of them. Unchanged sections keep their text and comments. Raises `ConfigError`.
    """
    path = Path(os.path.realpath(path))
    try:
        # the folder, as each change replaces the file itself
        with locked(os.open(path.parent, os.O_RDONLY), _LOCK_SECONDS):
            text = "" if may_create and not path.exists() else _read_text(path)
            before = _parse(path, text)
            after = copy.deepcopy(before)
            change(after)
            if after != before or not text:
                _replace(path, _changed_text(path, text, before, after))
    except BlockingIOError:
        raise ConfigError(f"users file {path} is being changed by another process; try again") from None
    except OSError as error:
        raise ConfigError(f"users file {path} can't be written: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    replace_file(path, text.encode(), path.with_name(f".{path.name}.{uuid4().hex}"), mode=0o600)


def _changed_text(path: Path, text: str, before: dict[str, User], after: dict[str, User]) -> str:
    """The text of the file with the sections of changed users rewritten; comments are kept."""
    blocks: list[tuple[str | None, list[str]]] = [(None, [])]
    for line in text.split("\n"):
        match = _HEADER.match(line)
        if match:
            blocks.append((match[1].removeprefix(_SECTION), []))
        blocks[-1][1].append(line)
    lines: list[str] = []
    for name, block in blocks:
        if name is None or (name in after and after[name] == before.get(name)):
            lines += block
        elif name in after:
            comments = [line for line in block if line.lstrip()[:1] in ("#", ";")]
            lines += [*_section(name, after[name])[:1], *comments, *_section(name, after[name])[1:], ""]
    for name in after.keys() - before.keys():
        lines += [*([""] if lines and lines[-1] else []), *_section(name, after[name]), ""]
    result = "\n".join(lines).strip("\n") + "\n"
    if _parse(path, result) == after:
        return result
    # the text did not parse as expected: write all sections without comments
    return "\n".join(line for name, user in after.items() for line in (*_section(name, user), ""))


def _section(name: str, user: User) -> list[str]:
    lines = [f"[{_SECTION}{name}]"]
    lines += [f"{mechanism} = {_credential_text(credential)}" for mechanism, credential in user.credentials.items()]
    lines += ["admin = true"] if user.admin else []
    lines += [f"{key} = {', '.join(rules)}" for key, rules in (("read", user.read), ("write", user.write)) if rules]
    return lines


class Users:
    """A broker's view of the users file; without a path there are no users. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        #: The users file, None if the broker has none.
        self.path = path
        #: Users by name, and whether any user has a rule; replaced as one value, since other threads read it.
        self._known: tuple[dict[str, User], bool] = {}, False
        self._looked_at = 0.0
        #: Time, size and inode of the file that was read; None if it must be read again.
        self._seen: tuple[int, int, int] | None = None
        #: The last failure that was logged; None after the file has been read.
        self._logged: str | None = ""
        #: Held during a read: an older view must not replace a newer one.
        self._lock = threading.Lock()
        if path is not None:
            self._reader = UsersReader(path)
            self._read(path)

    def _read(self, path: Path) -> None:
        """Read the file if it has changed. Raises `ConfigError`."""
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"users file {path}: {error.strerror}; `klog users add` creates one") from None
        self._looked_at = time.monotonic()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return
        users = self._reader.read()
        if time.time_ns() - status.st_mtime_ns > _TICK_NS:
            self._seen = seen
        if self._logged is None and users == self._known[0]:
            return
        self._logged = None
        if status.st_mode & 0o077:
            _log.warning("users file %s can be read by other users of this machine: chmod 600 it", path)
        self._known = users, any(user.has_rules for user in users.values())
        _log.info("%d users in %s", len(users), path)

    def _look_again(self) -> None:
        if self.path is None or time.monotonic() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return
        self._looked_at = time.monotonic()
        with self._lock:
            self._read_if_possible(self.path)

    def _read_if_possible(self, path: Path) -> None:
        try:
            self._read(path)
        except ConfigError as error:
            if str(error) != self._logged:  # each retry would log the same failure
                _log.error("%s; the users read before stay in force", error)
            self._logged = str(error)

    def credential(self, name: str, mechanism: str) -> Credential | None:
        self._look_again()
        user = self._known[0].get(name)
        return user.credentials.get(mechanism) if user is not None else None

    def rules(self, name: str) -> User | None:
        """The user's rules; None if no user has a rule, so that everybody may do everything."""
        if self.path is None:
            return None
        self._look_again()
        users, has_rules = self._known
        return users.get(name, User()) if has_rules else None

    @property
    def has_rules(self) -> bool:
        """Whether any user has a rule; until one has, everybody may do everything."""
        self._look_again()
        return self._known[1]

    def all(self) -> Mapping[str, User]:
        """Users by name; the caller must not change them."""
        self._look_again()
        return self._known[0]

    def change(self, change: Callable[[dict[str, User]], None]) -> None:
        """Change the file, and load the result before returning. Blocks during the write.

        `change` gets the current users of the file, and may raise. `ConfigError` if the broker has no users file or it
        can't be read or written; nothing is changed then.
        """
        if self.path is None:
            raise ConfigError("there is no file of users: set klog.users.file")
        change_users(self.path, change)
        with self._lock:
            self._seen = None  # two replacements within the clock's resolution look the same
            self._read_if_possible(self.path)  # another process may have written it since
