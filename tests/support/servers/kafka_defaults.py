"""Settings of Kafka's Java clients with types and defaults, from the HTML that their config classes print.

python -m tests.support.servers.kafka_defaults > tests/data/kafka-3.9.1/client-settings.json
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys

from tests.support.servers.kafka import Version, kafka_libs

CLIENTS = {
    "consumer": "org.apache.kafka.clients.consumer.ConsumerConfig",
    "producer": "org.apache.kafka.clients.producer.ProducerConfig",
    "admin": "org.apache.kafka.clients.admin.AdminClientConfig",
}
_SETTING = re.compile(
    r'<a id="([a-z0-9.]+)"></a>.*?<th>Type:</th><td>([^<]*)</td>.*?<th>Default:</th><td>(.*?)</td>', re.DOTALL
)
#: A number with the page's explanation: "300000 (5 minutes)".
_IN_WORDS = re.compile(r"^(-?\d+) \([^)]*\)$")


def settings(version: Version, client: str) -> dict[str, tuple[str, str]]:
    """Return (type, default) by setting; a setting without default has ""."""
    command = ["java", "-cp", f"{kafka_libs(version)}/*", CLIENTS[client]]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = {}
    for name, kind, default in _SETTING.findall(page):
        text = html.unescape(default).strip()
        found[name] = kind, _IN_WORDS.sub(r"\1", "" if text in ("null", '""') else text)
    return found


if __name__ == "__main__":
    everything = {client: settings("3.9.1", client) for client in CLIENTS}
    sys.stdout.write(json.dumps(everything, indent=1, sort_keys=True) + "\n")
