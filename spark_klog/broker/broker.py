"""The broker: puts its parts together. The handlers get it whole; its parts do not know it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple
from uuid import UUID

from spark_klog.broker.event_loop import BackgroundTasks, Decompression, Turns
from spark_klog.broker.fetches import FetchSessions, Purgatory
from spark_klog.broker.groups.coordinator import GroupCoordinator
from spark_klog.broker.log_flushes import LogFlushes
from spark_klog.broker.metadata.controller import Controller, Topics07
from spark_klog.broker.metadata.registry import Registry
from spark_klog.broker.metrics import Metrics
from spark_klog.broker.partitions import RENEWAL_POLL_SECONDS, RENEWAL_SECONDS, ServedPartitions
from spark_klog.broker.registry_follower import RegistryFollower, register_logs, settle_logs
from spark_klog.broker.schema_validation import SchemaValidator
from spark_klog.broker.security.authorizer import Authorizer
from spark_klog.broker.security.session import Session
from spark_klog.broker.security.users import Users
from spark_klog.broker.settings.config import BrokerConfig
from spark_klog.broker.topic_changes import TopicChanges
from spark_klog.broker.transactions.coordinator import (
    PRODUCER_IDS,
    TransactionCoordinator,
    claim_in_file,
    claim_in_tree,
)
from spark_klog.broker.transactions.verification import TransactionVerifier
from spark_klog.errors import DirectoryError
from spark_klog.log.directory import LogDirectory
from spark_klog.log.layout import check_alone
from spark_klog.protocol.apis import FETCH
from spark_klog.protocol.codec import Message
from spark_klog.protocol.schema import Api
from spark_klog.trees.memory import MemoryTree
from spark_klog.trees.opening import open_tree
from spark_klog.trees.paths import Endpoint

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A request's context, which a handler gets beside its message."""

    version: int
    client_id: str | None
    session: Session

    @property
    def peer(self) -> str:
        """The client's address and, unless anonymous, its user: for the log."""
        return self.session.peer


class Broker:
    """One broker. All methods run in the event loop's thread."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.users = Users(config.security.users_file)
        self.authorizer = Authorizer(self.users)
        if config.directories is None:
            check_alone(config.data_dir)
        self.logs = LogDirectory(config.data_dir, config.broker_id, config.log)
        try:
            session_seconds = config.zookeeper_session_timeout_ms / 1000
            tree = open_tree(config.directories, session_seconds) if config.directories is not None else MemoryTree()
            self.registry = Registry(tree, config.broker_id, session_seconds)
            is_shared = config.directories is not None
            controller = Controller(tree, self.registry, self._id_in_logs) if is_shared else None
            has_07 = config.paths_07 and (config.directories or "").startswith("zookeeper:")
            topics_07 = Topics07(tree, config.broker_id) if has_07 else None
            self.purgatory = Purgatory()
            self.turns = Turns()
            self.decompression = Decompression()
            self.schemas = SchemaValidator(config.schema_registry)
            tasks = BackgroundTasks()
            self.follower = RegistryFollower(self.registry, self.logs, self.purgatory, tasks, controller, topics_07)
            self.flushes = LogFlushes(tasks)
            self.partitions = ServedPartitions(
                self.registry, self.logs, self.follower, self.flushes, self.purgatory, self.turns
            )
            self.changes = TopicChanges(config, self.registry, self.follower, tasks)
            self.fetch_sessions = FetchSessions(config.fetch_session_slots, config.fetch_session_eviction_ms / 1000)
            self.metrics = Metrics()
            self.coordinator = GroupCoordinator(config, self.partitions, self.changes, tasks)
            self.groups, self.offsets = self.coordinator.groups, self.coordinator.offsets
            claim = (
                partial(claim_in_tree, tree, config.broker_id)
                if is_shared
                else partial(claim_in_file, config.data_dir / PRODUCER_IDS, config.broker_id)
            )
            self.transactions = TransactionCoordinator(config, self.partitions, self.changes, self.coordinator, claim)
            self.verifier = TransactionVerifier(self.registry, self.transactions)
            self.follower.on_dropped += self.coordinator.forget_topic, self.metrics.forget_topic
            self.follower.forgotten = self.coordinator.remove_deleted
            self.follower.on_set_aside += self.coordinator.forget_logs_of, self.transactions.forget_logs_of
            self.logs.set_cluster_id(self.registry.cluster_id(self.logs.cluster_id))
        except BaseException:
            self.logs.close()
            raise

    @property
    def cluster_id(self) -> str:
        assert self.logs.cluster_id is not None
        return self.logs.cluster_id

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Join the cluster with these addresses; blocks during the requests to the tree."""
        if self.config.directories is None:
            self.changes.restore_group_settings()
            register_logs(self.logs, self.registry)
        else:
            settle_logs(self.logs)
        self.registry.registration.register(endpoints, self.config.transaction_version)
        self.follower.start()
        deadline = time.monotonic() + RENEWAL_SECONDS
        while not self.registry.holds() and time.monotonic() < deadline:
            time.sleep(RENEWAL_POLL_SECONDS)

    def _id_in_logs(self, name: str, assignment: Mapping[int, Sequence[int]]) -> UUID | None:
        for partition in sorted(assignment):
            log = self.logs.get(name, partition)
            is_led = assignment[partition][:1] == [self.config.broker_id]
            if log is not None and log.topic_id is not None and is_led:
                return log.topic_id
        return None

    def note_answered(self, api: Api, response: Message | None, seconds: float) -> None:
        """Count a request and the records fetched by it."""
        self.metrics.answered(api, response, seconds)
        if api is FETCH and response is not None:
            for topic in response.get("responses", ()):
                for entry in topic["partitions"]:
                    if entry["records"]:
                        key = self.registry.key(topic["topic"], topic["topic_id"], entry["partition_index"])
                        self.metrics.fetched(*key, entry["records"], self.logs)

    def close(self) -> None:
        """Close the logs, and leave the cluster."""
        self.decompression.close()
        self.schemas.close()
        try:
            self.logs.close()
        finally:
            try:
                self.registry.registration.unregister()
                self.registry.close()
            except DirectoryError as error:
                _log.warning("leaving the directories failed; this broker's entry ends with its session: %s", error)
            except Exception:
                _log.exception("leaving the directories failed")
