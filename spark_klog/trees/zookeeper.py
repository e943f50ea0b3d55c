"""The tree in ZooKeeper, by kazoo: the session, how its requests are retried, how long it lives; and the tree.

If the connection is lost, operations wait for it, at most twice the session timeout. After every reconnect a thread of
the tree creates the ephemeral nodes of a lost session again, sets the watches again, and calls them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

from spark_klog.errors import ConfigError, DirectoryError
from spark_klog.trees.tree import SESSION_SECONDS, Lease, NodeExists, components, inner_components

_log = logging.getLogger(__name__)
_REPAIR_SECONDS = 1.0
_MAX_PENDING = 256
_CLAIM = "klog-claim-"
#: What an operation of a transaction takes beside its path; ZooKeeper refuses requests of 1 MiB (jute.maxbuffer).
_OPERATION_BYTES = 32
_MAX_TRANSACTION_BYTES = 512 * 1024
_kazoo_log = logging.getLogger("spark_klog.trees.kazoo")

_RETRY_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 1.0
#: kazoo waits for two thirds of the session's timeout for an answer.
_TIMEOUT_PER_READ_TIMEOUT = 3 / 2
_BEATS_PER_TIMEOUT = 6
_MAX_PAUSE_SECONDS = 1.0
_Clocks = tuple[float, float]
#: A method of kazoo's transactions and its arguments: "check", "delete" or "set_data", a path, ...
Operation = tuple[Any, ...]


class _Pipelined:
    """Pipelined requests with one wait for all; an answer is None if the request failed with `no_answer`."""

    def __init__(self, pending: list[Any], no_answer: type[Exception]) -> None:
        self._pending = pending
        self._no_answer = no_answer

    def get(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: list[Any] = []
        for request in self._pending:
            try:
                answers.append(request.get(timeout=max(0.0, deadline - time.monotonic())))
            except self._no_answer:
                answers.append(None)
        return answers


class _Committed:
    """A transaction that was sent. The result of one that failed is the error of the operation that failed."""

    def __init__(self, pending: Any, of_others: tuple[type[Exception], ...]) -> None:
        self._pending = pending
        self._of_others = of_others

    def get(self, timeout: float) -> None:
        for answer in self._pending.get(timeout=timeout):
            if isinstance(answer, Exception) and not isinstance(answer, self._of_others):
                raise answer


class ZooKeeperSession:
    """A connected session; see `ZooKeeperTree` for the parameters and errors.

    `client` is kazoo's, `errors` its module of exceptions, `timeout_seconds` the timeout that the server granted. Once
    `is_closed` is set, calls raise `DirectoryError`.
    """

    def __init__(self, connect: str, session_timeout: float) -> None:
        from kazoo import exceptions
        from kazoo.client import KazooClient
        from kazoo.handlers.threading import KazooTimeoutError
        from kazoo.retry import KazooRetry

        if _kazoo_log.level == logging.NOTSET:
            # kazoo warns of each attempt to connect; the tree logs once.
            _kazoo_log.setLevel(logging.ERROR)
        self.connect = connect
        self.errors = exceptions
        self.is_closed = False
        self._lost = (
            exceptions.ConnectionLoss,
            exceptions.SessionExpiredError,
            exceptions.OperationTimeoutError,
            KazooTimeoutError,
        )
        #: Errors about a node's state, which `call` passes on.
        self._of_nodes = (
            exceptions.NoNodeError,
            exceptions.NodeExistsError,
            exceptions.NotEmptyError,
            exceptions.BadVersionError,
        )
        #: In a transaction's answer, for the operations beside the one that failed.
        self._of_others = exceptions.RolledBackError, exceptions.RuntimeInconsistency
        self._attempt_seconds = self.timeout_seconds = session_timeout
        self.operation_seconds = 2 * session_timeout
        hosts, _, chroot = connect.partition("/")
        if "@" in hosts:
            raise ConfigError(
                "the address of ZooKeeper has a character @, and is not shown, as a password may be before it: "
                "write HOST:PORT,HOST:PORT/CHROOT"
            )
        # Not kazoo's chroot, which warns if it does not exist yet.
        self._chroot = "".join(f"/{name}" for name in components("/" + chroot.strip("/")))
        retry = KazooRetry(max_tries=-1, delay=_RETRY_SECONDS, max_delay=_MAX_BACKOFF_SECONDS)
        try:
            self.client = KazooClient(hosts, session_timeout, connection_retry=retry, logger=_kazoo_log)
        except ValueError as error:
            raise ConfigError(
                f"zookeeper.connect {connect!r} is malformed ({error}): write HOST:PORT,HOST:PORT/CHROOT"
            ) from None
        self._note_timeout()
        try:
            # A server that has just started may swallow a handshake, which kazoo awaits for the session timeout.
            self.client.start(self.operation_seconds)
        except KazooTimeoutError:
            raise DirectoryError(
                f"no ZooKeeper answers at {connect} within {self.operation_seconds:g} s: is it running, is the address "
                "right?"
            ) from None
        try:
            if self._chroot:
                self.call("/", lambda: self.client.ensure_path_async(self._chroot))
        except BaseException:
            self.stop()
            raise

    def _note_timeout(self) -> None:
        """Keep `timeout_seconds` as the server says, which may lower it: kazoo tells only its own read timeout."""
        connection = self.client._connection
        connect = connection._connect

        def connected(*address: Any) -> tuple[float, float]:
            read_ms, connect_ms = connect(*address)
            self.timeout_seconds = read_ms * _TIMEOUT_PER_READ_TIMEOUT / 1000
            return read_ms, connect_ms

        connection._connect = connected

    @property
    def session_id(self) -> int | None:
        """ZooKeeper's id of the session; None without a connection."""
        session = self.client.client_id
        return None if session is None else int(session[0])

    def stop(self) -> None:
        """End the session, and with it its ephemeral nodes."""
        try:
            self.client.stop()
            self.client.close()
        except Exception as error:  # the session ends by its timeout anyway
            _log.warning("closing the session with ZooKeeper %s failed: %s", self.connect, error)

    def real(self, path: str) -> str:
        """The path with the chroot before it; `ConfigError` for an invalid path."""
        components(path)
        return (self._chroot if path == "/" else f"{self._chroot}{path}") or "/"

    def call(self, path: str, start: Callable[[], Any]) -> Any:
        """The result of the request that `start` sends; retried while the connection is lost.

        Passes on those of kazoo's exceptions that are about a node's state. kazoo's own retries would wait for ever: a
        request queued without a connection has no timeout.
        """
        deadline = time.monotonic() + self.operation_seconds
        while True:
            left = deadline - time.monotonic()
            try:
                if self.is_closed:
                    raise DirectoryError(f"{path}: the tree in ZooKeeper {self.connect} is closed")
                return start().get(timeout=max(0.0, min(left, self._attempt_seconds)))
            except self._of_nodes:
                raise
            except self._lost as error:
                if left <= _RETRY_SECONDS:
                    raise DirectoryError(
                        f"{path}: no answer from ZooKeeper {self.connect} in {self.operation_seconds:g} s "
                        f"({type(error).__name__}): is it running?"
                    ) from error
                time.sleep(_RETRY_SECONDS)
            except self.errors.NoChildrenForEphemeralsError as error:
                raise DirectoryError(
                    f"{path} in ZooKeeper {self.connect}: a node above is ephemeral and can't have children"
                ) from error
            except self.errors.KazooException as error:
                raise DirectoryError(
                    f"{path}: ZooKeeper {self.connect} refused: {type(error).__name__} {error}".rstrip()
                ) from error

    def call_many(
        self,
        paths: Sequence[str],
        send: Callable[..., Any],
        requests: Sequence[tuple[Any, ...]],
        no_answer: type[Exception],
    ) -> list[Any]:
        """As `call` for `send` with each of the arguments, pipelined; an answer is None if one failed with `no_answer`.

        Errors name the first of the `paths`.
        """

        def start(first: int) -> _Pipelined:
            return _Pipelined([send(*request) for request in requests[first : first + _MAX_PENDING]], no_answer)

        starts = range(0, len(requests), _MAX_PENDING)
        return [answer for first in starts for answer in self.call(paths[0], partial(start, first))]

    def transact(self, path: str, operations: Sequence[Operation]) -> bool:
        """Do all operations or none; False if one failed by the state of its node.

        Also False if the connection was lost and an earlier attempt may have succeeded.
        """

        def start() -> _Committed:
            transaction = self.client.transaction()
            for name, *arguments in operations:
                getattr(transaction, name)(*arguments)
            return _Committed(transaction.commit_async(), self._of_others)

        try:
            self.call(path, start)
        except self._of_nodes:
            return False
        return True

    def is_ours(self, path: str) -> bool:
        """Whether a node exists and is an ephemeral node of this session."""
        real = self.real(path)
        stat = self.call(path, lambda: self.client.exists_async(real))
        session = self.session_id
        return stat is not None and session is not None and bool(stat.ephemeralOwner == session)


def _clocks() -> _Clocks:
    """Seconds of two clocks: one that counts suspended time, if there is one, and the wall clock.

    In a paused virtual machine the first may stand still as well; the wall clock is set later.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)), time.time()


def _seconds_since(then: _Clocks) -> float:
    clock, wall = _clocks()
    return max(clock - then[0], wall - then[1])


class SessionLease:
    """Until when a session with ZooKeeper certainly lives, by the clock; a thread sends the beats until `stop`.

    A process that stood still (SIGSTOP, a paused virtual machine) goes on as if nothing had happened: its own threads
    learn only later that ZooKeeper has ended its session, and that others have acted without it. So requests of our
    own, beats, note when they were sent: the session lives at least its timeout longer than the last one that
    ZooKeeper answered.
    """

    def __init__(self, session: ZooKeeperSession) -> None:
        self._zookeeper = session
        self._session: int | None = None
        #: When the last beat that was answered was sent, in the session of that id.
        self._answered: tuple[int, _Clocks] | None = None
        #: When the beat under way was sent.
        self._sent: _Clocks | None = None
        #: Whether this process stood still, and ZooKeeper has not answered since.
        self._stood_still = False
        self._was_cut_off, self._looked_at = False, _clocks()
        self._wakes = threading.Event()
        self._is_stopped = False
        self.restored(session.session_id)
        self._thread = threading.Thread(target=self._run, name="klog-zookeeper-beats", daemon=True)
        self._thread.start()

    @property
    def session(self) -> int | None:
        return self._session

    @property
    def holds(self) -> bool:
        answered = self._answered
        return (
            answered is not None
            and answered[0] == self._session
            and _seconds_since(answered[1]) < self._zookeeper.timeout_seconds
        )

    @property
    def is_cut_off(self) -> bool:
        return (
            self._was_cut_off
            and not self._zookeeper.client.connected
            and _seconds_since(self._looked_at) < self._zookeeper.timeout_seconds
        )

    def restored(self, session: int | None) -> None:
        """Note that the session of that id has the ephemeral nodes now."""
        self._session = session
        self._wakes.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._wakes.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            self._wakes.clear()
            self._look()
            pause = self._zookeeper.timeout_seconds / _BEATS_PER_TIMEOUT
            self._wakes.wait(min(_MAX_PAUSE_SECONDS, pause))

    def _look(self) -> None:
        if _seconds_since(self._looked_at) >= self._zookeeper.timeout_seconds:
            self._stood_still = True
        is_connected = self._zookeeper.client.connected
        self._was_cut_off = not is_connected and not self._stood_still
        self._looked_at = _clocks()  # last: it makes `is_cut_off` true
        # kazoo may lose a request that is sent in the moment in which a session ends
        if is_connected and (self._sent is None or _seconds_since(self._sent) >= self._zookeeper.timeout_seconds):
            self._beat()

    def _beat(self) -> None:
        session, sent = self._zookeeper.session_id, _clocks()

        def answered(result: Any) -> None:
            self._sent = None
            if result.successful() and session is not None and session == self._zookeeper.session_id:
                self._answered = session, sent
                if _seconds_since(sent) < self._zookeeper.timeout_seconds:
                    self._stood_still = False

        self._sent = sent
        self._zookeeper.client.exists_async(self._zookeeper.real("/")).rawlink(answered)


class _Reconnected:
    """Event for the worker: restore the watches and ephemeral nodes after a reconnect."""


class ZooKeeperTree:
    """A tree in the ensemble `connect`: HOST:PORT,HOST:PORT/CHROOT; creates the chroot.

    `session_timeout` is in seconds; the server may raise or lower it. `ConfigError` if `connect` is malformed,
    `DirectoryError` if no ZooKeeper answers for twice as long. Source: 0.10 documentation, "zookeeper.connect".
    """

    def __init__(self, connect: str, session_timeout: float = SESSION_SECONDS) -> None:
        from kazoo.protocol.states import EventType

        self._event_none = EventType.NONE
        self._ephemeral_lock = threading.Lock()
        self._ephemerals: dict[str, bytes] = {}
        self._watches: dict[str, list[Callable[[], None]]] = {}
        #: By watched path (with values): the children whose values have a watch.
        self._value_watches: dict[str, set[str]] = {}
        self._watchers: dict[str, partial[None]] = {}
        self._watch_lock = threading.Lock()
        self._events: SimpleQueue[str | type[_Reconnected] | None] = SimpleQueue()
        self._lease: SessionLease | None = None
        session = self._session = ZooKeeperSession(connect, session_timeout)
        self._client, self._errors, self._real = session.client, session.errors, session.real
        self._call, self._call_many = session.call, session.call_many
        self._client.add_listener(self._on_state)
        self._worker = threading.Thread(target=self._work, name="klog-zookeeper", daemon=True)
        self._worker.start()

    def get(self, path: str) -> bytes | None:
        return self.get_many([path])[0]

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        reals = [(self._real(path),) for path in paths]
        answers = self._call_many(paths, self._client.get_async, reals, self._errors.NoNodeError)
        return [None if answer is None else answer[0] or b"" for answer in answers]  # Kafka creates parents with null

    def put(self, path: str, value: bytes) -> None:
        inner_components(path)
        with self._ephemeral_lock:
            if path in self._ephemerals:
                # ephemeral: if `_restore` has not created the node again, this must not create a permanent one
                self._put(path, value, ephemeral=True)
                self._ephemerals[path] = value
                return
        self._put(path, value, ephemeral=False)

    def put_many(self, values: Mapping[str, bytes], *, lasting: bool = True) -> None:
        for path in values:
            inner_components(path)
        for path in values.keys() & self._ephemerals.keys():
            self.put(path, values[path])
        paths = [path for path in values if path not in self._ephemerals]
        missing = self._write_many(paths, values, self._client.set_async, self._errors.NoNodeError)
        create_async = partial(self._client.create_async, makepath=True)
        for path in self._write_many(missing, values, create_async, self._errors.NodeExistsError):
            self._put(path, values[path], ephemeral=False)  # another client created it meanwhile

    def _write_many(
        self, paths: list[str], values: Mapping[str, bytes], write: Callable[..., Any], refusal: type[Exception]
    ) -> list[str]:
        """Write nodes; return the paths whose write failed with `refusal`."""
        writes = [(self._real(path), values[path]) for path in paths]
        answers = self._call_many(paths, write, writes, refusal)
        return [path for path, answer in zip(paths, answers, strict=True) if answer is None]

    def _put(self, path: str, value: bytes, ephemeral: bool) -> None:
        real = self._real(path)
        while True:
            try:
                self._call(path, lambda: self._client.set_async(real, value))
                return
            except self._errors.NoNodeError:
                pass
            try:
                self._call(path, lambda: self._create_async(real, value, ephemeral))
                return
            except self._errors.NodeExistsError:
                pass  # another client created it meanwhile

    def swap(self, path: str, old: bytes, value: bytes) -> bool:
        real = self._real(path)
        return self._change_if(path, old, value, lambda claim: [[("set_data", real, value), ("delete", claim)]])

    def create(self, path: str, value: bytes, ephemeral: bool = False) -> None:
        inner_components(path)
        if not ephemeral:
            self._create(path, value, ephemeral=False)
            return
        # The lock keeps `_restore` from running between the two steps.
        with self._ephemeral_lock:
            self._create(path, value, ephemeral=True)
            self._ephemerals[path] = value

    def _create(self, path: str, value: bytes, ephemeral: bool) -> None:
        real = self._real(path)
        attempts = 0

        def start() -> Any:
            nonlocal attempts
            attempts += 1
            return self._create_async(real, value, ephemeral)

        try:
            self._call(path, start)
        except self._errors.NodeExistsError:
            # An earlier attempt may have succeeded and only its answer been lost. Only ephemeral nodes have an owner.
            if ephemeral and attempts > 1 and self._session.is_ours(path):
                return
            raise NodeExists(f"{path} exists in ZooKeeper {self._session.connect}: delete it first, or put") from None

    def _create_async(self, real: str, value: bytes, ephemeral: bool) -> Any:
        return self._client.create_async(real, value, ephemeral=ephemeral, makepath=True)

    def delete(self, path: str) -> None:
        inner_components(path)
        with self._ephemeral_lock:
            self._delete(self._real(path), path)
            for gone in [node for node in self._ephemerals if node == path or node.startswith(f"{path}/")]:
                del self._ephemerals[gone]

    def _delete(self, real: str, path: str) -> None:
        while True:
            try:
                self._call(path, lambda: self._client.delete_async(real))
                return
            except self._errors.NoNodeError:
                return
            except self._errors.NotEmptyError:
                pass
            self._delete_below(real, path)

    def _delete_below(self, real: str, path: str) -> None:
        try:
            names = self._call(path, lambda: self._client.get_children_async(real))
        except self._errors.NoNodeError:
            return
        for name in names:
            self._delete(f"{real}/{name}", path)

    def delete_if(self, path: str, value: bytes) -> bool:
        return self._change_if(path, value, None, partial(self._deletions, path))

    def _deletions(self, path: str, claim: str) -> list[list[Operation]]:
        """Deletions of all below a node and last of itself, in one transaction unless they are too long for it."""
        top, below = self._real(path), []
        level = [top]
        while level:
            requests = [(real,) for real in level]
            answers = self._call_many([path], self._client.get_children_async, requests, self._errors.NoNodeError)
            level = [f"{real}/{name}" for real, names in zip(level, answers, strict=True) for name in names or ()]
            below += [real for real in level if real != claim]
        transactions: list[list[Operation]] = [[]]
        size = 0
        for real in reversed(below):
            size += len(real.encode()) + _OPERATION_BYTES
            if size > _MAX_TRANSACTION_BYTES:
                transactions.append([])
                size = 0
            transactions[-1].append(("delete", real))
        transactions[-1] += [("delete", claim), ("delete", top)]
        return transactions

    def _change_if(
        self, path: str, old: bytes, new: bytes | None, changes: Callable[[str], list[list[Operation]]]
    ) -> bool:
        """If a node's value is `old`, do the transactions that `changes` returns; after the last it is `new`.

        `changes` gets the path of a claim, an ephemeral child of the node. Each transaction fails without the claim:
        data versions start at 0 in every node, so they can't tell this node from one created since under its name.
        """
        inner_components(path)
        real = self._real(path)
        is_begun = False
        while True:
            current = self.get(path)
            if current != old:
                return is_begun and current == new  # an attempt succeeded, only its answer was lost
            claim = f"{real}/{_CLAIM}{uuid4().hex}"
            try:
                with suppress(self._errors.NodeExistsError):  # only the answer was lost
                    self._call(path, partial(self._client.create_async, claim, b"", ephemeral=True))
                current, stat = self._call(path, lambda: self._client.get_async(real))
                if (current or b"") == old:
                    is_unchanged = [("check", real, stat.version), ("check", claim, 0)]
                    is_begun = True
                    if all(self._session.transact(path, [*is_unchanged, *change]) for change in changes(claim)):
                        return True
                self._call(path, partial(self._client.delete_async, claim))
            except self._errors.NoNodeError:
                pass

    def children(self, path: str) -> list[str]:
        real = self._real(path)
        try:
            return sorted(self._call(path, lambda: self._client.get_children_async(real)))
        except self._errors.NoNodeError:
            return []

    def watch(self, path: str, callback: Callable[[], None], values: bool = False) -> None:
        self._real(path)
        with self._watch_lock:
            if values:
                self._value_watches.setdefault(path, set())
            callbacks = self._watches.setdefault(path, [])
            callbacks.append(callback)
        try:
            self._set_watch(path)
        except DirectoryError:
            with self._watch_lock:
                callbacks.remove(callback)
            raise

    def sync(self) -> None:
        """ZooKeeper answers a change when most of its servers have it on the disk."""

    def lease(self) -> Lease:
        with self._ephemeral_lock:  # `_restore` notes the next session under it
            if self._lease is None:
                self._lease = SessionLease(self._session)
            return self._lease

    def close(self) -> None:
        if self._session.is_closed:
            return
        self._session.is_closed = True
        if self._lease is not None:
            self._lease.stop()
        self._client.remove_listener(self._on_state)
        self._events.put(None)
        self._session.stop()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def _set_watch(self, path: str) -> None:
        real = self._real(path)
        # One object per path: kazoo keeps them in a set, so that two watches make one event.
        changed = self._watchers.setdefault(path, partial(self._on_event, path))
        while True:
            try:
                names = self._call(path, lambda: self._client.get_children_async(real, watch=changed))
                break
            except self._errors.NoNodeError:
                if self._call(path, lambda: self._client.exists_async(real, watch=changed)) is None:
                    return
        if path in self._value_watches:
            self._watch_values(path, names)

    def _watch_values(self, path: str, names: list[str]) -> None:
        watched = self._value_watches[path]
        real = self._real(path).rstrip("/")
        new = [name for name in names if name not in watched]
        for first in range(0, len(new), _MAX_PENDING):
            chunk = new[first : first + _MAX_PENDING]
            watched.update(chunk)  # before the request: the event may come before the answer
            gets = [(f"{real}/{name}", partial(self._on_value, path, name)) for name in chunk]
            try:
                answers = self._call_many([path], self._client.get_async, gets, self._errors.NoNodeError)
            except DirectoryError:
                watched.difference_update(chunk)
                raise
            watched.difference_update(name for name, answer in zip(chunk, answers, strict=True) if answer is None)

    def _on_value(self, path: str, name: str, event: Any) -> None:
        self._value_watches[path].discard(name)
        self._on_event(path, event)

    def _on_event(self, path: str, event: Any) -> None:
        if event.type != self._event_none:  # NONE: the connection is lost; `_on_state` handles the reconnect
            self._events.put(path)

    def _on_state(self, state: str) -> None:
        # Called by kazoo's connection thread, which must not block.
        if state == "CONNECTED":
            _log.warning("reconnected to ZooKeeper %s", self._session.connect)
            self._events.put(_Reconnected)
        elif not self._session.is_closed:
            what = "session with" if state == "LOST" else "connection to"
            _log.warning("lost the %s ZooKeeper %s", what, self._session.connect)

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                if isinstance(event, str):
                    paths = [event]
                else:
                    self._restore()
                    with self._watch_lock:
                        paths = list(self._watches)
                        for watched in self._value_watches.values():
                            watched.clear()  # they ended with the connection
                # Set the watch before the callback, so that a change during the callback makes an event.
                for path in paths:
                    self._set_watch(path)
            except DirectoryError as error:
                if self._session.is_closed:
                    return
                _log.warning("cannot restore watches and ephemeral nodes yet, retrying: %s", error)
                timer = threading.Timer(_REPAIR_SECONDS, self._events.put, (event,))
                timer.daemon = True
                timer.start()
                continue
            for path in paths:
                self._notify(path)

    def _restore(self) -> None:
        with self._ephemeral_lock:
            session = self._session.session_id
            for path, value in list(self._ephemerals.items()):
                real = self._real(path)
                try:
                    self._call(path, partial(self._client.create_async, real, value, ephemeral=True))
                except self._errors.NoNodeError:
                    del self._ephemerals[path]
                    _log.warning("ephemeral node %s is not restored: its parent has been deleted", path)
                except self._errors.NodeExistsError:
                    if not self._session.is_ours(path):
                        del self._ephemerals[path]
                        _log.warning(
                            "the session with ZooKeeper %s was lost, and another process has created %s since",
                            self._session.connect,
                            path,
                        )
            if self._lease is not None and session is not None and session == self._session.session_id:
                self._lease.restored(session)

    def _notify(self, path: str) -> None:
        with self._watch_lock:
            callbacks = list(self._watches.get(path, ()))
        for callback in callbacks:
            if self._session.is_closed:
                return
            try:
                callback()
            except Exception:
                _log.exception("the watch on %s failed", path)
