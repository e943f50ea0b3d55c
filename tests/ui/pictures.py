"""Renew the pictures of `klog ui` in the documentation: `python -m tests.ui.pictures`. Port 9092 must be free."""

from __future__ import annotations

import json
import math
import threading
import time
from base64 import b64decode
from pathlib import Path

from spark_klog.client import Admin, Producer
from spark_klog.embedded import EmbeddedCluster
from tests.ui.browser import Browser, chromium
from tests.ui.support import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
_PARTITIONS = {"clicks": 3, "orders": 6, "payments": 1}
_PAGES = ("/", "/search", "/cart", "/products/17", "/products/204")
_USERS = ("ada", "grace", "edsger", "barbara")
#: How long the overview watches the rate before its picture is made.
_WATCHED_SECONDS = 45
_MOST_BYTES = 150_000


def _shop(servers: str, is_over: threading.Event) -> None:
    """Write clicks, by a rate that rises and falls, and an order now and then, until the event is set."""
    with Producer({"bootstrap.servers": servers, "linger.ms": "50"}) as producer:
        number = 0
        while not is_over.wait(0.1):
            for _ in range(int(60 + 40 * math.sin(time.monotonic() / 4))):
                number += 1
                user = _USERS[number % len(_USERS)]
                click = {
                    "user": user,
                    "page": _PAGES[number % len(_PAGES)],
                    "price": 1.5,
                    "tags": ["web", {"new": True}],
                }
                trace = [("trace", f"{number:016x}".encode())]
                producer.send("clicks", json.dumps(click).encode(), key=user.encode(), headers=trace)
                if number % 10 == 0:
                    order = {"id": number, "user": user, "books": number % 3 + 1}
                    producer.send("orders", json.dumps(order).encode(), key=user.encode())


def _resize(browser: Browser, height: int) -> None:
    browser.cdp("Emulation.setDeviceMetricsOverride", width=1200, height=height, deviceScaleFactor=1, mobile=False)


def _picture(browser: Browser, name: str) -> None:
    data = b64decode(browser.cdp("Page.captureScreenshot", format="png")["data"])
    assert len(data) < _MOST_BYTES, len(data)
    (IMAGES / f"{name}.png").write_bytes(data)


def main() -> None:
    with EmbeddedCluster(listen="127.0.0.1:9092") as cluster, chromium() as driver:
        servers = cluster.bootstrap_servers
        with Admin({"bootstrap.servers": servers}) as admin:
            for name, partitions in _PARTITIONS.items():
                admin.create_topic(name, partitions)
        is_over = threading.Event()
        shop = threading.Thread(target=_shop, args=(servers, is_over))
        shop.start()
        try:
            with serving("-b", servers) as page:
                browser = Browser(driver, page)
                browser.cdp("Emulation.setScrollbarsHidden", hidden=True)
                _resize(browser, 600)
                browser.open("overview")
                time.sleep(_WATCHED_SECONDS)
                _picture(browser, "ui-overview")
                is_over.set()
                shop.join()
                _resize(browser, 900)
                browser.open("messages", "clicks")
                browser.js("document.querySelectorAll('#messages details')[1].open = true")
                browser.wait(lambda: "klog consume" in browser.text("#messages"))
                _picture(browser, "ui-messages")
        finally:
            is_over.set()
            shop.join()


if __name__ == "__main__":
    main()
