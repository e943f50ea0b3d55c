"""A service of uvicorn whose handler produces in transactions, through SIGTERM, SIGKILL and a restart in the middle."""

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
from contextlib import suppress
from pathlib import Path

import pytest

from spark_klog.client import Admin, Consumer
from spark_klog.embedded import EmbeddedCluster
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
APP = """
import asyncio
import os
from contextlib import asynccontextmanager

from spark_klog.aio import Producer
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


@asynccontextmanager
async def lifespan(app):
    settings = {"bootstrap.servers": os.environ["SERVERS"], "transactional.id": "service", "linger.ms": "0"}
    async with Producer(settings) as producer:
        await producer.init_transactions()
        app.state.producer, app.state.turn = producer, asyncio.Lock()
        yield


async def order(request):
    number, producer = request.path_params["number"], request.app.state.producer
    async with request.app.state.turn:
        await producer.begin_transaction()
        producer.send_nowait("orders", b"%d" % number)
        producer.send_nowait("bills", b"%d" % number)
        await producer.commit_transaction()
    return JSONResponse(number)


app = Starlette(routes=[Route("/orders/{number:int}", order, methods=["POST"])], lifespan=lifespan)
"""


class _Service:
    """Processes of uvicorn, one after the other, on one port."""

    def __init__(self, folder: Path, servers: str) -> None:
        (folder / "app.py").write_text(APP)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [sys.executable, "-m", "uvicorn", "app:app", "--app-dir", str(folder), "--port", str(self.port)]
        self._environment = os.environ | {"SERVERS": servers, "PYTHONPATH": str(ROOT)}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, env=self._environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def restart(self, number: signal.Signals) -> None:
        self.end(number)
        self.process = self._start()

    def post(self, number: int) -> bool:
        """Whether the service has answered that the order is taken."""
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("POST", f"/orders/{number}")
            answer = connection.getresponse()
            return answer.status == 200 and answer.read() == b"%d" % number
        time.sleep(0.02)
        return False


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


@pytest.mark.test_all("kill")
def test_orders_through_restarts(tmp_path: Path) -> None:
    answered: list[int] = []
    asked = 0
    done, lock = threading.Event(), threading.Lock()
    with EmbeddedCluster() as cluster:
        servers = cluster.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            for topic in ("orders", "bills"):
                admin.create_topic(topic, 1)
        service = _Service(tmp_path, servers)

        def customer() -> None:
            nonlocal asked
            while not done.is_set():
                with lock:
                    asked = number = asked + 1
                if service.post(number):
                    answered.append(number)

        customers = [threading.Thread(target=customer) for _ in range(4)]
        try:
            for thread in customers:
                thread.start()
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
                before = len(answered)
                wait_until(lambda before=before: len(answered) > before + 30, seconds=60)  # type: ignore[misc]
                service.restart(number)
            before = len(answered)
            wait_until(lambda: len(answered) > before + 30, seconds=60)
        finally:
            done.set()
            for thread in customers:
                thread.join(60)
            code = service.end(signal.SIGTERM)
        assert code in (0, -signal.SIGTERM)  # uvicorn ends by the signal that it got
        orders, bills = _committed(servers, "orders"), _committed(servers, "bills")
    assert orders == bills
    assert set(orders.values()) == {1}
    assert set(answered) <= set(orders)
