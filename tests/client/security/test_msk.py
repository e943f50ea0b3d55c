"""AWS_MSK_IAM: tokens of AWS's signer, whose signatures the test recomputes; credentials and regions."""

from __future__ import annotations

import hmac
import time
from base64 import urlsafe_b64decode
from hashlib import sha256
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from spark_klog.client.settings import client_config
from spark_klog.errors import ConfigError, ConnectionFailed, SaslError
from spark_klog.protocol.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE
from spark_klog.security.sasl import SaslExchange
from spark_klog.security.tokens import aws_region

KEY, SECRET = "AKIAEXAMPLE", "the/secret+key"
BROKER = "b-1.demo.a1b2c3.c2.kafka.eu-central-1.amazonaws.com:9098"
IAM = "software.amazon.msk.auth.iam."
SETTINGS = {
    "by the name of AWS's library": {
        "sasl.mechanism": "AWS_MSK_IAM",
        "sasl.jaas.config": f"{IAM}IAMLoginModule required;",
        "sasl.client.callback.handler.class": f"{IAM}IAMClientCallbackHandler",
    },
    "by OAUTHBEARER": {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;",
        "sasl.login.callback.handler.class": f"{IAM}IAMOAuthBearerLoginCallbackHandler",
        "sasl.client.callback.handler.class": f"{IAM}IAMOAuthBearerSaslClientCallbackHandler",
    },
}


def _exchange(settings: dict[str, str]) -> SaslExchange:
    given = {"bootstrap.servers": BROKER, "security.protocol": "SASL_SSL", **settings}
    return SaslExchange(client_config(given).security, BROKER)


def _signature(query: dict[str, str], host: str, region: str) -> str:
    """Signature Version 4 of a presigned request, as AWS documents it; the user agent is not signed."""
    signed = sorted((name, value) for name, value in query.items() if name not in ("X-Amz-Signature", "User-Agent"))
    canonical = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in signed)
    request = f"GET\n/\n{canonical}\nhost:{host}\n\nhost\n{sha256().hexdigest()}"
    scope = (query["X-Amz-Date"][:8], region, "kafka-cluster", "aws4_request")
    assert query["X-Amz-Credential"] == "/".join((KEY, *scope))
    text = "\n".join(("AWS4-HMAC-SHA256", query["X-Amz-Date"], "/".join(scope), sha256(request.encode()).hexdigest()))
    key = f"AWS4{SECRET}".encode()
    for part in (*scope, text):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("spark_klog.security.tokens._kept", {})


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_token_is_a_signed_request(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = _exchange(settings)
    assert exchange.begin(time.monotonic() + 20) == (SASL_HANDSHAKE, {"mechanism": "OAUTHBEARER"})
    step = exchange.next(SASL_HANDSHAKE, {"error_code": 0, "mechanisms": ["OAUTHBEARER"]}, 0.0)
    assert step is not None
    api, message = step
    assert api is SASL_AUTHENTICATE
    start = "n,,\1auth=Bearer "
    sent = message["auth_bytes"].decode()
    assert sent.startswith(start)
    assert sent.endswith("\1\1")
    token = sent[len(start) : -2]
    url = urlsplit(urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
    assert (url.scheme, url.netloc) == ("https", "kafka.eu-central-1.amazonaws.com")
    query = {name: value for name, [value] in parse_qs(url.query).items()}
    assert query["Action"] == "kafka-cluster:Connect"
    assert SECRET not in sent

    assert query["X-Amz-Signature"] == _signature(query, url.netloc, "eu-central-1")
    assert exchange.next(SASL_AUTHENTICATE, {"error_code": 0, "auth_bytes": b"", "session_lifetime_ms": 0}, 0.0) is None


def test_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    shared = tmp_path / "credentials"
    shared.write_text(f"[streams]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    jaas = f'{IAM}IAMLoginModule required awsProfileName="streams" awsDebugCreds="true";'
    exchange = _exchange({"sasl.mechanism": "AWS_MSK_IAM", "sasl.jaas.config": jaas})
    exchange.begin(time.monotonic() + 20)
    step = exchange.next(SASL_HANDSHAKE, {"error_code": 0, "mechanisms": []}, 0.0)
    assert step is not None
    token = step[1]["auth_bytes"].decode().split("Bearer ")[1].rstrip("\1")
    assert "AKIAPROFILE" in urlsafe_b64decode(token + "==").decode()

    other = _exchange({"sasl.mechanism": "AWS_MSK_IAM", "sasl.jaas.config": jaas.replace("streams", "none")})
    with pytest.raises(SaslError, match=r"no AWS credentials to sign with .*awsProfileName in sasl.jaas.config"):
        other.begin(time.monotonic() + 20)


def test_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    with pytest.raises(SaslError, match="no AWS credentials to sign with"):
        _exchange({"sasl.mechanism": "AWS_MSK_IAM"}).begin(time.monotonic() + 20)
    # else its thread may have failed before the first look at it
    slow = "aws_msk_iam_sasl_signer.MSKAuthTokenProvider.generate_auth_token"
    monkeypatch.setattr(slow, lambda region: time.sleep(2))
    with pytest.raises(ConnectionFailed, match="in time"):
        _exchange({"sasl.mechanism": "AWS_MSK_IAM"}).begin(time.monotonic())


def test_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aws_region(BROKER.split(":")[0]) == "eu-central-1"
    assert aws_region("boot-x.c1.kafka-serverless.us-east-1.amazonaws.com") == "us-east-1"
    assert aws_region("b-2.x.kafka.cn-north-1.amazonaws.com.cn") == "cn-north-1"
    with pytest.raises(ConfigError, match=r"region of broker private.example, .* AWS_REGION"):
        aws_region("private.example")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert aws_region("private.example") == "eu-west-3"
