"""Apache Kafka brokers that all tests of a run share, since a start costs five seconds of CPU.

Each test uses its own topics, groups and transactional ids: tests of other files use the same broker at the same time.
A test that stops its broker, changes its settings, or looks at all topics or groups, starts its own `Kafka`.

The main process of a run starts them, on request of its workers: so they end with it, also if it is killed.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Protocol

from tests.support.servers.kafka import Kafka, Version

_SETTINGS = {
    "delete.topic.enable": "true",  # before 1.0 the default is false
    "log.cleaner.backoff.ms": 250,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
    "group.consumer.min.heartbeat.interval.ms": 300,
    "group.consumer.heartbeat.interval.ms": 300,
}
#: How many brokers run at once, unless more are in use. A module uses at most two.
_LIMIT = 4

Key = tuple[Version, tuple[tuple[str, object], ...]]
#: A worker's name.
User = str


class SharedKafkas(Protocol):
    """What the fixture `shared_kafkas` gives."""

    def get(self, version: Version, settings: Mapping[str, object] | None = None) -> Kafka:
        """Return a running broker; `settings` are broker properties added to those of all shared brokers."""

    def release(self) -> None:
        """The module of this process has ended: it uses no broker any longer."""


class KafkasOfRun:
    """Starts a broker on first use of its version and settings; beyond the limit stops the least recently used one."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._lock = threading.Lock()
        #: Each one's folder and start, the least recently used one first.
        self._running: dict[Key, tuple[Path, Future[Kafka]]] = {}
        self._users: dict[Key, set[User]] = {}
        self._numbers = itertools.count(1)
        # A broker dies with the thread that started it, and those of a pool live until its shutdown.
        self._starters = ThreadPoolExecutor(2, "start-kafka")
        self._listener: Listener | None = None
        self._address, self._password = "", secrets.token_hex()
        #: The files of tests that used a broker, by its folder.
        self.files: dict[Path, set[str]] = {}

    def get(self, key: Key, user: User, file: str) -> Kafka:
        """`file` is that of the test that asks."""
        with self._lock:
            folder, start = self._running.pop(key, (None, None))
            if folder is None or start is None or (start.done() and not _runs(start)):
                self._stop_unused(_LIMIT - 1)
                folder = self._make_folder() / f"kafka-{key[0]}-{next(self._numbers)}"
                start = self._starters.submit(_start, key, folder)
            self._running[key] = folder, start
            self._users.setdefault(key, set()).add(user)
            self.files.setdefault(folder, set()).add(file)
        return start.result()

    def release(self, user: User) -> None:
        with self._lock:
            for users in self._users.values():
                users.discard(user)

    def folders(self, file: str) -> list[Path]:
        """The folders of the brokers that this file's tests used."""
        return [folder for folder, files in self.files.items() if file in files]

    def serve(self) -> tuple[str, str]:
        """Take requests of workers; return the address and the password."""
        if self._listener is None:
            # An abstract name, which has no file and goes with the process.
            address = f"\0klog-tests-{os.getpid()}-{secrets.token_hex(4)}"
            self._listener = Listener(address, "AF_UNIX", authkey=self._password.encode())
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
            self._address = address
        return self._address, self._password

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            self._users.clear()
            self._stop_unused(0)
        self._starters.shutdown()

    def _stop_unused(self, limit: int) -> None:
        for key in [key for key in self._running if not self._users.get(key)]:
            if len(self._running) <= limit:
                return
            _, start = self._running.pop(key)
            if not start.cancel() and not start.exception():
                start.result().kill()  # its data are of no use
                start.result().close()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except (EOFError, ConnectionError):
                continue  # a worker that ended as it connected
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        user = ""
        try:
            with connection:
                while True:
                    key, user, file = connection.recv()
                    try:
                        connection.send(self.release(user) if key is None else self.get(key, user, file))
                    except Exception as error:
                        connection.send(error)
        except (EOFError, OSError):
            self.release(user)  # the worker has ended


class Direct:
    """The brokers of this process: the run has no workers."""

    def __init__(self, kafkas: KafkasOfRun) -> None:
        self._kafkas = kafkas

    def get(self, version: Version, settings: Mapping[str, object] | None = None) -> Kafka:
        return self._kafkas.get(_key(version, settings), "", _file())

    def release(self) -> None:
        self._kafkas.release("")


class OfMainProcess:
    """The brokers of the main process, for a worker."""

    def __init__(self, address: str, password: str, user: User) -> None:
        self._connection = Client(address, "AF_UNIX", password.encode())
        self._user = user

    def get(self, version: Version, settings: Mapping[str, object] | None = None) -> Kafka:
        answer = self._ask(_key(version, settings))
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Kafka)
        return answer

    def release(self) -> None:
        self._ask(None)

    def _ask(self, key: Key | None) -> object:
        self._connection.send((key, self._user, _file()))
        return self._connection.recv()


def _start(key: Key, folder: Path) -> Kafka:
    version, settings = key
    return Kafka(version, folder, {**_SETTINGS, **dict(settings)}).__enter__()


def _runs(start: Future[Kafka]) -> bool:
    return not start.exception() and start.result().pid is not None


def _key(version: Version, settings: Mapping[str, object] | None) -> Key:
    return version, tuple(sorted((settings or {}).items()))


def _file() -> str:
    """The file of the test that runs."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
