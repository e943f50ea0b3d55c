"""The clients that the documents of Kafka 0.7 to 0.10 describe: SimpleConsumer, ConsumerConnector, Producer.

They are thin: connections, fetches and formats are those of `spark_klog.client`. Public names are imported at first
use, so that importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_klog.classic.connector import ConsumerConnector
    from spark_klog.classic.membership import Blacklist, ConsumerRebalanceListener, TopicFilter, Whitelist
    from spark_klog.classic.producer import CallbackHandler, KeyedMessage, Producer, ProducerData
    from spark_klog.classic.simple import EARLIEST_TIME, LATEST_TIME, FetchRequest, SimpleConsumer
    from spark_klog.classic.streams import KafkaStream

__all__ = [
    "EARLIEST_TIME",
    "LATEST_TIME",
    "Blacklist",
    "CallbackHandler",
    "ConsumerConnector",
    "ConsumerRebalanceListener",
    "FetchRequest",
    "KafkaStream",
    "KeyedMessage",
    "Producer",
    "ProducerData",
    "SimpleConsumer",
    "TopicFilter",
    "Whitelist",
]

_PUBLIC = {
    "EARLIEST_TIME": "spark_klog.classic.simple",
    "LATEST_TIME": "spark_klog.classic.simple",
    "Blacklist": "spark_klog.classic.membership",
    "CallbackHandler": "spark_klog.classic.producer",
    "ConsumerConnector": "spark_klog.classic.connector",
    "ConsumerRebalanceListener": "spark_klog.classic.membership",
    "FetchRequest": "spark_klog.classic.simple",
    "KafkaStream": "spark_klog.classic.streams",
    "KeyedMessage": "spark_klog.classic.producer",
    "Producer": "spark_klog.classic.producer",
    "ProducerData": "spark_klog.classic.producer",
    "SimpleConsumer": "spark_klog.classic.simple",
    "TopicFilter": "spark_klog.classic.membership",
    "Whitelist": "spark_klog.classic.membership",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
