"""Fetch and cache tokens for OAUTHBEARER.

The process caches a token for most of its lifetime. The next connection then fetches a new one, within its deadline.

    endpoint   OAuth 2.0 client credentials (RFC 6749, 4.4), as in Kafka's Java clients (KIP-768)
    file       a token in a file, read again for each use
    provider   MODULE:FUNCTION, imported in this process: in Spark on the driver and in each worker. The function has no
               arguments and returns the token, or (token, its expiry in seconds since the epoch)
    claims     a token without signature (KIP-255), for development clusters only
    msk        for Amazon MSK's IAM access control: a request to the action kafka-cluster:Connect in the broker's
               region, signed with AWS credentials (Signature Version 4) by AWS's own package. MSK takes it by
               OAUTHBEARER, on the same port as from Java's AWS_MSK_IAM
"""

from __future__ import annotations

import json
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import Any

from spark_klog.base.cache import Newest
from spark_klog.base.extras import require
from spark_klog.base.in_a_thread import within
from spark_klog.errors import ConfigError, ConnectionFailed, KlogError, SaslError
from spark_klog.security.config import MskConfig, OAuthConfig, without_secrets

#: Brokers of MSK and MSK Serverless: ...kafka.REGION.amazonaws.com, ...kafka-serverless.REGION.amazonaws.com.
_HOST = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?\.?")


#: RFC 6750, 2.1.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MOST_BYTES = 1024 * 1024
_LONGEST_SECONDS = 10.0
#: The part of a token's lifetime for which it is cached, as in Kafka's Java clients.
_USED = 0.8
_MOST_KEPT = 16


#: A token, and its expiry in seconds since the epoch, None if unknown.
_Token = tuple[str, float | None]
_lock = threading.Lock()
#: Cached tokens by source, with the time until which they are used.
_kept: Newest[tuple[OAuthConfig, str], tuple[str, float]] = Newest(_MOST_KEPT)


def token_of(config: OAuthConfig, host: str, deadline: float, named: Callable[[str], str]) -> str:
    """A token for the broker at `host` that has not expired. `named` returns a setting as the user typed it.

    `SaslError` if the endpoint refuses or the token is invalid or expired, `ConnectionFailed` if the endpoint can't be
    reached before `deadline`, a reading of `time.monotonic`; `ConfigError` for a missing file or provider.
    """
    now = time.time()
    region = aws_region(host) if config.msk is not None else ""
    with _lock:
        token, until = _kept.get((config, region), (None, 0.0))
    if token is not None and now < until:
        return token
    if config.endpoint:
        token, expires = _from_endpoint(config, deadline, named)
    elif config.file:
        token, expires = _from_file(config, named)
    elif config.provider:
        token, expires = _from_provider(config, named)
    elif config.msk is not None:
        token, expires = msk_token(config.msk, region, deadline)
    else:
        token, expires = _unsecured(config, now)
    if not _TOKEN.fullmatch(token):
        raise SaslError(f"the OAUTHBEARER token of {_source(config)} is empty or has invalid characters")
    expires = _expiry(token) if expires is None else expires
    if expires is not None and expires <= now:
        late = now - expires
        raise SaslError(
            f"the OAUTHBEARER token of {_source(config)} expired {late:.0f} s ago: it must be renewed there"
        )
    if expires is not None and not config.file:
        with _lock:
            _kept[config, region] = token, now + _USED * (expires - now)
    return token


def _source(config: OAuthConfig) -> str:
    if config.endpoint:
        address = urllib.parse.urlsplit(config.endpoint)
        return f"{address.scheme}://{address.hostname}{f':{address.port}' if address.port else ''}{address.path}"
    return config.file or config.provider or ("AWS_MSK_IAM" if config.msk is not None else "sasl.jaas.config")


def _expiry(token: str) -> float | None:
    """The claim `exp` if the token is a JWT; only the broker checks its signature."""
    parts = token.split(".")
    try:
        claims = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _from_file(config: OAuthConfig, named: Callable[[str], str]) -> _Token:
    try:
        return Path(config.file).read_text("ascii").strip(), None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not ASCII"
        setting = named("sasl.oauthbearer.token.endpoint.url")
        raise ConfigError(f"{setting}: {config.file} can't be read: {why}") from None


def _from_provider(config: OAuthConfig, named: Callable[[str], str]) -> _Token:
    module, _, name = config.provider.partition(":")
    setting = f"{named('sasl.oauthbearer.provider')}={config.provider}"
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting} can't be imported: {error}; Spark's workers need the module, too") from None
    try:
        given = function()
    except KlogError:
        raise
    except Exception as error:  # any kind, from the user's function; its text may contain a secret
        raise SaslError(f"{setting} failed with {type(error).__name__}") from None
    value, expires = given if isinstance(given, tuple) else (given, None)
    if not isinstance(value, str) or not (expires is None or isinstance(expires, (int, float))):
        raise ConfigError(f"{setting} returned neither a token nor (token, seconds since the epoch)")
    return value, expires


def _unsecured(config: OAuthConfig, now: float) -> _Token:
    def part(value: dict[str, Any]) -> str:
        return urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    expires = now + config.lifetime_seconds
    claims: dict[str, Any] = {**dict(config.claims or ()), "iat": now, "exp": expires}
    return f"{part({'alg': 'none'})}.{part(claims)}.", expires


def aws_region(host: str) -> str:
    """The AWS region of a broker: from its host name, else AWS_REGION or AWS_DEFAULT_REGION.

    `ConfigError` if none of them says it.
    """
    match = _HOST.search(host)
    region = match.group(1) if match else os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigError(
            f"AWS_MSK_IAM needs the region of broker {host}, whose name is not one of Amazon MSK: set the environment "
            "variable AWS_REGION (in Spark on the driver and the executors)"
        )
    return region


def msk_token(config: MskConfig, region: str, deadline: float) -> _Token:
    """(token, its expiry in seconds since the epoch), signed before `deadline`, a reading of `time.monotonic`.

    `ConfigError` without the signer, `SaslError` without credentials, `ConnectionFailed` if AWS does not answer.
    """
    require("AWS_MSK_IAM", "aws_msk_iam_sasl_signer")
    from aws_msk_iam_sasl_signer import MSKAuthTokenProvider as Signer

    def sign() -> tuple[str, int]:
        if config.role:
            session = (config.session,) if config.session else ()
            return Signer.generate_auth_token_from_role_arn(region, config.role, *session)  # type: ignore[no-any-return]
        if config.profile:
            return Signer.generate_auth_token_from_profile(region, config.profile)  # type: ignore[no-any-return]
        return Signer.generate_auth_token(region)  # type: ignore[no-any-return]

    try:
        token, expires_ms = within(deadline, sign, "signature of AWS")
    except TimeoutError:
        raise ConnectionFailed("AWS did not return credentials in time") from None
    except Exception as error:  # botocore raises many kinds; their texts may hold parts of credentials
        raise SaslError(
            f"no AWS credentials to sign with ({type(error).__name__}): set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or awsProfileName in sasl.jaas.config, or a role"
        ) from None
    return token, expires_ms / 1000


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the client's secret to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _from_endpoint(config: OAuthConfig, deadline: float, named: Callable[[str], str]) -> _Token:
    fields = {"grant_type": "client_credentials"} | ({"scope": config.scope} if config.scope else {})
    pair = [config.client_id, config.client_secret]
    if config.urlencode:
        pair = [urllib.parse.quote_plus(part) for part in pair]
    request = urllib.request.Request(
        config.endpoint,
        urllib.parse.urlencode(fields).encode(),
        {"Authorization": f"Basic {b64encode(':'.join(pair).encode()).decode()}", "Accept": "application/json"},
    )
    until = min(time.monotonic() + _LONGEST_SECONDS, deadline)
    context = _https(config, named)

    def ask() -> Any:
        opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
        try:
            with opener.open(request, timeout=max(0.001, until - time.monotonic())) as answer:
                return json.loads(answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            raise _refused(config, error, named) from None

    try:
        # urllib's own timeout is for each read, and not for the look-up of the name
        answer = within(until, ask, "klog-token")
        lifetime = answer.get("expires_in")
        expires = None if lifetime is None else time.time() + float(lifetime)
        return str(answer["access_token"]), expires
    except KlogError:
        raise
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise SaslError(
                f"the token endpoint {_source(config)} is not trusted: {reason.verify_message}; set "
                f"{named('https.ca.location')} to the file of its authority"
            ) from None
        why = reason if str(reason) else "it did not answer in time"
        raise ConnectionFailed(f"the token endpoint {_source(config)} gives no answer: {why}") from None
    except HTTPException as error:
        what = f"does not answer by HTTP ({type(error).__name__}): is it the right port?"
        raise ConnectionFailed(f"the token endpoint {_source(config)} {what}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise SaslError(f"the token endpoint {_source(config)} answers without an access_token") from None


def _https(config: OAuthConfig, named: Callable[[str], str]) -> ssl.SSLContext | None:
    if not config.endpoint.startswith("https:"):
        return None
    try:
        context = ssl.create_default_context(cafile=config.ca or None)
    except OSError as error:
        raise ConfigError(f"{named('https.ca.location')}={config.ca}: {error.strerror or 'not PEM'}") from None
    # Python's default since 3.13 refuses authorities as `openssl req -x509` makes them; brokers may have such ones
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # see `key_stores.client_context`
    return context


def _refused(config: OAuthConfig, error: urllib.error.HTTPError, named: Callable[[str], str]) -> KlogError:
    secrets = (config.client_secret,)
    try:
        body = json.loads(error.read(_MOST_BYTES))
        parts = [str(body[name]) for name in ("error", "error_description") if name in body]
        said = ": ".join(without_secrets(part, secrets) for part in parts)
    except (OSError, HTTPException, ValueError, TypeError, RecursionError):
        said = ""
    text = f"the token endpoint {_source(config)} answers {error.code}"
    text += f" ({said})" if said else ""
    if error.code >= 500 or error.code == 429:
        return ConnectionFailed(text)
    return SaslError(f"{text}: check the client's id and secret, and {named('sasl.oauthbearer.scope')}")
