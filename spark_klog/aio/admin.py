"""The admin client on asyncio's loop."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from spark_klog.aio.driver import LoopDriver
from spark_klog.client.admin.admin import TransactionCalls
from spark_klog.client.admin.groups import GroupCalls
from spark_klog.client.admin.topics import TopicCalls
from spark_klog.client.admin.users import UserCalls
from spark_klog.client.calls import OnLoop
from spark_klog.client.requests import Steps
from spark_klog.errors import AdminClosed


class Admin(TopicCalls, GroupCalls, UserCalls, TransactionCalls, OnLoop):
    """Administer a cluster from asyncio's loop.

        async with Admin({"bootstrap.servers": "127.0.0.1:9092"}) as admin:
            await admin.create_topic("clicks", 6, replication_factor=3)
            for name, found in (await admin.describe_topics(["clicks", "orders"])).items():
                print(name, found)  # a TopicDescription or a KlogError

    Calls, settings and errors are those of `spark_klog.client.Admin`; each call is to be awaited. `async with`
    connects; without it the first call does. Calls of several tasks are made one after the other: each waits for its
    turn up to default.api.timeout.ms. A cancelled call may have made its changes or not; others go on.

    A client belongs to the loop of its first call: `ConcurrentUse` in another one, `ConfigError` without one (in a
    thread, or with Trio), `AdminClosed` in a process forked since.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check `settings` by Kafka's names; `ConfigError` names an unknown or wrong one."""
        self._begin_own(settings)
        self._driver = LoopDriver("admin client", AdminClosed)

    def make(self, steps: Steps[Any]) -> Coroutine[Any, Any, Any]:
        return self._make(steps)

    async def _make(self, steps: Steps[Any]) -> Any:
        if self._is_closed:
            raise AdminClosed("the admin client is closed")
        late = f"calls of other tasks took {self._timeout_ms / 1000:g} s ({self._limit})"
        return await self._driver.run(self._driver.in_turn(steps, self._timeout_ms / 1000, late))

    async def __aenter__(self) -> Admin:
        """Connect; raises what `spark_klog.client.Admin` raises."""
        self._driver.check_loop()
        try:
            await self._make(self.cluster.asking_metadata([]))
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def close(self) -> None:  # type: ignore[override]
        """Close the connections; calls that wait, and later ones, raise `AdminClosed`."""
        self._driver.check_loop()
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._driver.close(AdminClosed("the admin client was closed"))
        self.cluster.close()
