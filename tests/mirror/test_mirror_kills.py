"""Kill a mirror at random moments while records arrive: exactly-once copies each once, at-least-once loses none.

SPARK_KLOG_KILLS sets the number of kills (default 1), SPARK_KLOG_SEED the random choices; SPARK_KLOG_KAFKAS=all adds
real Kafka brokers.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
from confluent_kafka import Producer

from tests.support.clients.consumers import running
from tests.support.clients.mirrors import SECONDS, mirror_once, read_topic, start_mirror, wait_for
from tests.support.clients.topics import make_topic
from tests.support.servers.kafka import NEWEST, Version
from tests.support.servers.shared_kafka import SharedKafkas

_KILLS = int(os.environ.get("SPARK_KLOG_KILLS", "1"))
_SEED = int(os.environ.get("SPARK_KLOG_SEED", random.randrange(1 << 30)))
_PARTITIONS = 3
#: The mirror is killed at most this many seconds after the first progress of a run.
_LONGEST = 1.0
Server = Version | Literal["klog"]
_ALL = os.environ.get("SPARK_KLOG_KAFKAS") == "all"
_MORE: list[tuple[Server, Server]] = [("3.9.1", "klog"), ("klog", "3.9.1"), ("0.10.2.2", NEWEST)]
_SIDES: list[tuple[Server, Server]] = [("klog", "klog"), *(_MORE if _ALL else [])]


class _Writer(threading.Thread):
    """Writes numbered records until it is stopped, some of them in transactions that abort."""

    def __init__(self, servers: str, topic: str, *, is_old: bool) -> None:
        super().__init__(daemon=True)
        self._topic, self._is_old = topic, is_old
        self._plain = Producer({"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0, "acks": "all"})
        self._settings = {"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0}
        self._done = threading.Event()
        self.sent = 0

    def run(self) -> None:
        transactional = None
        if not self._is_old:
            transactional = Producer(self._settings)
            transactional.init_transactions(SECONDS)
        while not self._done.wait(0.01):
            for _ in range(30):
                self._plain.produce(self._topic, b"%d" % self.sent, b"key", self.sent % _PARTITIONS)
                self.sent += 1
            self._plain.flush(SECONDS)
            if transactional is not None and self.sent % 300 == 0:
                transactional.begin_transaction()
                transactional.produce(self._topic, b"aborted", b"key", 0)
                transactional.flush(SECONDS)
                transactional.abort_transaction(SECONDS)

    def finish(self) -> None:
        self._done.set()
        self.join(SECONDS)
        assert not self.is_alive()


@pytest.mark.timeout(0)  # SPARK_KLOG_KILLS sets the duration; each step has its own deadline
@pytest.mark.parametrize(("source", "target"), _SIDES)
@pytest.mark.parametrize(
    "is_exact",
    [
        pytest.param(False, id="at least once", marks=pytest.mark.test_all("kill")),
        pytest.param(True, id="exactly once"),
    ],
)
def test_killed_at_any_moment(
    source: Server, target: Server, is_exact: bool, server_dir: Path, shared_kafkas: SharedKafkas
) -> None:
    chance = random.Random(_SEED)
    topic = f"t-{uuid.uuid4().hex[:8]}"
    more = ("--name", topic, "--commit-interval", "0.1", *(["--exactly-once"] if is_exact else []))
    with ExitStack() as stack:
        first = stack.enter_context(running(source, server_dir / "source", shared_kafkas)).servers
        second = stack.enter_context(running(target, server_dir / "target", shared_kafkas)).servers
        make_topic(first, topic, _PARTITIONS)
        more = ("--topics", topic, *more)
        writer = _Writer(first, topic, is_old=source == "0.10.2.2")
        writer.start()
        for _ in range(_KILLS):
            mirror = start_mirror(server_dir / "mirror.log", first, second, *more)
            try:
                wait_for(mirror, 1)
                time.sleep(chance.uniform(0, _LONGEST))  # only varies the moment of the kill
            finally:
                mirror.kill()
                mirror.communicate(timeout=SECONDS)
        writer.finish()
        mirror_once(first, second, *more)
        before = read_topic(first, topic, _PARTITIONS)
        after = read_topic(second, topic, _PARTITIONS)
    assert sum(map(len, before)) == writer.sent, f"seed {_SEED}"
    if is_exact:
        assert after == before, f"seed {_SEED}"
    else:
        for mirrored, written in zip(after, before, strict=True):
            assert list(dict.fromkeys(mirrored)) == written, f"seed {_SEED}"
