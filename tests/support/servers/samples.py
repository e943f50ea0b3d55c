"""Scrape metrics and parse them with the Prometheus client."""

from __future__ import annotations

import http.client

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Parse samples by name and labels; asserts that they are unique."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def ask(address: str, method: str = "GET", target: str = "/metrics") -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request(method, target)
    response = connection.getresponse()
    return response, response.read()


def scrape(address: str) -> Samples:
    response, body = ask(address)
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(body.decode())
