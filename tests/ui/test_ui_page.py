"""The page in Chromium: all views, hostile records, search, live mode, keyboard, narrow and dark, accessibility."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from spark_klog.client import Admin, Producer as KlogProducer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.load.journal.history import claim_output, new_identity
from spark_klog.load.journal.store import open_store
from tests.support.clients.klog import klog_command
from tests.support.clients.topics import make_topic
from tests.ui.browser import Browser
from tests.ui.support import Page, serving

CLICKS = "clicks"
#: Texts that the page must show unchanged, and never treat as markup, script or an address.
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "</pre></td></script><img src=x onerror='window.pwned = 1'>",
    '"><svg onload=window.pwned=1>',
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned = 1')()}}",
    "${window.pwned = 1}",
    "' onclick='window.pwned = 1",
    "&lt;b&gt; &#60;b&#62;",
    "a\u202eb\u0000c\x1b[31m",
    "http://evil.example/?x=<b>",
]
HOSTILE_JSON = [
    {"__proto__": {"pwned": 1}, "constructor": {"prototype": {"pwned": 1}}},
    {"<img src=x onerror=window.pwned=1>": "<img src=x onerror=window.pwned=1>"},
]
VIEWS = [
    "overview",
    f"topic/{CLICKS}",
    f"messages/{CLICKS}",
    f"record/{CLICKS}/0/1",
    "groups",
    "group/readers",
    "queries",
    "loads",
    "schemas",
]
#: Whether all rows show their details, which the page creates when a row is opened.
IS_EACH_OPEN = "return [...document.querySelectorAll('td > details')].every((one) => one.childElementCount > 1)"


def fill(servers: str) -> None:
    make_topic(servers, CLICKS, 3)
    make_topic(servers, "__proto__", 1)
    make_topic(servers, "orders", 6)
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for number in range(120):
        value = {"user": number % 7, "page": f"/products/{number}", "tags": ["a", {"deep": None}], "price": 1.5}
        producer.produce(CLICKS, json.dumps(value), f"user-{number % 7}", headers=[("trace", b"%032x" % number)])
    producer.produce(CLICKS, bytes(range(256)), b"\xff\xfe")
    assert producer.flush(30) == 0
    for group in ("readers", HOSTILE[1]):
        consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 0})
        consumer.commit(offsets=[TopicPartition(CLICKS, 0, 5)], asynchronous=False)
        consumer.close()


@pytest.fixture(scope="module")
def page(cluster: EmbeddedCluster, module_server_dir: Path) -> Iterator[Page]:
    fill(cluster.bootstrap_servers)
    checkpoint = module_server_dir / "checkpoint"
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"0d6c7b1e-clicks"}')
    (checkpoint / "offsets" / "3").write_text("v1\n{}\n" + json.dumps({CLICKS: {"0": 8, "1": 4}}))
    (checkpoint / "commits" / "3").write_text("v1\n{}")
    load = module_server_dir / "load"
    load.mkdir()
    claim_output(open_store(str(load)), new_identity(None, {"format": "parquet", "schema": "", "infers": False}, {}))
    places = ("--checkpoint", str(checkpoint), "--load", str(load), "--load", str(module_server_dir / "<b>none"))
    with serving("-b", cluster.bootstrap_servers, "--allow-changes", *places) as running:
        yield running


@pytest.fixture
def browser(chromium: webdriver.Chrome, page: Page) -> Iterator[Browser]:
    chromium.get_log("browser")
    made = Browser(chromium, page)
    made.cdp("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
    made.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    yield made
    assert made.problems() == []
    chromium.get("about:blank")


def test_every_view(browser: Browser) -> None:
    browser.open("overview")
    assert "127.0.0.1" in browser.text("header")
    assert CLICKS in browser.text("#main")
    assert "__proto__" in browser.text("#main")
    browser.open("topic", CLICKS)
    assert "121 records" in browser.text("#main")
    assert "retention.ms" in browser.text("#main")
    browser.open("messages", CLICKS)
    assert 20 <= browser.rows() <= 50
    while browser.older():
        pass
    assert browser.rows() == 121
    browser.open("groups")
    assert {"readers", HOSTILE[1]} <= set(browser.text("#main").replace("\t", "\n").splitlines())
    browser.open("group", "readers")
    assert "records behind" in browser.text("#lag")
    assert "kafka" in browser.text("#main")
    browser.open("group", HOSTILE[1])
    assert browser.text("h1") == HOSTILE[1]
    browser.open("group", "nobody")
    assert browser.text("#lag").startswith("The coordinator has no such group")
    browser.open("queries")
    assert "0d6c7b1e-clicks" in browser.text("#main")
    browser.open("loads")
    assert "Nothing is missing." in browser.text("#main")
    assert "has no load" in browser.text("#main")


def _sort_by(browser: Browser, caption: str, title: str) -> list[list[str]]:
    """Click a column's title; the cells of the rows then."""
    table = (
        f"[...document.querySelectorAll('table')].find((one) => one.caption.innerText.includes({json.dumps(caption)}))"
    )
    buttons = f"[...{table}.querySelectorAll('button.sort')]"
    browser.js(f"{buttons}.find((one) => one.innerText.startsWith({json.dumps(title)})).click()")
    rows: list[list[str]] = browser.js(
        f"return [...{table}.tBodies[0].rows].map((row) => [...row.cells].map((one) => one.innerText))"
    )
    return rows


def _figure(text: str) -> int:
    """-1 for what is not known, which is last."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdecimal() else -1


def test_tables_are_sorted(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    """By size, records and lag; the order stays when a live view is drawn again."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 3)
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for number in range(1000):
        producer.produce(topic, b"x" * 500, partition=number * number % 3)
    assert producer.flush(30) == 0
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "log_level": 0})
    places = [TopicPartition(topic, 0, 1), TopicPartition(topic, 1, 2), TopicPartition(CLICKS, 0, 1)]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()
    browser.open("overview")
    rows = _sort_by(browser, "topics", "Records")
    assert rows[0][0] == topic
    counts = [_figure(row[2]) for row in rows]
    assert counts == sorted(counts, reverse=True)
    assert browser.js("return document.querySelector('[aria-sort=descending]').innerText").startswith("Records")
    _sort_by(browser, "topics", "Size")
    drawn = browser.js("return window.before = document.querySelector('[aria-sort=descending]')")
    assert drawn
    browser.wait(lambda: browser.js("return !document.contains(window.before)"))  # it was drawn again
    assert browser.js("return document.querySelector('[aria-sort=descending]').innerText").startswith("Size")
    browser.open("groups")
    assert _sort_by(browser, "groups", "Lag")[0][0] == topic
    browser.open("group", topic)
    by_topic = _sort_by(browser, "Lag by topic", "Lag")
    offsets = _sort_by(browser, "Offsets", "Lag")
    lags = [_figure(row[4]) for row in offsets]
    assert lags == sorted(lags, reverse=True)
    of_topic, of_clicks = (
        sum(max(0, lag) for row, lag in zip(offsets, lags, strict=True) if row[0] == name) for name in (topic, CLICKS)
    )
    assert [(row[0], _figure(row[2])) for row in by_topic] == [(topic, of_topic), (CLICKS, of_clicks)]
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.delete_consumer_groups([topic])[topic].result(30)  # other tests count groups


def test_a_message_takes_a_line(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    """Whatever is in it; one that is cut says so, times and keys are not broken."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    values = [b"short", b"word " * 300, b"x" * 100_000, b"\n".join([b"line"] * 20), b"\xff" * 17, b"\xff" * 16]
    for value in values:
        producer.produce(topic, value, b"key " * 20)
    assert producer.flush(30) == 0
    browser.open("messages", topic)
    rows = browser.js(
        "return [...document.querySelectorAll('#messages tbody tr')]"
        ".map((row) => [row.cells[4].innerText, row.getBoundingClientRect().height])"
    )
    assert len({height for _, height in rows}) == 1
    assert rows[0][1] < 40
    assert [text.endswith("…") for text, _ in rows[::-1]] == [False, True, True, False, True, False]
    assert browser.js("return document.querySelector('#messages .preview').title") == "80 bytes"


def test_a_view_that_fails_says_why(browser: Browser) -> None:
    browser.driver.get("about:blank")
    browser.driver.get(f"{browser.page.address}#/topic/missing")
    browser.wait(lambda: "UNKNOWN_TOPIC_OR_PARTITION" in browser.text("#main"))
    assert [one for one in browser.problems() if "502" not in one] == []  # the console logs the failed request
    for odd in ("%", "constructor/x", "overview/%E0%A4%A"):
        browser.driver.get(f"{browser.page.address}#/{odd}")
        browser.wait(lambda: browser.text("h1") == "Overview")


def test_json_as_a_tree_and_bytes_as_hex(browser: Browser) -> None:
    browser.open("messages", CLICKS)
    opened = browser.js(
        "const all = [...document.querySelectorAll('#messages details')];"
        "const one = all.find((row) => row.innerText.includes('/products/'));"
        "one.open = true; one.scrollIntoView(); return true"
    )
    assert opened
    browser.wait(lambda: "user: " in browser.text("#messages .tree"))
    assert browser.js("return document.querySelectorAll('#messages .tree details').length") >= 2
    copied = browser.text("#messages pre[aria-label='klog consume']")
    assert copied.startswith("klog consume -b '127.0.0.1:")
    assert f"'{CLICKS}' -p " in copied
    assert '"klog"' in browser.text("#messages pre[aria-label=Spark]")
    open_all = "document.querySelectorAll('#messages details').forEach((one) => one.open = true)"
    while True:
        browser.js(open_all)
        browser.wait(lambda: browser.js(IS_EACH_OPEN))
        if "f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff" in browser.text("#messages"):
            break
        assert browser.older()


def test_records_can_inject_nothing(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for text in HOSTILE:
        producer.produce(topic, text, text, headers=[(text.replace("\0", ""), text.encode())])
    for value in HOSTILE_JSON:
        producer.produce(topic, json.dumps(value), json.dumps(value))
    producer.produce(topic, "[" * 30_000)
    assert producer.flush(30) == 0
    browser.open("messages", topic)
    open_all = "document.querySelectorAll('#messages details').forEach((one) => one.open = true)"
    browser.js(open_all)
    browser.wait(lambda: browser.js("return document.querySelectorAll('#messages .tree').length") >= 4)
    browser.js(open_all)
    browser.wait(lambda: "constructor: " in browser.text("#messages"))
    shown = browser.js("return document.getElementById('messages').textContent")
    for text in HOSTILE:
        escaped = text.replace("\u202e", "\\u202e").replace("\0", "\\u0000").replace("\x1b", "\\u001b")
        assert shown.count(escaped) >= 3, text
    for view in VIEWS[:2]:
        browser.open(*view.split("/"))
    browser.open("group", HOSTILE[1])
    browser.open("groups")
    for check in (
        "return window.pwned ?? null",
        "return ({}).pwned ?? null",
        "return document.querySelector('img, iframe, object, embed, main script, [onclick], [onerror], [onload]')",
        "return [...document.querySelectorAll('a')].find((one) => !one.href.startsWith(location.origin)) ?? null",
        "return document.scripts.length === 1 ? null : document.scripts.length",
    ):
        assert browser.js(check) is None, check


def test_the_policy_stops_inline_code(browser: Browser) -> None:
    browser.open("overview")
    browser.js(
        "const one = document.createElement('script'); one.textContent = 'window.pwned = 1'; document.body.append(one);"
        "const image = document.createElement('div');"
        'image.innerHTML = \'<img src="data:,x" onerror="window.pwned = 1">\';'
        "document.body.append(image)"
    )
    browser.wait(lambda: any("Content Security Policy" in one for one in browser.problems()))
    assert browser.js("return window.pwned ?? null") is None


@pytest.mark.test_all("long")
def test_search_of_a_million_records(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 4)
    count = 1_000_000
    numbers = pa.array(range(count)).cast(pa.string())
    values = pa.compute.binary_join_element_wise("record ", numbers, " with some words", "")
    with KlogProducer({"bootstrap.servers": cluster.bootstrap_servers, "compression.type": "lz4"}) as producer:
        producer.send_arrow(pa.record_batch({"value": values.cast(pa.binary())}), topic)
    browser.open("messages", topic)
    browser.type("#search", "record 765432 with", Keys.ENTER)
    browser.wait(lambda: " found in " in browser.text("#result"))
    assert browser.text("#result").startswith("1 found in 1,000,000 records")
    assert "record 765432 with some words" in browser.text("#messages")
    browser.js("document.getElementById('search').value = ''")
    browser.type("#search", "record", Keys.ENTER)
    browser.wait(lambda: "limit of messages" in browser.text("#result"))
    assert browser.rows() == 100


@pytest.mark.test_all("long")
def test_live_messages_take_no_memory(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 2)
    stop = threading.Event()

    def write() -> None:
        with KlogProducer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
            number = 0
            while not stop.is_set():  # about 5,000 a second
                for _ in range(250):
                    producer.send(topic, b"live %d %s" % (number, b"x" * 500))
                    number += 1
                stop.wait(0.05)

    def heap() -> float:
        browser.js("window.gc()")
        return float(browser.js("return performance.memory.usedJSHeapSize"))

    def server() -> tuple[int, int, int]:
        """The server's resident memory in KiB, its threads and its open files."""
        folder = Path(f"/proc/{browser.page.pid}")
        resident = re.search(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
        assert resident
        return int(resident[1]), len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))

    def written() -> int:
        words = browser.text("#messages caption").split("; ")[-1].split(" ")[0].replace(",", "")
        return int(words) if words.isdecimal() else 0

    writer = threading.Thread(target=write)
    writer.start()
    try:
        browser.open("messages", topic)
        browser.click("#live")
        browser.wait(lambda: written() > 2000)
        before, nodes = heap(), browser.js("return document.querySelectorAll('*').length")
        first, (resident, threads, files) = written(), server()
        browser.wait(lambda: written() > first + 15_000)
        after = heap()
        assert browser.rows() <= 50
        assert browser.js("return document.querySelectorAll('*').length") <= nodes + 1000
        assert after < before + 8_000_000
        now = server()
        assert now[0] < resident + 50_000
        assert (now[1] <= threads + 10, now[2] <= files + 10) == (True, True), (now, threads, files)
        assert browser.js("return document.getElementById('live').getAttribute('aria-pressed')") == "true"
    finally:
        stop.set()
        writer.join()


@pytest.mark.test_all("long")
def test_the_overview_is_live(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    browser.open("overview")
    make_topic(cluster.bootstrap_servers, topic, 1)
    browser.type("#filter", topic)
    browser.wait(lambda: topic in browser.text("#main table:has(a)"))
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for _ in range(1234):
        producer.produce(topic, b"x")
    assert producer.flush(30) == 0
    browser.wait(lambda: "1,234" in browser.text("#main table:has(a)"))


@pytest.mark.test_all("long")
def test_an_outage_is_said_and_ends(
    chromium: webdriver.Chrome, make_cluster: Callable[..., EmbeddedCluster], topic: str
) -> None:
    cluster = make_cluster()
    make_topic(cluster.bootstrap_servers, topic, 1)
    command = klog_command("ui", "--listen", "0", "-b", cluster.bootstrap_servers)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            browser = Browser(chromium, Page.of(process))
            browser.open("overview")
            assert browser.text("#outage") == ""
            cluster.kill(0)
            browser.wait(lambda: f"The broker at {cluster.bootstrap_servers} has not answered since" in browser.text())
            # a view opened during the outage says so, too, and loads when the broker is back
            browser.js("location.hash = arguments[0]", f"#/topic/{topic}")
            browser.wait(lambda: "do not answer" in browser.text("#main") or "tried for" in browser.text("#main"))
            cluster.restart(0)
            browser.wait(lambda: browser.text("#outage") == "" and browser.text("h1") == topic)
            process.terminate()
            browser.wait(lambda: "klog ui at 127.0.0.1" in browser.text("#outage"))
            assert process.wait(30) == 0
        finally:
            process.kill()
            chromium.get("about:blank")
            chromium.get_log("browser")  # drop the log of requests that failed as expected


def test_changes_by_the_page(browser: Browser, topic: str) -> None:
    browser.open("overview")
    browser.type("#create-topic input[name=name]", topic, Keys.ENTER)
    browser.wait(lambda: browser.text("#status") == f"topic {topic} is created")
    browser.open("topic", topic)
    browser.type("#produce textarea", "by hand")
    browser.click("#produce button")
    browser.wait(lambda: "at offset 0" in browser.text("#status"))
    (message,) = browser.page.get("messages", name=topic)["messages"]
    assert (message["key"], message["value"]["text"]) == (None, "by hand")
    browser.open("group", "readers")
    browser.click("#move-group button:not([type])")
    browser.wait(lambda: "nothing is changed yet" in browser.text("#moves"))
    browser.click("#move-group button[type=button]")
    browser.wait(lambda: "Offsets are set" in browser.text("#moves"))
    offsets = {
        one["partition"]: one["offsets"]["kafka"]["offset"]
        for one in browser.page.get("group", name="readers")["partitions"]
    }
    assert offsets == {0: 0, 1: 0, 2: 0}


@pytest.mark.test_all("long")
def test_every_view_and_record_has_an_address(browser: Browser) -> None:
    browser.open("messages", CLICKS)
    browser.js("const form = document.forms.jump; form.partition.value = '1'; form.offset.value = '3'")
    browser.js("document.forms.jump.order.value = 'oldest'")
    browser.click("#jump button")

    def offsets() -> list[str]:
        return list(
            browser.js("return [...document.querySelectorAll('#messages td:nth-child(3)')].map((one) => one.innerText)")
        )

    def address() -> str:
        return str(browser.js("return location.hash"))

    browser.wait(lambda: offsets()[:3] == ["3", "4", "5"])
    assert address() == f"#/messages/{CLICKS}?partition=1&offset=3&order=oldest"
    shown = offsets()
    browser.driver.refresh()
    browser.wait(lambda: offsets() == shown)
    assert browser.js("return document.forms.jump.order.value") == "oldest"

    browser.click("#messages tbody tr:nth-child(2) a")
    browser.wait(lambda: browser.text("h1") == f"Record 1:4 of {CLICKS}")
    assert address() == f"#/record/{CLICKS}/1/4"
    assert '"klog"' in browser.text("pre[aria-label=Spark]")
    (record,) = browser.page.get("messages", name=CLICKS, partition=1, offset=4, count=1)["messages"]
    assert record["key"]["text"] in browser.text("pre[aria-label=Key]")
    browser.click("#main p.row a:nth-child(2)")
    browser.wait(lambda: browser.text("h1") == f"Record 1:5 of {CLICKS}")
    browser.driver.back()
    browser.driver.back()
    browser.wait(lambda: offsets() == shown)

    browser.type("#search", "/products/42", Keys.ENTER)
    browser.wait(lambda: browser.text("#result").endswith(" s"))
    found, searched = browser.text("#result").split(",")[0], address()
    assert "search=%2Fproducts%2F42" in searched
    browser.open("overview")
    browser.js("location.hash = arguments[0]", searched)
    browser.wait(lambda: browser.text("#result").split(",")[0] == found)
    browser.open("groups")
    browser.type("input[type=search]", "read")
    browser.driver.refresh()
    browser.wait(lambda: "1 of 2 groups" in browser.text("#main"))


def test_a_committed_offset_beyond_the_end(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    """A topic that was made anew: the group's offset has no lag, and the page says why."""
    servers = cluster.bootstrap_servers
    make_topic(servers, topic, 1)
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "log_level": 0})
    consumer.commit(offsets=[TopicPartition(topic, 0, 77)], asynchronous=False)
    consumer.close()
    browser.open("group", topic)
    assert "77 beyond the end" in browser.text("#main")
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_group(topic)  # other tests count the groups


@pytest.mark.test_all("long")
def test_export_by_the_page(browser: Browser, tmp_path: Path) -> None:
    browser.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open("messages", CLICKS)
    browser.click("#export button")
    file = tmp_path / f"{CLICKS}.jsonl"
    browser.wait(file.exists)
    assert len(file.read_text().splitlines()) == 121
    browser.js("document.querySelectorAll('#export select')[1].value = 'csv'")
    browser.click("#export button")
    table = tmp_path / f"{CLICKS}.csv"
    browser.wait(table.exists)
    assert len(table.read_text().splitlines()) == 122


@pytest.mark.test_all("long")
def test_groups_of_a_topic_and_axes(browser: Browser) -> None:
    browser.open("topic", CLICKS)
    browser.wait(lambda: "readers" in browser.text("#readers"))
    row = browser.text("#readers tbody tr:first-child").split("\t")
    assert row[:3] in ([HOSTILE[1], "Empty", "0"], ["readers", "Empty", "0"])
    assert int(row[3]) > 0
    browser.open("topic", "orders")
    browser.wait(lambda: browser.text("#readers") == "No group reads this topic.")
    axis = browser.text("figure.chart .values").splitlines()
    assert (axis[-1], len(axis)) == ("0", 3)
    browser.wait(lambda: re.fullmatch(r"\d\d:\d\d:\d\d\n\d\d:\d\d:\d\d UTC", browser.text("figure.chart .times")))


@pytest.mark.test_all("long")
def test_deletion_by_the_page(browser: Browser, cluster: EmbeddedCluster, topic: str) -> None:
    make_topic(cluster.bootstrap_servers, topic, 1)
    browser.open("topic", topic)
    assert browser.js("return document.querySelector('#delete-topic button').disabled")
    browser.type("#delete-topic input", topic[:-1], Keys.ENTER)
    assert browser.js("return document.querySelector('#delete-topic button').disabled")
    assert topic in {one["name"] for one in browser.page.get("overview")["topics"]}
    browser.type("#delete-topic input", topic[-1])
    browser.click("#delete-topic button")
    browser.wait(lambda: browser.text("#status") == f"topic {topic} is deleted")
    assert topic not in {one["name"] for one in browser.page.get("overview")["topics"]}
    with serving("-b", cluster.bootstrap_servers) as reading:
        only = Browser(browser.driver, reading)
        only.open("topic", CLICKS)
        assert only.js("return document.querySelector('form')") is None
        browser.driver.get("about:blank")


def test_the_keyboard_is_enough(browser: Browser) -> None:
    browser.open("overview")

    def press(*keys: str) -> None:
        """Send keys to the focused element, which a live view may replace meanwhile."""
        ActionChains(browser.driver).send_keys(*keys).perform()

    def view() -> str:
        return str(browser.js("return document.getElementById('main').dataset.view"))

    press("/")
    assert browser.js("return document.activeElement.id") == "filter"
    press(CLICKS, Keys.ESCAPE, "j")
    browser.wait(lambda: browser.js("return document.activeElement.textContent") == CLICKS)
    press(Keys.ENTER)
    browser.wait(lambda: view() == "topic")
    for key, expected in (("g", "groups"), ("q", "queries"), ("l", "loads"), ("o", "overview")):
        press(key)
        browser.wait(lambda: view() == expected)  # noqa: B023
    press("?")
    browser.wait(lambda: "Keys:" in browser.text("#status"))


@pytest.mark.test_all("long")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible_narrow_light_and_dark(browser: Browser, axe: str, scheme: str) -> None:
    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    width = 360 if scheme == "dark" else 1200
    browser.cdp("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    for view in VIEWS:
        browser.open(*view.split("/"))
        if view.startswith("messages"):
            browser.js("document.querySelector('#messages details').open = true")
        assert browser.js("return document.documentElement.scrollWidth") <= width, view
        dark = browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        assert dark == (scheme == "dark")
        browser.js(axe)
        found = browser.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then("
            "    (found) => done(found.violations), (error) => done([String(error)]))"
        )
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == [], view
