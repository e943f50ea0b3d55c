"""Dead letters of a load in a topic, beside the folder that it has of them.

They have the form of all letters in topics (client/dead_letters.py), with the load's id as reader. A transaction has
some thousand letters of a run, and the progress, an offset of the group `klog-dead-letters-of.LOAD`: what a killed call
has left to do, the next one does, so that each letter is in the topic once. The load's journal notes the progress, too:
brokers forget groups without members, after a week by default.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

from spark_klog.base.clock import system_ms
from spark_klog.base.durable import check_version
from spark_klog.base.names import check_topic_name
from spark_klog.client.cluster import Cluster
from spark_klog.client.dead_letters import CONVERTERS, CORRUPT_BATCH, READING, SIZES, DeadLetter
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import of_bytes, without_ids
from spark_klog.errors import LoadError, ProducerFenced
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import dead_letters, letters_in_topic
from spark_klog.load.journal.model import VERSION, LettersInTopic
from spark_klog.load.journal.store import Store, read_json, to_json
from spark_klog.security.config import Settings

_log = logging.getLogger(__name__)
#: What the address of a topic begins with.
SCHEME = "topic:"
GROUP = "klog-dead-letters-of."
#: Letters of a transaction: progress counts those of a file.
_LETTERS = 2000
#: Bits of the progress that number a file's transactions; those above have the file's place in its run, and the run.
_OF_FILE, _OF_RUN = 22, 42


class LetterTopic:
    """The topic at an address, `topic:NAME`, of the cluster that is loaded, for the dead letters of a load."""

    def __init__(self, address: str, client: Mapping[str, str], load: str) -> None:
        """`ConfigError` for a name that no topic has."""
        self._topic, self._load, self._group = address.removeprefix(SCHEME), load, f"{GROUP}{load}"
        check_topic_name(self._topic)
        self._client = Settings(without_ids(of_bytes(client)) | SIZES)

    def check(self) -> None:
        """`ProtocolError` if there is no such topic: a first letter may come months later."""
        with Cluster.connect(self._client) as cluster:
            cluster.partitions([self._topic])

    def catch_up(self, store: Store) -> None:
        """Write the letters of the load's committed runs that the topic lacks; `store` has the load's journal.

        `LoadError` for a damaged letter, errors as of `Producer`. Another call that writes them goes on alone.
        """
        files = sorted(read_summary(store).letters.items(), key=itemgetter(1))
        if not files:
            return
        key = self._topic, 0
        settings = Settings(self._client | {"transactional.id": self._group})
        with (
            Producer.of_cluster(Cluster.connect(settings), creates_topics=False) as producer,
            Cluster.connect(self._client) as cluster,
        ):
            try:
                producer.init_transactions()
                cluster.partitions([self._topic])
                topic_id = str(cluster.topic_ids.get(self._topic, ""))
                noted = letters_in_topic(store, self._topic, topic_id)
                start = max(noted, GroupOffsets(cluster, self._group, is_stable=True).fetch([key]).get(key, 0))
                done = start
                for name, (run, place) in files:
                    number = (run << _OF_RUN) + (place << _OF_FILE)
                    if number >> _OF_FILE < start >> _OF_FILE:
                        continue  # a later file was begun with
                    letters = self._letters(store, name, is_new=number >= start)
                    while part := list(islice(letters, _LETTERS)):
                        number += 1
                        if number <= start:
                            continue
                        producer.begin_transaction()
                        for letter in part:
                            self._send(producer, letter)
                        producer.send_offsets_to_transaction({key: number}, self._group)
                        producer.commit_transaction()
                        done = number
                if done > noted:
                    store.write(paths.letters_in(self._topic), to_json(LettersInTopic(topic_id, done)))
            except ProducerFenced as error:
                _log.info("another call writes the dead letters of load %s: %s", self._load, error)

    def _letters(self, store: Store, name: str, *, is_new: bool) -> Iterator[dict[str, Any]]:
        """The letters of a file; `is_new` if none of them is in the topic. One that somebody has removed is left
        out."""
        path = paths.dead_letter(name)
        if store.size(path) is None:
            if is_new:
                _log.warning("%s/%s is not there, and so not in topic %s", store.address, path, self._topic)
        elif paths.is_of_values(name):
            yield from (letter for _, letter in dead_letters(store, name))
        else:
            batch = read_json(store, path) or {}
            check_version(batch.get("version"), VERSION, f"{store.address}/{path}", "remove it", LoadError)
            yield batch

    def _send(self, producer: Producer, letter: dict[str, Any]) -> None:
        try:
            is_batch = "timestamp" not in letter
            said = DeadLetter(
                letter["topic"],
                letter["partition"],
                letter["offset"],
                reader=self._load,
                task="0",
                stage=READING if is_batch else CONVERTERS["value"],
                where="spark_klog.load",
                error=CORRUPT_BATCH if is_batch else "spark_klog.errors.DecodeError",
                reason=letter["reason"],
                time=letter.get("time", system_ms()),
                attempts=1,
            )
            key, value = (_bytes(letter.get(name)) for name in ("key", "bytes" if is_batch else "value"))
            own = tuple((name, _bytes(data)) for name, data in letter.get("headers", ()))
            moment = max(-1, int(letter.get("timestamp", -1)))
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(
                f"a dead letter of load {self._load} is damaged ({error!r}): restore or remove it"
            ) from None
        # without a span, whose context would be a header
        Producer.send(producer, self._topic, value, key, timestamp=moment, headers=own + said.headers)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text, validate=True)
