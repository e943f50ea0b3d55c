"""Errors hide a broker's message if a secret is part of it."""

from __future__ import annotations

import pytest

from spark_klog.client.settings import client_config
from spark_klog.errors import ErrorCode, SaslError
from spark_klog.protocol.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.security.sasl import SaslExchange

#: Kafka's message for a wrong name or password.
_KAFKAS = "Authentication failed: Invalid username or password"


def _refusal(password: str, said: str) -> str:
    security = client_config(
        {
            "bootstrap.servers": "h:1",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "ann",
            "sasl.password": password,
        }
    ).security
    exchange = SaslExchange(security, "h:1")
    exchange.begin(0.0)
    exchange.next(SASL_HANDSHAKE, {"error_code": 0, "mechanisms": ["PLAIN"]}, 0.0)
    answer = {"error_code": ErrorCode.SASL_AUTHENTICATION_FAILED, "error_message": said, "auth_bytes": b""}
    with pytest.raises(SaslError) as refused:
        exchange.next(SASL_AUTHENTICATE, answer, 0.0)
    return str(refused.value)


@pytest.mark.parametrize("password", ["Invalid", "Authentication failed", "e", "username or"])
def test_a_password_that_is_a_word_of_the_answer(password: str) -> None:
    said = _refusal(password, _KAFKAS)
    assert "it says: something that is not shown, as the secret is part of it. Check name and password of user" in said
    assert "ailed:" not in said  # the rest of the sentence would reveal the word that is missing
    assert "[hidden]" not in said


def test_an_answer_with_the_password_in_it() -> None:
    said = _refusal("s3cr3t-word", "ann has tried s3cr3t-word")
    assert "s3cr3t" not in said
    assert "broker h:1 refuses PLAIN" in said


def test_another_answer_is_shown() -> None:
    assert f"it says: {_KAFKAS}. Check name and password of user 'ann'" in _refusal("s3cr3t-word", _KAFKAS)
