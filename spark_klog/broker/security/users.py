"""The users of a broker: the file of `users_file`, read again when it changes, and changed over the wire."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from spark_klog.broker.security.mechanisms import Credential
from spark_klog.broker.security.users_file import User, change_users, read_users
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 1.0
#: A file that was written so short a time ago may change again without a change of its time or size: file systems note
#: times in ticks, of two seconds at the most.
_TICK_NS = 2_000_000_000


class Users:
    """The file as a broker sees it; None is a file without users. Safe to ask from any thread."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        #: Users by name, and whether any has a rule: replaced at once, other threads ask meanwhile.
        self._known: tuple[dict[str, User], bool] = {}, False
        self._looked_at = 0.0
        #: What the file looked like that was read, or that can't be.
        self._seen: tuple[int, int, int] | None = None
        #: The failure that was logged last; None once the file was read.
        self._told: str | None = ""
        #: Held while the file is read: an older view must not replace a newer one.
        self._lock = threading.Lock()
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
        users = read_users(path)
        if time.time_ns() - status.st_mtime_ns > _TICK_NS:
            self._seen = seen
        if self._told is None and users == self._known[0]:
            return
        self._told = None
        if status.st_mode & 0o077:
            _log.warning("users file %s can be read by others; chmod 600 it", path)
        self._known = users, any(user.has_rules for user in users.values())
        _log.info("%d users in %s", len(users), path)

    def _look_again(self) -> None:
        if self._path is None or time.monotonic() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return
        self._looked_at = time.monotonic()
        with self._lock:
            self._read_if_possible(self._path)

    def _read_if_possible(self, path: Path) -> None:
        try:
            self._read(path)
        except ConfigError as error:
            if str(error) != self._told:  # it is tried again and again
                _log.error("%s; what was read before holds", error)
            self._told = str(error)

    def credential(self, name: str, mechanism: str) -> Credential | None:
        """The user's credential for a SCRAM mechanism."""
        self._look_again()
        user = self._known[0].get(name)
        return user.credentials.get(mechanism) if user is not None else None

    def rules(self, name: str) -> User | None:
        """What the user may do; None where nobody has a rule and so all may do everything."""
        if self._path is None:
            return None
        self._look_again()
        users, has_rules = self._known
        return users.get(name, User()) if has_rules else None

    @property
    def path(self) -> Path | None:
        """The file, None for a broker without users."""
        return self._path

    @property
    def has_rules(self) -> bool:
        """Whether any user has a rule: as long as none has, all may do everything."""
        self._look_again()
        return self._known[1]

    def all(self) -> Mapping[str, User]:
        """Users by name; the caller does not change them."""
        self._look_again()
        return self._known[0]

    def change(self, change: Callable[[dict[str, User]], None]) -> None:
        """Change the file; what it holds then is known when this returns. Blocks while the file is written.

        `change` gets the users as the file has them now, and may raise. `ConfigError` for a file that can't be read or
        written, or a broker without one; nothing is changed then.
        """
        if self._path is None:
            raise ConfigError("there is no file of users: set klog.users.file")
        change_users(self._path, change)
        with self._lock:
            self._seen = None  # a file that is replaced twice within the clock's resolution looks the same
            self._read_if_possible(self._path)  # somebody else may have written it since
