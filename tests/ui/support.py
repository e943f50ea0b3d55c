"""Run `klog ui`, and send requests to its server."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any

from tests.support.clients.klog import klog_command
from tests.support.servers.kafka import free_port


class Page:
    """The server of `klog ui`."""

    def __init__(self, address: str, token: str, pid: int) -> None:
        self.address, self.token, self.pid = address, token, pid

    @classmethod
    def of(cls, process: subprocess.Popen[str]) -> Page:
        """The page whose address `klog ui` prints."""
        assert process.stdout is not None
        match = re.fullmatch(r"the page is at (http://127\.0\.0\.1:\d+/)\?token=(\S+)\n", process.stdout.readline())
        assert match, process.communicate()
        return cls(match[1], match[2], process.pid)

    @property
    def host(self) -> str:
        """HOST:PORT."""
        return self.address.removeprefix("http://").rstrip("/")

    def get_request(self, path: str) -> bytes:
        """A GET request for a socket."""
        head = f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        return head.encode()

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, **parameters: object
    ) -> tuple[int, Any]:
        """Send a request to the API, a POST if it has a body; return (status, decoded JSON or events)."""
        query = urllib.parse.urlencode(parameters)
        named = {**self.authorization, **(headers or {})}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            named = {"Content-Type": "application/json", **named}
        request = urllib.request.Request(f"{self.address}api/{path}?{query}", data, named)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, events(text) if text.startswith("event: ") else json.loads(text)

    def get(self, path: str, **parameters: object) -> Any:
        """Send a GET request that must succeed; return the decoded JSON."""
        status, answer = self.ask(path, **parameters)
        assert status == 200, answer
        return answer

    def download(self, path: str, **parameters: object) -> tuple[str, Message]:
        """Send a GET request that must succeed; return the text and the headers."""
        address = f"{self.address}api/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=self.authorization), timeout=60
        ) as response:
            return response.read().decode(), response.headers

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """POST a change with the page's token."""
        return self.ask(path, body, {"X-Klog-Token": self.get("session")["token"]})


def events(text: str) -> list[tuple[str, Any]]:
    """Parse server-sent events."""
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
    assert "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found) == text
    return [(name, json.loads(data)) for name, data in found]


@contextmanager
def serving(*arguments: str) -> Iterator[Page]:
    """Run `klog ui` on a free port; it must end cleanly.

    Not on port 0: a client of a broker that had that port before would keep connecting to it.
    """
    command = klog_command("ui", "--listen", str(free_port()), *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Page.of(process)
            process.terminate()
            _, errors = process.communicate(timeout=30)
            assert (process.returncode, errors) == (0, ""), errors
        finally:
            process.kill()
