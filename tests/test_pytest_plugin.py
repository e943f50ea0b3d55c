"""The pytest plugin, in pytest runs of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
ROUND_TRIP = """
    from confluent_kafka import Producer
    from kafka import KafkaConsumer

    def test_round_trip(klog_cluster, klog_topic):
        servers = klog_cluster.bootstrap_servers
        producer = Producer({"bootstrap.servers": servers})
        producer.produce(klog_topic, b"value")
        assert producer.flush(20) == 0
        consumer = KafkaConsumer(klog_topic, bootstrap_servers=servers, group_id=None, auto_offset_reset="earliest")
        assert consumer.partitions_for_topic(klog_topic) == {0}
        assert next(consumer).value == b"value"
        consumer.close()
"""
WHO = """
    import asyncio, pathlib, pytest, time
    from confluent_kafka.admin import AdminClient

    def has_brokers(cluster, count):
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        deadline = time.monotonic() + 60
        while (found := len(admin.list_topics(timeout=20).brokers)) < count and time.monotonic() < deadline:
            time.sleep(0.05)  # one that has just started does not know the others yet
        return found == count
"""


@pytest.fixture
def users(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with a user's tests and the plugin "installed": pytest finds it by its entry point."""
    installed = pytester.mkdir("site")
    lines = (ROOT / "pyproject.toml").read_text().split("[project.entry-points.pytest11]\n")[1].splitlines()
    assert lines[0].startswith("klog = ")
    metadata = installed / "klog_of_this_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: klog-of-this-test\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\n" + lines[0].replace('"', "") + "\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


def run(users: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return users.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=120)


def run_here(users: pytest.Pytester) -> pytest.RunResult:
    """Run in this process, which starts no interpreter."""
    return users.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")


def test_fixtures_serve_the_clients_of_users(users: pytest.Pytester) -> None:
    users.makepyfile(
        ROUND_TRIP,
        test_more=WHO
        + """
    servers = []

    @pytest.mark.parametrize("again", [1, 2])
    def test_tests_share_a_cluster_and_have_topics_of_their_own(klog_cluster, klog_topic, again):
        servers.append((klog_cluster.bootstrap_servers, klog_topic))
        assert len({server for server, _ in servers}) == 1
        assert len({topic for _, topic in servers}) == again

    def test_coroutines(klog_aio_producer, klog_aio_consumer, klog_aio_admin, klog_topic):
        async def main():
            async with klog_aio_producer({"linger.ms": 0}) as producer, klog_aio_admin() as admin:
                assert (await producer.send(klog_topic, b"v")).offset == 0
                assert klog_topic in [topic.name for topic in await admin.list_topics()]
            async with klog_aio_consumer({"group.id": klog_topic}) as consumer:
                consumer.subscribe([klog_topic])
                assert (await asyncio.wait_for(anext(consumer), 60)).value == b"v"

        asyncio.run(main())

    @pytest.mark.klog_topic(partitions=3, settings={"retention.ms": "1000"})
    def test_topics_as_told(klog_cluster, klog_topic):
        topics = AdminClient({"bootstrap.servers": klog_cluster.bootstrap_servers}).list_topics(timeout=20).topics
        assert len(topics[klog_topic].partitions) == 3

    def test_own_clusters(klog_cluster_factory, klog_cluster):
        from spark_klog.broker.faults import ErrorAnswer, Fault
        own = klog_cluster_factory(brokers=2, settings={"num.partitions": "5"}, faults=[])
        own.inject(Fault(ErrorAnswer("LEADER_NOT_AVAILABLE"), api="Produce"))
        assert has_brokers(own, 2)
        assert has_brokers(klog_cluster, 1)
    """,
    )
    result = run(users, "--strict-markers")
    result.assert_outcomes(passed=6)


def test_options(users: pytest.Pytester) -> None:
    users.makepyfile(
        WHO
        + """
    @pytest.mark.parametrize("again", [1, 2])
    def test_own_cluster_each(klog_cluster, again):
        assert has_brokers(klog_cluster, 2)
        command = pathlib.Path(f"/proc/{klog_cluster.pid(0)}/cmdline").read_text()
        assert "num.partitions=4" in command and "log.segment.bytes=1048576" in command
        (pathlib.Path(__file__).parent / "pids").open("a").write(f"{klog_cluster.pid(0)} {klog_cluster.pid(1)} ")
    """
    )
    users.makeini(
        """
        [pytest]
        klog_brokers = 3
        klog_cluster_scope = function
        klog_settings =
            num.partitions = 4
            log.segment.bytes=1048576
        """
    )
    run(users, "--klog-brokers=2").assert_outcomes(passed=2)
    pids = (users.path / "pids").read_text().split()
    assert len(set(pids)) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("klog_cluster_scope = world", "*one of session, package*"),
        ("klog_settings = a", "*'a' is not NAME=VALUE*"),
        ("klog_brokers = x", "klog_brokers = x: give a number of brokers, 1 or more"),
        ("addopts = --klog-brokers 0", "--klog-brokers 0: give a number of brokers, 1 or more"),
    ],
)
def test_settings_that_are_wrong(users: pytest.Pytester, setting: str, told: str) -> None:
    users.makepyfile("def test(klog_cluster): pass")
    users.makeini(f"[pytest]\n{setting}")
    result = run_here(users)
    assert result.ret != 0
    assert told.strip("*") in result.stdout.str() + result.stderr.str()


def test_markers_that_are_wrong(users: pytest.Pytester) -> None:
    """A wrong `klog_topic` marker fails its test instead of making a topic with one partition."""
    told = {
        "3": "klog_topic(3): it takes partitions=N and settings={...} by name",
        "partition=3": "klog_topic(partition=3): it takes partitions=N and settings={...} by name",
        "partitions='3'": "klog_topic(partitions='3'): give a number, 1 or more",
        "partitions=0": "klog_topic(partitions=0): give a number, 1 or more",
    }
    tests = [
        f"@pytest.mark.klog_topic({marker})\ndef test_{number}(klog_topic): pass" for number, marker in enumerate(told)
    ]
    users.makepyfile("\n".join(["import pytest", *tests]))
    result = run_here(users)
    result.assert_outcomes(errors=len(told))
    for text in told.values():
        assert text in result.stdout.str()


def test_a_failed_test_shows_what_brokers_logged_during_it(users: pytest.Pytester) -> None:
    users.makepyfile(
        """
    def test_before(klog_topic):
        assert klog_topic.startswith("test-before-")

    def test_failing(klog_cluster, klog_topic, klog_cluster_factory):
        klog_cluster_factory()
        assert False

    def test_without_brokers():
        assert False
    """
    )
    result = run(users)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*- broker-0 log, all of it in */klog0/broker-0.log -*", "*created topic test-failing-*"]
    )
    text = result.stdout.str()
    assert "created topic test-before-" not in text
    assert text.count("- broker-0 log") == 2  # the shared cluster's and the test's own
    (path,) = {line.split(" in ")[1].split(" -")[0] for line in text.splitlines() if "/klog0/broker-0.log" in line}
    assert "created topic test-before-" in Path(path).read_text()


@pytest.mark.test_all("long")
def test_workers_have_clusters_of_their_own(users: pytest.Pytester) -> None:
    test = "def test(klog_cluster, klog_topic, worker_id):\n    assert False, f'{worker_id} {klog_cluster.pid(0)}'\n"
    users.makepyfile(test_one=test, test_other=test)
    result = run(users, "-n2", "--dist=loadfile")
    result.assert_outcomes(failed=2)
    told = {line.split("AssertionError: ")[1] for line in result.stdout.lines if line.startswith("E ") and "gw" in line}
    assert {line.split()[0] for line in told} == {"gw0", "gw1"}
    assert len({line.split()[1] for line in told}) == 2
    assert result.stdout.str().count("- broker-0 log") == 2


def test_pytest_starts_without_what_it_does_not_need(users: pytest.Pytester) -> None:
    users.makepyfile(
        """
    import sys

    def test(pytestconfig):
        assert pytestconfig.pluginmanager.has_plugin("klog")
        heavy = {"pyspark", "pandas", "pyarrow", "numpy", "asyncio", "kazoo", "spark_klog.embedded"}
        assert not heavy & set(sys.modules)
    """
    )
    # anyio, a dependency of Starlette, has a pytest plugin that imports asyncio
    run(users, "-p", "no:xdist", "-p", "no:anyio").assert_outcomes(passed=1)


def test_pytest_without_the_plugin(users: pytest.Pytester) -> None:
    users.makepyfile(
        """
    def test(pytestconfig):
        assert not pytestconfig.pluginmanager.has_plugin("klog")

    def test_fixture(klog_cluster):
        pass
    """
    )
    result = run(users, "-p", "no:klog")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'klog_cluster' not found*"])
