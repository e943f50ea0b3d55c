"""Third-party clients behind one interface, one file each; `ALL` has the order of docs/reference/clients.md."""

from __future__ import annotations

from tests.support.clients.aio import AioKafka
from tests.support.clients.client import CODECS, Client, Member, Record, Seen, as_magic
from tests.support.clients.confluent import Confluent, ConfluentAs082, ConfluentAs090
from tests.support.clients.franz_go import FranzGo
from tests.support.clients.java import Java0102, Java39, Java41, Java44
from tests.support.clients.kafka_js import KafkaJs
from tests.support.clients.kafka_python import KafkaPython
from tests.support.clients.kcat import Kcat

__all__ = ["ALL", "CODECS", "Client", "Member", "Record", "Seen", "as_magic"]

ALL: tuple[type[Client], ...] = (
    Kcat,
    Confluent,
    ConfluentAs082,
    ConfluentAs090,
    KafkaPython,
    AioKafka,
    Java0102,
    Java39,
    Java41,
    Java44,
    FranzGo,
    KafkaJs,
)
