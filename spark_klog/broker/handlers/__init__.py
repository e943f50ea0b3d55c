"""Handlers: one module per API, whose `handle` takes a request and returns a response or an awaitable of one."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from importlib import import_module

from spark_klog.broker.broker import Broker, Request
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.codec import Message

Handler = Callable[[Broker, Request, Message], Message | Awaitable[Message | None] | None]


def _handler(api_name: str) -> Handler:
    module = import_module(f"{__name__}.{re.sub('(?<!^)(?=[A-Z])', '_', api_name).lower()}")
    handle: Handler = module.handle
    return handle


HANDLERS: dict[int, Handler] = {key: _handler(api.name) for key, api in BY_KEY.items()}
