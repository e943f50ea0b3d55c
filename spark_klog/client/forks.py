"""Clients and forks: a child of `os.fork` or `multiprocessing` shares the sockets of its parent's clients.

What it would send and read there is missing at the parent, and a LeaveGroup would be the parent's. So a child's calls
are refused, and its `close` closes only its own descriptors: neither a request nor TLS' close_notify is sent.
"""

from __future__ import annotations

import os

from spark_klog.errors import KlogError


class Maker:
    """The process that has made a client."""

    def __init__(self, client: str, error: type[KlogError]) -> None:
        self._client, self._error = client, error
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def check(self) -> None:
        if os.getpid() != self._process:
            raise self._error(f"process {self._process} has made this {self._client}: make a new one after a fork")
