"""What takes long or much memory is ended, and holds up nothing that is small."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.registry import processes, work
from spark_klog.registry.errors import RegistryRefusal
from spark_klog.registry.processes import Processes
from spark_klog.registry.work import Source
from tests.schemas.registry.asking import register
from tests.support.waiting import wait_until


@pytest.fixture
def run() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


def _soon() -> float:
    return time.monotonic() + 30


def test_what_a_function_returns_and_raises(run: Processes) -> None:
    source = Source("AVRO", '{"type": "array", "items": "int"}')
    assert run(work.canonical, source, False, True, deadline=_soon()) == '{"type":"array","items":"int"}'
    with pytest.raises(RegistryRefusal, match="neither an Avro type nor a name") as refused:
        run(work.canonical, Source("AVRO", '"R"'), False, True, deadline=_soon())
    assert (refused.value.code, refused.value.status) == (42201, 422)
    large = "x" * 200_000
    assert run(len, large, deadline=_soon()) == 200_000
    with pytest.raises(RegistryRefusal, match="have more than 16 MiB"):
        run(len, "x" * (17 << 20), deadline=_soon())


def test_calls_that_do_not_end(run: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FIRST", (1, 0.1, 256 << 20))
    monkeypatch.setattr(processes, "_SECOND", (1, 0.3, 512 << 20))
    run = Processes()
    try:
        with ThreadPoolExecutor(4) as pool:
            endless = [pool.submit(run, sum, range(1 << 60), deadline=_soon()) for _ in range(3)]
            pids = {run(os.getpid, deadline=_soon()) for _ in range(3)}  # each has its turn
            refusals = [future.exception(30) for future in endless]
        assert {getattr(refused, "code", None) for refused in refusals} == {50002}
        with pytest.raises(RegistryRefusal):
            run(time.sleep, 60, deadline=time.monotonic() + 0.1)
        pids.add(run(os.getpid, deadline=_soon()))
    finally:
        run.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_calls_that_wait_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer than its time of the processor, and none much of that."""
    monkeypatch.setattr(processes, "_FIRST", (1, 0.02, *processes._FIRST[2:]))
    run = Processes()
    try:
        first = run(os.getpid, deadline=_soon())
        with ThreadPoolExecutor(30) as pool:
            made = [pool.submit(run, time.sleep, 0.04, deadline=_soon()) for _ in range(30)]
            assert [future.result(30) for future in made] == [None] * 30
        source = Source("PROTOBUF", 'syntax = "proto3"; message A { int32 a = 1; }')
        assert "int32 a = 1;" in run(work.canonical, source, True, True, deadline=_soon())
        with pytest.raises(RegistryRefusal, match=r"b\.proto"):
            run(work.canonical, source._replace(text='import "b.proto";'), True, True, deadline=_soon())
        assert run(os.getpid, deadline=_soon()) == first
    finally:
        run.close()


def _killed(lane: processes._Lane) -> None:
    """Kill the process that a lane has, as the kernel does if memory is short."""
    children: list[processes._Child] = []
    wait_until(lambda: bool(children.extend([*lane._busy, *lane._idle]) or children))
    os.killpg(children[0]._process.pid, signal.SIGKILL)
    children[0]._process.wait()


def test_processes_that_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FIRST", (1, 0.02, *processes._FIRST[2:]))
    run = Processes()
    try:
        total = sum(range(20_000_000))  # longer than the first lane's 20 ms on any machine
        for lane in (run._first, run._second):
            assert run(sum, range(20_000_000), deadline=_soon()) == total
            with ThreadPoolExecutor(1) as pool:
                _killed(run._second)  # idle
                at_work = pool.submit(run, time.sleep, 0.3, deadline=_soon())
                wait_until(lambda: bool(run._first._busy))
                _killed(run._first)
                if lane is run._second:
                    wait_until(lambda: bool(run._second._busy))
                    _killed(lane)
                assert at_work.result(30) is None
    finally:
        run.close()


def test_calls_that_need_much_memory(run: Processes) -> None:
    with pytest.raises(RegistryRefusal, match="more than 512 MiB of memory") as refused:
        run(bytes, 1 << 30, deadline=_soon())
    assert refused.value.code == 42209
    assert run(len, "x", deadline=_soon()) == 1


def test_close_ends_calls(run: Processes) -> None:
    run(len, "x", deadline=_soon())
    refusals: list[BaseException] = []

    def call() -> None:
        try:
            run(time.sleep, 60, deadline=_soon())
        except RegistryRefusal as refused:
            refusals.append(refused)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    run.close()
    thread.join(10)
    assert len(refusals) == 1
    with pytest.raises(RegistryRefusal, match="closing"):
        run(len, "x", deadline=_soon())


def test_nothing_is_left_by_a_registry_that_is_killed(make_cluster: Callable[..., EmbeddedCluster]) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", folder)
        cluster = make_cluster(schema_registry=True)
        assert cluster.schema_registry_url is not None
        register(cluster.schema_registry_url, "a", '"int"')
        assert list(Path(folder).glob("klog-schemas-*"))
        cluster.kill_schema_registry()
        wait_until(lambda: not list(Path(folder).glob("klog-schemas-*")))
