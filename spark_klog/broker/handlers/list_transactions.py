"""ListTransactions v0-1 (KIP-664, KIP-994): the transactional ids that this broker coordinates."""

from __future__ import annotations

from spark_klog.broker.broker import Broker, Request
from spark_klog.broker.transactions.transaction import State
from spark_klog.clock import system_ms
from spark_klog.errors import ErrorCode
from spark_klog.protocol.codec import Message

_STATES = {state.text for state in State}


def handle(broker: Broker, request: Request, message: Message) -> Message:
    states, producers = set(message["state_filters"]), set(message["producer_id_filters"])
    unknown = sorted(states - _STATES)
    answer = {"error_code": ErrorCode.NONE, "unknown_state_filters": unknown, "transaction_states": []}
    if broker.transactions.is_loading:
        return answer | {"error_code": ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
    if not broker.authorizer.is_admin(request.session):  # as in Kafka, ids that the client may not see are left out
        return answer
    age, now = message["duration_filter"], system_ms()
    answer["transaction_states"] = [
        {
            "transactional_id": each.transactional_id,
            "producer_id": each.producer.producer_id,
            "transaction_state": each.state.text,
        }
        for each in broker.transactions
        if (not states or each.state.text in states)
        and (not producers or each.producer.producer_id in producers)
        and (age < 0 or (each.state is State.ONGOING and now - each.started_ms > age))
    ]
    return answer
