"""Every API of the client, with every error code that a broker may return and every fault of a response.

The tables have the client's reaction: RETRY (ask the same broker again), REFRESH (look up the leader, coordinator or
controller first), FAIL (raise `ProtocolError` at once). The codes of each API are those that Apache Kafka's brokers
return; Produce and InitProducerId are in test_producer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import kafka.errors
import pytest

from spark_klog.client import Admin
from spark_klog.client.cluster import Cluster
from spark_klog.client.coordinator import find_coordinator
from spark_klog.client.fetch.ranges import fetch_range
from spark_klog.client.offsets import NO_OFFSET, GroupOffsets, list_offsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import client_config
from spark_klog.errors import (
    ConnectionFailed,
    DecodeError,
    ErrorCode,
    KlogError,
    ProtocolError,
    Remedy,
    RequestTimedOut,
    UnsupportedVersionError,
)
from spark_klog.protocol.tables.records import EARLIEST, LATEST
from tests.support.brokers.faults import (
    Fault,
    cut,
    double,
    dripped,
    dropped,
    empty,
    error,
    late,
    lost,
    misaddressed,
    renamed,
    repeated,
    silent,
    throttled,
    top_error,
)
from tests.support.brokers.kafka_python_wire import Message, read_records
from tests.support.brokers.scripted_broker import ScriptedCluster

pytestmark = pytest.mark.usefixtures("driver")

T0, T1 = ("t", 0), ("t", 1)
VALUES = [b"a", b"b", b"c"]
GROUP = "g"
RETRY, REFRESH, FAIL = Remedy.RETRY, Remedy.REFRESH, Remedy.FAIL


def _topic_error(code: int) -> Fault:
    def change(answer: Message) -> None:
        for topic in answer["topics"]:
            topic.update(error_code=code, partitions=[])

    return Fault(change)


class Call(NamedTuple):
    """A client call that uses an API, its expected result, and the broker's expected state afterwards."""

    run: Callable[[Cluster], Any]
    result: Any
    state: Callable[[ScriptedCluster], Any] = lambda brokers: None
    after: Any = None
    fault: Callable[[int], Fault] = error


def _fetch(cluster: Cluster) -> list[bytes]:
    found = []
    for fetched in fetch_range(cluster, *T0, 0, 3):
        found += [value for _, _, value in read_records(bytes(fetched.data))]
    return found


def _sizes(brokers: ScriptedCluster) -> dict[str, int]:
    return {name: sum(topic == name for topic, _ in brokers.logs) for name, _ in brokers.logs}


def _connected(cluster: Cluster) -> dict[str, list[int]]:
    return cluster.attempt(lambda: cluster.partitions(["t"]))


def _settings(cluster: Cluster) -> dict[str, str | None]:
    (found,) = Admin(cluster).describe_configs([("topic", "t")]).check().values()
    return {entry.name: entry.value for entry in found.values() if not entry.is_default}


CALLS = {
    "ApiVersions": Call(_connected, {"t": [0, 1]}),
    "Metadata": Call(_connected, {"t": [0, 1]}, fault=_topic_error),
    "ListOffsets": Call(lambda cluster: list_offsets(cluster, {T0: LATEST, T1: EARLIEST}), {T0: 3, T1: 0}),
    "Fetch": Call(_fetch, VALUES),
    "FindCoordinator": Call(lambda cluster: cluster.attempt(lambda: find_coordinator(cluster, GROUP)), 0),
    "OffsetCommit": Call(
        lambda cluster: GroupOffsets(cluster, GROUP).commit({T0: 7, T1: 8}),
        None,
        lambda brokers: brokers.offsets[GROUP],
        {T0: 7, T1: 8},
    ),
    "OffsetFetch": Call(lambda cluster: GroupOffsets(cluster, GROUP).fetch([T0, T1]), {T0: 5}),
    "ListGroups": Call(lambda cluster: [found.group for found in Admin(cluster).list_groups()], [GROUP]),
    "DescribeGroups": Call(lambda cluster: Admin(cluster).describe_group(GROUP).state, "Empty"),
    "CreateTopics": Call(
        lambda cluster: Admin(cluster).create_topic("n", 3, replication_factor=1) and None,
        None,
        _sizes,
        {"t": 2, "n": 3},
    ),
    "DeleteTopics": Call(lambda cluster: Admin(cluster).delete_topic("t"), None, _sizes, {}),
    "CreatePartitions": Call(
        lambda cluster: Admin(cluster).create_partitions({"t": 4}).check() and None, None, _sizes, {"t": 4}
    ),
    "DescribeConfigs": Call(_settings, {"a": "1"}),
    "IncrementalAlterConfigs": Call(
        lambda cluster: Admin(cluster).alter_configs({("topic", "t"): {"b": "2", "a": None}}).check() and None,
        None,
        lambda brokers: brokers.configs["t"],
        {"b": "2"},
    ),
}

_E = ErrorCode
_LEADER = (
    _E.UNKNOWN_TOPIC_OR_PARTITION,
    _E.LEADER_NOT_AVAILABLE,
    _E.NOT_LEADER_OR_FOLLOWER,
    _E.REPLICA_NOT_AVAILABLE,
    _E.KAFKA_STORAGE_ERROR,
    _E.FENCED_LEADER_EPOCH,
    _E.UNKNOWN_LEADER_EPOCH,
)
_CHANGE_FAILS = (
    _E.TOPIC_AUTHORIZATION_FAILED,
    _E.CLUSTER_AUTHORIZATION_FAILED,
    _E.INVALID_TOPIC_EXCEPTION,
    _E.INVALID_REQUEST,
    _E.POLICY_VIOLATION,
    _E.UNSUPPORTED_VERSION,
    _E.UNKNOWN_SERVER_ERROR,
)
_CHANGE_RETRIES = (_E.REQUEST_TIMED_OUT, _E.THROTTLING_QUOTA_EXCEEDED)
TABLE: dict[str, dict[Remedy, tuple[int, ...]]] = {
    "ApiVersions": {FAIL: (_E.UNSUPPORTED_VERSION, _E.INVALID_REQUEST, _E.UNKNOWN_SERVER_ERROR)},
    "Metadata": {
        REFRESH: (_E.UNKNOWN_TOPIC_OR_PARTITION, _E.LEADER_NOT_AVAILABLE),
        FAIL: (
            _E.INVALID_TOPIC_EXCEPTION,
            _E.TOPIC_AUTHORIZATION_FAILED,
            _E.INVALID_REPLICATION_FACTOR,
            _E.UNKNOWN_SERVER_ERROR,
        ),
    },
    "ListOffsets": {
        RETRY: (_E.REQUEST_TIMED_OUT, _E.OFFSET_NOT_AVAILABLE),
        REFRESH: _LEADER,
        FAIL: (
            _E.TOPIC_AUTHORIZATION_FAILED,
            _E.UNSUPPORTED_VERSION,
            _E.INVALID_REQUEST,
            _E.UNKNOWN_SERVER_ERROR,
        ),
    },
    "Fetch": {
        RETRY: (
            _E.UNKNOWN_SERVER_ERROR,
            _E.OFFSET_NOT_AVAILABLE,
            _E.FETCH_SESSION_ID_NOT_FOUND,
            _E.INVALID_FETCH_SESSION_EPOCH,
            _E.FETCH_SESSION_TOPIC_ID_ERROR,
        ),
        REFRESH: (*_LEADER, _E.OFFSET_OUT_OF_RANGE, _E.UNKNOWN_TOPIC_ID, _E.INCONSISTENT_TOPIC_ID),
        FAIL: (
            _E.CORRUPT_MESSAGE,
            _E.TOPIC_AUTHORIZATION_FAILED,
            _E.INVALID_TOPIC_EXCEPTION,
            _E.CLUSTER_AUTHORIZATION_FAILED,
            _E.UNSUPPORTED_VERSION,
            _E.UNSUPPORTED_COMPRESSION_TYPE,
            _E.OFFSET_MOVED_TO_TIERED_STORAGE,
        ),
    },
    "FindCoordinator": {
        RETRY: (_E.COORDINATOR_LOAD_IN_PROGRESS,),
        REFRESH: (_E.COORDINATOR_NOT_AVAILABLE,),
        FAIL: (_E.INVALID_GROUP_ID, _E.GROUP_AUTHORIZATION_FAILED, _E.INVALID_REQUEST, _E.UNKNOWN_SERVER_ERROR),
    },
    "OffsetCommit": {
        RETRY: (_E.COORDINATOR_LOAD_IN_PROGRESS, _E.REQUEST_TIMED_OUT, _E.STALE_MEMBER_EPOCH),
        REFRESH: (_E.COORDINATOR_NOT_AVAILABLE, _E.NOT_COORDINATOR, _E.UNKNOWN_TOPIC_OR_PARTITION),
        FAIL: (
            _E.OFFSET_METADATA_TOO_LARGE,
            _E.ILLEGAL_GENERATION,
            _E.INVALID_GROUP_ID,
            _E.UNKNOWN_MEMBER_ID,
            _E.REBALANCE_IN_PROGRESS,
            _E.INVALID_COMMIT_OFFSET_SIZE,
            _E.TOPIC_AUTHORIZATION_FAILED,
            _E.GROUP_AUTHORIZATION_FAILED,
            _E.FENCED_INSTANCE_ID,
            _E.UNKNOWN_SERVER_ERROR,
        ),
    },
    "OffsetFetch": {
        RETRY: (_E.COORDINATOR_LOAD_IN_PROGRESS, _E.UNSTABLE_OFFSET_COMMIT),
        REFRESH: (_E.COORDINATOR_NOT_AVAILABLE, _E.NOT_COORDINATOR),
        FAIL: (
            _E.INVALID_GROUP_ID,
            _E.UNKNOWN_MEMBER_ID,
            _E.STALE_MEMBER_EPOCH,
            _E.TOPIC_AUTHORIZATION_FAILED,
            _E.GROUP_AUTHORIZATION_FAILED,
            _E.UNKNOWN_SERVER_ERROR,
        ),
    },
    "ListGroups": {
        RETRY: (_E.COORDINATOR_LOAD_IN_PROGRESS,),
        REFRESH: (_E.COORDINATOR_NOT_AVAILABLE,),
        FAIL: (_E.CLUSTER_AUTHORIZATION_FAILED, _E.UNKNOWN_SERVER_ERROR),
    },
    "DescribeGroups": {
        RETRY: (_E.COORDINATOR_LOAD_IN_PROGRESS,),
        REFRESH: (_E.COORDINATOR_NOT_AVAILABLE, _E.NOT_COORDINATOR),
        FAIL: (_E.INVALID_GROUP_ID, _E.GROUP_AUTHORIZATION_FAILED, _E.UNKNOWN_SERVER_ERROR),
    },
    "CreateTopics": {
        RETRY: _CHANGE_RETRIES,
        REFRESH: (_E.NOT_CONTROLLER,),
        FAIL: (
            *_CHANGE_FAILS,
            _E.TOPIC_ALREADY_EXISTS,
            _E.INVALID_PARTITIONS,
            _E.INVALID_REPLICATION_FACTOR,
            _E.INVALID_REPLICA_ASSIGNMENT,
            _E.INVALID_CONFIG,
        ),
    },
    "DeleteTopics": {
        RETRY: _CHANGE_RETRIES,
        REFRESH: (_E.NOT_CONTROLLER,),
        FAIL: (*_CHANGE_FAILS, _E.UNKNOWN_TOPIC_OR_PARTITION, _E.TOPIC_DELETION_DISABLED),
    },
    "CreatePartitions": {
        RETRY: _CHANGE_RETRIES,
        REFRESH: (_E.NOT_CONTROLLER,),
        FAIL: (
            *_CHANGE_FAILS,
            _E.UNKNOWN_TOPIC_OR_PARTITION,
            _E.INVALID_PARTITIONS,
            _E.INVALID_REPLICA_ASSIGNMENT,
            _E.REASSIGNMENT_IN_PROGRESS,
        ),
    },
    "DescribeConfigs": {
        RETRY: (_E.REQUEST_TIMED_OUT,),
        REFRESH: (_E.UNKNOWN_TOPIC_OR_PARTITION,),
        FAIL: (*_CHANGE_FAILS, _E.INVALID_CONFIG),
    },
    "IncrementalAlterConfigs": {
        RETRY: _CHANGE_RETRIES,
        REFRESH: (_E.NOT_CONTROLLER, _E.UNKNOWN_TOPIC_OR_PARTITION),
        FAIL: (*_CHANGE_FAILS, _E.INVALID_CONFIG),
    },
}
#: Cases that wait at the same time.
_AT_ONCE = 24
CASES = [(name, code, remedy) for name, rows in TABLE.items() for remedy, codes in rows.items() for code in codes]
PASSING = [(name, code) for name, code, remedy in CASES if remedy is not FAIL]


@contextmanager
def _running() -> Iterator[ScriptedCluster]:
    with ScriptedCluster({"t": 2}) as running:
        running.append("t", 0, VALUES)
        running.offsets[GROUP] = {T0: 5}
        running.configs["t"] = {"a": "1"}
        yield running


@pytest.fixture
def brokers() -> Iterator[ScriptedCluster]:
    with _running() as running:
        yield running


def _all_at_once(check: Callable[..., None], cases: list[Any]) -> None:
    """Run checks in parallel, as they mostly wait, each with its own brokers; failures name the case."""

    def run(case: Any) -> str | None:
        with _running() as brokers:
            try:
                check(brokers, *case)
            except BaseException as problem:  # also pytest's own failures
                return f"{case}: {type(problem).__name__}: {problem}"
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        assert [problem for problem in pool.map(run, cases) if problem] == []


def _cluster(brokers: ScriptedCluster, timeout_ms: int = 20_000) -> Cluster:
    settings = {
        "bootstrap.servers": brokers.bootstrap_servers,
        "request.timeout.ms": str(timeout_ms),
        "retry.backoff.ms": "5",
    }
    return Cluster(client_config(settings))


def _id(value: object) -> str | None:
    return value.name if isinstance(value, ErrorCode | Remedy) else None


@pytest.mark.parametrize(("name", "code", "remedy"), CASES, ids=_id)
def test_an_error_that_comes_once(brokers: ScriptedCluster, name: str, code: int, remedy: Remedy) -> None:
    call = CALLS[name]
    before = call.state(brokers)
    brokers.on(name, call.fault(code))
    with _cluster(brokers) as cluster:
        if remedy is FAIL:
            with pytest.raises(ProtocolError) as raised:
                call.run(cluster)
            assert raised.value.code == code
            assert brokers.count(name) == 1
            assert call.state(brokers) == before
            return
        assert call.run(cluster) == call.result
    assert call.state(brokers) == call.after
    names = [asked.name for asked in brokers.asked]
    first = names.index(name)
    second = names.index(name, first + 1)
    assert remedy is not REFRESH or {"Metadata", "FindCoordinator"} & set(names[first + 1 : second + 1])


def test_errors_that_stay() -> None:
    def check(brokers: ScriptedCluster, name: str, code: int) -> None:
        call = CALLS[name]
        before = call.state(brokers)
        brokers.always(name, call.fault(code))
        with _cluster(brokers, 2000) as cluster:
            begin = time.monotonic()
            with pytest.raises(ProtocolError) as raised:
                call.run(cluster)
            assert time.monotonic() - begin < 20
        assert raised.value.code == code
        assert 2 <= brokers.count(name) < 120  # the client pauses after each
        assert call.state(brokers) == before

    _all_at_once(check, PASSING)


def _late_or_gone(name: str) -> type[KlogError]:
    # the client sends these to any broker: the error names each one that it tried
    return ConnectionFailed if name in ("ApiVersions", "Metadata", "FindCoordinator") else RequestTimedOut


#: Faults of every response, and the expected error after request.timeout.ms.
STAYING: dict[str, tuple[Fault, Callable[[str], type[KlogError] | tuple[type[KlogError], ...]]]] = {
    "late": (late(30), _late_or_gone),
    "silent": (silent(), _late_or_gone),
    "dripped": (dripped(0.3), _late_or_gone),
    # RequestTimedOut if the call's time ends within an attempt
    "dropped": (dropped(), lambda name: (ConnectionFailed, RequestTimedOut)),
    "lost": (lost(), lambda name: (ConnectionFailed, RequestTimedOut)),
    "throttled": (throttled(40), lambda name: (ProtocolError, ConnectionFailed, RequestTimedOut)),
    "throttled for long": (throttled(60_000), lambda name: (ConnectionFailed, RequestTimedOut)),
}
#: APIs for which a response without entries is complete.
LISTS = ("ApiVersions", "ListGroups")


def test_faults_that_stay() -> None:
    def check(brokers: ScriptedCluster, name: str, fault: str) -> None:
        what, expected = STAYING[fault]
        brokers.always(name, what)
        with _cluster(brokers, 1500) as cluster:
            begin = time.monotonic()
            with pytest.raises(expected(name)):
                CALLS[name].run(cluster)
            assert time.monotonic() - begin < 20
        assert brokers.count(name) < 120

    _all_at_once(
        check,
        [(name, fault) for name in CALLS for fault in STAYING if "throttled" not in fault or name not in LISTS],
    )


@pytest.mark.parametrize("fault", [dropped(), lost(), throttled(50)], ids=["dropped", "lost", "throttled"])
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_that_passes(brokers: ScriptedCluster, name: str, fault: Fault) -> None:
    call = CALLS[name]
    if fault.times and name in LISTS:
        return
    brokers.on(name, fault)
    with _cluster(brokers) as cluster:
        assert call.run(cluster) == call.result
    assert call.state(brokers) == call.after
    asked = [request for request in brokers.asked if request.name == name]
    assert len(asked) >= 2
    assert not fault.times or asked[1].at - asked[0].at >= 0.05


WRONG = {"empty": empty(), "renamed": renamed(), "repeated": repeated(), "cut": cut(), "misaddressed": misaddressed()}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_an_answer_to_another_question(brokers: ScriptedCluster, name: str, fault: str) -> None:
    call = CALLS[name]
    brokers.on(name, WRONG[fault])
    with _cluster(brokers) as cluster:
        if name in ("Metadata", "ApiVersions", "ListGroups") and fault in ("renamed", "repeated"):
            return  # these list everything, so that no entry is unexpected
        if name in ("Metadata", "Fetch") and fault == "empty":
            assert call.run(cluster) == call.result  # as of a broker that has just started: the client asks again
        elif fault == "empty" and name == "ListGroups":
            assert call.run(cluster) == []
        else:
            with pytest.raises(UnsupportedVersionError if (name, fault) == ("ApiVersions", "empty") else DecodeError):
                call.run(cluster)


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_comes_twice_is_not_taken_for_another(brokers: ScriptedCluster, name: str) -> None:
    call = CALLS[name]
    brokers.always(name, double())
    with _cluster(brokers) as cluster:
        try:
            result = call.run(cluster)
        except DecodeError as error:
            refusal = str(error)
        else:
            refusal = ""
            assert (result, call.state(brokers)) == (call.result, call.after)
        assert not refusal or "not under way" in refusal


def test_the_answers_own_error(brokers: ScriptedCluster) -> None:
    for name in ("Fetch", "ListGroups", "Metadata"):
        brokers.on(name, top_error(_E.CLUSTER_AUTHORIZATION_FAILED))
        with _cluster(brokers) as cluster, pytest.raises(KlogError) as raised:
            CALLS[name].run(cluster)
        assert isinstance(raised.value, ProtocolError), name


def test_special_answers(brokers: ScriptedCluster) -> None:
    with _cluster(brokers) as cluster:
        brokers.on("ListOffsets", error(_E.UNSUPPORTED_FOR_MESSAGE_FORMAT, partition=1))
        assert list_offsets(cluster, {T0: 0, T1: 0}) == {T0: 0, T1: NO_OFFSET}
        brokers.on("OffsetFetch", error(_E.UNKNOWN_TOPIC_OR_PARTITION, partition=0))
        assert GroupOffsets(cluster, GROUP).fetch([T0, T1]) == {}
        brokers.on("DescribeGroups", error(_E.GROUP_ID_NOT_FOUND))
        assert Admin(cluster).describe_group("nobody").state == "Dead"


def test_a_partition_without_a_leader_keeps_no_other_from_being_asked_for(brokers: ScriptedCluster) -> None:
    brokers.leaders[T0] = -1
    with _cluster(brokers, 300) as cluster:
        with pytest.raises(ProtocolError, match="partition t-0: LEADER_NOT_AVAILABLE"):
            list_offsets(cluster, {T0: LATEST, T1: LATEST})
        asked = [request.message for request in brokers.asked if request.name == "ListOffsets"]
        wanted = [entry["partition_index"] for message in asked for entry in message["topics"][0]["partitions"]]
        assert wanted == [1]  # once: the client keeps the answer for the next attempt
        leaders, failures = cluster.by_leader([T0, T1, ("nowhere", 0)])
    assert leaders == {0: [T1]}
    assert {key: failure.code for key, failure in failures.items()} == {
        T0: _E.LEADER_NOT_AVAILABLE,
        ("nowhere", 0): _E.UNKNOWN_TOPIC_OR_PARTITION,
    }


def test_codes_are_classified_as_by_kafka() -> None:
    """Our remedies match "Retriable" in kafka-python's classes, except codes that Kafka's own clients also retry."""
    beyond = {_E.CORRUPT_MESSAGE}  # CorruptRecordException is a RetriableException in Kafka's client
    found = {item.errno: item for item in vars(kafka.errors).values() if isinstance(getattr(item, "errno", None), int)}
    newer = {code for code in ErrorCode if code > _E.TRANSACTION_ABORTABLE}  # kafka-python does not know them
    assert not any(code in found or code.remedy is not FAIL for code in newer)
    for code in set(ErrorCode) - newer:
        known: Any = found[code]
        if code == _E.ELECTION_NOT_NEEDED:
            continue  # only elections return it
        assert (code.remedy is not FAIL) == (known.retriable or code in beyond), code.name
        assert not known.invalid_metadata or code.remedy is REFRESH, code.name


def test_a_transaction_timeout_that_the_broker_refuses(brokers: ScriptedCluster) -> None:
    brokers.always("InitProducerId", error(_E.INVALID_TRANSACTION_TIMEOUT))
    with Producer({"bootstrap.servers": brokers.bootstrap_servers, "transactional.id": "x"}) as producer:
        with pytest.raises(ProtocolError, match=r"transaction\.timeout\.ms is larger.*transaction\.max\.timeout\.ms"):
            producer.init_transactions()
