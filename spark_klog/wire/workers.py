"""Threads that make calls for an event loop, and that nobody waits for when the process ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class Workers:
    """At most `count` daemon threads; up to `most` calls wait for one.

    Python joins the threads of `concurrent.futures` at exit: a call that takes for ever would keep the process.
    """

    def __init__(self, name: str, count: int, most: int) -> None:
        self._name, self._count = name, count
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], None]]] = queue.Queue(most)
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """The result of a call to come. From one thread only; `queue.Full` if too many calls wait."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put_nowait((future, run))
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        while not self._is_closed:
            _, run = self._calls.get()
            run()

    def close(self) -> None:
        """Begin no more calls, and cancel those that wait; those that run go on. May be called twice."""
        self._is_closed = True
        waiting = True
        while waiting:
            try:
                self._calls.get_nowait()[0].cancel()
            except queue.Empty:
                waiting = False
        for _ in self._threads:  # wake them
            self._calls.put((Future(), lambda: None))
