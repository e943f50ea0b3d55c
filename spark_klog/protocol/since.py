"""The first version of Apache Kafka that has each API, for messages about brokers that lack it.

From the KIPs that introduced them; APIs that Kafka 0.10.1 has are left out.
"""

from __future__ import annotations

from spark_klog.protocol.schema import Api

_SINCE = {
    **dict.fromkeys((21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33), "0.11"),
    **dict.fromkeys((34, 35, 36, 37), "1.0"),
    **dict.fromkeys((38, 39, 40, 41, 42), "1.1"),
    43: "2.2",
    44: "2.3",
    **dict.fromkeys((45, 46, 47), "2.4"),
    **dict.fromkeys((48, 49), "2.6"),
    **dict.fromkeys((50, 51), "2.7"),
    **dict.fromkeys((60, 61), "2.8"),
    **dict.fromkeys((65, 66), "3.0"),
    74: "3.7",
    75: "3.8",
}


def since(api: Api) -> str:
    """The first version of Kafka that has the API, as a clause for a message; "" if all have it."""
    return f", it needs Kafka {_SINCE[api.key]} or later" if api.key in _SINCE else ""
