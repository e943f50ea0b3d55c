"""What all calls of the admin client share: the lock, the deadline, attempts for each item, and routing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spark_klog.base.interrupts import CallLock
from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import POSITIVE_INT, value_of
from spark_klog.client.answers import answer_error, by_key, worst
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import Coordinators
from spark_klog.client.forks import Maker
from spark_klog.client.offsets import UNKNOWN_SECONDS, partition_entries
from spark_klog.client.security import settings as security_settings
from spark_klog.client.settings import ClientConfig, client_config, setting_texts
from spark_klog.errors import (
    AdminClosed,
    AuthenticationError,
    ConfigError,
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    ItemsFailed,
    KlogError,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersionError,
    is_retriable,
)
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.protocol.tables.groups import GROUP

_log = logging.getLogger(__name__)
_API_TIMEOUT = "default.api.timeout.ms"
_DEFAULT_API_TIMEOUT_MS = 60_000
_WITH_EFFECT = frozenset(
    [
        "bootstrap.servers",
        "client.id",
        "isolation.level",
        "request.timeout.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "socket.connection.setup.timeout.ms",
        _API_TIMEOUT,
    ]
).union(security_settings.NAMES)
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
#: Final errors of a broker that has not answered for any item.
_UNUSABLE = (AuthenticationError, DecodeError, UnsupportedVersionError)


@dataclass(frozen=True)
class AdminConfig:
    """Parsed settings; `api_timeout_ms` bounds a call, `client.request_timeout_ms` a request."""

    client: ClientConfig
    api_timeout_ms: int


def admin_config(settings: Mapping[str, Any]) -> AdminConfig:
    """Parse settings by Kafka's names; values and `ConfigError` as in `client_config`.

    Logs the names of settings of Kafka's clients that have no effect here.
    """
    client = client_config(settings)
    timeout = max(_DEFAULT_API_TIMEOUT_MS, client.request_timeout_ms)
    if _API_TIMEOUT in settings:
        text = setting_texts({_API_TIMEOUT: settings[_API_TIMEOUT]})[_API_TIMEOUT]
        timeout = value_of(POSITIVE_INT, _API_TIMEOUT, text)
        if timeout < client.request_timeout_ms:
            raise ConfigError(
                f"{_API_TIMEOUT}={timeout} must be at least request.timeout.ms={client.request_timeout_ms}"
            )
    if ignored := sorted(set(settings) - _WITH_EFFECT):
        _log.warning("settings without effect on an admin client: %s", ", ".join(ignored))
    return AdminConfig(client, timeout)


class Outcomes(dict[_K, _V | KlogError], Generic[_K, _V]):
    """The result of each item that was asked for, or the `KlogError` that it failed with.

    The call itself raises only if no broker answered for any item. Use `check` if all items must succeed.
    """

    def check(self) -> dict[_K, _V]:
        """The results if all items succeeded.

        Otherwise raise the item's error if only one was asked for, or else `ItemsFailed`.
        """
        failures = self.failures
        if failures and len(self) == 1:
            raise next(iter(failures.values()))
        if failures:
            raise ItemsFailed(failures, len(self))
        return self.successes

    @property
    def successes(self) -> dict[_K, _V]:
        """The results of the items that succeeded."""
        return {key: result for key, result in self.items() if not isinstance(result, KlogError)}

    @property
    def failures(self) -> dict[_K, KlogError]:
        """The errors of the items that failed."""
        return {key: result for key, result in self.items() if isinstance(result, KlogError)}


class _Turn(CallLock):  # type: ignore[misc]  # as `CallLock`
    """Admits one thread at a time; `until` is the end of its time, with that in which it has waited.

    `own` is the client's cluster, None if it is the caller's: then the deadlines of the caller's blocks hold.
    """

    def __init__(self, own: Cluster | None, maker: Maker, seconds: float, limit: str) -> None:
        self._own, self._maker, self._seconds, self._limit = own, maker, seconds, limit
        self.until = 0.0

    def _begin(self, *, is_nested: bool) -> None:
        self._maker.check()  # before the lock, which a thread of the parent may have held
        until = time.monotonic() + self._seconds
        if not self.acquire(timeout=min(self._seconds, threading.TIMEOUT_MAX)):
            raise RequestTimedOut(f"calls of other threads took {self._seconds:g} s ({self._limit})")
        if not is_nested:
            self.until = until
            if self._own is not None:
                self._own.end_deadlines()


class AdminCalls:
    """The base of the families of calls."""

    def __init__(self, settings: Mapping[str, Any] | Cluster) -> None:
        if isinstance(settings, Cluster):
            #: For the package's own use by one thread; with several, `exclusive` lends it.
            self.cluster = settings
            self._timeout_ms, self._limit = settings.config.request_timeout_ms, "request.timeout.ms"
        else:
            config = admin_config(settings)
            self.cluster = Cluster(config.client)
            self._timeout_ms, self._limit = config.api_timeout_ms, "default.api.timeout.ms"
            try:
                self.cluster.metadata([])
            except BaseException:
                self.cluster.close()
                raise
        self._maker = Maker("admin client", AdminClosed)
        own = None if self.cluster is settings else self.cluster
        self._turn = _Turn(own, self._maker, self._timeout_ms / 1000, self._limit)
        self._is_closed = False
        self._found = Coordinators(self.cluster)
        self._keeps_coordinators = False

    @contextmanager
    def same_coordinators(self) -> Iterator[None]:
        """For the package's own use: the calls of the block share the coordinators that they found, until one fails.

        Not for blocks that last long: a coordinator that is silent since would take a call's whole time.
        """
        self._found.forget()
        self._keeps_coordinators = True
        try:
            yield
        finally:
            self._keeps_coordinators = False

    @contextmanager
    def exclusive(self) -> Iterator[Cluster]:
        """For the package's own use: the cluster, while the calls of other threads wait; bounded as one call."""
        with self._turn, self._call():
            yield self.cluster

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Bound the block, with the wait for the turn in which it is, by the timeout of a call."""
        if self._is_closed:
            raise AdminClosed("the admin client is closed")
        if not self._keeps_coordinators:
            self._found.forget()
        with self.cluster.within(1000 * (self._turn.until - time.monotonic()), self._limit):
            yield

    @property
    def _broker_timeout_ms(self) -> int:
        """The time for a broker to make a change: it answers REQUEST_TIMED_OUT before this client gives up."""
        return max(1, self.cluster.config.request_timeout_ms * 9 // 10)

    def _attempt(self, action: Callable[[], _V]) -> _V:
        """Run `action` until it succeeds, see `Cluster.attempt`, in this thread's turn and the timeout of the call."""
        with self._turn, self._call():
            return self.cluster.attempt(action, self._timeout_ms, self._limit)

    def _each(
        self,
        keys: Iterable[_K],
        ask: Callable[[list[_K]], Mapping[_K, _V | KlogError]],
        *,
        waits_for_topics: bool = False,
    ) -> Outcomes[_K, _V]:
        """Ask for the items in this thread's turn, until none has a retriable error or the time is over.

        A topic that does not exist is a final error if a look-up after a second says so, or with `waits_for_topics` at
        the end of the time. What `ask` raises is retried for all items if it is retriable; it is the call's error if
        none was answered. So is an item's error if no broker gave any item a usable answer.
        """
        with self._turn, self._call():
            found: dict[_K, _V | KlogError] = {}
            #: The errors of the last attempt if `ask` raised.
            refused: dict[_K, KlogError] = {}
            wanted = list(dict.fromkeys(keys))
            rest = wanted
            unknown_until = time.monotonic() + UNKNOWN_SECONDS

            def is_passing(result: object, asked_at: float) -> bool:
                is_missing = isinstance(result, ProtocolError) and result.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                is_late = is_missing and not waits_for_topics and asked_at > unknown_until
                return is_retriable(result) and not is_late

            def ask_rest() -> None:
                nonlocal rest
                asked_at = time.monotonic()
                with self._found.forgotten_on_error():
                    try:
                        found.update(ask(rest))
                    except (ConnectionFailed, RequestTimedOut, ProtocolError) as refusal:
                        refused.update(dict.fromkeys(rest, refusal))
                        raise
                    refused.clear()
                    rest = [key for key in rest if is_passing(found[key], asked_at)]
                    if rest:
                        raise worst([error for key in rest if isinstance(error := found[key], KlogError)])

            try:
                if wanted:
                    self._attempt(ask_rest)
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                # else it had no time: the answers before stand
                if all(error is not result for result in found.values()):
                    found |= refused
                    if not any(_is_answered(result) for result in found.values()) or found.keys() == refused.keys():
                        raise
            unusable = [error for error in found.values() if isinstance(error, _UNUSABLE)]
            if found and len(unusable) == len(found):
                raise unusable[0]
            return Outcomes({key: found[key] for key in wanted})

    def _ask_brokers(
        self,
        api: Api,
        by_node: Mapping[int, Collection[_K]],
        request: Callable[[Collection[_K]], Message],
        entries: Callable[[Message], Iterable[tuple[_K, Message]]],
        doing: str,
        accepted: Collection[ErrorCode] = (),
    ) -> dict[_K, Message | KlogError]:
        """Ask each broker for its items at once; the entry of each item in the response, or its error.

        Entries with an `accepted` code are not errors. `doing` stands before the item in errors.
        """
        found: dict[_K, Message | KlogError] = {}
        requests = {node: request(keys) for node, keys in by_node.items()}
        for node, answer in self.cluster.request_each(api, requests).items():
            keys = by_node[node]
            try:
                if isinstance(answer, KlogError):
                    raise answer
                answered = by_key(api, answer, entries(answer), keys)
            except KlogError as error:
                found |= dict.fromkeys(keys, error)
            else:
                for key, entry in answered.items():
                    is_accepted = entry["error_code"] in accepted
                    found[key] = entry if is_accepted else entry_or_error(api, entry, doing, key)
        return found

    def _each_at_leaders(
        self,
        api: Api,
        wanted: Iterable[TopicPartition],
        request: Callable[[Collection[TopicPartition]], Message],
        entries: Callable[[Message], Iterable[tuple[TopicPartition, Message]]] = partition_entries,
    ) -> Outcomes[TopicPartition, Message]:
        """Ask the leaders of partitions as `_ask_brokers` does, each as `_each` does."""

        def ask(rest: list[TopicPartition]) -> dict[TopicPartition, Message | KlogError]:
            by_node, failures = self.cluster.by_leader(rest)
            answered = self._ask_brokers(api, by_node, request, entries, f"{api.name} of")
            return {**failures, **answered}

        return self._each(wanted, ask)

    def _knows(self, node: int) -> bool:
        """Whether a broker is part of the cluster; fetches metadata if the last ones do not name it."""
        if node not in self.cluster.nodes:
            self.cluster.metadata([])
        return node in self.cluster.nodes

    def _coordinators(
        self, keys: Iterable[str], kind: int = GROUP
    ) -> tuple[dict[int, list[str]], dict[str, KlogError]]:
        """The groups or transactional ids by coordinator, and the errors of those that have none now."""
        by_node: dict[int, list[str]] = {}
        failures: dict[str, KlogError] = {}
        for key, node in self._found.nodes(keys, kind).items():
            if isinstance(node, ProtocolError):
                failures[key] = node
            else:
                by_node.setdefault(node, []).append(key)
        return by_node, failures

    def _ask_coordinators(
        self,
        api: Api,
        keys: Iterable[str],
        request: Callable[[Collection[str]], Message],
        entries: Callable[[Message], Iterable[tuple[str, Message]]],
        doing: str,
        kind: int = GROUP,
    ) -> dict[str, Message | KlogError]:
        """Like `_ask_brokers`, of the coordinators of groups or transactional ids."""
        by_node, failures = self._coordinators(keys, kind)
        return {**failures, **self._ask_brokers(api, by_node, request, entries, doing)}

    def _change(
        self,
        api: Api,
        keys: Iterable[_K],
        request: Callable[[Collection[_K]], Message],
        entries: Callable[[Message], Iterable[tuple[_K, Message]]],
        doing: str,
        made_before: Callable[[_K, ErrorCode], bool] = lambda key, code: False,
    ) -> Outcomes[_K, Message]:
        """Ask the controller to change items; the entry of each in the response, {} if the response was lost.

        If a response was lost or late, the broker may have made the change and refuses it in the next attempt:
        `made_before` then decides whether that error shows that the change is there.
        """
        is_answer_lost: set[_K] = set()

        def result(key: _K, entry: Message) -> Message | KlogError:
            found = entry_or_error(api, entry, doing, key)
            if isinstance(found, ProtocolError):
                if found.code == ErrorCode.REQUEST_TIMED_OUT:
                    is_answer_lost.add(key)
                elif key in is_answer_lost:
                    try:
                        return {} if made_before(key, found.code) else found
                    except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                        # the other items' outcomes in this response stand
                        what = _named(doing, key)
                        return RequestTimedOut(f"{what}: an earlier answer was lost, and the check failed: {error}")
            return found

        def ask(rest: list[_K]) -> dict[_K, Message | KlogError]:
            node = self.cluster.controller()
            try:
                answer = self.cluster.request(node, api, request(rest))
            except (ConnectionFailed, RequestTimedOut) as error:
                if not error.is_unsent:
                    is_answer_lost.update(rest)
                raise
            return {key: result(key, entry) for key, entry in by_key(api, answer, entries(answer), rest).items()}

        return self._each(keys, ask)

    def close(self) -> None:
        """Close the connections, after the call of another thread if there is one. Later calls raise `AdminClosed`."""
        if self._maker.is_forked:
            self.cluster.close()
            return
        with self._turn:
            self._is_closed = True
            self.cluster.close()


def _is_answered(result: object) -> bool:
    """Whether a broker has answered for an item, be it with an error."""
    return not isinstance(result, ConnectionFailed | RequestTimedOut)


def entry_or_error(api: Api, entry: Message, doing: str, key: object) -> Message | KlogError:
    """The entry of an item in a response, or its error with the broker's message."""
    if not entry["error_code"]:
        return entry
    reason = entry.get("error_message")
    what = _named(doing, key)
    return answer_error(api, entry["error_code"], f"{what} ({reason})" if reason else what)


def _named(doing: str, key: object) -> str:
    """What is done to an item, for errors; a partition is shown as TOPIC-NUMBER."""
    return f"{doing} {'-'.join(map(str, key)) if type(key) is tuple else key}"


def by_field(results: str, key: str) -> Callable[[Message], Iterator[tuple[Any, Message]]]:
    """A function that yields the entries in the field `results` of a response, by their field `key`."""

    def entries(answer: Message) -> Iterator[tuple[Any, Message]]:
        for entry in answer[results]:
            yield entry[key], entry

    return entries


def mapped(outcomes: Outcomes[_K, Message], result: Callable[[Message], _V]) -> Outcomes[_K, _V]:
    """The outcomes with `result` of the response's entry for success; a `ProtocolError` of `result` is the outcome."""

    def outcome(entry: Message | KlogError) -> _V | KlogError:
        try:
            return entry if isinstance(entry, KlogError) else result(entry)
        except ProtocolError as error:
            return error

    return Outcomes({key: outcome(entry) for key, entry in outcomes.items()})


def without_results(outcomes: Outcomes[_K, Message]) -> Outcomes[_K, None]:
    """The outcomes with None for success."""
    return mapped(outcomes, lambda _: None)


def no_broker(node: int) -> KlogError:
    """The error of a broker that is not part of the cluster."""
    return ProtocolError(
        ErrorCode.BROKER_NOT_AVAILABLE, f"broker {node}", advice="the cluster has no broker with this id now"
    )
