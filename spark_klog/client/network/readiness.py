"""Waiting for several connections at once."""

from __future__ import annotations

import selectors
from collections.abc import Collection

from spark_klog.client.interrupts import WAIT
from spark_klog.client.network.connection import Connection


def wait_until_ready(connections: Collection[Connection], timeout: float) -> None:
    """Wait up to `timeout` seconds until `open_step` or `poll` of one of the connections can continue."""
    if any(connection.closed or connection.has_read_ahead for connection in connections):
        return
    with selectors.DefaultSelector() as selector:
        for connection in dict.fromkeys(connections):  # one may have several requests under way
            selector.register(connection, connection.events)
        with WAIT:
            selector.select(max(timeout, 0))
