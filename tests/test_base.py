"""What all rooms use: dictionaries with a bound, pauses that double, locks of processes, shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_klog.base.cache import Cache, Newest
from spark_klog.base.clock import doubled
from spark_klog.base.durable import locked
from spark_klog.base.memory import MemoryRoom, memory_bytes
from tests.support.waiting import wait_until


def test_the_newest_are_kept() -> None:
    newest: Newest[int, int] = Newest(100)
    for number in [0, 1, *range(2, 500), 400]:
        newest[number] = number
    assert [*newest] == [*range(401, 500), 400]
    cache: Cache[str, int] = Cache(2)
    for place, name in enumerate("abca"):
        cache.keep(name, place)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (3, None, 2)


def test_threads_share_the_newest() -> None:
    newest: Newest[int, int] = Newest(20)

    def fill(first: int) -> None:
        for number in range(first, first + 30_000):
            newest[number % 5_000] = number

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, range(0, 4_000, 1_000)))
    finally:
        sys.setswitchinterval(interval)
    assert len(newest) <= 24


def test_pauses_double_up_to_a_bound() -> None:
    assert [doubled(0.1, 1.0, failures) for failures in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert doubled(3.0, 60.0, 10_000) == 60.0


def test_a_lock_excludes_other_processes(tmp_path: Path) -> None:
    program = (
        "import os, sys; from spark_klog.base.durable import locked\n"
        "with locked(os.open(sys.argv[1], os.O_RDONLY)): print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(BlockingIOError), locked(os.open(tmp_path, os.O_RDONLY), 0.05):
            pass
        other.stdin.close()
        with locked(os.open(tmp_path, os.O_RDONLY), 10.0):
            pass


def test_no_more_memory_than_there_is() -> None:
    """Threads wait for each other, and each of them has its turn, be it too large for the room."""
    room, lock, held, most = MemoryRoom(10), threading.Lock(), [0], [0]

    def work(size: int) -> int:
        with room.of(size):
            with lock:
                held[0] += min(size, 10)
                most[0] = max(most[0], held[0])
            with lock:
                held[0] -= min(size, 10)
        return size

    sizes = [1, 9, 10, 25, 3, 4, 5] * 20
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, sizes)) == sizes
    assert 0 < most[0] <= 10


def test_whoever_came_first_has_memory_first() -> None:
    """Small ones do not pass a large one that waits; an error gives the room back."""
    room, ends = MemoryRoom(10), [threading.Event() for _ in range(3)]
    order: list[int] = []

    def work(number: int, size: int) -> None:
        with room.of(size):
            order.append(number)
            ends[number].wait(60)

    threads = [threading.Thread(target=work, args=(number, size)) for number, size in enumerate((6, 10, 1))]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda count=count: len(room._waiting) + len(order) == count, seconds=60)  # type: ignore[misc]
    assert order == [0]
    for end in ends:
        end.set()
    for thread in threads:
        thread.join(60)
    assert order[:2] == [0, 1]
    with pytest.raises(ValueError, match="x"), room.of(10):
        raise ValueError("x")
    with room.of(10):
        assert memory_bytes() > 1 << 28
