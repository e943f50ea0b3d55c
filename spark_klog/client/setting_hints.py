"""Settings that are unknown here: names of other libraries and programs, or misspelt ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

#: librdkafka's names for Kafka's settings, used by kcat and confluent-kafka.
LIBRDKAFKAS = {
    "compression.codec": "compression.type",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.max.bytes": "max.request.size",
    "message.send.max.retries": "retries",
    "message.timeout.ms": "delivery.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.timeout.ms": "request.timeout.ms",
    "topic.metadata.refresh.interval.ms": "metadata.max.age.ms",
}
#: librdkafka's settings that count something else than bytes, and Kafka's that do what they are for.
LIBRDKAFKAS_COUNTS = {
    "batch.num.messages": "batch.size",
    "queue.buffering.max.kbytes": "buffer.memory",
    "queue.buffering.max.messages": "buffer.memory",
    "queued.max.messages.kbytes": "fetch.max.bytes",
    "queued.min.messages": "fetch.max.bytes",
}
#: kafka-python's settings whose names are not Kafka's with underscores.
KAFKA_PYTHONS = {
    "sasl_oauth_token_provider": "sasl.oauthbearer.provider",
    "sasl_plain_password": "sasl.password",
    "sasl_plain_username": "sasl.username",
    "ssl_cafile": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_check_hostname": "ssl.endpoint.identification.algorithm",
    "ssl_ciphers": "ssl.cipher.suites",
    "ssl_crlfile": "ssl.crl.location",
    "ssl_keyfile": "ssl.key.location",
    "ssl_password": "ssl.key.password",
}
SERIALIZERS = frozenset({"key.serializer", "value.serializer", "key.deserializer", "value.deserializer"})
BYTES = "keys and values are bytes: encode and decode them in your program"
#: What comes before clients' settings in Spark, Kafka Connect and Streams, Flink SQL and Spring.
_PREFIXES = re.compile(r"(?:spring\.)?(?:kafka\.)?(?:properties\.)?(?:(?:consumer|producer|admin)\.)?(?:override\.)?")
#: How close (a ratio of `difflib`) an unknown name is to the setting that it probably means. A short name may differ in
#: one letter, if it has at least so many.
_CLOSE, _SHORTEST = 0.85, 4


def hint(name: str, prefix: str, known: Collection[str]) -> str:
    """Advice for an unknown setting, among the known ones."""
    if name in LIBRDKAFKAS:
        return f"it is librdkafka's, Kafka's name for it is {prefix}{LIBRDKAFKAS[name]}"
    if name in LIBRDKAFKAS_COUNTS:
        return f"it is librdkafka's: set {prefix}{LIBRDKAFKAS_COUNTS[name]}, in bytes"
    if name == "compression.level":
        codecs = ", ".join(f"{prefix}compression.{codec}.level" for codec in ("gzip", "lz4", "zstd"))
        return f"it is librdkafka's: set that of the codec, {codecs}"
    if name.replace("_", ".") in SERIALIZERS:
        return f"remove it, {BYTES}"
    if name in KAFKA_PYTHONS:
        return f"it is kafka-python's, write {prefix}{KAFKA_PYTHONS[name]}"
    name = name.lower()
    for other in (name, _PREFIXES.sub("", name, count=1), name.replace("_", ".")):
        if other in known:
            return f"write {prefix}{other}"
    beginning = [other for other in known if other.startswith(name)]
    cutoff = min(_CLOSE, 1 - 1 / max(len(name), _SHORTEST))
    close = difflib.get_close_matches(name, known, 1, cutoff) or (beginning if len(beginning) == 1 else [])
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "remove it: Kafka's Java clients have no such setting"
