"""A look at a cluster of which some brokers may not answer: what the others say, and what is missing."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import TypeVar

from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import some_of
from spark_klog.client import Admin
from spark_klog.client.admin.calls import Outcomes
from spark_klog.client.admin.groups import GroupDescription, GroupListing
from spark_klog.client.answers import worst
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import Committed, asking_offsets_of_led
from spark_klog.client.requests import each, run
from spark_klog.client.retry import pause_seconds
from spark_klog.errors import ConnectionFailed, KlogError, ProtocolError, RequestTimedOut, is_retriable
from spark_klog.protocol.tables.records import EARLIEST, LATEST

#: Seconds for the answers to a request of the look, and for those of later ones if a broker was silent.
_ANSWER_SECONDS, _LATER_SECONDS = 5.0, 2.0
_Key = TypeVar("_Key", bound=Hashable)
_SILENCE = (ConnectionFailed, RequestTimedOut)


class Look:
    """One look at a cluster: what its brokers say within some seconds, and why the rest is missing.

    Its calls raise errors that another attempt does not mend, and those of which all is missing.
    """

    def __init__(self) -> None:
        self._seconds = _ANSWER_SECONDS
        #: The coordinators of the groups that were described, and the errors of those that were silent since.
        self._coordinators: dict[str, int] = {}
        self._silent: dict[int, KlogError] = {}
        #: Brokers that have not said which groups they have, groups and partitions of which nothing is known.
        self.brokers: dict[int, KlogError] = {}
        self.groups: dict[str, KlogError] = {}
        self.partitions: dict[TopicPartition, KlogError] = {}

    @contextmanager
    def waiting(self, cluster: Cluster) -> Iterator[None]:
        """Bound the requests of a block by the time that this look still has for silent brokers."""
        begin = time.monotonic()
        try:
            with cluster.within(self._seconds * 1000):
                yield
        finally:
            if time.monotonic() - begin >= self._seconds:
                self._seconds = _LATER_SECONDS

    def list_groups(self, admin: Admin) -> list[GroupListing]:
        """The groups of the brokers that answer, sorted by name."""
        with admin.exclusive() as cluster, self.waiting(cluster):
            answered = admin.list_groups_by_broker()
        self.brokers = _passing(answered.failures, len(answered))
        groups = [group for listed in answered.successes.values() for group in listed]
        return sorted(groups, key=lambda group: group.group)

    def describe_groups(self, admin: Admin, names: Collection[str]) -> Outcomes[str, GroupDescription]:
        """The groups whose coordinators answer, or refuse to describe them."""
        with admin.exclusive() as cluster, self.waiting(cluster):
            described = admin.describe_groups(names)
        self.groups = {name: error for name, error in described.failures.items() if isinstance(error, _SILENCE)}
        self._coordinators = {name: group.coordinator for name, group in described.successes.items()}
        return Outcomes({name: described[name] for name in described if name not in self.groups})

    def list_group_offsets(self, admin: Admin, group: str) -> dict[TopicPartition, Committed] | None:
        """The committed offsets of a group; None if its coordinator does not answer, or did not for another group."""
        node = self._coordinators.get(group, -1)
        error = self._silent.get(node)
        if error is None:
            try:
                with admin.exclusive() as cluster, self.waiting(cluster):
                    return admin.list_group_offsets(group)
            except _SILENCE as silence:
                error = silence
            if node >= 0:
                self._silent[node] = error
        self.groups[group] = error
        return None

    def ends(
        self, cluster: Cluster, partitions: Collection[TopicPartition]
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """The (earliest, latest) offset of each partition whose leader answers, by the cluster's last metadata."""
        offsets = self.offsets(cluster, partitions, (EARLIEST, LATEST))
        return offsets[EARLIEST], offsets[LATEST]

    def offsets(
        self, cluster: Cluster, partitions: Collection[TopicPartition], times: Collection[int]
    ) -> dict[int, dict[TopicPartition, int]]:
        """The offsets at each of the times; a partition of which one is missing has none."""
        offsets: dict[int, dict[TopicPartition, int]] = {at: {} for at in times}
        failed: dict[TopicPartition, KlogError] = {}
        rest = list(partitions)
        for is_again in (False, True):
            with self.waiting(cluster):
                answers = run(each({at: asking_offsets_of_led(cluster, dict.fromkeys(rest, at)) for at in times}))
            for at, answer in answers.items():
                if isinstance(answer, KlogError):
                    raise answer
                offsets[at] |= answer[0]
                # a request that is late ends the connection, and so those beside it: they are silence, too
                late = {key for key, error in failed.items() if isinstance(error, RequestTimedOut)}
                failed |= {key: error for key, error in answer[1].items() if key not in late}
            rest = [key for key, error in failed.items() if not isinstance(error, RequestTimedOut)]
            if is_again or not rest:
                break
            time.sleep(pause_seconds(cluster.config, 1))  # a leader may just have moved
            try:
                with self.waiting(cluster):
                    cluster.metadata({topic for topic, _ in rest})
            except _SILENCE:
                break
            for key in rest:
                del failed[key]
        for key in partitions:
            self.partitions.pop(key, None)  # an earlier call may have had no answer
        self.partitions |= _passing(failed, len(partitions))
        return {at: {key: answered[key] for key in answered if key not in failed} for at, answered in offsets.items()}

    @property
    def missing(self) -> list[str]:
        """What is missing, and why: a line for each kind and reason."""
        partitions = {
            f"{topic}-{number}": error for (topic, number), error in sorted(self.partitions.items(), key=itemgetter(0))
        }
        brokers = {str(node): error for node, error in self.brokers.items()}
        kinds: dict[str, Mapping[str, KlogError]] = {
            "the groups of broker": brokers,
            "group": self.groups,
            "partition": partitions,
        }
        lines = []
        for kind, errors in kinds.items():
            reasons: dict[str, list[str]] = {}
            for name, error in errors.items():
                reasons.setdefault(reason_of(error), []).append(name)
            for reason, names in reasons.items():
                lines.append(f"no answer about {kind} {some_of(names)}: {reason}")
        return lines


def reason_of(error: KlogError) -> str:
    """An error without the name of the partition, if it has one."""
    return error.code.name if isinstance(error, ProtocolError) else str(error)


def _passing(failed: Mapping[_Key, KlogError], asked: int) -> dict[_Key, KlogError]:
    """The failures; raises those that are final, and the worst if nothing has answered."""
    for error in failed.values():
        if not is_retriable(error):
            raise error
    if failed and len(failed) == asked and any(isinstance(error, _SILENCE) for error in failed.values()):
        raise worst(list(failed.values()))
    return dict(failed)
