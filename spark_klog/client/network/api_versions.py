"""The versions of the APIs that one broker supports (ApiVersions)."""

from __future__ import annotations

from collections.abc import Iterable

from spark_klog.errors import UnsupportedVersionError
from spark_klog.protocol.apis import ADD_PARTITIONS_TO_TXN, FETCH, PRODUCE
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.since import since

#: The last versions used: later ones need topic ids, which only some fetches have, or are for brokers only.
_LAST = {PRODUCE.key: 12, FETCH.key: 12, ADD_PARTITIONS_TO_TXN.key: 3}


class ApiVersions:
    """A broker's first and last version of each API; none before `set`. `address` is for messages."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._versions: dict[int, tuple[int, int]] = {}

    def set(self, entries: Iterable[Message]) -> None:
        """Take over the entries of an ApiVersions response; `UnsupportedVersionError` if there are none."""
        self._versions |= {entry["api_key"]: (entry["min_version"], entry["max_version"]) for entry in entries}
        if not self._versions:
            raise UnsupportedVersionError(f"broker {self._address} lists no API in its ApiVersions response")

    @property
    def are_known(self) -> bool:
        return bool(self._versions)

    def highest(self, api: Api) -> int:
        """The highest version that both sides support; `UnsupportedVersionError` if there is none."""
        if api.key not in self._versions:
            raise UnsupportedVersionError(f"broker {self._address} does not support {api.name}{since(api)}")
        first, last = self._versions[api.key]
        version = min(last, _LAST.get(api.key, api.versions.last))
        if version < max(first, api.versions.first):
            raise UnsupportedVersionError(
                f"broker {self._address} supports {api.name} {first}-{last}, "
                f"this client {api.versions.first}-{api.versions.last}"
            )
        return version

    def has(self, api: Api, version: int) -> bool:
        """Whether the broker supports this version."""
        first, last = self._versions.get(api.key, (0, -1))
        return first <= version <= last
