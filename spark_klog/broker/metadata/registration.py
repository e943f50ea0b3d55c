"""This broker's own entry in the shared tree, /brokers/ids/N: ephemeral, so that it ends with the broker."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence

from spark_klog.base.clock import system_ms
from spark_klog.broker.metadata.nodes import NodeDecoder, create_node
from spark_klog.errors import DirectoryError
from spark_klog.trees import paths
from spark_klog.trees.tree import Tree

_log = logging.getLogger(__name__)
_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.25


class Registration:
    """The entry of one broker; `session_seconds` is the timeout of the tree's sessions."""

    def __init__(self, tree: Tree, decoder: NodeDecoder, broker_id: int, session_seconds: float) -> None:
        self._tree = tree
        self._decoder = decoder
        self._broker_id = broker_id
        self._path = paths.broker_id_path(broker_id)
        self._session_seconds = session_seconds
        self._entry: bytes | None = None

    def register(self, endpoints: Sequence[paths.Endpoint], transaction_version: int = 0) -> None:
        """Create the entry; `transaction_version` is the last one that this broker serves.

        An entry with one of our own addresses is replaced: the port is ours now, so the entry is from an earlier run.
        If the other address does not answer, its broker may have been killed: wait until its session has ended. Raises
        `DirectoryError` if another broker has the id.
        """
        for path in paths.COMMON_PATHS:
            if self._tree.get(path) is None:
                create_node(self._tree, path, b"")
        path, entry = self._path, paths.broker_payload(endpoints, system_ms(), transaction_version)
        ours = {(endpoint.host, endpoint.port) for endpoint in endpoints}
        deadline: float | None = None
        while not create_node(self._tree, path, entry, ephemeral=True):
            other = self._tree.get(path)
            if other is None:
                continue
            others = self._decoder.decode(paths.parse_broker, other, path) or []
            if any((endpoint.host, endpoint.port) in ours for endpoint in others):
                self._tree.delete(path)
                continue
            where = paths.host_and_port(others[0].host, others[0].port) if others else "another address"
            refusal = f"broker id {self._broker_id} is registered by a broker at {where}"
            if others and answers((others[0].host, others[0].port)):
                raise DirectoryError(f"{refusal}; choose another --broker-id")
            if deadline is None:
                # the ZooKeeper server may round the timeout up, or raise it
                deadline = time.monotonic() + 2 * self._session_seconds
                _log.warning("%s, which does not answer: waiting for the end of its session", refusal)
            elif time.monotonic() > deadline:
                raise DirectoryError(
                    f"{refusal}, which does not answer, but its session has not ended in "
                    f"{2 * self._session_seconds:g} s; choose another --broker-id, or stop that broker"
                )
            time.sleep(_PAUSE_SECONDS)
        self._entry = entry
        controller = self._tree.get(paths.CONTROLLER_PATH)
        if (
            controller
            and self._decoder.decode(paths.parse_controller, controller, paths.CONTROLLER_PATH) == self._broker_id
        ):
            self._tree.delete(paths.CONTROLLER_PATH)  # left by an earlier run

    def unregister(self) -> None:
        """Remove this broker's entry, unless another broker has taken its id."""
        entry, self._entry = self._entry, None
        if entry is not None and self._tree.get(self._path) == entry:
            self._tree.delete(self._path)

    def keep(self) -> bool:
        """Register again if the entry is missing; after a lost session the tree itself does that.

        Returns whether the entry is there, and this broker's.
        """
        if self._entry is None:
            return False
        there = self._tree.get(self._path)
        if there is None and create_node(self._tree, self._path, self._entry, ephemeral=True):
            _log.warning("the entry of broker %d was missing: registered it again", self._broker_id)
            return True
        if there not in (None, self._entry):
            self._decoder.log_error(
                self._path, f"broker id {self._broker_id} has been taken by another broker; clients are sent there"
            )
        return there == self._entry


def answers(address: tuple[str, int]) -> bool:
    """Whether a server listens at (host, port)."""
    try:
        with socket.create_connection(address, _PROBE_SECONDS):
            return True
    except OSError:
        return False
