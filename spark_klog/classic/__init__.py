"""The clients that the documents of Kafka 0.7 to 0.10 describe: SimpleConsumer, ConsumerConnector, Producer.

They are thin: connections, fetches and formats are those of `spark_klog.client`. Public names are imported at first
use, so that importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_klog.base.names import imported_at_first_use

if TYPE_CHECKING:
    from spark_klog.classic.connector import ConsumerConnector
    from spark_klog.classic.member import Blacklist, ConsumerRebalanceListener, TopicFilter, Whitelist
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

__getattr__ = imported_at_first_use(
    __name__,
    {
        "connector": "ConsumerConnector",
        "member": "Blacklist ConsumerRebalanceListener TopicFilter Whitelist",
        "producer": "CallbackHandler KeyedMessage Producer ProducerData",
        "simple": "EARLIEST_TIME LATEST_TIME FetchRequest SimpleConsumer",
        "streams": "KafkaStream",
    },
)
