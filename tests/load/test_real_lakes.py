"""Loads into tables of real catalogs and stores: answers are lost, two run at once, and each record is there once.

tests/load/test_table_kills.py kills such loads.
"""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path

import pytest

from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import LoadError
from spark_klog.files import open_folder
from spark_klog.load.audit import status
from spark_klog.load.run import LoadOptions
from spark_klog.tables import iceberg_stores
from spark_klog.tables.opening import open_table
from tests.load.change_source import KEYED, ChangeSource, offsets_of, rows_of
from tests.load.real_lakes import REAL, RealLakes, RealPlace
from tests.load.support import Unlocked, race, run
from tests.load.tables import Kind, Lake, check_each_once, make_lake
from tests.spark.support import create_topic, produce, values
from tests.support.brokers.tcp_proxy import TcpProxy
from tests.support.runs.soak import SOAK
from tests.support.servers.http_proxy import Fate, HttpProxy

pytestmark = [pytest.mark.peer, pytest.mark.test_all("client"), pytest.mark.usefixtures("short_leases")]
_PLACES = pytest.mark.parametrize(("kind", "place"), REAL)
_EACH = 40
_numbers = count(1)
_FATES: tuple[Fate, ...] = ("refused", "lost", "cut", "late")


@_PLACES
def test_answers_that_are_lost(
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    real_lakes: RealLakes,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    place: RealPlace,
) -> None:
    """A run goes on or fails, and the next one makes it whole: by appends, then by changes of rows."""
    servers, chance = cluster.bootstrap_servers, random.Random(6)
    lake, proxy = real_lakes.make(kind, place, tmp_path, monkeypatch)
    create_topic(servers, topic, 2)
    failed = 0
    for number in range(24 if SOAK else 4):
        produce(servers, topic, values(_EACH, start=number * _EACH, partitions=2))
        sent = (number + 1) * _EACH
        if isinstance(proxy, TcpProxy):
            proxy.disturb()
        else:  # some requests of a run that is whole are lost, among the first ones or the later ones
            before: list[Fate] = ["good"] * chance.randrange(8 if number % 2 else 2)
            proxy.set_fates(*before, *chance.choices(_FATES, k=1 + number % 3))
        try:
            run(servers, lake.address, topic, max_task_records=20)
        except LoadError:
            failed += 1
        if isinstance(proxy, TcpProxy):
            proxy.calm()
        else:
            proxy.set_fates()
        check_each_once(lake, topic, sent)
        run(servers, lake.address, topic, max_task_records=20)
        assert check_each_once(lake, topic, sent) == sent
    assert (status(lake.address).findings, status(lake.address).unfinished) == ([], "")


@_PLACES
def test_changes_whose_answers_are_lost(
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    real_lakes: RealLakes,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    place: RealPlace,
) -> None:
    lake, proxy = real_lakes.make(kind, place, tmp_path, monkeypatch)
    source = ChangeSource(cluster.bootstrap_servers, topic, 50)
    for number in range(12 if SOAK else 3):
        source.change(60)
        if not isinstance(proxy, TcpProxy):
            before: list[Fate] = ["good"] * (number * 2)
            proxy.set_fates(*before, _FATES[number % 4])
        try:
            run(source.servers, lake.address, topic, settings=KEYED)
        except LoadError:
            run(source.servers, lake.address, topic, settings=KEYED)
        if not isinstance(proxy, TcpProxy):
            proxy.set_fates()
        assert offsets_of(lake.address, topic) == source.end
        for name, read in lake.readers().items():
            assert rows_of(read()) == source.rows(source.end), name


@_PLACES
def test_two_loads_at_once(
    cluster: EmbeddedCluster,
    topic: str,
    tmp_path: Path,
    real_lakes: RealLakes,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    place: RealPlace,
) -> None:
    """Without leases: whoever loses is told so."""
    servers = cluster.bootstrap_servers
    lake, _ = real_lakes.make(kind, place, tmp_path, monkeypatch)
    create_topic(servers, topic, 2)
    monkeypatch.setattr("spark_klog.load.run.locked", Unlocked)
    assert not lake.exists()  # pyiceberg makes the tables of a catalog in SQLite, which two can't do at once
    options = LoadOptions({"bootstrap.servers": servers}, [topic], lake.address, max_task_records=20)
    lost: list[str] = []
    for number in range(10 if SOAK else 3):
        produce(servers, topic, values(60, start=number * 60, partitions=2))
        lost += race(options)
        sent = 60 * (number + 1)
        check_each_once(lake, topic, sent)
        run(servers, lake.address, topic, max_task_records=20)
        assert check_each_once(lake, topic, sent) == sent
    assert status(lake.address).findings == []
    assert all("another run" in one or "run again" in one.lower() or "another attempt" in one for one in lost), lost


def _rest(folder: Path, uri: str, monkeypatch: pytest.MonkeyPatch, lakes: RealLakes) -> Lake:
    properties = {"TYPE": "rest", "URI": uri}
    return make_lake("iceberg", folder, monkeypatch, lakes.s3.address, f"rest-{next(_numbers)}", properties)


def test_a_catalog_that_is_killed(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, real_lakes: RealLakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL at any moment of a run, and started again: the run goes on, or the next one does."""
    servers, chance = cluster.bootstrap_servers, random.Random(7)
    server = real_lakes.rest_server(real_lakes.s3.address)
    lake = _rest(tmp_path, f"http://{server.address}", monkeypatch, real_lakes)
    create_topic(servers, topic, 2)
    for number in range(20 if SOAK else 3):
        produce(servers, topic, values(_EACH, start=number * _EACH, partitions=2))
        sent = (number + 1) * _EACH
        with ThreadPoolExecutor(1) as pool:  # the server ends with the thread that starts it
            loading = pool.submit(run, servers, lake.address, topic, max_task_records=20)
            wait([loading], chance.uniform(0, 1))
            server.kill()
            server.start()
            wait([loading])
        assert loading.exception() is None or isinstance(loading.exception(), LoadError)
        check_each_once(lake, topic, sent)
        run(servers, lake.address, topic, max_task_records=20)
        assert check_each_once(lake, topic, sent) == sent
    assert (status(lake.address).findings, status(lake.address).unfinished) == ([], "")


def test_a_catalog_that_does_not_answer(
    cluster: EmbeddedCluster, topic: str, tmp_path: Path, real_lakes: RealLakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load waits for a time, and then looks whether its commit is in the table."""
    monkeypatch.setattr(iceberg_stores, "_ANSWER_SECONDS", 1.0)
    lake = _rest(tmp_path, f"http://{real_lakes.rest.address}", monkeypatch, real_lakes)
    create_topic(cluster.bootstrap_servers, topic)
    for number in range(4):
        produce(cluster.bootstrap_servers, topic, values(20, start=number * 20))
        before: list[Fate] = ["good"] * (number % 2)
        real_lakes.rest.set_fates(*before, "held")
        assert run(cluster.bootstrap_servers, lake.address, topic).runs == [number + 1]
        real_lakes.rest.set_fates()
        assert check_each_once(lake, topic, 20 * (number + 1)) == 20 * (number + 1)


@pytest.mark.parametrize("good", range(3))
def test_a_file_of_azure_whose_removal_is_refused(
    good: int, tmp_path: Path, real_lakes: RealLakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow leases the file first, and ends the process if a request about the lease fails."""
    lake, proxy = real_lakes.make("delta", "azurite", tmp_path, monkeypatch)
    assert isinstance(proxy, HttpProxy)
    place = open_table(lake.address).location
    folder = open_folder(place, LoadError)
    folder.write("file", b"content")
    proxy.set_fates(*["good"] * good, *["refused"] * 8)
    program = (
        "import sys; from spark_klog.errors import LoadError; from spark_klog.files import open_folder\n"
        "try: open_folder(sys.argv[1], LoadError).remove('file')\n"
        "except LoadError as error: sys.exit(str(error))"
    )
    done = subprocess.run([sys.executable, "-c", program, place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 if good else (done.returncode == 1 and "can't be removed: " in done.stderr)
    proxy.set_fates()
    folder.remove("file")
    assert folder.size("file") is None
