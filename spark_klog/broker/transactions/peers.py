"""Send one request to another broker. Brokers do not use the client package; they exchange nothing else."""

from __future__ import annotations

import asyncio

from spark_klog.broker.metadata.registry import Registry
from spark_klog.directories.paths import PLAINTEXT
from spark_klog.errors import ConnectionFailed, KlogError
from spark_klog.protocol.codec import Message, decode_response, encode_request
from spark_klog.protocol.schema import Api
from spark_klog.wire.frames import MAX_FRAME, SIZE, frame_size

_SECONDS = 5.0
_CORRELATION_ID = 1
_CLIENT_ID = "klog-broker"
#: What `ask` and `peer_address` raise.
UNANSWERED = (KlogError, OSError, asyncio.TimeoutError)


def peer_address(registry: Registry, node: int) -> tuple[str, int]:
    """Another broker's PLAINTEXT address; raises `ConnectionFailed` if it has none."""
    for endpoint in registry.brokers.get(node, ()):
        if endpoint.security_protocol == PLAINTEXT:
            return endpoint.host, endpoint.port
    raise ConnectionFailed(f"broker {node} has no PLAINTEXT listener, or is not in the cluster")


async def ask(address: tuple[str, int], api: Api, version: int, message: Message) -> Message:
    """Send a request and return the response. Raises one of `UNANSWERED`."""
    return await asyncio.wait_for(_ask(address, api, version, message), _SECONDS)


async def _ask(address: tuple[str, int], api: Api, version: int, message: Message) -> Message:
    reader, writer = await asyncio.open_connection(*address)
    try:
        request = encode_request(api, version, _CORRELATION_ID, _CLIENT_ID, message).to_bytes()
        writer.write(SIZE.pack(len(request)) + request)
        size = frame_size(await reader.readexactly(SIZE.size), MAX_FRAME)
        _, answer = decode_response(api, version, await reader.readexactly(size))
        return answer
    except asyncio.IncompleteReadError:
        raise ConnectionFailed(f"{address[0]}:{address[1]} closed the connection without an answer") from None
    finally:
        writer.close()
