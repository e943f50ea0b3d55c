"""Keys of an object store that a catalog gives out, and that end: whoever has the folder open renews them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

_log = logging.getLogger(__name__)
#: Keys are renewed when a third of their time is left, at most so long before they end, and after that long if their
#: end is not known. A catalog that gives no answer is asked again after a pause. In seconds.
_MARGIN, _PAUSE = 300.0, 5.0


@dataclass(frozen=True)
class Keys:
    """A pyarrow file system with keys, which are to be renewed at a time in seconds since the epoch."""

    filesystem: Any
    renew_at: float

    @classmethod
    def until(cls, filesystem: Any, end_ms: int | None) -> Keys:
        """Of keys that have just been given out, and end at a time in ms since the epoch; None if that is not known."""
        now = time.time()
        if end_ms is None:
            return cls(filesystem, now + _MARGIN)
        left = max(end_ms / 1000 - now, 0.0)
        return cls(filesystem, now + left - min(_MARGIN, left / 3))


def as_query(signature: str) -> str:
    """A shared access signature of Azure as pyarrow takes it, which adds the text to the URL."""
    return signature if signature.startswith("?") else f"?{signature}"


class KeyedUri(str):
    """The URI of a folder in an object store, without keys in its text, beside `keys` and what gives out new ones.

    `give` is called on any host, and is pickled with the URI. While it fails the keys at hand are used further: the
    store says when they have ended. Slices of the text, and texts made of it, are plain.
    """

    give: Callable[[], Keys]
    _keys: Keys
    _renewing: threading.Lock

    def __new__(cls, uri: str, give: Callable[[], Keys], keys: Keys) -> KeyedUri:
        made = super().__new__(cls, uri)
        made.give, made._keys, made._renewing = give, keys, threading.Lock()
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedUri, (str(self), self.give, self._keys)

    def filesystem(self, *, anew: bool = False) -> Any:
        """The pyarrow file system, the same object until its keys are renewed; `anew` for keys that last long."""
        with self._renewing:
            if anew or time.time() >= self._keys.renew_at:
                try:
                    self._keys = self.give()
                except Exception as error:  # of any catalog's package
                    _log.warning("keys for %s can't be renewed now: %s", self, error)
                    self._keys = replace(self._keys, renew_at=time.time() + _PAUSE)
            return self._keys.filesystem

    @property
    def path(self) -> str:
        """The bucket or container, and the folder in it."""
        parts = urlsplit(self)
        container, _, host = parts.netloc.rpartition("@")
        return f"{container or host}{unquote(parts.path)}"
