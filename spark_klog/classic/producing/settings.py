"""Settings of the classic Producer, by the names of Kafka 0.8 to 0.10 and of 0.7."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_klog.classic.settings import setting, sort_settings
from spark_klog.client.config import parse_value
from spark_klog.errors import ConfigError

#: The names of Kafka 0.7 for those of 0.8 to 0.10.
_OTHER_NAMES = {
    "batch.size": "batch.num.messages",
    "broker.list": "metadata.broker.list",
    "compression.type": "compression.codec",
    "queue.enqueueTimeout.ms": "queue.enqueue.timeout.ms",
    "queue.size": "queue.buffering.max.messages",
    "queue.time": "queue.buffering.max.ms",
    "socket.timeout.ms": "request.timeout.ms",
    "topic.metadata.refresh.interval.ms": "metadata.max.age.ms",
    "zk.connect": "zookeeper.connect",
    "zk.sessiontimeout.ms": "zookeeper.session.timeout.ms",
}
_WITHOUT_EFFECT = frozenset(
    [
        "buffer.size",
        "connect.timeout.ms",
        "num.retries",
        "reconnect.interval",
        "reconnect.time.interval.ms",
        "send.buffer.bytes",
        "zk.connectiontimeout.ms",
        "zk.synctime.ms",
        "zookeeper.connection.timeout.ms",
        "zookeeper.sync.time.ms",
    ]
)
_REFUSED = {
    name: f"{name} names a Java class: {instead}"
    for name, instead in {
        "serializer.class": "pass encoder=FUNCTION to the Producer",
        "key.serializer.class": "pass key_encoder=FUNCTION to the Producer",
        "partitioner.class": "pass partitioner=FUNCTION to the Producer",
        "event.handler": "pass event_handler=FUNCTION to the Producer",
        "callback.handler": "pass callback_handler=OBJECT to the Producer",
    }.items()
}
_CODECS = {"0": "none", "1": "gzip", "2": "snappy", "3": "lz4"}
_BROKER_07 = re.compile(r"[0-9]+:([^:]+:[0-9]+)")


@dataclass(frozen=True)
class ProducerConfig:
    """Parsed settings. Times in ms; `client` has the settings that all clients of the package share."""

    client: Mapping[str, Any]
    brokers: str = setting("metadata.broker.list", "", "brokers")
    zookeeper_connect: str = setting("zookeeper.connect", "", "text")
    session_timeout_ms: int = setting("zookeeper.session.timeout.ms", 6_000, "positive int")
    is_async: bool = setting("producer.type", False, "type")
    acks: str = setting("request.required.acks", "-1", "text")
    request_timeout_ms: int = setting("request.timeout.ms", 10_000, "positive int")
    retries: int = setting("message.send.max.retries", 3, "int")
    codec: str = setting("compression.codec", "none", "codec")
    compressed_topics: frozenset[str] = setting("compressed.topics", frozenset(), "topics")
    queue_ms: int = setting("queue.buffering.max.ms", 5_000, "int")
    queue_size: int = setting("queue.buffering.max.messages", 10_000, "positive int")
    batch_size: int = setting("batch.num.messages", 200, "positive int")
    enqueue_timeout_ms: int = setting("queue.enqueue.timeout.ms", -1, "timeout")

    def client_settings(self, servers: str | list[str], codec: str) -> dict[str, Any]:
        """The settings of a client producer at these addresses."""
        delivery = (self.retries + 1) * self.request_timeout_ms
        own = {"request.timeout.ms": self.request_timeout_ms, "delivery.timeout.ms": delivery, "max.block.ms": delivery}
        own_texts = {"acks": self.acks, "compression.type": codec, "bootstrap.servers": servers}
        return {**own, **self.client, **own_texts}


def producer_config(settings: Mapping[str, Any]) -> ProducerConfig:
    """Parse settings by Kafka's names; `ConfigError` for a wrong value, or unless one way to find brokers is set.

    Settings that are not the producer's are client settings, for example of TLS.
    """
    values, shared = sort_settings(settings, ProducerConfig, _parse, _OTHER_NAMES, _WITHOUT_EFFECT, _REFUSED)
    config = ProducerConfig(shared, **values)
    if bool(config.brokers) == bool(config.zookeeper_connect):
        raise ConfigError("set one of metadata.broker.list (0.7: broker.list) and zookeeper.connect (0.7: zk.connect)")
    return config


def _parse(kind: str, name: str, text: str) -> Any:
    text = text.strip()
    if kind == "type":
        if text not in ("sync", "async"):
            raise ConfigError(f"{name}={text}: set sync or async")
        return text == "async"
    if kind == "brokers":  # 0.7 writes ID:HOST:PORT
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return ",".join(found[1] if (found := _BROKER_07.fullmatch(part)) else part for part in parts)
    if kind == "codec":
        codec = _CODECS.get(text, text)
        if codec not in _CODECS.values():
            raise ConfigError(f"{name}={text}: set one of {', '.join(_CODECS.values())}, or its number from 0 to 3")
        return codec
    if kind == "topics":
        return frozenset(part.strip() for part in text.split(",") if part.strip())
    if kind == "timeout":
        return -1 if text == "-1" else parse_value("int", name, text)
    return parse_value(kind, name, text)
