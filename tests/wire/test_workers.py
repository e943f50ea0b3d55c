"""Threads that make calls for an event loop."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from spark_klog.wire.http import Workers


def test_calls_have_results_and_errors() -> None:
    workers = Workers("test", 2, 10)
    assert sorted(workers.submit(pow, 2, n).result(10) for n in range(5)) == [1, 2, 4, 8, 16]
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result(10)
    workers.close()
    workers.close()


def test_calls_one_after_the_other_are_made_by_one_thread() -> None:
    workers = Workers("one", 8, 10)
    assert len({workers.submit(threading.get_ident).result(10) for _ in range(50)}) == 1
    workers.close()


def test_calls_that_wait_are_bounded_and_cancelled() -> None:
    workers = Workers("test", 1, 2)
    is_over, has_begun = threading.Event(), threading.Event()

    def hang() -> str:
        has_begun.set()
        is_over.wait(30)
        return "over"

    running = workers.submit(hang)
    assert has_begun.wait(10)
    waiting = [workers.submit(hang) for _ in range(2)]
    with pytest.raises(queue.Full):
        workers.submit(hang)
    workers.close()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(10)
    is_over.set()
    assert running.result(10) == "over"


def test_a_process_does_not_wait_for_them() -> None:
    program = """
import threading
from spark_klog.wire.http import Workers

workers = Workers("test", 1, 1)
workers.submit(threading.Event().wait)
workers.close()
"""
    subprocess.run([sys.executable, "-c", program], timeout=30, check=True)
