"""The coordinator of a group or of a transactional id (FindCoordinator)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from spark_klog.client.answers import answer_error, by_key
from spark_klog.client.cluster import Bounds, Cluster
from spark_klog.client.requests import Steps, at_once, retried, run
from spark_klog.client.retry import Retry
from spark_klog.errors import ConnectionFailed, ErrorCode, KlogError, ProtocolError, RequestTimedOut, is_retriable
from spark_klog.protocol.apis import FIND_COORDINATOR
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import GROUP

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
#: The first version of FindCoordinator that takes several keys.
_FIRST_OF_SEVERAL = 4


def finding_coordinators(
    cluster: Cluster, keys: Sequence[str], kind: int, outer: Bounds | None = None
) -> Steps[dict[str, int | ProtocolError]]:
    """The node ids of the coordinators of groups or transactional ids; an error for those that have none now.

    One request, to brokers before Kafka 3.0 one for each. Raises what `Cluster.asking_any` and `by_key` raise.
    """
    nodes: dict[str, int | ProtocolError] = {}

    def message(version: int) -> Message:
        if version >= _FIRST_OF_SEVERAL:
            return {"coordinator_keys": rest, "key_type": kind}
        return {"key": rest[0], "key_type": kind}

    while rest := [key for key in keys if key not in nodes]:
        answer = yield from cluster.asking_any(FIND_COORDINATOR, message, outer)
        entries = {rest[0]: answer}
        if answer["node_id"] < 0 and not answer["error_code"]:  # of a version with several
            several = ((str(each["key"]), each) for each in answer["coordinators"])
            entries = by_key(FIND_COORDINATOR, answer, several, rest)
        for key, entry in entries.items():
            what = f"coordinator of {'group' if kind == GROUP else 'transactional id'} {key}"
            code = entry["error_code"]
            nodes[key] = answer_error(FIND_COORDINATOR, code, what) if code else int(entry["node_id"])
    if any(isinstance(node, int) for node in nodes.values()):
        yield from cluster.asking_metadata([], outer)  # the brokers' addresses
    return nodes


def find_coordinator(cluster: Cluster, key: str, kind: int = GROUP) -> int:
    """The node id of the coordinator of a group or transactional id; `ProtocolError` if there is none now."""
    return run(finding_coordinator(cluster, key, kind))


def finding_coordinator(cluster: Cluster, key: str, kind: int = GROUP, outer: Bounds | None = None) -> Steps[int]:
    """The steps of `find_coordinator`, in these bounds."""
    node = (yield from finding_coordinators(cluster, [key], kind, outer))[key]
    if isinstance(node, ProtocolError):
        raise node
    return node


class Coordinators:
    """The coordinators that requests go to, looked up once until a failure."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: Node ids by (kind, key).
        self._nodes: dict[tuple[int, str], int] = {}

    def node(self, key: str, kind: int = GROUP) -> int:
        """The node id of a coordinator; raises what `find_coordinator` raises."""
        return run(self.asking_node(key, kind))

    def asking_node(self, key: str, kind: int = GROUP) -> Steps[int]:
        node = (yield from self.asking_nodes([key], kind))[key]
        if isinstance(node, ProtocolError):
            raise node
        return node

    def nodes(self, keys: Iterable[str], kind: int = GROUP) -> dict[str, int | ProtocolError]:
        """The coordinators of several groups or transactional ids, as of `finding_coordinators`."""
        return run(self.asking_nodes(keys, kind))

    def asking_nodes(self, keys: Iterable[str], kind: int = GROUP) -> Steps[dict[str, int | ProtocolError]]:
        wanted = list(dict.fromkeys(keys))
        missing = [key for key in wanted if (kind, key) not in self._nodes]
        looked_up = yield from finding_coordinators(self._cluster, missing, kind)
        self._nodes.update({(kind, key): node for key, node in looked_up.items() if isinstance(node, int)})
        return {key: looked_up[key] if key in looked_up else self._nodes[kind, key] for key in wanted}

    def asking(
        self,
        key: str,
        api: Api,
        message: Message,
        result: Callable[[Message], _Result],
        kind: int,
        last: int | None = None,
    ) -> Steps[_Result]:
        """The steps of a request to a coordinator, tried again up to max.block.ms; `result` makes its result.

        Raises what `result` raises; if that can be retried, or if there is no answer, only at the deadline. `last`: see
        `Connection.version_of`.
        """

        def steps(node: int, deadline: float) -> Steps[_Result]:
            return result((yield from self._cluster.asking(node, api, message, deadline, last)))

        return self.trying(key, steps, kind)

    def trying(self, key: str, steps: Callable[[int, float], Steps[_Result]], kind: int) -> Steps[_Result]:
        """`steps` of a coordinator's node id and a deadline, tried again as those of `asking`."""
        outer = self._cluster.bounds(self._cluster.config.max_block_ms, "max.block.ms")
        retry = Retry(self._cluster.config, *outer)
        while True:
            try:
                with self.forgotten_on_error():
                    if (kind, key) not in self._nodes:
                        self._nodes[kind, key] = yield from finding_coordinator(self._cluster, key, kind, outer)
                    deadline = self._cluster.bounds(outer=outer).deadline
                    node = self._nodes[kind, key]
                    try:
                        return (yield from steps(node, deadline))
                    except (ConnectionFailed, RequestTimedOut):
                        self._cluster.suspect(node)  # so that others are asked first for the coordinator
                        raise
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                if not is_retriable(error) or (isinstance(error, ConnectionFailed) and self._cluster.has_no_patience()):
                    raise
                yield from retried(retry, error)
                _log.debug("trying again: %s", error)

    def forget(self) -> None:
        """Look all coordinators up again: a request to one of them has failed."""
        self._nodes.clear()

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        try:
            yield
        except KlogError as error:
            self.forget()
            if isinstance(error, ProtocolError) and error.code == ErrorCode.NOT_COORDINATOR:
                self._cluster.doubt()  # another broker may know better which one it is
            raise

    def attempt(
        self, action: Callable[[], _Result], timeout_ms: int | None = None, limit: str = "request.timeout.ms"
    ) -> _Result:
        """As `Cluster.attempt`; looks all coordinators up again after each failure."""

        return run(self.attempting(lambda: at_once(action), timeout_ms, limit))

    def attempting(
        self, action: Callable[[], Steps[_Result]], timeout_ms: int | None = None, limit: str = "request.timeout.ms"
    ) -> Steps[_Result]:
        def once() -> Steps[_Result]:
            with self.forgotten_on_error():
                return (yield from action())

        return self._cluster.attempting(once, timeout_ms, limit)
