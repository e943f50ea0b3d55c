"""Settings of a registry: what they mean, what is refused, and that no secret is shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from spark_klog.errors import ConfigError, MissingPackage
from spark_klog.schemas.registry.client import RegistryClient
from spark_klog.schemas.registry.settings import registry_config
from spark_klog.security.config import Settings

_URL = {"url": "http://a:8081"}
_OAUTH = {
    "bearer.auth.credentials.source": "oauthbearer",
    "bearer.auth.issuer.endpoint.url": "https://issuer/token",
    "bearer.auth.client.id": "me",
    "bearer.auth.client.secret": "very-secret",
}


def test_urls_and_users() -> None:
    config = registry_config({"url": "http://u:p%40ss@a:8081/x/, https://b"})
    assert config.urls == ("http://a:8081/x", "https://b")
    assert (config.user, config.password) == ("u", "p@ss")
    assert config.tls is not None
    config = registry_config({**_URL, "basic.auth.user.info": "u:p:q"})
    assert (config.user, config.password) == ("u", "p:q")
    assert registry_config({**_URL, "basic.auth.username": "u", "basic.auth.password": "p:q"}) == config


@pytest.mark.parametrize("path", ["/subjects", "/base/schemas/"])
def test_a_url_of_a_part_of_the_api(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^schemaRegistryUrl is the registry's address, without /s"):
        registry_config({"url": f"http://a:8081{path}"}, "schemaRegistry.")


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFO", "user:very-secret")
    (tmp_path / "token").write_text("very-secret\n")
    shown = []
    for settings in (
        {**_URL, "basic.auth.user.info": "user:very-secret"},
        {**_URL, "basic.auth.user.info": "env:INFO"},
        {**_URL, "bearer.auth.token": f"file:{tmp_path / 'token'}"},
        {**_URL, **_OAUTH, "bearer.auth.logical.cluster": "lsrc-1", "bearer.auth.identity.pool.id": "pool-1"},
        {"url": "http://user:very-secret@a:8081"},
    ):
        config = registry_config(settings)
        oauth = config.oauth
        assert "very-secret" in (config.password, config.token, oauth and oauth.client_secret)
        shown.append(repr(config))
        if "@" not in settings["url"]:
            shown.append(repr(Settings(settings)))
    assert not re.search("very-secret", " ".join(shown))
    assert dict(registry_config({**_URL, **_OAUTH, "bearer.auth.logical.cluster": "l"}).headers) == {
        "target-sr-cluster": "l"
    }


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, r"^schema\.registry\.url is required"),
        ({"url": "a:8081"}, r"^schema\.registry\.url must be http://HOST:PORT"),
        ({"url": "http://a:8081, ftp://very-secret@b"}, "and its URL 2 is not$"),
        ({"url": "http://u:1/very-secret@a:8081"}, "and its URL 1 is not$"),
        ({"url": "http://u:very-secret,p@a:8081"}, "and its URL 1 is not$"),
        ({"url": "http://a:port"}, "and 'http://a:port' is not$"),
        ({"url": "registry:8081"}, "must be http://HOST:PORT or https://HOST:PORT, and 'registry:8081' is not$"),
        ({**_URL, "urls": "x"}, r"unknown setting schema\.registry\.urls: did you mean url\?"),
        ({**_URL, "basic.auth.user.info": "very-secret"}, r"basic\.auth\.user\.info must be USER:PASSWORD"),
        (
            {**_URL, "basic.auth.password": "very-secret"},
            r"basic\.auth\.username needs schema\.registry\.basic\.auth\.pa",
        ),
        (
            {**_URL, "basic.auth.username": "u", "basic.auth.password": "p", "basic.auth.user.info": "u:very-secret"},
            r"excludes schema\.registry\.basic\.auth\.username",
        ),
        ({**_URL, "basic.auth.credentials.source": "USER_INFO"}, r"basic\.auth\.user\.info must be"),
        ({**_URL, "basic.auth.credentials.source": "URL"}, "the URL has no user"),
        ({**_URL, "basic.auth.credentials.source": "SASL_INHERIT"}, "no SASL user"),
        ({**_URL, "basic.auth.credentials.source": "FILE"}, "set URL, USER_INFO or SASL_INHERIT"),
        ({**_URL, "bearer.auth.scope": "s"}, r"needs schema\.registry\.bearer\.auth\.credentials\.source"),
        ({**_URL, **_OAUTH, "bearer.auth.client.secret": ""}, r"set schema\.registry\.bearer\.auth\.client\.secret"),
        ({**_URL, "bearer.auth.token": "t", "basic.auth.user.info": "u:very-secret"}, "excludes a user"),
        ({**_URL, "ssl.ca.location": "/ca.pem"}, "is not https"),
        ({**_URL, "retries.wait.ms": "soon"}, r"schema\.registry\.retries\.wait\.ms=soon"),
        ({**_URL, "basic.auth.user.info": "env:KLOG_NOWHERE"}, "KLOG_NOWHERE is not set"),
    ],
)
def test_what_is_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        registry_config(settings)
    assert "very-secret" not in str(caught.value)


def test_without_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingPackage, match=r"^a schema registry needs httpx.*pip install 'spark-klog\[registry\]'$"):
        RegistryClient(registry_config(_URL))
