"""Two runs of a load at once in an object store: of all writers of a file one succeeds, of all runs one commits."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from spark_klog.base import extras
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError, MissingPackage
from spark_klog.files import open_folder, store_requests
from spark_klog.load.audit import status
from spark_klog.load.journal import lease
from spark_klog.load.journal.store import locked, open_store
from spark_klog.load.run import Loaded, LoadOptions, load
from tests.load.buckets import bucket, committed, seen
from tests.load.support import InProcess, expected, kills, run
from tests.load.unreliable_s3 import Fate, UnreliableS3, serving
from tests.spark.support import create_topic, produce, values
from tests.support.runs.soak import SOAK

_SECONDS = 30
#: The address of a server, and the server.
Served = tuple[str, UnreliableS3]
_BACKOFF = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=10), "base": 2}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    s3 = UnreliableS3()
    with serving(s3) as address:
        yield address, s3


pytestmark = pytest.mark.usefixtures("short_leases")

# Creating a file

_numbers = iter(range(10**6))
_fates = st.lists(st.sampled_from(["good", "refused", "lost", "late"]), max_size=8)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(_fates, st.integers(1, 3), st.booleans())
def test_one_of_all_writers_creates_a_file(served: Served, fates: list[Fate], writers: int, at_once: bool) -> None:
    """Requests and answers are lost or late: nobody succeeds beside another one, and content never changes."""
    address, s3 = served
    uri = bucket(address, "model")
    path = f"decision-{next(_numbers)}"
    barrier = threading.Barrier(writers if at_once else 1)

    def create(number: int) -> bool | None:
        barrier.wait()
        with suppress(OSError):
            return open_folder(uri).create(path, b"%d" % number)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_requests, "_RETRIES", {"max_retries": 1, "backoff": _BACKOFF})
        patch.setattr(store_requests, "_SECONDS", 1.0)
        s3.fates.extend(fates)
        with ThreadPoolExecutor(writers if at_once else 1) as pool:
            answers = list(pool.map(create, range(writers)))
        s3.fates.clear()
        content = open_folder(uri).read(path)
        s3.carry_out_late()
    assert answers.count(True) <= 1
    if True in answers:
        assert content == b"%d" % answers.index(True)
    if False in answers:
        assert content is not None
        assert answers[int(content)] is not False
    if content is not None:
        assert open_folder(uri).read(path) == content
    now = open_folder(uri)
    assert now.create(path, b"late") == (now.read(path) == b"late")


def test_a_file_of_the_same_content_is_another_writers(served: Served) -> None:
    address, s3 = served
    uri = bucket(address, "same")
    assert [open_folder(uri).create("marker", b"") for _ in range(2)] == [True, False]
    s3.fates.extend(["lost"])
    assert open_folder(uri).create("own", b"")


def test_credentials_of_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    address, _ = served
    bucket(address, "environment")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_ENDPOINT_URL", f"http://{address}"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    folder = open_folder("s3://environment/out")
    assert [folder.create("file", b"x"), folder.create("file", b"y"), folder.read("file")] == [True, False, b"x"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    assert open_folder(bucket(address, "environment")).create("other", b"")


# Which stores are refused


def test_a_request_that_is_refused_for_good(served: Served) -> None:
    """It is not tried again for a minute."""
    began = time.monotonic()
    uri = bucket(served[0], "absent").replace("@absent", "@nobody-has-this")
    with pytest.raises(LoadError, match=r"nobody-has-this/out.*/file can't be written"):
        open_store(uri).create("file", b"")
    for code in (400, 403):
        assert store_requests._is_final(OSError(f"PUT http://s3/x - Server returned non-2xx status code: {code} Bad"))
    for code in (408, 409, 429, 503):
        assert not store_requests._is_final(OSError(f"Server returned non-2xx status code: {code} Try again"))
    assert time.monotonic() - began < _SECONDS


def test_a_store_without_conditional_puts(served: Served) -> None:
    address, s3 = served
    uri = bucket(address, "unconditional")
    s3.has_conditions = False
    try:
        with pytest.raises(LoadError, match=r"s3://\*\*\*@unconditional/out.* has no conditional put .*single_writer"):
            with locked(open_store(uri)):
                pytest.fail("nothing keeps two runs apart here")
        with locked(open_store(f"{uri}&single_writer=true")):
            assert open_store(f"{uri}&single_writer=true").create("file", b"")
    finally:
        s3.has_conditions = True


def test_without_obstore(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bucket(served[0], "without")
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "obstore")
    with pytest.raises(MissingPackage, match=r"needs obstore, .*pip install 'spark-klog\[objectstore\]'"):
        with locked(open_store(uri)):
            pytest.fail("nothing keeps two runs apart here")
    with locked(open_store(f"{uri}&single_writer=true")):
        pass


# The lease


def test_a_second_run_is_refused_while_the_first_one_lives(served: Served) -> None:
    uri = bucket(served[0], "lives")
    for _ in range(2):
        with locked(open_store(uri)):
            for _ in range(2):
                with pytest.raises(LoadError, match=r"is under way \(process \d+ on .* began at .*\): wait"):
                    with locked(open_store(uri)):
                        pytest.fail("two runs have the lease")
            open_store(uri).write("_klog/load.json", b"")
    assert open_store(uri).names("_klog/lease") == ["00000002", "00000002.renewed"]


def test_the_lease_of_a_newer_version_is_refused(served: Served) -> None:
    uri = bucket(served[0], "newer")
    store = open_store(uri)
    store.create("_klog/lease/00000001", b'{"version": 2, "later": 1}')
    with pytest.raises(LoadError, match=r"lease/00000001 has version 2, and .*, or remove .*/_klog/lease if no run is"):
        with locked(store):
            pytest.fail("it took the lease over")


def test_a_first_run_that_is_refused_leaves_nothing(cluster: EmbeddedCluster, topic: str, served: Served) -> None:
    uri = bucket(served[0], "strange")
    open_store(uri).write("part-0.parquet", b"of another program")
    create_topic(cluster.bootstrap_servers, topic)
    with pytest.raises(LoadError, match="belongs to another load, or to none"):
        run(cluster.bootstrap_servers, uri, topic)
    assert open_store(uri).paths_below("") == ["part-0.parquet"]


def test_a_run_that_stood_still_changes_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bucket(served[0], "frozen")
    first, second = open_store(uri), open_store(uri)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 1000.0)
    with ExitStack() as frozen, ExitStack() as other:
        frozen.enter_context(locked(first))
        first.write("before", b"")
        began = time.monotonic()
        other.enter_context(locked(second))
        assert time.monotonic() - began >= lease.LEASE_SECONDS
        for change in (
            lambda: first.write("after", b""),
            lambda: first.create("after", b""),
            lambda: first.remove("before"),
            lambda: first.move("before", "after"),
        ):
            with pytest.raises(LoadError, match="stood still for 2 s or longer, and another run"):
                change()
        second.write("own", b"")
        assert second.names("") == ["_klog", "before", "own"]


def test_a_run_that_is_late_but_alone_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 1000.0)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.1)
    store = open_store(bucket(served[0], "alone"))
    with locked(store):
        time.sleep(0.2)
        store.write("file", b"")
    assert store.read("file") == b""


_HOLDER = """
import sys, time
from spark_klog.load.journal.store import locked, open_store
with locked(open_store(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.test_all("kill")
def test_the_lease_of_a_process_that_was_killed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bucket(served[0], "killed")
    monkeypatch.setattr(lease, "LEASE_SECONDS", 20.0)
    with subprocess.Popen([sys.executable, "-c", _HOLDER, uri], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(LoadError, match=rf"process {process.pid} on"), locked(open_store(uri)):
                pytest.fail("two runs have the lease")
        finally:
            process.kill()
    began = time.monotonic()
    with locked(open_store(uri)):
        assert time.monotonic() - began < 15  # the system says that the process has ended


def test_a_process_that_proc_hides_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc with hidepid=2 hides those of other users, which a signal does not reach, either."""
    real = Path.read_text, Path.read_bytes

    def hiding(number: int, process: int) -> Any:
        def read(path: Path, *arguments: Any, **options: Any) -> Any:
            if str(path) == f"/proc/{process}/stat":
                raise FileNotFoundError(path)
            return real[number](path, *arguments, **options)

        return read

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        holder = json.dumps({"process": process.pid, "instance": lease._instance(process.pid)}).encode()
        assert not lease._is_dead_process(holder)
        with monkeypatch.context() as hidden:
            for number, name in enumerate(("read_text", "read_bytes")):
                hidden.setattr(Path, name, hiding(number, process.pid))
            assert not lease._is_dead_process(holder)
            hidden.setattr(os, "kill", Mock(side_effect=PermissionError))
            assert not lease._is_dead_process(holder)
            hidden.setattr(os, "kill", Mock(side_effect=ProcessLookupError))
            assert lease._is_dead_process(holder)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lease._is_dead_process(holder), "its parent has not noticed"
    assert lease._is_dead_process(holder)


# Loads


class _UntilOneIsRefused(InProcess):
    """Goes on once the other run of the pair has ended."""

    def __init__(self, has_ended: threading.Event) -> None:
        super().__init__()
        self._has_ended = has_ended

    def run(self, tasks: Any, job: Any) -> None:
        assert self._has_ended.wait(_SECONDS)
        super().run(tasks, job)


@pytest.mark.parametrize("pairs", [1, pytest.param(20 if SOAK else 3, marks=pytest.mark.test_all("long"))])
def test_pairs_of_loads_at_once(cluster: EmbeddedCluster, topic: str, served: Served, pairs: int) -> None:
    servers, uri = cluster.bootstrap_servers, bucket(served[0], f"pairs-{pairs}")
    create_topic(servers, topic, 2)
    for number in range(pairs):
        produce(servers, topic, values(20, partitions=2))
        has_ended, barrier = threading.Event(), threading.Barrier(2)

        def one(_: int, has_ended: threading.Event = has_ended, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            try:
                options = LoadOptions({"bootstrap.servers": servers}, [topic], uri, max_task_records=5)
                return load(options, _UntilOneIsRefused(has_ended))
            except LoadError as error:
                return error
            finally:
                has_ended.set()

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(one, range(2)))
        [loaded] = [item for item in answers if isinstance(item, Loaded)]
        [refused] = [item for item in answers if isinstance(item, LoadError)]
        assert loaded.runs == [number + 1]
        assert f"another run of the load in s3://***@pairs-{pairs}/out" in str(refused)
        assert "is under way" in str(refused)
    assert seen(uri) == committed(uri) == expected(topic, {0: 10 * pairs, 1: 10 * pairs})
    assert status(uri).findings == []
    run(servers, uri, topic)
    assert committed(uri) == expected(topic, {0: 10 * pairs, 1: 10 * pairs})


_LOAD = """
import random, sys, time
from spark_klog.load.journal import lease
from spark_klog.load.run import LoadOptions, load
from tests.load.support import InProcess

lease.RENEW_SECONDS, lease.LEASE_SECONDS = 0.2, 20.0

class Slow(InProcess):
    def run(self, tasks, job):
        for number in tasks:
            time.sleep(random.random() / 4)
            super().run({number: tasks[number]}, job)

load(LoadOptions({"bootstrap.servers": sys.argv[1]}, [sys.argv[2]], sys.argv[3], max_task_records=5), Slow())
"""


@pytest.mark.test_all("kill")
def test_pairs_of_processes_of_which_one_is_killed(cluster: EmbeddedCluster, topic: str, served: Served) -> None:
    """Whichever of them has the lease, the next run goes on at once: the system tells that the process is dead."""
    servers, uri = cluster.bootstrap_servers, bucket(served[0], "processes")
    create_topic(servers, topic, 2)
    chance = random.Random(7)
    codes: list[int] = []
    rounds = kills() or 2
    for _ in range(rounds):
        produce(servers, topic, values(40, partitions=2))
        command = [sys.executable, "-c", _LOAD, servers, topic, uri]
        pair = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        plans = len(open_store(uri).names("_klog/runs"))
        deadline = time.monotonic() + _SECONDS
        while len(open_store(uri).names("_klog/runs")) == plans and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() / 4)
        pair[chance.randrange(2)].kill()
        for process in pair:
            _, said = process.communicate(timeout=_SECONDS)
            codes.append(process.returncode)
            assert process.returncode != 1 or "another run of the load in" in said
        assert len(set(there := seen(uri))) == len(there)
    run(servers, uri, topic, max_task_records=5)
    assert seen(uri) == committed(uri) == expected(topic, {0: 20 * rounds, 1: 20 * rounds})
    assert status(uri).findings == []
    assert {-9, 0, 1} == set(codes) | {0, 1}
