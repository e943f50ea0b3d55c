"""Handlers: for each API the function of its name, in the module of its family.

It gets the broker, the request's context and its message, and returns the response or an awaitable of it; None is no
response.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.handlers import (
    acls,
    cluster,
    configs,
    consumer_groups,
    credentials,
    fetch,
    groups,
    list_offsets,
    offsets,
    produce,
    reassignments,
    topics,
    transaction_lists,
    transactions,
)
from spark_klog.protocol.apis import BY_KEY
from spark_klog.protocol.codec import Message

Handler = Callable[[Broker, Request, Message], Message | Awaitable[Message | None] | None]

_MODULES = (
    *(acls, cluster, configs, credentials, fetch, groups, list_offsets, offsets, produce, reassignments, topics),
    *(consumer_groups, transaction_lists, transactions),
)


def _handler(api_name: str) -> Handler:
    name = re.sub("(?<!^)(?=[A-Z])", "_", api_name).lower()
    (handler,) = [vars(module)[name] for module in _MODULES if callable(vars(module).get(name))]
    return handler  # type: ignore[no-any-return]


HANDLERS: dict[int, Handler] = {key: _handler(api.name) for key, api in BY_KEY.items()}
