"""ApiVersions v0-4 (KIP-35): the APIs and versions that this broker serves, from the protocol tables."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.codec import Message


def handle(broker: Broker, request: Request, message: Message) -> Message:
    keys = [
        {"api_key": api.key, "min_version": api.versions.first, "max_version": api.versions.last}
        for api in BY_KEY.values()
    ]
    return {"error_code": 0, "api_keys": keys}
