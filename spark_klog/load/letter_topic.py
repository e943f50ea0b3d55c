"""Dead letters of a load in a topic, beside the folder that it has of them.

They have the form of all letters in topics (client/dead_letters.py), with the load's id as reader. A transaction has
some thousand letters of a run, and the progress, an offset of the group `klog-dead-letters-of.LOAD`: what a killed call
has left to do, the next one does, so that each letter is in the topic once. The load's journal notes the progress, too:
brokers forget groups without members, after a week by default.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from spark_klog.base.clock import system_ms
from spark_klog.base.names import check_topic_name
from spark_klog.client.cluster import Cluster
from spark_klog.client.dead_letters import CONVERTERS, CORRUPT_BATCH, READING, SIZES, DeadLetter
from spark_klog.client.offsets import GroupOffsets
from spark_klog.client.producer.producer import Producer
from spark_klog.client.settings import of_bytes, without_ids
from spark_klog.errors import ProducerFenced
from spark_klog.load.journal import paths
from spark_klog.load.journal.checkpoint import read_summary
from spark_klog.load.journal.history import letters_in_topic
from spark_klog.load.journal.letters import StoredLetter, unsent
from spark_klog.load.journal.model import LettersInTopic
from spark_klog.load.journal.store import Store, to_json
from spark_klog.security.config import Settings

_log = logging.getLogger(__name__)
#: What the address of a topic begins with.
SCHEME = "topic:"
GROUP = "klog-dead-letters-of."


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
        files = read_summary(store).letters
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
                done = start = max(noted, GroupOffsets(cluster, self._group, is_stable=True).fetch([key]).get(key, 0))
                for done, letters in unsent(store, files, start):
                    producer.begin_transaction()
                    for letter in letters:
                        self._send(producer, letter)
                    producer.send_offsets_to_transaction({key: done}, self._group)
                    producer.commit_transaction()
                if done > noted:
                    store.write(paths.letters_in(self._topic), to_json(LettersInTopic(topic_id, done)))
            except ProducerFenced as error:
                _log.info("another call writes the dead letters of load %s: %s", self._load, error)

    def _send(self, producer: Producer, letter: StoredLetter) -> None:
        is_batch = letter.batch is not None
        said = DeadLetter(
            letter.topic,
            letter.partition,
            letter.offset,
            reader=self._load,
            task="0",
            stage=READING if is_batch else CONVERTERS["value"],
            where="spark_klog.load",
            error=CORRUPT_BATCH if is_batch else "spark_klog.errors.DecodeError",
            reason=letter.reason,
            time=system_ms() if letter.time is None else letter.time,
            attempts=1,
        )
        value = letter.batch if is_batch else letter.value
        moment = max(-1, -1 if letter.timestamp is None else letter.timestamp)
        headers = (*letter.headers, *said.headers)
        # without a span, whose context would be a header
        Producer.send(producer, self._topic, value, letter.key, timestamp=moment, headers=headers)
