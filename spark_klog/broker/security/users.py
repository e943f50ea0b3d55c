"""The broker's users, from the file of `users_file`: reloaded when it changes, and changed by requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from spark_klog.broker.security.mechanisms import Credential
from spark_klog.broker.security.users_file import User, UsersReader, change_users
from spark_klog.errors import ConfigError

_log = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 1.0
#: A file modified so recently may change again with the same time and size: file systems store times in ticks of up to
#: two seconds.
_TICK_NS = 2_000_000_000


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
        """The user's credential for a SCRAM mechanism."""
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
