"""Chromium on the page of `klog ui`."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.support.packages.registries import program
from tests.ui.support import Page


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Start Debian's Chromium without a window, with its driver."""
    options = webdriver.ChromeOptions()
    options.binary_location = program(("chromium",), "chromium")
    driver = program(("chromedriver",), "chromium-driver")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--js-flags=--expose-gc")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service(driver))
    browser.set_page_load_timeout(60)
    browser.set_script_timeout(60)
    try:
        yield browser
    finally:
        browser.quit()


class Browser:
    """Chromium on the page of `klog ui`."""

    def __init__(self, driver: webdriver.Chrome, page: Page) -> None:
        self.driver, self.page = driver, page
        driver.get(f"{page.address}?token={page.token}")

    def open(self, *parts: str) -> None:
        """Show a view, and wait until it is loaded."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.page.address}#/" + "/".join(urllib.parse.quote(part, safe="") for part in parts))
        self.wait(lambda: self.js("return document.getElementById('main').dataset.view") in (parts[0], "error"))
        assert self.js("return document.getElementById('main').dataset.view") == parts[0], self.text()

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str = "body") -> str:
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def type(self, selector: str, *keys: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).send_keys(*keys)

    def rows(self) -> int:
        """The number of messages shown."""
        return int(self.js("return document.querySelectorAll('#messages tbody tr').length"))

    def older(self) -> bool:
        """Show older messages; return False if there are none."""
        if self.js("return document.getElementById('older').hidden"):
            return False
        before = self.rows()
        self.click("#older")
        self.wait(lambda: self.rows() > before)
        return True

    def wait(self, look: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)
        return found

    def cdp(self, command: str, **parameters: object) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)

    def problems(self) -> list[str]:
        """Errors and warnings in the console: script errors, violations of the content security policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
