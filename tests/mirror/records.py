"""Records of all shapes, to mirror."""

from __future__ import annotations

import uuid

from confluent_kafka import Producer

_TIME = 1_700_000_000_000
PARTITIONS = 2


def produce_all_shapes(servers: str, topic: str, *, is_old: bool = False) -> None:
    """Write records of all shapes: nulls, headers, old timestamps, codecs, committed and aborted transactions."""
    for codec in ("none", "lz4", "gzip", "snappy") if is_old else ("none", "lz4", "zstd", "gzip", "snappy"):
        producer = Producer({"bootstrap.servers": servers, "compression.type": codec, "linger.ms": 50, "log_level": 0})
        for number in range(400):
            headers = [("h", b"%d" % number), ("null", None)] if number % 3 == 0 and not is_old else []
            value = None if number % 7 == 0 else f"{codec} {number} ".encode() * 10
            key = None if number % 5 == 0 else b"k%d" % number
            producer.produce(topic, value, key, number % PARTITIONS, timestamp=_TIME + number, headers=headers)
        assert producer.flush(30) == 0
    if is_old:
        return
    producer = Producer({"bootstrap.servers": servers, "transactional.id": uuid.uuid4().hex, "log_level": 0})
    producer.init_transactions(30)
    for number in range(6):
        producer.begin_transaction()
        for record in range(20):
            producer.produce(topic, b"transaction %d %d" % (number, record), None, record % PARTITIONS, timestamp=_TIME)
        producer.flush(30)
        if number % 2:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
