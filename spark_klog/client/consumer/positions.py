"""Find leaders and positions of assigned partitions: metadata, committed offsets, offset resets.

The ends of leader epochs tell a consumer that a log was truncated (KIP-320, OffsetForLeaderEpoch): a new leader may
lack the last records of the former one (unclean election). A position that was reached by records of epoch E is still
right if the new leader's records of epochs up to E end at it or later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error, by_key
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.consumer.assignment import Assigned, Assignment, Leader, Troubles
from spark_klog.client.consumer.group import ConsumerGroup
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.offsets import NO_OFFSET, Committed, by_topic, offsets_of_led
from spark_klog.client.retry import CALL_TIMEOUT, pause_seconds
from spark_klog.errors import (
    ConnectionFailed,
    ErrorCode,
    KlogError,
    LogTruncated,
    NoOffsetForPartition,
    OffsetOutOfRange,
    ProtocolError,
    RequestTimedOut,
    TopicRecreated,
    UnsupportedVersionError,
    is_retriable,
)
from spark_klog.protocol.apis import METADATA, OFFSET_FOR_LEADER_EPOCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.tables.records import EARLIEST, LATEST, READ_UNCOMMITTED

#: A consumer's replica id.
_CONSUMER = -1
#: Brokers before 2.3 answer only other brokers if there are rules.
_DECLINED = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


_log = logging.getLogger(__name__)


class Positions:
    """Find the missing leaders and positions of an `Assignment`; each step asks brokers and waits for the answers.

    Retriable failures are noted in the partition (see `Assigned.failed`), the others in `troubles`.
    """

    def __init__(self, cluster: Cluster, config: ConsumerConfig, assignment: Assignment, troubles: Troubles) -> None:
        self._cluster, self._config = cluster, config
        self._assignment = assignment
        self._troubles = troubles
        self._refresh_at = -math.inf
        #: When the last look-up of leaders that was answered began, a reading of `time.monotonic`.
        self.refreshed_at = -math.inf
        self._refreshes = 0

    def step(self, group: ConsumerGroup | None) -> None:
        """Find leaders and positions that the brokers know now; `group` has the committed offsets."""
        now = time.monotonic()
        lacking = [item for item in self._assignment.partitions.values() if item.leader is None]
        is_old = now >= self.refreshed_at + self._config.client.metadata_max_age_ms / 1000
        if (lacking or (is_old and self._assignment.partitions)) and now >= self._refresh_at:
            self._find_leaders(lacking)
        items = list(self._assignment.partitions.values())
        if beyond := [item for item in items if item.out_of_range is not None]:
            self._check_ranges(beyond)
        if unknown := [item for item in items if item.position is None and item.leader and now >= item.retry_at]:
            self._find_positions(unknown, group)
        if unchecked := [item for item in items if item.is_unchecked and item.leader and now >= item.retry_at]:
            self._check_epochs(unchecked)

    def look_at(self) -> float:
        """When `step` has something to do next, a reading of `time.monotonic`."""
        if not self._assignment.partitions:
            return math.inf
        at = max(self._refresh_at, self.refreshed_at + self._config.client.metadata_max_age_ms / 1000)
        for item in self._assignment.partitions.values():
            if item.out_of_range is not None:
                return 0.0
            if item.leader is None:
                at = min(at, self._refresh_at)
            elif item.position is None or item.is_unchecked:
                at = min(at, item.retry_at)
        return at

    def _find_leaders(self, lacking: list[Assigned]) -> None:
        now = time.monotonic()
        self._refreshes += 1
        self._refresh_at = now + pause_seconds(self._config.client, self._refreshes)
        try:
            topics, creates = {topic for topic, _ in self._assignment.partitions}, self._config.allow_auto_create_topics
            found = self._cluster.metadata(topics, create=creates, is_retried=True)
        except (ConnectionFailed, RequestTimedOut) as error:
            self._troubles.note("the cluster", error)
            for item in lacking:
                item.failed(error, self._config.client)
            return
        self.refreshed_at = now
        recreated: set[str] = set()
        for item in self._assignment.partitions.values():
            failure = self._take_leader(item, found.get(item.topic))
            if item.is_recreated:
                self._begin_again(item, is_told=item.topic in recreated)
                recreated.add(item.topic)
            if failure is not None and not failure.retriable:
                self._troubles.final.append(failure)
            if failure is not None and item.leader is None:
                self._troubles.note(item.name, failure)
                item.failed(failure, self._config.client)
            if failure is None or failure.code not in UNKNOWN_TOPIC or item.was_known:
                item.unknown_since = math.inf
            elif item.unknown_since == math.inf:
                item.unknown_since = now
        if all(item.leader is not None for item in self._assignment.partitions.values()):
            self._refreshes = 0

    def _take_leader(self, item: Assigned, topic: Message | None) -> ProtocolError | None:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic["error_code"]
        if topic is None or code not in (0, ErrorCode.LEADER_NOT_AVAILABLE):
            return answer_error(METADATA, code, f"topic {item.topic}")
        for entry in topic["partitions"]:
            if entry["partition_index"] == item.partition:
                if entry["leader_id"] < 0:
                    break
                if topic["topic_id"] in item.retired_ids:  # this broker does not know the new topic yet
                    return answer_error(METADATA, ErrorCode.UNKNOWN_TOPIC_ID, f"topic {item.topic}")
                if topic["topic_id"].int:
                    item.find(topic["topic_id"])
                item.was_known = True
                item.lead(Leader(entry["leader_id"], entry["leader_epoch"]))
                return None
        else:
            what = f"partition {item.name}, of a topic with {len(topic['partitions'])} partitions"
            return ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, what)
        return answer_error(METADATA, ErrorCode.LEADER_NOT_AVAILABLE, f"partition {item.name}")

    def _begin_again(self, item: Assigned, *, is_told: bool) -> None:
        """Begin with the new topic as auto.offset.reset says, or raise."""
        assert item.topic_id is not None
        assert item.found_id is not None
        recreated = TopicRecreated(item.topic, item.topic_id, item.found_id)
        start = self._config.auto_offset_reset.time(round(time.time() * 1000))
        if start is not None:
            if not is_told:
                _log.warning("%s; going on as auto.offset.reset says", recreated.what)
            item.restart(start)
            return
        if not is_told:
            self._troubles.final.append(recreated)
        item.failed(recreated, self._config.client)
        item.leader = None

    def _find_positions(self, unknown: list[Assigned], group: ConsumerGroup | None) -> None:
        asked = [item.key for item in unknown if item.start is None]
        known: Mapping[TopicPartition, Committed] = {}
        if asked and group is not None:
            timeout_ms = 1000 * (self._cluster.deadline() - time.monotonic())
            failed: Mapping[TopicPartition, KlogError]
            try:
                known, failed = group.committed_now(asked, timeout_ms, CALL_TIMEOUT)
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                failed = dict.fromkeys(asked, error)
            for item in unknown:
                failure = failed.get(item.key)
                if failure is not None:
                    self._troubles.note("the group's coordinator", failure)
                    if not is_retriable(failure):
                        raise failure
                    item.failed(failure, self._config.client)
            unknown = [item for item in unknown if item.key not in failed]
        now_ms = round(time.time() * 1000)
        times = {}
        for item in unknown:
            if item.key in known:
                item.seek(known[item.key].offset, known[item.key].leader_epoch)
                item.succeeded()
                continue
            if item.start is None:
                item.start = self._config.auto_offset_reset.time(now_ms)
            if item.start is None:
                missing = NoOffsetForPartition(*item.key)
                item.failed(missing, self._config.client, keeps_leader=True)
                self._troubles.final.append(missing)
            else:
                times[item.key] = item.start
        for key, offset in self._offsets(times).items():
            item = self._assignment.partitions[key]
            if offset == NO_OFFSET and times[key] != LATEST:
                item.start = LATEST  # no record is that late
                continue
            _log.info("position of %s: %d", item.name, offset)
            item.seek(max(0, offset))
            item.succeeded()

    def _offsets(
        self, times: Mapping[TopicPartition, int], isolation_level: int | None = None
    ) -> dict[TopicPartition, int]:
        """Offsets by ListOffsets, see `list_offsets`; partitions that fail are noted and left out."""
        if not times:
            return {}
        found, failed = offsets_of_led(self._cluster, times, isolation_level)
        for key, error in failed.items():
            item = self._assignment.partitions[key]
            self._troubles.note(item.name, error)
            item.failed(error, self._config.client)
        return found

    def _check_epochs(self, unchecked: list[Assigned]) -> None:
        """Ask leaders whether they have the records before the positions; go back to where the logs diverge.

        `DecodeError` for a bad response.
        """
        by_node: dict[int, dict[TopicPartition, Assigned]] = {}
        for item in unchecked:
            assert item.leader is not None
            by_node.setdefault(item.leader.node, {})[item.key] = item
        requests = {}
        for node, items in by_node.items():
            entries = (
                (key, {"partition": key[1], "current_leader_epoch": item.leader_epoch, "leader_epoch": item.epoch})
                for key, item in items.items()
            )
            topics = [{"topic": topic, "partitions": some} for topic, some in by_topic(entries).items()]
            requests[node] = {"replica_id": _CONSUMER, "topics": topics}
        for node, answer in self._cluster.request_each(OFFSET_FOR_LEADER_EPOCH, requests).items():
            items = by_node[node]
            ends: Mapping[TopicPartition, Message | KlogError | None]
            if isinstance(answer, UnsupportedVersionError):  # before 0.11
                ends = dict.fromkeys(items)
            elif isinstance(answer, KlogError):
                ends = dict.fromkeys(items, answer)
            else:
                entries = (
                    ((topic["topic"], entry["partition"]), entry)
                    for topic in answer["topics"]
                    for entry in topic["partitions"]
                )
                try:
                    ends = by_key(OFFSET_FOR_LEADER_EPOCH, answer, entries, items)
                except ProtocolError as error:
                    ends = dict.fromkeys(items, error)
            for key, end in ends.items():
                self._check_epoch(items[key], end)

    def _check_epoch(self, item: Assigned, end: Message | KlogError | None) -> None:
        """Compare a position with the end of its epoch at the leader; None if the broker can't tell."""
        if isinstance(end, dict) and end["error_code"] not in (0, _DECLINED):
            end = answer_error(OFFSET_FOR_LEADER_EPOCH, end["error_code"], f"leader epochs of {item.name}")
        if isinstance(end, KlogError):
            if not is_retriable(end):
                self._troubles.final.append(end)
            self._troubles.note(item.name, end)
            item.failed(end, self._config.client)
            return
        assert item.position is not None
        if end is not None and not end["error_code"] and 0 <= end["end_offset"] < item.position:
            truncated = LogTruncated(*item.key, item.position, item.epoch, end["end_offset"])
            if self._config.auto_offset_reset.time(0) is None:
                self._troubles.final.append(truncated)
                item.failed(truncated, self._config.client, keeps_leader=True)
                return
            _log.warning("%s; going on there", truncated.what)
            item.seek(end["end_offset"], end["leader_epoch"])
        item.is_unchecked = False
        item.succeeded()

    def _check_ranges(self, beyond: list[Assigned]) -> None:
        """Ask leaders for the range of offsets: a broker that has just lost or gained a partition may be wrong."""
        wanted = {item.key: item for item in beyond if item.position == item.out_of_range and item.leader is not None}
        for item in beyond:
            item.out_of_range = None
        first = self._offsets(dict.fromkeys(wanted, EARLIEST))
        last = self._offsets(dict.fromkeys(first, LATEST), READ_UNCOMMITTED)  # positions may be in open transactions
        for key, end in last.items():
            item, offset = wanted[key], wanted[key].position
            assert offset is not None
            if first[key] <= offset <= end:
                continue
            error = OffsetOutOfRange(*key, (offset, offset + 1), (first[key], end))
            start = self._config.auto_offset_reset.time(round(time.time() * 1000))
            if start is None:
                self._troubles.final.append(error)
            else:
                _log.warning("%s; going on as auto.offset.reset says", error)
                item.restart(start)
