"""A running member of a group in ZooKeeper: one thread that rebalances, fetches into the streams, and commits.

Every member computes the same assignment from what all see: the members' registrations, and the topics' partitions. For
each topic the partitions, in order of their numbers, are divided into ranges for the threads (streams) that read it, in
order of their ids (that of Java's strings); the first ones get one more if that leaves a remainder. A member keeps the
partitions that stay its own, where Kafka's consumers release everything first: each partition has an owner's node, so
members that see another state of the group only wait for each other.

It keeps the group's offsets in ZooKeeper, at the group's coordinator, or in both while a group moves.

Source: 0.10 documentation, "Consumers and Consumer Groups", "Consumer registration algorithm", "Consumer rebalancing
algorithm", "Consumer Offset Tracking" and "Migrating offsets from ZooKeeper to Kafka".
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from spark_klog.base.names import TopicPartition, topic_pattern
from spark_klog.base.settings import some_partitions
from spark_klog.classic.settings import ConnectorConfig
from spark_klog.classic.streams import Held, KafkaStream
from spark_klog.client import Consumer
from spark_klog.client.cluster import Cluster
from spark_klog.client.offsets import GroupOffsets, numbers_by_topic, offsets_of_led
from spark_klog.client.settings import client_config
from spark_klog.errors import ConnectionFailed, DirectoryError, KlogError, RebalanceFailed, WokenUp, is_retriable
from spark_klog.trees.consumers import (
    BLACK_LIST,
    STATIC,
    WHITE_LIST,
    OffsetDirectory,
    Registration,
    consumer_id_path,
    owner_path,
    parse_registration,
    registration_payload,
)
from spark_klog.trees.paths import (
    BROKER_IDS_PATH,
    BROKER_TOPICS_PATH,
    consumer_ids_path,
    parse_broker,
    parse_topic,
    topic_path,
)
from spark_klog.trees.tree import NodeExists, Tree

_log = logging.getLogger(__name__)
#: The first pause while other members have not released their partitions, in seconds; it doubles up to
#: rebalance.backoff.ms.
_FIRST_PAUSE = 0.02
#: Seconds that a turn of the thread fetches at most, before it looks at the clock again.
_TURN = 0.5
#: Messages decoded at once.
_CHUNK = 10_000
#: Seconds that fetching waits for a full stream before it pauses the stream's partitions: what was fetched of them is
#: then dropped, and fetched again.
_GRACE = 0.05
_PLACES = {-1: "latest", -2: "earliest", None: "none"}
_QUOTES = "\"'"
_INTERNAL = frozenset(["__consumer_offsets", "__transaction_state"])


class ConsumerRebalanceListener:
    """A listener that a connector calls in the thread that rebalances. Keep it short; errors are logged."""

    def before_releasing_partitions(self, partitions: Mapping[str, list[int]]) -> None:
        """Called before these partitions, by topic, are committed and released. Not for those that were lost."""

    def before_starting_fetchers(self, consumer_id: str, assignment: Mapping[str, Mapping[int, str]]) -> None:
        """Called before reading begins, with all that this member owns: the stream's id by topic and partition."""


class TopicFilter:
    """A regular expression that a topic's whole name matches; a comma means "or", spaces and outer quotes are dropped.

    `ConfigError` as of `topic_pattern`.
    """

    pattern: str

    def __init__(self, regex: str) -> None:
        self.regex = regex.strip().replace(",", "|").replace(" ", "").strip(_QUOTES)
        self._compiled = topic_pattern(f"{type(self).__name__}: {regex!r}", self.regex)

    def allows(self, topic: str, exclude_internal_topics: bool = True) -> bool:
        """Whether streams of this filter read the topic."""
        is_match = self._compiled.fullmatch(topic) is not None
        return is_match is (self.pattern == WHITE_LIST) and not (exclude_internal_topics and topic in _INTERNAL)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.regex!r})"


class Whitelist(TopicFilter):
    """Topics whose names match."""

    pattern = WHITE_LIST


class Blacklist(TopicFilter):
    """Topics whose names do not match."""

    pattern = BLACK_LIST


def streams_by_topic(
    registration: Registration, topics: Collection[str], exclude_internal_topics: bool
) -> dict[str, int]:
    """How many streams a member has for each topic that it reads; `topics` are all that exist."""
    if registration.pattern == STATIC:
        return dict(registration.subscription)
    ((regex, streams),) = registration.subscription.items()
    chosen = (Whitelist if registration.pattern == WHITE_LIST else Blacklist)(regex)
    return {topic: streams for topic in topics if chosen.allows(topic, exclude_internal_topics)}


def thread_id(consumer: str, number: int) -> str:
    """The id of a member's stream, which the owner's node holds."""
    return f"{consumer}-{number}"


def threads_by_topic(
    members: Mapping[str, Registration], topics: Collection[str], exclude_internal_topics: bool = True
) -> dict[str, list[str]]:
    """The ids of the threads that read each topic, in order; `topics` are all that exist."""
    owners: dict[str, list[str]] = {}
    for consumer, registration in members.items():
        for topic, streams in streams_by_topic(registration, topics, exclude_internal_topics).items():
            owners.setdefault(topic, []).extend(thread_id(consumer, number) for number in range(streams))
    return {
        topic: sorted(threads, key=lambda thread: thread.encode("utf-16-be", "surrogatepass"))  # Java's order
        for topic, threads in owners.items()
    }


def assign(
    threads: Mapping[str, Collection[str]], partitions: Mapping[str, Collection[int]]
) -> dict[TopicPartition, str]:
    """The thread that owns each partition, from `threads_by_topic` and the partitions of the topics that exist."""
    owners: dict[TopicPartition, str] = {}
    for topic, readers in threads.items():
        numbers = sorted(partitions.get(topic, ()))
        each, more = divmod(len(numbers), len(readers))
        start = 0
        for position, reader in enumerate(readers):
            end = start + each + (position < more)
            owners.update(((topic, number), reader) for number in numbers[start:end])
            start = end
    return owners


def new_consumer_id(group: str, consumer_id: str | None) -> str:
    """The id of a member, as Kafka's consumers make it: group, host, time and a random part, or consumer.id."""
    own = consumer_id or f"{socket.gethostname()}-{time.time_ns() // 1_000_000}-{uuid.uuid4().hex[:8]}"
    return f"{group}_{own}"


def broker_addresses(tree: Tree, protocol: str) -> list[str]:
    """HOST:PORT of each registered broker's listener with this security protocol, sorted."""
    names = tree.children(BROKER_IDS_PATH)
    payloads = tree.get_many([f"{BROKER_IDS_PATH}/{name}" for name in names])
    addresses = set()
    for name, payload in zip(names, payloads, strict=True):
        if payload is not None:
            endpoints = parse_broker(payload, f"{BROKER_IDS_PATH}/{name}")
            addresses |= {f"{point.host}:{point.port}" for point in endpoints if point.security_protocol == protocol}
    return sorted(addresses)


class Membership:
    """Registration and ownership of one member; the caller closes the tree, which ends both.

    Methods raise `DirectoryError`, and `DecodeError` for a node of another member that can't be read.
    """

    def __init__(
        self, tree: Tree, group: str, consumer: str, registration: Registration, exclude_internal: bool
    ) -> None:
        self._tree, self._group, self.consumer = tree, group, consumer
        self._registration, self._exclude_internal = registration, exclude_internal

    def register(self) -> None:
        """Create the member's node, in place of one that a former process with the same consumer.id has left."""
        self._create(
            consumer_id_path(self._group, self.consumer),
            registration_payload(self._registration, time.time_ns() // 1_000_000),
        )

    def _create(self, path: str, value: bytes) -> None:
        try:
            self._tree.create(path, value, ephemeral=True)
        except NodeExists:
            self._tree.delete(path)
            self._tree.create(path, value, ephemeral=True)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when members, brokers, topics or their partitions may have changed."""
        self._tree.watch(consumer_ids_path(self._group), callback)
        self._tree.watch(BROKER_IDS_PATH, callback)
        self._tree.watch(BROKER_TOPICS_PATH, callback, values=True)

    def is_registered(self) -> bool:
        return self._tree.get(consumer_id_path(self._group, self.consumer)) is not None

    def assignment(self) -> dict[TopicPartition, str]:
        """The thread of this member that is to own each partition (steps 1 to 7 of the algorithm)."""
        top = consumer_ids_path(self._group)
        names = self._tree.children(top)
        paths = [f"{top}/{name}" for name in names]
        payloads = zip(names, paths, self._tree.get_many(paths), strict=True)
        members = {name: parse_registration(payload, path) for name, path, payload in payloads if payload is not None}
        is_static = all(registration.pattern == STATIC for registration in members.values())
        topics = [] if is_static else self._tree.children(BROKER_TOPICS_PATH)
        threads = threads_by_topic(members, topics, self._exclude_internal)
        own = streams_by_topic(self._registration, topics, self._exclude_internal)
        wanted = {topic: threads[topic] for topic in own if topic in threads}
        owners = assign(wanted, self._partitions(wanted))
        mine = {thread_id(self.consumer, number) for number in range(max(own.values(), default=0))}
        return {key: owner for key, owner in owners.items() if owner in mine}

    def _partitions(self, topics: Iterable[str]) -> dict[str, list[int]]:
        paths = {topic: topic_path(topic) for topic in topics}
        payloads = self._tree.get_many(list(paths.values()))
        answers = zip(paths.items(), payloads, strict=True)
        return {topic: list(parse_topic(payload, path)[0]) for (topic, path), payload in answers if payload}

    def lost(self, owned: Mapping[TopicPartition, str]) -> list[TopicPartition]:
        """The partitions that are another member's now, because this member's session was lost meanwhile."""
        paths = [owner_path(self._group, *key) for key in owned]
        answers = zip(owned.items(), self._tree.get_many(paths), strict=True)
        return [key for (key, thread), payload in answers if payload != thread.encode()]

    def claim(self, wanted: Mapping[TopicPartition, str]) -> list[TopicPartition]:
        """Become the owner of partitions (step 9); those that another member still owns are left out."""
        claimed = []
        for key, thread in wanted.items():
            path = owner_path(self._group, *key)
            try:
                self._tree.create(path, thread.encode(), ephemeral=True)
            except NodeExists:
                if self._tree.get(path) != thread.encode():
                    continue
                self._create(path, thread.encode())  # of an attempt whose answer was lost
            claimed.append(key)
        return claimed

    def release(self, keys: Collection[TopicPartition]) -> None:
        """Give up partitions that this member owns (step 8)."""
        for key in keys:
            self._tree.delete(owner_path(self._group, *key))


class OffsetStorages:
    """The offsets of a group in the `storages` "kafka" and "zookeeper"; raises what these raise."""

    def __init__(self, tree: Tree, group: str, storages: Sequence[str]) -> None:
        self._group = group
        self._in_kafka = "kafka" in storages
        self._directory = OffsetDirectory(tree, group) if "zookeeper" in storages else None

    def commit(self, cluster: Cluster, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit in each storage; the coordinator's leaves out topics that do not exist any more."""
        if self._in_kafka:
            GroupOffsets(cluster, self._group).commit(offsets, skips_deleted=True)
        if self._directory is not None:
            self._directory.commit(offsets)

    def fetch(self, cluster: Cluster, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The committed offsets; with both storages the larger one, as in Kafka."""
        if not partitions:
            return {}
        offsets = GroupOffsets(cluster, self._group).fetch(partitions) if self._in_kafka else {}
        if self._directory is not None:
            for key, offset in self._directory.fetch(partitions).items():
                offsets[key] = max(offset, offsets.get(key, offset))
        return offsets


class Member:
    """Members rebalance in any order and at any time: each claims the partitions that are its own by what it sees, and
    tries again, after a pause, for those that their former owners have not released yet.

    One `client.Consumer` fetches all partitions that the member holds. Its thread does all but `wake`, `has_room` and
    what takes the lock.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        tree: Tree,
        consumer_id: str,
        registration: Registration,
        stream_of: Callable[[str, int], KafkaStream],
        on_failure: Callable[[KlogError], None],
        at_most_once: bool,
    ) -> None:
        """`stream_of` gives the stream of a topic and a thread's number; `on_failure` learns what ends the thread."""
        self._config, self._tree, self._stream_of = config, tree, stream_of
        self._on_failure, self._at_most_once = on_failure, at_most_once
        self._commits = config.auto_commit and not at_most_once
        self._membership = Membership(tree, config.group_id, consumer_id, registration, config.exclude_internal_topics)
        self._offsets = OffsetStorages(tree, config.group_id, config.storages)
        self._addresses: list[str] = []
        self._cluster: Cluster | None = None
        self._consumer: Consumer | None = None
        self.listener: ConsumerRebalanceListener | None = None
        self._held: dict[TopicPartition, Held] = {}
        #: Those of `_held` that the consumer reads, and that it has paused; their streams by identity.
        self._assigned: dict[TopicPartition, Held] = {}
        self._paused: set[TopicPartition] = set()
        self._streams: dict[int, KafkaStream] = {}
        #: Guards `_held`, commits and the cluster.
        self._lock = threading.RLock()
        #: Ends the thread's wait.
        self._woken = threading.Event()
        self._is_stopping = False
        #: Set if something has changed in ZooKeeper since the last rebalance began.
        self._has_changed = threading.Event()
        self._retry_at = 0.0
        self._pause = _FIRST_PAUSE
        self._commit_at = 0.0
        self._thread = threading.Thread(target=self._run_until_error, name=f"klog-{consumer_id}", daemon=True)

    def join(self) -> None:
        """Register, rebalance until all partitions of this member are its own, and start the thread."""
        self.register()
        until = time.monotonic() + self._config.rebalance_seconds
        while missing := self.rebalance():
            if time.monotonic() >= until:
                raise RebalanceFailed(
                    f"group {self._config.group_id}: other members still own {_shown(missing)} after "
                    f"{self._config.rebalance_seconds:g} s (rebalance.max.retries * rebalance.backoff.ms)"
                )
            self._has_changed.wait(max(0.0, self._retry_at - time.monotonic()))
        self._commit_at = time.monotonic() + self._config.auto_commit_interval_ms / 1000
        self._thread.start()

    def register(self) -> None:
        """Become a member; others rebalance from now on."""
        self._membership.register()
        self._membership.watch(self._on_change)

    @property
    def owned(self) -> dict[TopicPartition, str]:
        """The partitions that this member owns, with the ids of the streams that read them."""
        with self._lock:
            return {key: held.thread for key, held in self._held.items()}

    def _on_change(self) -> None:
        self._has_changed.set()
        self.wake()

    def wake(self) -> None:
        """End the thread's wait. Any thread may call it."""
        self._woken.set()
        consumer = self._consumer
        if consumer is not None:
            consumer.wakeup()

    def has_room(self) -> None:
        """A stream has room for another fetch. Any thread may call it."""
        self._woken.set()
        if self._paused:
            self.wake()

    def _run_until_error(self) -> None:
        try:
            self._run()
        except KlogError as error:
            _log.error("group %s: reading ends: %s", self._config.group_id, error)
            self._on_failure(error)
        except Exception as error:
            _log.exception("group %s: reading ends", self._config.group_id)
            self._on_failure(KlogError(f"the connector's thread has failed: {error!r}"))

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._turn()
            except KlogError as error:
                if self._is_stopping:
                    return
                if not is_retriable(error) and not isinstance(error, DirectoryError):
                    raise
                _log.warning("group %s: trying again: %s", self._config.group_id, error)
                self._put_off()
                self._woken.clear()
                self._woken.wait(self._pause)

    def _turn(self) -> None:
        now = time.monotonic()
        until = now + _TURN
        if self._has_changed.is_set() or self._retry_at:
            if now >= self._retry_at:
                missing = self.rebalance()
                if missing:
                    _log.debug("group %s: other members still own %s", self._config.group_id, _shown(missing))
            if self._retry_at:
                until = min(until, self._retry_at)
        if self._commits and now >= self._commit_at:
            self._commit_at = now + self._config.auto_commit_interval_ms / 1000
            self._commit_quietly(self._held.values())
        self._fetch(until)

    def _put_off(self) -> None:
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, self._config.rebalance_backoff_ms / 1000)

    def rebalance(self) -> list[TopicPartition]:
        """Release what is another member's, claim what is this one's; return what others have not released yet."""
        with self._lock:
            self._has_changed.clear()
            try:
                missing = self._rebalance_once()
            except BaseException:
                self._has_changed.set()
                raise
        if missing:
            self._put_off()
        else:
            self._retry_at, self._pause = 0.0, _FIRST_PAUSE
        return missing

    def _rebalance_once(self) -> list[TopicPartition]:
        membership = self._membership
        if not membership.is_registered():  # the session was lost
            membership.register()
        lost = membership.lost({key: held.thread for key, held in self._held.items()})
        if lost:
            _log.warning("group %s: other members have taken %s over", self._config.group_id, _shown(lost))
            self._drop(lost)
        if not self._find_brokers():
            return []  # the watch on brokers tells of the first one
        wanted = membership.assignment()
        self._release([key for key, held in self._held.items() if wanted.get(key) != held.thread])
        new = {key: thread for key, thread in wanted.items() if key not in self._held}
        claimed = membership.claim(new)
        try:
            self._start({key: new[key] for key in claimed})
        except BaseException:
            membership.release([key for key in claimed if key not in self._held])
            raise
        return sorted(new.keys() - set(claimed))

    def _release(self, keys: Collection[TopicPartition], *, commits: bool = True, counts_own: bool = False) -> None:
        """Step 8, after a commit of what was consumed."""
        if not keys:
            return
        self._listen(lambda listener: listener.before_releasing_partitions(numbers_by_topic(sorted(keys))))
        gone = self._drop(keys)
        if commits and self._commits:
            self._commit_quietly(gone, counts_own=counts_own)
        self._membership.release(keys)

    def _drop(self, keys: Collection[TopicPartition]) -> list[Held]:
        gone = [self._held.pop(key) for key in keys]
        for held in gone:
            held.is_released = True
        for stream in {id(held.stream): held.stream for held in gone}.values():
            stream.drop_released()
        self._assign()
        return gone

    def _start(self, claimed: dict[TopicPartition, str]) -> None:
        if not claimed:
            return
        offsets = self._offsets.fetch(self._connected(), claimed)
        first = self._first_offsets([key for key in claimed if key not in offsets])
        for key, thread in claimed.items():
            start, stream = offsets.get(key, first.get(key)), self._stream_of(key[0], int(thread.rpartition("-")[2]))
            self._held[key] = Held(key, thread, stream, self, start, offsets.get(key), start)
        assignment: dict[str, dict[int, str]] = {}
        for (topic, number), held in sorted(self._held.items()):
            assignment.setdefault(topic, {})[number] = held.thread
        self._listen(lambda listener: listener.before_starting_fetchers(self._membership.consumer, assignment))
        self._assign()

    def _listen(self, call: Callable[[ConsumerRebalanceListener], None]) -> None:
        if self.listener is not None:
            try:
                call(self.listener)
            except Exception:
                _log.exception("the rebalance listener of group %s failed", self._config.group_id)

    def commit(self, *, counts_own: bool) -> None:
        """Commit what was consumed; raises what the storages raise. At most once: that was done before."""
        with self._lock:
            self._commit(self._held.values(), counts_own=counts_own)

    def _commit(self, parts: Collection[Held], *, counts_own: bool) -> None:
        if self._at_most_once:
            return  # more is committed already
        offsets: dict[TopicPartition, int] = {}
        for held in parts:
            offset = held.stream.consumed(held, counts_own=counts_own)
            if offset is not None and offset != held.committed:
                offsets[held.key] = offset
        if offsets:
            self._offsets.commit(self._connected(), offsets)
            for held in parts:
                held.committed = offsets.get(held.key, held.committed)

    def _commit_quietly(self, parts: Collection[Held], *, counts_own: bool = False) -> None:
        with self._lock:
            try:
                self._commit(list(parts), counts_own=counts_own)
            except KlogError as error:
                _log.warning("offsets of group %s are not committed: %s", self._config.group_id, error)

    def may_give_out(self, held: Held, end: int) -> bool:
        """Commit a fetch before its messages are given out if at most once; False if its partition was released."""
        if held.is_released or not self._at_most_once:
            return not held.is_released
        with self._lock:
            if held.is_released:
                return False
            self._offsets.commit(self._connected(), {held.key: end})
            held.committed = end
            return True

    def _connected(self) -> Cluster:
        """The cluster, for offsets; `ConnectionFailed` while no broker is registered."""
        if self._cluster is None:
            raise ConnectionFailed("no broker is registered in ZooKeeper")
        return self._cluster

    def _find_brokers(self) -> bool:
        """Look for brokers in ZooKeeper; False if there is none. The clients are made again if all have moved."""
        addresses = broker_addresses(self._tree, str(self._config.client.get("security.protocol", "PLAINTEXT")).upper())
        if not addresses:
            return self._cluster is not None
        if not set(addresses) & set(self._addresses):
            self._close_clients()
            settings = self._config.client_settings(addresses)
            self._cluster = Cluster(client_config(settings))
            self._consumer = Consumer(
                {
                    **settings,
                    "auto.offset.reset": _PLACES[self._config.reset.place],
                    "fetch.max.wait.ms": self._config.fetch_wait_max_ms,
                    "fetch.min.bytes": self._config.fetch_min_bytes,
                    "max.partition.fetch.bytes": self._config.fetch_message_max_bytes,
                    "max.poll.records": _CHUNK,
                }
            )
            self._assigned = {}
            self._assign()
        self._addresses = addresses
        return True

    def _first_offsets(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where to begin without a committed offset, as auto.offset.reset says; without those not found yet."""
        place = self._config.reset.place
        if place is None or not keys:
            return {}
        cluster = self._connected()
        cluster.metadata(sorted({topic for topic, _ in keys}))
        offsets, failed = offsets_of_led(cluster, dict.fromkeys(keys, place))
        for key, error in failed.items():
            _log.info("the first offset of %s-%d is looked up later: %s", *key, error)
        return offsets

    def _assign(self) -> None:
        """Read exactly the held partitions from now on; those read before go on."""
        before, self._assigned = self._assigned, dict(self._held)
        self._streams = {id(held.stream): held.stream for held in self._held.values()}
        self._paused &= self._held.keys()
        if self._consumer is not None:
            self._consumer.assign(
                (*key, held.fetched) if before.get(key) is not held and held.fetched is not None else key
                for key, held in self._held.items()
            )

    def _fetch(self, until: float) -> None:
        """Fetch for the streams until messages have come, something wakes this thread, or the time is over."""
        self._woken.clear()
        full = [stream for stream in self._streams.values() if stream.is_full]
        if self._consumer is None or not self._assigned or (full and len(full) == len(self._streams)):
            self._woken.wait(max(0.0, until - time.monotonic()))
            return
        if full and not self._paused:
            self._woken.wait(_GRACE)
        self._pause_full()
        try:
            records = self._consumer.poll(max(0.0, until - time.monotonic()))
        except WokenUp:
            return
        if not records:
            return
        held = self._assigned.get((records[0].topic, records[0].partition))
        if held is not None:
            held.fetched = self._consumer.position(*held.key)
            held.stream.put(held, records, held.fetched)

    def _pause_full(self) -> None:
        """Pause the partitions of full streams, so that they hold up no other, and go on with the rest."""
        assert self._consumer is not None
        full = {key for key, held in self._assigned.items() if held.stream.is_full}
        if full != self._paused:
            self._consumer.pause(full - self._paused)
            self._consumer.resume(self._paused - full)
            self._paused = full

    def _close_clients(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._cluster is not None:
            self._cluster.close()
        self._consumer = self._cluster = None
        self._paused.clear()

    def leave(self, *, commits: bool, counts_own: bool) -> None:
        """End the thread, commit, release all partitions, end the streams. The tree's end ends the registration."""
        self._is_stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            with self._lock:
                self._release(list(self._held), commits=commits, counts_own=counts_own)
        except KlogError as error:
            _log.warning("group %s: partitions are released when the session ends: %s", self._config.group_id, error)
        finally:
            self._close_clients()


def _shown(keys: Collection[TopicPartition]) -> str:
    return some_partitions(keys, 5)
