"""Faults scripted over HTTP, as a suite in any language does, and what kcat sees of them."""

from __future__ import annotations

import http.client
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_klog.broker.faults.control import serve_control
from spark_klog.broker.faults.script import FaultScript
from spark_klog.errors import ConfigError
from tests.support.clients.tools import kcat_path
from tests.support.servers.broker import KlogBroker, broker_command, refusal
from tests.support.servers.kafka import HOST, free_port

REFUSED = {"kind": "ErrorAnswer", "code": "TOPIC_AUTHORIZATION_FAILED"}


class Control:
    """A client of a broker's fault control, by urllib."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, method: str, path: str = "/faults", body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        if data is not None:
            named.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(f"http://{self.address}{path}", data, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def fired(self) -> list[int]:
        return [one["fired"] for one in self.ask("GET")[1]["faults"]]


@pytest.fixture(scope="module")
def broker(module_server_dir: Path) -> Iterator[tuple[KlogBroker, Control]]:
    port = free_port()
    with KlogBroker(module_server_dir, "--control", str(port)) as running:
        yield running, Control(f"{HOST}:{port}")


@pytest.fixture
def control(broker: tuple[KlogBroker, Control]) -> Iterator[Control]:
    yield broker[1]
    broker[1].ask("DELETE")


def produce(broker: KlogBroker, topic: str) -> subprocess.CompletedProcess[bytes]:
    settings = ("-X", "message.timeout.ms=20000", "-X", "retry.backoff.ms=50")
    command = [kcat_path(), "-P", "-b", broker.bootstrap_servers, "-t", topic, "-p", "0", *settings]
    return subprocess.run(command, input=b"value\n", capture_output=True, timeout=120)


def test_faults_that_kcat_sees(broker: tuple[KlogBroker, Control], control: Control, topic: str) -> None:
    assert produce(broker[0], topic).returncode == 0
    status, answer = control.ask("POST", body={"faults": [{"do": REFUSED, "api": "Produce", "topic": topic}]})
    assert status == 201
    (number,) = answer["ids"]
    refused = produce(broker[0], topic)
    assert refused.returncode != 0
    assert b"authorization failed" in refused.stderr.lower()
    (listed,) = control.ask("GET")[1]["faults"]
    assert (listed["id"], listed["fault"]["do"]["code"]) == (number, "TOPIC_AUTHORIZATION_FAILED")
    assert listed["fired"] >= 1
    assert control.ask("DELETE", f"/faults/{number}") == (200, {"removed": 1})
    assert produce(broker[0], topic).returncode == 0
    # a passing error: librdkafka retries
    passing = {"do": {"kind": "ErrorAnswer", "code": "NOT_LEADER_OR_FOLLOWER"}, "api": "Produce", "count": 2}
    control.ask("POST", body={"faults": [passing]})
    assert produce(broker[0], topic).returncode == 0
    assert control.fired() == [2]


def test_a_script_is_kept_in_order(control: Control) -> None:
    faults = [{"do": {"kind": "Delay", "ms": number}, "api": "ListGroups"} for number in range(3)]
    ids = control.ask("POST", body={"faults": faults})[1]["ids"]
    assert ids == sorted(set(ids))
    assert control.ask("DELETE", f"/faults/{ids[1]}")[0] == 200
    assert [one["id"] for one in control.ask("GET")[1]["faults"]] == [ids[0], ids[2]]
    assert control.ask("DELETE", f"/faults/{ids[1]}") == (404, {"error": f"there is no fault {ids[1]}"})
    assert control.ask("DELETE") == (200, {"removed": 2})
    assert control.ask("GET") == (200, {"faults": []})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no json", "Expecting value"),
        (b"[]", "the body must be"),
        ({"faults": {}}, "the body must be"),
        ({"faults": [3]}, "each fault must be an object"),
        ({"faults": [{"do": {"kind": "Explode"}}]}, "is not a fault"),
        ({"faults": [{"do": {"kind": "Dely", "ms": 1}}]}, "kind='Dely': did you mean Delay?"),
        ({"faults": [{"do": REFUSED, "api": "Prodce"}]}, "Produce"),
        ({"faults": [{"do": {"kind": "Delay", "ms": -1}}]}, "ms=-1"),
        ({"faults": [{"do": {"kind": "Drop"}}] * 10_001}, "at most 10,000"),
    ],
)
def test_wrong_faults_are_refused(control: Control, body: Any, reason: str) -> None:
    status, answer = control.ask("POST", body=body)
    assert status == 400
    assert reason in answer["error"]
    assert control.ask("GET") == (200, {"faults": []})


def test_pages_of_other_sites_are_refused(control: Control) -> None:
    port = control.address.rpartition(":")[2]
    for host, status in (("evil.example", 403), (f"evil.example:{port}", 403), (f"localhost:{port}", 200)):
        assert control.ask("GET", Host=host)[0] == status
    assert control.ask("GET", Origin="http://evil.example")[0] == 403
    assert control.ask("POST", body=b'{"faults": []}', Content_Type="text/plain")[0] == 415
    assert control.ask("GET", "/")[0] == 404
    assert control.ask("POST", "/", body={})[0] == 404


def test_bodies_are_bounded(control: Control) -> None:
    connection = http.client.HTTPConnection(control.address, timeout=20)
    headers = {"Content-Type": "application/json", "Content-Length": str(2**40)}
    connection.request("POST", "/faults", headers=headers)
    assert connection.getresponse().status == 413
    assert control.ask("GET")[0] == 200


def test_only_loopback_unless_told(tmp_path: Path) -> None:
    line = refusal([*broker_command(tmp_path / "data", free_port()), "--control", "0.0.0.0:0"])
    assert "--allow-remote-control" in line
    for wrong in ("x:y", "nowhere"):
        with pytest.raises(ConfigError, match=f"--control: '{wrong}' is not HOST:PORT"):
            serve_control(FaultScript(), wrong)
    served = serve_control(FaultScript(), "0.0.0.0:0", is_remote_allowed=True)
    assert Control(f"127.0.0.1:{served.address.rpartition(':')[2]}").ask("GET") == (200, {"faults": []})
    served.close()
