"""The clients of `spark_klog.aio` behind the calls of the synchronous ones, so that the same tests run over both."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, TimeoutError as Late
from types import TracebackType
from typing import Any, TypeVar

import pytest

from spark_klog.aio import Admin, Consumer, Producer
from spark_klog.aio.driver import LoopDriver
from spark_klog.base.names import TopicPartition
from spark_klog.client import RebalanceListener, RecordMetadata, requests
from spark_klog.client.requests import Steps
from spark_klog.errors import BufferExhausted, DeliveryPending, KlogError

_T = TypeVar("_T")
#: Seconds of a call that should have ended long ago by a timeout of its own.
_LONGEST = 120.0


def run(main: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    """Run on a loop of its own, for so many seconds at most; `AssertionError` if another task is left."""

    async def all_of_it() -> None:
        await asyncio.wait_for(main, seconds)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(all_of_it())


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loop of a test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    @property
    def is_here(self) -> bool:
        """Whether the code runs in the loop's thread."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if self.loop.is_closed():  # by `close`: the call says so
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(_LONGEST)

    def close(self) -> None:
        """End the loop; `AssertionError` if a task or a watched socket is left."""
        if self.loop.is_closed():
            return
        left = self.run(self._left())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_LONGEST)
        assert not left, left

    async def _left(self) -> list[object]:
        watched = [key for key in self.loop._selector.get_map().values() if key.fileobj != self.loop._ssock.fileno()]  # type: ignore[attr-defined]
        return [*(asyncio.all_tasks() - {asyncio.current_task()}), *watched[1:]]


class LoopRequests:
    """The requests of calls that wait for them, made by a `LoopDriver` in the thread of a loop."""

    def __init__(self) -> None:
        self._loop, self._driver = Loop(), LoopDriver("client", KlogError)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have all modules of the package that are imported make their requests here."""
        for name, module in list(sys.modules.items()):
            if name.startswith("spark_klog.") and getattr(module, "run", None) is requests.run:
                monkeypatch.setattr(module, "run", self.run)

    def run(self, steps: Steps[_T]) -> _T:
        # a call within the steps of another one waits by itself
        return requests.run(steps) if self._loop.is_here else self._loop.run(self._driver.run(steps))

    def close(self) -> None:
        self._loop.run(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._driver.close(KlogError("the test is over"))


class Rounds:
    """Counts the rounds of drivers, and cancels a task at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = 0
        self._victim: asyncio.Task[None] | None = None
        original = LoopDriver._round

        def counted(driver: LoopDriver) -> None:
            original(driver)
            self._left -= 1
            if self._left == 0 and self._victim is not None:
                self._victim.cancel()

        monkeypatch.setattr(LoopDriver, "_round", counted)

    async def cancelled(self, work: Coroutine[Any, Any, None], number: int) -> bool:
        """Do the work, or cancel it at this round; whether it was cancelled. Raises what the work raises."""
        self._left, self._victim = number, asyncio.create_task(work)
        victim = self._victim
        await asyncio.wait([victim])
        self._victim = None  # nothing is cancelled meanwhile
        if not victim.cancelled():
            await victim
        return victim.cancelled()


class _OnLoop:
    """A client, opened in the thread of a loop of its own, where its calls are made."""

    def __init__(self, kind: type[Admin | Consumer | Producer], settings: Mapping[str, Any], **named: Any) -> None:
        self._loop = Loop()
        try:
            self._client: Any = kind(settings, **named)
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """The calls that are not written here, by the same names."""
        call = getattr(self._client, name)

        async def made(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            return await result if inspect.isawaitable(result) else result

        return (lambda *arguments, **named: self._loop.run(made(*arguments, **named))) if callable(call) else call


class LoopAdmin(_OnLoop):
    """The admin client of `spark_klog.aio`, whose calls are made in the loop's thread."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(Admin, settings)

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    def __enter__(self) -> LoopAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener(RebalanceListener):
    """Calls a listener in a thread, where it may call a `LoopConsumer`."""

    def __init__(self, listener: RebalanceListener) -> None:
        self._listener = listener

    async def on_assigned(self, partitions: list[TopicPartition]) -> None:
        await asyncio.to_thread(self._listener.on_assigned, partitions)

    async def on_revoked(self, partitions: list[TopicPartition]) -> None:
        await asyncio.to_thread(self._listener.on_revoked, partitions)

    async def on_lost(self, partitions: list[TopicPartition]) -> None:
        await asyncio.to_thread(self._listener.on_lost, partitions)


class LoopConsumer(_OnLoop):
    """The consumer of `spark_klog.aio`, whose calls are made in the loop's thread."""

    def __init__(self, settings: Mapping[str, Any], **named: Any) -> None:
        super().__init__(Consumer, settings, **named)

    def subscribe(self, topics: Any, listener: Any = None) -> None:
        listener = _Listener(listener) if isinstance(listener, RebalanceListener) else listener
        self.__getattr__("subscribe")(topics, listener)

    def close(self, timeout: float = 30.0) -> None:
        try:
            self._loop.run(self._client.close(timeout))
        finally:
            self._loop.close()

    def __enter__(self) -> LoopConsumer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self._loop.run(self._client.__aexit__(kind, *rest))
        finally:
            self._loop.close()


class LoopDelivery:
    """A future of `send_nowait` as a `Delivery`."""

    def __init__(self, topic: str, outcome: Future[RecordMetadata]) -> None:
        self.topic, self._outcome = topic, outcome

    @property
    def partition(self) -> int:
        return self.result(_LONGEST).partition

    def done(self) -> bool:
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> RecordMetadata:
        try:
            return self._outcome.result(timeout)
        except Late:
            if self._outcome.done():  # it is the record's error
                raise
            raise DeliveryPending(self.topic, -1, timeout or 0.0) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return self._outcome.exception(timeout)
        except Late:
            raise DeliveryPending(self.topic, -1, timeout or 0.0) from None


class LoopProducer(_OnLoop):
    """Calls are made in the loop's thread; `send` waits for room and the topic, not for the record."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(Producer, settings)

    def send(self, topic: str, *arguments: Any, **named: Any) -> LoopDelivery:
        outcome: Future[RecordMetadata] = Future()
        self._loop.run(self._send(outcome, topic, *arguments, **named))
        return LoopDelivery(topic, outcome)

    async def _send(self, outcome: Future[RecordMetadata], topic: str, *arguments: Any, **named: Any) -> None:
        producer = self._client
        producer._check("send")
        if isinstance(topic, str):
            await producer.partitions(topic)
        until = asyncio.get_running_loop().time() + producer._max_block
        while True:
            try:
                future = producer.send_nowait(topic, *arguments, **named)
                break
            except BufferExhausted:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(0.001)

        def done(future: asyncio.Future[RecordMetadata]) -> None:
            if (error := future.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(future.result())

        future.add_done_callback(done)

    def transaction_under_way(self) -> Any:
        assert self._client._transactions is not None
        return self._client._transactions.under_way

    def close(self) -> None:
        try:
            self._loop.run(self._client.close())
        finally:
            self._loop.close()

    def abort(self) -> None:
        async def end() -> None:
            self._client._end()

        if not self._loop.loop.is_closed():
            self._loop.run(end())
            self._loop.close()

    def __enter__(self) -> LoopProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run(self._client.__aexit__(kind, error, trace))
        finally:
            self._loop.close()
