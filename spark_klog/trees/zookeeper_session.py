"""A session with ZooKeeper, by kazoo: how requests are sent and retried, what their errors mean, how long it lives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from spark_klog.errors import ConfigError, DirectoryError
from spark_klog.trees.tree import components

_log = logging.getLogger(__name__)
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
        for one in self._pending:
            try:
                answers.append(one.get(timeout=max(0.0, deadline - time.monotonic())))
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

    def call_many(self, path: str, start: Callable[[], list[Any]], no_answer: type[Exception]) -> list[Any]:
        """As `call` for several requests, which are pipelined; an answer is None if one failed with `no_answer`."""
        answers: list[Any] = self.call(path, lambda: _Pipelined(start(), no_answer))
        return answers

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
