"""SaslHandshake v0-1 (KIP-43): the client chooses a mechanism."""

from __future__ import annotations

import logging

from spark_klog.broker.broker import Broker, Request
from spark_klog.protocol.codec import Message

_log = logging.getLogger(__name__)


def handle(broker: Broker, request: Request, message: Message) -> Message:
    session = request.session
    code = session.handshake(message["mechanism"], request.version)
    if code:
        _log.warning("%s asks for SASL mechanism %.50r: %s", request.peer, message["mechanism"], code.name)
    return {"error_code": code, "mechanisms": session.mechanisms}
