"""Find leaders and positions of assigned partitions: metadata, committed offsets, offset resets.

The ends of leader epochs tell a consumer that a log was truncated (KIP-320, OffsetForLeaderEpoch): a new leader may
lack the last records of the former one (unclean election). A position that was reached by records of epoch E is still
right if the new leader's records of epochs up to E end at it or later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

from spark_klog.base.names import TopicPartition
from spark_klog.client.answers import answer_error, by_key
from spark_klog.client.cluster import UNKNOWN_TOPIC, Cluster
from spark_klog.client.consumer.assignment import Assigned, Assignment, Leader, Troubles
from spark_klog.client.consumer.group import ConsumerGroup
from spark_klog.client.consumer.settings import ConsumerConfig
from spark_klog.client.offsets import NO_OFFSET, Committed, asking_offsets_of_led, by_topic
from spark_klog.client.requests import Steps
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
#: Seconds after which an assigned partition that no broker has ever known is an error: a new topic needs a moment.
UNKNOWN_SECONDS = 0.5


class Positions:
    """Find the missing leaders and positions of an `Assignment`; each step asks brokers and waits for the answers.

    A partition that has another position since, as after a seek, is left as it is.
    Retriable failures are noted in the partition (see `Assigned.failed`), the others in `troubles`.
    """

    def __init__(self, cluster: Cluster, config: ConsumerConfig, assignment: Assignment, troubles: Troubles) -> None:
        self._cluster, self._config = cluster, config
        self._assignment = assignment
        self._troubles = troubles
        self._refresh_at = -math.inf
        #: When the last look-up of leaders that was answered began, a reading of `time.monotonic`.
        self.refreshed_at = -math.inf
        #: When the last one of all topics began.
        self._all_at = -math.inf
        self._refreshes = 0
        #: Look-ups of leaders in a row that were not answered in time.
        self.late = 0

    def step(self, group: ConsumerGroup | None, patience: Callable[[], tuple[float, str]]) -> Steps[None]:
        """Find leaders and positions that the brokers know now; `group` has the committed offsets.

        `patience` says how long to wait for the latter: a leader that is silent must not delay the others for long.
        """
        now = time.monotonic()
        lacking = [state for state in self._assignment.restless if state.leader is None]
        if not any(state.failure for state in self._assignment.restless):
            self._refreshes = 0
        is_old = now >= self._all_at + self._config.client.metadata_max_age_ms / 1000
        if (lacking or (is_old and self._assignment.partitions)) and now >= self._refresh_at:
            yield from self._find_leaders(lacking, is_old=is_old)
        items = list(self._assignment.restless)
        with self._cluster.within(*patience()):
            if beyond := [state for state in items if state.out_of_range is not None]:
                yield from self._check_ranges(beyond)
            if unknown := [each for each in items if each.position is None and each.leader and now >= each.retry_at]:
                yield from self._find_positions(unknown, group)
            if unchecked := [each for each in items if each.is_unchecked and each.leader and now >= each.retry_at]:
                yield from self._check_epochs(unchecked)

    def look_at(self) -> float:
        """When `step` has something to do next, a reading of `time.monotonic`."""
        if not self._assignment.partitions:
            return math.inf
        at = max(self._refresh_at, self._all_at + self._config.client.metadata_max_age_ms / 1000)
        for state in self._assignment.restless:
            if state.out_of_range is not None:
                return 0.0
            if state.leader is None:
                at = min(at, self._refresh_at)
            elif state.position is None or state.is_unchecked:
                at = min(at, state.retry_at)
        return at

    def look_at_once(self) -> None:
        """Look up the leaders of a new assignment without a pause after earlier look-ups."""
        self._refreshes, self._refresh_at = 0, -math.inf

    def _find_leaders(self, lacking: list[Assigned], *, is_old: bool) -> Steps[None]:
        """Look up the leaders of all topics if those that are known are old, else of topics that lack some."""
        now = time.monotonic()
        self._refreshes += 1
        self._refresh_at = now + pause_seconds(self._config.client, self._refreshes)
        if any(state.failure for state in lacking):
            self._cluster.doubt()
        try:
            asked = self._assignment.partitions.values() if is_old else lacking
            topics, creates = {state.topic for state in asked}, self._config.allow_auto_create_topics
            metadata = yield from self._cluster.asking_metadata(topics, create=creates, is_retried=True)
        except (ConnectionFailed, RequestTimedOut) as error:
            self._troubles.note("the cluster", error)
            self.late = self.late + 1 if error.is_late else 0
            for state in lacking:
                state.failed(error, self._config.client)
            return
        self.refreshed_at, self.late = now, 0
        self._all_at = now if is_old else self._all_at
        recreated: set[str] = set()
        failures: dict[Assigned, KlogError] = {}
        for state in list(self._assignment.partitions.values()):
            if state.topic not in topics:
                continue  # it was assigned meanwhile
            failure = self._take_leader(state, metadata.get(state.topic))
            if state.is_recreated:
                self._begin_again(state, is_told=state.topic in recreated)
                recreated.add(state.topic)
            if failure is not None and not failure.retriable:
                self._troubles.final.append(failure)
            if failure is not None and state.leader is None:
                failures[state] = failure
            if failure is None or failure.code not in UNKNOWN_TOPIC or state.was_known:
                state.unknown_since = math.inf
            elif state.unknown_since == math.inf:
                state.stir()
                state.unknown_since = now
            sure_at = state.unknown_since + UNKNOWN_SECONDS
            if now < sure_at < self._refresh_at:
                self._refresh_at = sure_at
        self._troubles.note_all(failures)
        for state, noted in failures.items():
            state.failed(noted, self._config.client)

    def _take_leader(self, state: Assigned, topic: Message | None) -> ProtocolError | None:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic["error_code"]
        if topic is None or code not in (0, ErrorCode.LEADER_NOT_AVAILABLE):
            return answer_error(METADATA, code, f"topic {state.topic}")
        for entry in topic["partitions"]:
            if entry["partition_index"] == state.partition:
                if entry["leader_id"] < 0:
                    break
                if topic["topic_id"] in state.retired_ids:  # this broker does not know the new topic yet
                    return answer_error(METADATA, ErrorCode.UNKNOWN_TOPIC_ID, f"topic {state.topic}")
                if topic["topic_id"].int:
                    state.find(topic["topic_id"])
                state.was_known = True
                state.lead(Leader(entry["leader_id"], entry["leader_epoch"]))
                return None
        else:
            what = f"partition {state.name}, of a topic with {len(topic['partitions'])} partitions"
            return ProtocolError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, what)
        return answer_error(METADATA, ErrorCode.LEADER_NOT_AVAILABLE, f"partition {state.name}")

    def _begin_again(self, state: Assigned, *, is_told: bool) -> None:
        """Begin with the new topic as auto.offset.reset says, or raise."""
        assert state.topic_id is not None
        assert state.found_id is not None
        recreated = TopicRecreated(state.topic, state.topic_id, state.found_id)
        start = self._config.auto_offset_reset.time(round(time.time() * 1000))
        if start is not None:
            if not is_told:
                _log.warning("%s; going on as auto.offset.reset says", recreated.what)
            state.restart(start)
            return
        if not is_told:
            self._troubles.final.append(recreated)
        state.failed(recreated, self._config.client)
        state.leader = None

    def _find_positions(self, unknown: list[Assigned], group: ConsumerGroup | None) -> Steps[None]:
        runs = {state.key: state.run for state in unknown}
        asked = [state.key for state in unknown if state.start is None]
        known: Mapping[TopicPartition, Committed] = {}
        if asked and group is not None:
            timeout_ms = 1000 * (self._cluster.deadline() - time.monotonic())
            failed: Mapping[TopicPartition, KlogError]
            try:
                known, failed = yield from group.committed_now(asked, timeout_ms, CALL_TIMEOUT)
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                failed = dict.fromkeys(asked, error)
            for state in unknown:
                failure = failed.get(state.key)
                if failure is not None:
                    self._troubles.note("the group's coordinator", failure)
                    if not is_retriable(failure):
                        raise failure
                    state.failed(failure, self._config.client)
            unknown = [state for state in unknown if state.key not in failed and state.run == runs[state.key]]
        now_ms = round(time.time() * 1000)
        times = {}
        for state in unknown:
            if state.key in known:
                state.seek(known[state.key].offset, known[state.key].leader_epoch)
                state.succeeded()
                continue
            if state.start is None:
                state.start = self._config.auto_offset_reset.time(now_ms)
            if state.start is None:
                missing = NoOffsetForPartition(*state.key)
                state.failed(missing, self._config.client, keeps_leader=True)
                self._troubles.final.append(missing)
            else:
                times[state.key] = state.start
        states = {state.key: state for state in unknown}
        for key, offset in (yield from self._offsets(times)).items():
            state = states[key]
            if state.run != runs[key]:
                continue
            if offset == NO_OFFSET and times[key] != LATEST:
                state.start = LATEST  # no record is that late
                continue
            _log.info("position of %s: %d", state.name, offset)
            state.seek(max(0, offset))
            state.succeeded()

    def _offsets(
        self, times: Mapping[TopicPartition, int], isolation_level: int | None = None
    ) -> Steps[dict[TopicPartition, int]]:
        """Offsets by ListOffsets, see `list_offsets`; partitions that fail are noted and left out."""
        if not times:
            return {}
        offsets, failed = yield from asking_offsets_of_led(self._cluster, times, isolation_level)
        states = {key: state for key in failed if (state := self._assignment.partitions.get(key)) is not None}
        self._troubles.note_all({state: failed[key] for key, state in states.items()})
        for key, state in states.items():
            state.failed(failed[key], self._config.client)
        return offsets

    def _check_epochs(self, unchecked: list[Assigned]) -> Steps[None]:
        """Ask leaders whether they have the records before the positions; go back to where the logs diverge.

        `DecodeError` for a bad response.
        """
        by_node: dict[int, dict[TopicPartition, Assigned]] = {}
        for state in unchecked:
            assert state.leader is not None
            by_node.setdefault(state.leader.node, {})[state.key] = state
        requests: dict[int, tuple[int, Message]] = {}
        runs = {state.key: state.run for state in unchecked}
        for node, items in by_node.items():
            entries = (
                (key, {"partition": key[1], "current_leader_epoch": state.leader_epoch, "leader_epoch": state.epoch})
                for key, state in items.items()
            )
            topics = [{"topic": topic, "partitions": some} for topic, some in by_topic(entries).items()]
            requests[node] = node, {"replica_id": _CONSUMER, "topics": topics}
        for node, answer in (yield from self._cluster.asking_all(OFFSET_FOR_LEADER_EPOCH, requests)).items():
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
                if items[key].run == runs[key]:
                    self._check_epoch(items[key], end)

    def _check_epoch(self, state: Assigned, end: Message | KlogError | None) -> None:
        """Compare a position with the end of its epoch at the leader; None if the broker can't tell."""
        if isinstance(end, dict) and end["error_code"] not in (0, _DECLINED):
            end = answer_error(OFFSET_FOR_LEADER_EPOCH, end["error_code"], f"leader epochs of {state.name}")
        if isinstance(end, KlogError):
            if not is_retriable(end):
                self._troubles.final.append(end)
            self._troubles.note_all({state: end})
            state.failed(end, self._config.client)
            return
        assert state.position is not None
        if end is not None and not end["error_code"] and 0 <= end["end_offset"] < state.position:
            truncated = LogTruncated(*state.key, state.position, state.epoch, end["end_offset"])
            if self._config.auto_offset_reset.time(0) is None:
                self._troubles.final.append(truncated)
                state.failed(truncated, self._config.client, keeps_leader=True)
                return
            _log.warning("%s; going on there", truncated.what)
            state.seek(end["end_offset"], end["leader_epoch"])
        state.is_unchecked = False
        state.succeeded()

    def _check_ranges(self, beyond: list[Assigned]) -> Steps[None]:
        """Ask leaders for the range of offsets: a broker that has just lost or gained a partition may be wrong."""
        wanted = {
            state.key: state for state in beyond if state.position == state.out_of_range and state.leader is not None
        }
        runs = {state.key: state.run for state in beyond}
        for state in beyond:
            state.out_of_range = None
        first = yield from self._offsets(dict.fromkeys(wanted, EARLIEST))
        # positions may be in open transactions
        last = yield from self._offsets(dict.fromkeys(first, LATEST), READ_UNCOMMITTED)
        for key, end in last.items():
            state, offset = wanted[key], wanted[key].position
            if offset is None or state.run != runs[key]:
                continue
            if first[key] <= offset <= end:
                continue
            error = OffsetOutOfRange(*key, (offset, offset + 1), (first[key], end))
            start = self._config.auto_offset_reset.time(round(time.time() * 1000))
            if start is None:
                self._troubles.final.append(error)
            else:
                _log.warning("%s; going on as auto.offset.reset says", error)
                state.restart(start)
