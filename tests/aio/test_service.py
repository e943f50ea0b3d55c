"""The service of docs/recipes/fastapi.md: each order that it has answered is there once, and is billed once."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from spark_klog.client import Admin, Consumer, Producer
from spark_klog.embedded import EmbeddedCluster
from tests.support.papers.pages import ROOT, snippets
from tests.support.waiting import wait_until

PAGE = "docs/recipes/fastapi.md"


class _Service:
    """Processes of uvicorn, one after the other, on one port; with `reloads` children of one process."""

    def __init__(self, folder: Path, servers: str, *, reloads: bool) -> None:
        self._app = folder / "app.py"
        self._app.write_text(next(each.text for each in snippets(PAGE) if each.language == "python"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [sys.executable, "-m", "uvicorn", "app:app", "--app-dir", str(folder), "--port", str(self.port)]
        self._command += ["--reload", "--reload-dir", str(folder)] if reloads else []
        self._environment = os.environ | {"SERVERS": servers, "PYTHONPATH": str(ROOT)}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, env=self._environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def reload(self) -> None:
        """Have uvicorn find another file."""
        self._app.write_text(f"{self._app.read_text()}\n")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def restart(self, number: signal.Signals) -> None:
        self.end(number)
        self.process = self._start()

    def ask(self, method: str, path: str) -> int:
        """The status of the answer, 0 without one."""
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        time.sleep(0.02)
        return 0


def _committed(servers: str, topic: str) -> Counter[int]:
    settings = {"bootstrap.servers": servers, "isolation.level": "read_committed"}
    found: Counter[int] = Counter()
    with Admin(settings) as admin, Consumer(settings) as consumer:
        end = admin.list_offsets({(topic, 0): "latest"}).check()[topic, 0].offset or 0
        consumer.assign([(topic, 0, -2)])
        until = time.monotonic() + 60
        while consumer.position(topic, 0) < end:
            assert time.monotonic() < until
            found.update(int(record.value or b"") for record in consumer.poll(0.2))
    return found


def _fence(service: _Service, servers: str) -> None:
    """Have the task fail that writes the bills: the service says so, and a restart makes up for it."""
    with Producer({"bootstrap.servers": servers, "transactional.id": "bills-0"}) as producer:
        producer.init_transactions()
    wait_until(lambda: service.ask("GET", "/health") == 503)
    service.restart(signal.SIGTERM)


@pytest.mark.test_all("kill")
@pytest.mark.parametrize("reloads", [False, True])
def test_orders_through_restarts(tmp_path: Path, reloads: bool) -> None:
    pytest.importorskip("fastapi")
    answered: list[int] = []
    asked = 0
    done, lock = threading.Event(), threading.Lock()
    with EmbeddedCluster() as cluster:
        servers = cluster.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            for topic in ("orders", "bills"):
                admin.create_topic(topic, 1)
        service = _Service(tmp_path, servers, reloads=reloads)
        interruptions: list[Callable[[], None]] = [
            lambda: service.restart(signal.SIGTERM),
            lambda: service.restart(signal.SIGKILL),
            lambda: _fence(service, servers),
        ]

        def customer() -> None:
            nonlocal asked
            while not done.is_set():
                with lock:
                    asked = number = asked + 1
                if service.ask("POST", f"/orders/{number}") == 200:
                    answered.append(number)

        def wait_for_orders() -> None:
            before = len(answered)
            wait_until(lambda: len(answered) > before + 30)

        customers = [threading.Thread(target=customer) for _ in range(4)]
        try:
            for thread in customers:
                thread.start()
            for interrupt in [service.reload] * 2 if reloads else interruptions:
                wait_for_orders()
                interrupt()
            wait_for_orders()
            done.set()
            for thread in customers:
                thread.join(60)
            orders = _committed(servers, "orders")
            wait_until(lambda: _committed(servers, "bills").total() >= orders.total())
        finally:
            done.set()
            code = service.end(signal.SIGTERM)
        assert code in (0, -signal.SIGTERM)  # uvicorn ends by the signal that it got
        assert _committed(servers, "bills") == _committed(servers, "orders") == orders
    assert set(orders.values()) == {1}
    assert set(answered) <= set(orders)
