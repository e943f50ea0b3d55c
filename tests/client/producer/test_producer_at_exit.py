"""At exit a program writes records that it has not flushed, within a time limit; a warning counts those it can't."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.brokers.model_cluster import Fate, ModelCluster

BEGIN = """
import os, sys, threading
from spark_klog.client import Producer
from spark_klog.client.producer import producer
producer._SECONDS_AT_EXIT = {seconds}
producer = Producer({{"bootstrap.servers": "{servers}", "linger.ms": "{linger}", "retry.backoff.ms": "1"}})
"""
SEND = """
for number in range(100):
    producer.send("t", b"%d" % number, on_delivery=lambda error, metadata: print(metadata.offset, flush=True))
"""
VALUES = [b"%d" % number for number in range(100)]


def run(brokers: ModelCluster, program: str, seconds: float = 60, linger: int = 600_000) -> tuple[int, list[str], str]:
    """Run a program to its end; return its status, its lines and what it writes to stderr."""
    begin = BEGIN.format(servers=brokers.servers, seconds=seconds, linger=linger)
    ended = subprocess.run([sys.executable, "-c", begin + program], capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout.split(), ended.stderr


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise ValueError('the end')", 1)],
)
def test_records_that_were_not_flushed(end: str, status: int) -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        found, told, errors = run(brokers, SEND + end)
        assert (found, told) == (status, [str(number) for number in range(100)])
        assert brokers.log["t", 0] == VALUES
        assert "not confirmed" not in errors


def test_arrow_rows_that_were_not_flushed() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        rows = "import pyarrow; producer.send_arrow(pyarrow.table({'value': [b'%d' % n for n in range(100)]}), 't')"
        assert run(brokers, rows) == (0, [], "")
        assert brokers.log["t", 0] == VALUES


def test_a_forked_process_writes_nothing_at_its_exit() -> None:
    with ModelCluster(1, {"t": 1}) as brokers:
        assert run(brokers, SEND + "if (child := os.fork()): os.waitpid(child, 0)")[0] == 0
        assert brokers.log["t", 0] == VALUES


@pytest.mark.parametrize("more", ["", "threading.Thread(target=producer.flush, daemon=True).start()"])
def test_brokers_that_do_not_answer(more: str) -> None:
    """The exit has a time limit, also while another thread waits in flush."""
    with ModelCluster(1, {"t": 1}, lambda node, keys: Fate(drop_before=True)) as brokers:
        status, told, errors = run(brokers, SEND + more, seconds=0.5)
    assert (status, told) == (0, [])
    assert "the program ends with 100 records not confirmed: call flush or close before" in errors


def test_only_what_is_lost_is_counted() -> None:
    topics = {"t": 2}
    program = """
producer.send("t", b"confirmed", partition=0)
producer.flush()
for number in range(30):
    producer.send("t", bytes(100), partition=1)
"""
    with ModelCluster(2, topics, lambda node, keys: Fate(drop_before=node == 1)) as brokers:
        _, _, errors = run(brokers, program, seconds=0.5)
        assert brokers.log["t", 0] == [b"confirmed"]
    assert "with 30 records not confirmed" in errors


def test_an_error_is_told_with_the_number() -> None:
    with ModelCluster(1, {"t": 1}, lambda node, keys: Fate(errors={("t", 0): 29})) as brokers:
        _, _, errors = run(brokers, SEND.replace("metadata.offset", "error"))
    assert "with 100 records not confirmed" in errors
    assert "produce to t-0: TOPIC_AUTHORIZATION_FAILED" in errors


def test_a_callback_that_does_not_return_does_not_keep_the_program() -> None:
    program = """
called = threading.Event()
def wait(error, metadata):
    called.set()
    threading.Event().wait()
producer.send("t", b"v", on_delivery=wait)
called.wait(60)
"""
    with ModelCluster(1, {"t": 1}) as brokers:
        assert run(brokers, program, seconds=0.5, linger=0) == (0, [], "")
        assert brokers.log["t", 0] == [b"v"]
