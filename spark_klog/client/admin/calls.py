"""What all calls of the admin client share: the lock, the deadline, attempts for each item, and routing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

from spark_klog.base.interrupts import CallLock
from spark_klog.base.names import TopicPartition
from spark_klog.base.settings import POSITIVE_INT, value_of
from spark_klog.client.answers import answer_error, by_key, worst
from spark_klog.client.calls import Calls
from spark_klog.client.cluster import Cluster, by_node
from spark_klog.client.coordinator import Coordinators
from spark_klog.client.forks import Maker
from spark_klog.client.offsets import UNKNOWN_SECONDS
from spark_klog.client.requests import Steps, at_once, each, unsent
from spark_klog.client.settings import ClientConfig, check_settings, client_config, setting_texts
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
from spark_klog.security import settings as security_settings

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
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
#: Final errors of a broker that has not answered for any item.
_UNUSABLE = (AuthenticationError, DecodeError, UnsupportedVersionError)
#: Which broker (a node id) to ask for which items, and the errors of items that have no broker now.
Routes = tuple[Mapping[int, list[_K]], Mapping[_K, KlogError]]
#: The steps that find routes of items.
Places = Callable[[list[_K]], Steps[tuple[Mapping[int, list[_K]], Mapping[_K, KlogError]]]]
#: The entries in the response to a request for items: a function of both.
Entries = Callable[[Message, Collection[_K]], Iterable[tuple[_K, Message]]]


def admin_config(settings: Mapping[str, Any]) -> tuple[ClientConfig, int]:
    """Parse settings, as `client_config` does, and default.api.timeout.ms, which bounds a call.

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
    return client, timeout


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
        return {key: result for key, result in self.items() if not isinstance(result, KlogError)}

    @property
    def failures(self) -> dict[_K, KlogError]:
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


class AdminCalls(Calls):
    """The base of the families of calls."""

    def __init__(self, settings: Mapping[str, Any] | Cluster) -> None:
        if isinstance(settings, Cluster):
            self._begin(settings, settings.config.request_timeout_ms, "request.timeout.ms", is_own=False)
            return
        self._begin_own(settings)
        try:
            self.cluster.metadata([])
        except BaseException:
            self.cluster.close()
            raise

    def _begin_own(self, settings: Mapping[str, Any]) -> None:
        check_settings("Admin", settings)
        config, timeout_ms = admin_config(settings)
        self._begin(Cluster(config), timeout_ms, _API_TIMEOUT, is_own=True)

    def _begin(self, cluster: Cluster, timeout_ms: int, limit: str, *, is_own: bool) -> None:
        #: For the package's own use by one thread; with several, `exclusive` lends it.
        self.cluster, self._timeout_ms, self._limit = cluster, timeout_ms, limit
        self._maker = Maker("admin client", AdminClosed)
        self._turn = _Turn(cluster if is_own else None, self._maker, timeout_ms / 1000, limit)
        self._is_closed = False
        self._found = Coordinators(cluster)
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

    def _attempt(self, action: Callable[[], Steps[_V]]) -> Steps[_V]:
        """Run `action` until it succeeds, see `Cluster.attempt`, in this thread's turn and the timeout of the call."""
        with self._turn, self._call():
            return (yield from self.cluster.attempting(action, self._timeout_ms, self._limit))

    def _each(
        self,
        keys: Iterable[_K],
        ask: Callable[[list[_K]], Steps[Mapping[_K, _V | KlogError]]],
        *,
        waits_for_topics: bool = False,
    ) -> Steps[Outcomes[_K, _V]]:
        """Ask for the items in this thread's turn, until none has a retriable error or the time is over.

        A topic that does not exist is a final error if a look-up after a second says so, or with `waits_for_topics` at
        the end of the time. What `ask` raises is retried for all items if it is retriable; it is the call's error if
        none was answered. So is an item's error if no broker gave any item a usable answer.
        """
        with self._turn, self._call():
            results: dict[_K, _V | KlogError] = {}
            #: The errors of the last attempt if `ask` raised.
            refused: dict[_K, KlogError] = {}
            wanted = list(dict.fromkeys(keys))
            rest = wanted
            unknown_until = time.monotonic() + UNKNOWN_SECONDS

            def is_passing(result: object, asked_at: float) -> bool:
                is_missing = isinstance(result, ProtocolError) and result.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                is_late = is_missing and not waits_for_topics and asked_at > unknown_until
                return is_retriable(result) and not is_late

            def ask_rest() -> Steps[None]:
                nonlocal rest
                asked_at = time.monotonic()
                with self._found.forgotten_on_error():
                    try:
                        results.update((yield from ask(rest)))
                    except (ConnectionFailed, RequestTimedOut, ProtocolError) as refusal:
                        refused.update(dict.fromkeys(rest, refusal))
                        raise
                    refused.clear()
                    rest = [key for key in rest if is_passing(results[key], asked_at)]
                    if rest:
                        raise worst([error for key in rest if isinstance(error := results[key], KlogError)])

            try:
                if wanted:
                    yield from self._attempt(ask_rest)
            except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                # else it had no time: the answers before stand
                if all(error is not result for result in results.values()):
                    results |= refused
                    if not any(_is_answered(result) for result in results.values()) or results.keys() == refused.keys():
                        raise
            unusable = [error for error in results.values() if isinstance(error, _UNUSABLE)]
            if results and len(unusable) == len(results):
                raise unusable[0]
            return Outcomes({key: results[key] for key in wanted})

    def _each_at(
        self,
        api: Api,
        keys: Iterable[_K],
        request: Callable[[list[_K]], Message],
        entries: Entries[_K],
        doing: str,
        is_made: Callable[[_K, ErrorCode], bool] = lambda key, code: False,
        *,
        is_there: Callable[[_K], Steps[bool]] = lambda key: at_once(lambda: True),
        check: Callable[[list[_K]], Steps[None]] = lambda keys: at_once(lambda: None),
        places: Places[_K] | None = None,
        result: Callable[[Message], Any] = lambda entry: None,
    ) -> Steps[Outcomes[_K, Any]]:
        """Ask the controller, or the brokers in `places`, as `_ask` and `_each` do; `result`: see `mapped`.

        If a response was lost or late, the broker may have made the change and refuses it in the next attempt:
        `is_made` then decides whether that error shows that the change is there, and `is_there` looks; its entry is {}.
        `check` comes before each request, and may ask brokers.
        """
        is_answer_lost: set[_K] = set()

        def settled(key: _K, answer: Message | KlogError) -> Steps[Message | KlogError]:
            if isinstance(answer, ConnectionFailed | RequestTimedOut):
                if not answer.is_unsent:
                    is_answer_lost.add(key)
            elif isinstance(answer, ProtocolError):
                if answer.code == ErrorCode.REQUEST_TIMED_OUT:
                    is_answer_lost.add(key)
                elif key in is_answer_lost:
                    try:
                        return {} if is_made(key, answer.code) and (yield from is_there(key)) else answer
                    except (ConnectionFailed, RequestTimedOut, ProtocolError) as error:
                        # the other items' outcomes in this response stand
                        what = _named(doing, key)
                        return RequestTimedOut(f"{what}: an earlier answer was lost, and the check failed: {error}")
            return answer

        def ask(rest: list[_K]) -> Steps[dict[_K, Message | KlogError]]:
            try:
                where = places or self._at_controller
                answered = yield from self._ask(where, api, rest, request, entries, doing, check=check)
            except (ConnectionFailed, RequestTimedOut) as error:
                if not error.is_unsent:
                    is_answer_lost.update(rest)
                raise
            outcomes: dict[_K, Message | KlogError] = {}
            for key, answer in answered.items():
                outcomes[key] = yield from settled(key, answer)
            return outcomes

        return mapped((yield from self._each(keys, ask)), result)

    def _ask(
        self,
        places: Places[_K],
        api: Api,
        keys: list[_K],
        request: Callable[[list[_K]], Message],
        entries: Entries[_K],
        doing: str,
        *,
        accepted: Collection[ErrorCode] = (),
        one_by_one: bool = False,
        check: Callable[[list[_K]], Steps[None]] = lambda keys: at_once(lambda: None),
    ) -> Steps[dict[_K, Message | KlogError]]:
        """Ask the brokers in `places` for their items; the entry of each item in a response, or its error.

        With `one_by_one` each item has a request of its own. Entries with an `accepted` code are not errors; each says
        in `answered_by` which broker has answered. `doing` stands before the item in errors. If one request was for
        all items and has no usable answer, its error is raised.
        """
        with unsent():
            its_keys, failures = yield from places(keys)
            yield from check(keys)
            asked = [
                (node, some)
                for node, of_node in its_keys.items()
                for some in ([[key] for key in of_node] if one_by_one else [of_node])
            ]
            requests = {number: (node, request(some)) for number, (node, some) in enumerate(asked)}
        answers: dict[_K, Message | KlogError] = dict(failures)
        for number, answer in (yield from self.cluster.asking_all(api, requests)).items():
            node, some = asked[number]
            try:
                if isinstance(answer, KlogError):
                    raise answer
                if entries is not whole:
                    checked(api, answer, _named(doing, next(iter(some))))
                answered = by_key(api, answer, entries(answer, some), some)
            except KlogError as error:
                if len(asked) == 1 and not failures and not one_by_one and not isinstance(error, _UNUSABLE):
                    raise
                answers |= dict.fromkeys(some, error)
                continue
            for key, entry in answered.items():
                entry["answered_by"] = node
                is_accepted = entry["error_code"] in accepted
                answers[key] = entry if is_accepted else entry_or_error(api, entry, _named(doing, key))
        return answers

    def _at_controller(self, keys: list[_K]) -> Steps[Routes[_K]]:
        return {(yield from self.cluster.asking_controller()): keys}, {}

    def _at_coordinators(
        self, keys: Iterable[_K], kind: int = GROUP, name: Callable[[_K], str] = str
    ) -> Steps[Routes[_K]]:
        """The items by coordinator, and the errors of those that have none now; `name` gives the coordinated name."""
        named = {key: name(key) for key in keys}
        nodes = yield from self._found.asking_nodes(named.values(), kind)
        return by_node({key: nodes[its_name] for key, its_name in named.items()})

    def _at_brokers(self, nodes: Mapping[_K, int]) -> Steps[Routes[_K]]:
        """The items by their brokers, and the errors of those whose broker is not part of the cluster."""
        if not set(self.cluster.nodes).issuperset(nodes.values()):
            yield from self.cluster.asking_metadata([])

        def known_or_error(node: int) -> int | KlogError:
            advice = "the cluster has no broker with this id now"
            error = ProtocolError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {node}", advice=advice)
            return node if node in self.cluster.nodes else error

        return by_node({key: known_or_error(node) for key, node in nodes.items()})

    def _ask_controller(
        self,
        api: Api,
        request: Message,
        check: Callable[[], Steps[None]] = lambda: at_once(lambda: None),
    ) -> Steps[Message]:
        """The controller's response, without an error."""

        def ask() -> Steps[Message]:
            controller = yield from self.cluster.asking_controller()
            yield from check()
            return checked(api, (yield from self.cluster.asking(controller, api, request)))

        return self._attempt(ask)

    def _of_all_brokers(self, of_broker: Callable[[int], Steps[Iterable[_V]]]) -> Steps[list[_V]]:
        def ask() -> Steps[list[_V]]:
            listed: list[_V] = []
            for answer in (yield from self._of_each_broker(of_broker)).values():
                if isinstance(answer, KlogError):
                    raise answer
                listed += answer
            return listed

        return self._attempt(ask)

    def _of_each_broker(self, of_broker: Callable[[int], Steps[_V]]) -> Steps[dict[int, _V | KlogError]]:
        """What each broker says, all of them asked at once, or its error."""
        yield from self.cluster.asking_metadata([])
        return (yield from each({node: of_broker(node) for node in self.cluster.nodes}))

    def close(self) -> None:
        """Close the connections, after the call of another thread if there is one. Later calls raise `AdminClosed`."""
        if self._maker.is_forked:
            self.cluster.close()
            return
        with self._turn:
            self._is_closed = True
            self.cluster.close()


def _is_answered(result: object) -> bool:
    return not isinstance(result, ConnectionFailed | RequestTimedOut)


def entry_or_error(api: Api, entry: Message, what: str) -> Message | KlogError:
    """The entry of an item in a response, or its error with the broker's message."""
    if not entry["error_code"]:
        return entry
    reason = entry.get("error_message")
    return answer_error(api, entry["error_code"], f"{what} ({reason})" if reason else what)


def checked(api: Api, answer: Message, what: str = "") -> Message:
    """A response; raises its error if it has one as a whole."""
    result = entry_or_error(api, {"error_code": 0, **answer}, what or api.name)
    if isinstance(result, KlogError):
        raise result
    return answer


def _named(doing: str, key: object) -> str:
    """What is done to an item, for errors; a partition is shown as TOPIC-NUMBER."""
    return f"{doing} {'-'.join(map(str, key)) if type(key) is tuple else key}"


def by_field(results: str, key: str) -> Entries[Any]:
    """The entries in the field `results` of a response, by their field `key`."""
    return lambda answer, _: ((entry[key], entry) for entry in answer[results])


def by_partition(
    results: str = "topics", topic: str = "name", partitions: str = "partitions", number: str = "partition_index"
) -> Entries[TopicPartition]:
    """The entries of partitions in a response, whose fields have these names."""
    return lambda answer, _: (
        ((its[topic], entry[number]), entry) for its in answer[results] for entry in its[partitions]
    )


def whole(answer: Message, keys: Collection[_K]) -> Iterator[tuple[_K, Message]]:
    """The response itself as the entry of the only item."""
    return ((key, answer) for key in keys)


def known(number: int) -> int | None:
    """A number in a response; None for -1, which says that there is none or that the broker is too old to know it."""
    return number if number >= 0 else None


def mapped(outcomes: Outcomes[_K, Message], result: Callable[[Message], Any] = lambda entry: None) -> Outcomes[_K, Any]:
    """The outcomes with `result` of the response's entry for success; a `ProtocolError` of `result` is the outcome."""

    def outcome(entry: Message | KlogError) -> Any:
        try:
            return entry if isinstance(entry, KlogError) else result(entry)
        except ProtocolError as error:
            return error

    return Outcomes({key: outcome(entry) for key, entry in outcomes.items()})
