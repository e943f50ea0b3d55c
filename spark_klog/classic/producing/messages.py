"""The messages of classic producers, and the functions and hooks around their queue."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class KeyedMessage(NamedTuple):
    """A message for a topic; `part_key`, if given, chooses the partition in place of `key` and is not sent."""

    topic: str
    message: Any
    key: Any = None
    part_key: Any = None


class ProducerData(NamedTuple):
    """Kafka 0.7: several messages for a topic; `key` chooses the partition of all of them, and is not sent."""

    topic: str
    data: Sequence[Any]
    key: Any = None


#: Makes the bytes of a message or key; None is sent as null.
Encoder = Callable[[Any], bytes | None]
#: Chooses a partition from 0 to below the number of partitions; not called without a key.
Partitioner = Callable[[Any, int], int]
#: Gets a batch, and the function that sends messages; may change, split or leave out what it sends.
EventHandler = Callable[[Sequence[KeyedMessage], Callable[[Sequence[KeyedMessage]], None]], None]


def default_encoder(data: Any) -> bytes | None:
    """The default: bytes stay as they are. TypeError for anything else."""
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    raise TypeError(f"a message or key is {type(data).__name__}, not bytes: pass encoder or key_encoder")


def string_encoder(data: Any) -> bytes | None:
    """Text in UTF-8, as kafka.serializer.StringEncoder."""
    return None if data is None else str(data).encode()


def hash_partitioner(key: Any, partitions: int) -> int:
    """The default: hash(key) % partitions, with the hash of Java's strings, byte arrays and integers.

    So text and bytes go where Kafka's DefaultPartitioner and ByteArrayPartitioner sent them.
    """
    if isinstance(key, int):
        found = (key ^ (key >> 32)) & 0xFFFFFFFF if not -(2**31) <= key < 2**31 else key & 0xFFFFFFFF
    elif isinstance(key, (bytes, bytearray)):
        found = 1
        for byte in key:
            found = (31 * found + (byte - 256 if byte > 127 else byte)) & 0xFFFFFFFF
    else:
        found = 0
        units = str(key).encode("utf-16-be", "surrogatepass")
        for at in range(0, len(units), 2):
            found = (31 * found + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    signed = found - 2**32 if found >= 2**31 else found
    return (0 if signed == -(2**31) else abs(signed)) % partitions


def random_partitioner(key: Any, partitions: int) -> int:
    """Any partition, whatever the key."""
    return random.randrange(partitions)


class CallbackHandler:
    """Hooks around the queue of an asynchronous producer (0.7: kafka.producer.async.CallbackHandler).

    `before_enqueue` and `after_enqueue` are called in the thread that sends, the others in the producer's.
    """

    def before_enqueue(self, message: KeyedMessage) -> KeyedMessage:
        """Return the message to add to the queue."""
        return message

    def after_enqueue(self, message: KeyedMessage, added: bool) -> None:
        """Called with whether the message was added, or dropped as the queue was full."""

    def after_dequeuing_existing_data(self, messages: Sequence[KeyedMessage]) -> Sequence[KeyedMessage]:
        """Return the messages to add to the batch, for those that were taken from the queue."""
        return messages

    def before_sending_data(self, messages: Sequence[KeyedMessage]) -> Sequence[KeyedMessage]:
        """Return the messages to send for a batch."""
        return messages

    def last_batch_before_close(self) -> Sequence[KeyedMessage]:
        """Return messages to send at the very end."""
        return ()

    def close(self) -> None:
        """Called when the producer is closed."""
