"""The coordinator of a group or of a transactional id (FindCoordinator)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spark_klog.client.answers import by_key, check_code
from spark_klog.client.cluster import Cluster
from spark_klog.errors import KlogError
from spark_klog.protocol.apis import FIND_COORDINATOR
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.coordinator import GROUP

#: The first version of FindCoordinator that takes several keys.
_FIRST_OF_SEVERAL = 4


def find_coordinator(cluster: Cluster, key: str, kind: int = GROUP) -> int:
    """The node id of the coordinator of a group or transactional id; `ProtocolError` if there is none now."""
    is_of_several = False

    def request(version: int) -> Message:
        nonlocal is_of_several
        is_of_several = version >= _FIRST_OF_SEVERAL
        return {"coordinator_keys": [key], "key_type": kind} if is_of_several else {"key": key, "key_type": kind}

    answer = cluster.any_broker(FIND_COORDINATOR, request)
    entry = answer
    if is_of_several:
        found = ((str(item["key"]), item) for item in answer["coordinators"])
        entry = by_key(FIND_COORDINATOR, answer, found, [key])[key]
    check_code(
        FIND_COORDINATOR,
        entry["error_code"],
        f"coordinator of {'group' if kind == GROUP else 'transactional id'} {key}",
    )
    cluster.metadata([])
    return int(entry["node_id"])


class Coordinators:
    """The coordinators that requests go to, looked up once until a failure."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: Node ids by (kind, key).
        self._nodes: dict[tuple[int, str], int] = {}

    def node(self, key: str, kind: int = GROUP) -> int:
        """The node id of a coordinator; raises what `find_coordinator` raises."""
        if (kind, key) not in self._nodes:
            self._nodes[kind, key] = find_coordinator(self._cluster, key, kind)
        return self._nodes[kind, key]

    def forget(self) -> None:
        """Look all coordinators up again: a request to one of them has failed."""
        self._nodes.clear()

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """`forget` if the block raises a `KlogError`."""
        try:
            yield
        except KlogError:
            self.forget()
            raise
