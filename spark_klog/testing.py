"""Clusters for tests without pytest: a base class for unittest, and an object with the calls of Testcontainers.

For pytest see `spark_klog.pytest_plugin`.
"""

from __future__ import annotations

import re
import unittest
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from spark_klog.client import Admin
from spark_klog.embedded import EmbeddedCluster

__all__ = ["KlogContainer", "KlogTestCase"]


class KlogTestCase(unittest.TestCase):
    """Tests with a cluster, which those of a class share; each should use topics of its own.

        class TestOrders(KlogTestCase):
            klog_arguments = {"brokers": 2}

            def test_order(self):
                topic = self.klog_topic(partitions=3)

    It goes together with other base classes, such as `pyspark.testing.sqlutils.ReusedSQLTestCase` and
    `unittest.IsolatedAsyncioTestCase`, as the first one: those of PySpark do not call the next.
    """

    #: Arguments of `EmbeddedCluster`.
    klog_arguments: ClassVar[Mapping[str, Any]] = {}
    klog_cluster: ClassVar[EmbeddedCluster]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.klog_cluster = EmbeddedCluster(**cls.klog_arguments).start()
        cls.addClassCleanup(cls.klog_cluster.stop)

    def klog_topic(self, partitions: int = 1, settings: Mapping[str, str] | None = None) -> str:
        """Create a topic, and return its name."""
        name = f"{re.sub(r'[^A-Za-z0-9]+', '-', self.id())[-100:]}-{uuid.uuid4().hex[:8]}"
        with Admin({"bootstrap.servers": self.klog_cluster.bootstrap_servers}) as admin:
            admin.create_topic(name, partitions, configs=settings)
        return name


class KlogContainer(EmbeddedCluster):
    """An `EmbeddedCluster` with the calls of Testcontainers' KafkaContainer: no container, no Docker.

        with KlogContainer() as kafka:
            producer = Producer({"bootstrap.servers": kafka.get_bootstrap_server()})

    An image, and what only containers have, is accepted and has no meaning.
    """

    def __init__(self, image: str = "", **arguments: Any) -> None:
        """`arguments` are those of `EmbeddedCluster`; `port` and others of KafkaContainer are left out."""
        super().__init__(**{name: value for name, value in arguments.items() if name not in _OF_CONTAINERS})

    def start(self, timeout: float = 0) -> KlogContainer:
        super().start()
        return self

    def stop(self, force: bool = True, delete_volume: bool = True) -> None:
        super().stop()

    def __enter__(self) -> KlogContainer:
        return self.start()

    def get_bootstrap_server(self) -> str:
        return self.bootstrap_servers

    def get_container_host_ip(self) -> str:
        return self.bootstrap_servers.rpartition(",")[2].rpartition(":")[0]

    def get_exposed_port(self, port: int = 9093) -> int:
        """The port of the last broker, whichever port is asked for: that of a single one."""
        return int(self.bootstrap_servers.rpartition(":")[2])

    def with_env(self, key: str, value: str) -> KlogContainer:
        """Set a broker's setting as images do: KAFKA_NUM_PARTITIONS is num.partitions.

        Others have no meaning, nor have those of a container's JVM, its log and its listeners: clients reach the
        brokers at `get_bootstrap_server`.
        """
        name = key.removeprefix("KAFKA_")
        if name != key and not _OF_IMAGES.fullmatch(name):
            self._settings |= {name.lower().replace("_", "."): str(value)}
        return self

    def with_envs(self, **variables: str) -> KlogContainer:
        for key, value in variables.items():
            self.with_env(key, value)
        return self

    def with_kraft(self, *_: Any, **__: Any) -> KlogContainer:
        """Accepted, without a meaning, as the other calls that it stands for."""
        return self

    with_cluster_id = with_kwargs = with_name = with_network = with_network_aliases = with_kraft


#: Variables of Kafka's images that are no settings of a broker, or are about the container's network.
_OF_IMAGES = re.compile(
    "(.*_)?OPTS|(JMX|LOG4J|TOOLS_LOG4J|CONTROLLER)_.*|(ADVERTISED_)?LISTENERS|LISTENER_SECURITY_PROTOCOL_MAP|"
    "INTER_BROKER_LISTENER_NAME|BROKER_ID|NODE_ID|PROCESS_ROLES|ZOOKEEPER_CONNECT|LOG_DIRS?"
)
_OF_CONTAINERS = frozenset({"port", "wait_strategy_check_string", "docker_client_kw"})
