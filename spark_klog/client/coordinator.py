"""The coordinator of a group or of a transactional id (FindCoordinator)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from spark_klog.client.answers import answer_error, by_key
from spark_klog.client.cluster import Cluster
from spark_klog.errors import KlogError, ProtocolError
from spark_klog.protocol.apis import FIND_COORDINATOR
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.groups import GROUP

#: The first version of FindCoordinator that takes several keys.
_FIRST_OF_SEVERAL = 4


def find_coordinators(cluster: Cluster, keys: Iterable[str], kind: int = GROUP) -> dict[str, int | ProtocolError]:
    """The node ids of the coordinators of groups or transactional ids; an error for those that have none now.

    One request, to brokers before Kafka 3.0 one for each. Raises what `Cluster.any_broker` and `by_key` raise.
    """
    found: dict[str, int | ProtocolError] = {}
    rest = list(dict.fromkeys(keys))
    while rest:
        message, judged = question(rest, kind)
        answered = judged(cluster.any_broker(FIND_COORDINATOR, message))
        found |= answered
        rest = [key for key in rest if key not in answered]
    if any(isinstance(node, int) for node in found.values()):
        cluster.metadata([])
    return found


def question(
    keys: list[str], kind: int
) -> tuple[Callable[[int], Message], Callable[[Message], dict[str, int | ProtocolError]]]:
    """Functions that make FindCoordinator for a version, and the node ids or errors of its response.

    Those are of all keys, or of the first one where the broker takes only one.
    """
    is_of_several = False

    def message(version: int) -> Message:
        nonlocal is_of_several
        is_of_several = version >= _FIRST_OF_SEVERAL
        return {"coordinator_keys": keys, "key_type": kind} if is_of_several else {"key": keys[0], "key_type": kind}

    def judged(answer: Message) -> dict[str, int | ProtocolError]:
        entries = {keys[0]: answer}
        if is_of_several:
            several = ((str(item["key"]), item) for item in answer["coordinators"])
            entries = by_key(FIND_COORDINATOR, answer, several, keys)
        found: dict[str, int | ProtocolError] = {}
        for key, entry in entries.items():
            what = f"coordinator of {'group' if kind == GROUP else 'transactional id'} {key}"
            code = entry["error_code"]
            found[key] = answer_error(FIND_COORDINATOR, code, what) if code else int(entry["node_id"])
        return found

    return message, judged


def find_coordinator(cluster: Cluster, key: str, kind: int = GROUP) -> int:
    """The node id of the coordinator of a group or transactional id; `ProtocolError` if there is none now."""
    found = find_coordinators(cluster, [key], kind)[key]
    if isinstance(found, ProtocolError):
        raise found
    return found


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

    def nodes(self, keys: Iterable[str], kind: int = GROUP) -> dict[str, int | ProtocolError]:
        """The coordinators of several groups or transactional ids, as of `find_coordinators`."""
        wanted = list(dict.fromkeys(keys))
        missing = [key for key in wanted if (kind, key) not in self._nodes]
        found = find_coordinators(self._cluster, missing, kind)
        self._nodes.update({(kind, key): node for key, node in found.items() if isinstance(node, int)})
        return {key: found[key] if key in found else self._nodes[kind, key] for key in wanted}

    def known(self, key: str, kind: int = GROUP) -> int | None:
        """The node id of a coordinator if it has been looked up."""
        return self._nodes.get((kind, key))

    def learn(self, key: str, found: int | ProtocolError, kind: int = GROUP) -> int:
        """Take over what `question` has found, and return it; raise it if it is an error."""
        if isinstance(found, ProtocolError):
            raise found
        self._nodes[kind, key] = found
        return found

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
