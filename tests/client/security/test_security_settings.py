"""TLS and SASL settings under Java's and librdkafka's names: their meaning, contradictions, and hidden secrets."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from spark_klog.client.settings import client_config, without_effect
from spark_klog.errors import ConfigError
from spark_klog.security.config import SaslConfig, Settings
from spark_klog.security.settings import parse_jaas
from spark_klog.spark.options import source_options
from spark_klog.spark.write.sink_options import sink_options

SERVERS = {"bootstrap.servers": "h:1"}
SECRET = 's3cret;="\\ value'
KAFKAS = "org.apache.kafka.common.security."
PLAIN_MODULE, SCRAM_MODULE = f"{KAFKAS}plain.PlainLoginModule", f"{KAFKAS}scram.ScramLoginModule"
OAUTH_MODULE = f"{KAFKAS}oauthbearer.OAuthBearerLoginModule"
KERBEROS_MODULE, MSK_MODULE = (
    "com.sun.security.auth.module.Krb5LoginModule",
    "software.amazon.msk.auth.iam.IAMLoginModule",
)
SASL = SERVERS | {"security.protocol": "SASL_SSL"}
PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def _sasl(settings: dict[str, str]) -> SaslConfig:
    found = client_config(settings).security.sasl
    assert found is not None
    return found


@pytest.mark.parametrize("shaded", ["", "kafkashaded."])
@pytest.mark.parametrize(
    ("mechanism", "module"),
    [("PLAIN", PLAIN_MODULE), ("SCRAM-SHA-256", SCRAM_MODULE), ("SCRAM-SHA-512", SCRAM_MODULE)],
)
def test_jaas_and_librdkafkas_names_are_the_same(mechanism: str, module: str, shaded: str) -> None:
    quoted = SECRET.replace("\\", "\\\\").replace('"', '\\"')
    jaas = f'{shaded}{module} required\n  username="alice"\n  password="{quoted}";'
    by_java = _sasl(SASL | {"sasl.mechanism": mechanism, "sasl.jaas.config": jaas})
    by_c = _sasl(SASL | {"sasl.mechanisms": mechanism, "sasl.username": "alice", "sasl.password": SECRET})
    assert by_java == by_c == SaslConfig(mechanism, "alice", SECRET)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("a.B required;", {}),
        ("a.B REQUIRED x=y z='q\"' ;", {"x": "y", "z": 'q"'}),
        ('a.B optional /* a "comment" */ x="//no comment" // x="1"\n;', {"x": "//no comment"}),
        (r'a.B sufficient x="\t\101\0\\";', {"x": "\tA\0\\"}),
        ('a.B required x = "1";', {"x": "1"}),
    ],
)
def test_jaas(text: str, options: dict[str, str]) -> None:
    assert parse_jaas(text, "sasl.jaas.config") == ("a.B", options)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('a.B required password="top-secret', "a quotation mark or a comment has no end"),
        ('a.B required password="top-secret"', "the ; at its end is missing"),
        ('a.B password="top-secret";', "it does not begin with a class and a flag"),
        ('a.B required password "top-secret";', "option 1 is not NAME=VALUE"),
        ("a.B required password=;", "option 1 has no value"),
        ('a.B required x="top-secret"; c.D required;', "it has several login modules"),
        ("", "it does not begin with a class and a flag"),
    ],
)
def test_jaas_that_is_wrong_is_not_shown(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kafka.sasl.jaas.config: {why}")) as caught:
        parse_jaas(text, "kafka.sasl.jaas.config")
    assert "secret" not in str(caught.value)


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"security.protocol": "TLS"}, "x.security.protocol=TLS: set PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL"),
    ({"sasl.username": "a"}, "x.sasl.username is set, but x.security.protocol=PLAINTEXT uses no SASL"),
    ({"ssl.ca.location": "f"}, "x.ssl.ca.location is set, but x.security.protocol=PLAINTEXT uses no TLS: set"),
    ({"security.protocol": "SSL", "sasl.mechanism": "PLAIN"}, "x.security.protocol=SSL uses no SASL: set x.security"),
    ({"security.protocol": "SASL_PLAINTEXT", "ssl.key.password": "a"}, "uses no TLS: set x.security.protocol=SASL_SSL"),
    ({"security.protocol": "SASL_SSL"}, "x.sasl.mechanism is not set: set PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, "),
    ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSAPI"}, "x.sasl.mechanism=GSAPI: set PLAIN, "),
    ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "needs a name and a password, and x.sasl.username"),
    (
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "PLAIN", "sasl.username": "a"},
        "x.sasl.mechanisms=PLAIN needs a name and a password, and x.sasl.password is not set",
    ),
    (
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.mechanisms": "PLAIN"},
        "x.sasl.mechanism and x.sasl.mechanisms are the same setting: remove one of them",
    ),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": f'{SCRAM_MODULE} required username="a" password="top-secret";',
        },
        f"x.sasl.jaas.config: {SCRAM_MODULE} is for SCRAM, but x.sasl.mechanism=PLAIN",
    ),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": f'{PLAIN_MODULE} required username="a" passwort="top-secret";',
        },
        f"option 2 of {PLAIN_MODULE} is not supported: did you mean password? username, password are",
    ),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "a",
            "sasl.jaas.config": f'{PLAIN_MODULE} required username="a" password="top-secret";',
        },
        "x.sasl.jaas.config and x.sasl.username exclude each other: remove one",
    ),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.jaas.config": f'{KERBEROS_MODULE} required useTicketCache="true";',
        },
        f"x.sasl.jaas.config: {KERBEROS_MODULE} is for GSSAPI, but x.sasl.mechanism=PLAIN",
    ),
    (
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.kerberos.service.name": "kafka"},
        "x.sasl.kerberos.service.name is for GSSAPI, but the mechanism is PLAIN",
    ),
    (
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI", "sasl.kerberos.keytab": "/k"},
        "x.sasl.kerberos.keytab needs x.sasl.kerberos.principal",
    ),
    (
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI", "sasl.password": "top-secret"},
        "x.sasl.password is not for GSSAPI, which takes tickets of Kerberos",
    ),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": f'{MSK_MODULE} required awsProfilName="a";',
        },
        f"option 1 of {MSK_MODULE} is not supported: did you mean awsProfileName?",
    ),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.client.callback.handler.class": "com.example.Handler",
        },
        "setting x.sasl.client.callback.handler.class is not supported",
    ),
    ({"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}, "needs exactly one source of tokens"),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": "https://h/token",
        },
        "needs the client's id and secret",
    ),
    *(
        (
            {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.oauthbearer.token.endpoint.url": url,
                "sasl.oauthbearer.client.id": "a",
                "sasl.oauthbearer.client.secret": "top-secret",
            },
            "x.sasl.oauthbearer.token.endpoint.url is not a URL of https, http or file",
        )
        for url in (
            *("h/token", "https:///token", "https://h:port/token", "https://h:99999/token", "https://[::1/token"),
            *("https://a:top-secret@h/token", "https://h/a b", "https://h/\u00e4", "HTTPS://h/token"),
        )
    ),
    (
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.provider": "function"},
        "x.sasl.oauthbearer.provider=function: set MODULE:FUNCTION",
    ),
    ({"security.protocol": "SSL", "ssl.ca.pem": "file"}, "x.ssl.ca.pem is not PEM"),
    ({"security.protocol": "SSL", "ssl.key.location": "f"}, "x.ssl.key.location is set without the certificate"),
    (
        {"security.protocol": "SSL", "ssl.ca.location": "f", "ssl.truststore.certificates": PEM},
        "x.ssl.ca.location and x.ssl.truststore.certificates exclude each other",
    ),
    ({"security.protocol": "SSL", "ssl.truststore.type": "BKS"}, "x.ssl.truststore.type=BKS: set PEM, PKCS12 or JKS"),
    ({"security.protocol": "SSL", "ssl.enabled.protocols": "SSLv3"}, "=SSLv3: set TLSv1.2, TLSv1.3 or both"),
    ({"ssl.truststore.locaton": "f"}, "unknown client setting 'x.ssl.truststore.locaton'; did you mean x.ssl.trust"),
    ({"sasl.pasword": "top-secret"}, "unknown client setting 'x.sasl.pasword'; did you mean x.sasl.password?"),
    ({"ssl.engine.factory.class": "C"}, "setting x.ssl.engine.factory.class is not supported: it names a Java class"),
    ({"ssl.engine.location": "C"}, "setting x.ssl.engine.location is not supported: no engine of OpenSSL is loaded"),
    ({"sasl.kerberos.service.name": "kafka"}, "x.security.protocol=PLAINTEXT uses no SASL"),
    (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.login.callback.handler.class": "com.example.Handler",
        },
        "set x.sasl.oauthbearer.provider=MODULE:FUNCTION",
    ),
]


@pytest.mark.parametrize(("settings", "why"), REFUSED)
def test_contradictions_are_named_before_connecting(settings: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        client_config(SERVERS | settings, "x.")
    assert "top-secret" not in str(caught.value)


def test_host_names_are_checked_unless_told_otherwise() -> None:
    def tls(**more: str) -> Any:
        settings = {name.replace("_", "."): value for name, value in more.items()}
        return client_config(SERVERS | {"security.protocol": "ssl"} | settings).security.tls

    assert tls().check_hostname
    assert tls(ssl_endpoint_identification_algorithm="HTTPS").check_hostname
    assert not tls(ssl_endpoint_identification_algorithm="").check_hostname
    assert not tls(ssl_endpoint_identification_algorithm="none").check_hostname
    assert tls(ssl_endpoint_identification_algorithm="").verify
    unverified = tls(enable_ssl_certificate_verification="false")
    assert not unverified.verify
    assert not unverified.check_hostname


def test_what_has_no_effect_is_listed() -> None:
    given = SERVERS | {"ssl.protocol": "TLSv1.3", "sasl.login.refresh.window.factor": "0.8"}
    client_config(given)
    assert without_effect(given) == ["sasl.login.refresh.window.factor", "ssl.protocol"]


def test_no_repr_shows_a_secret() -> None:
    jaas = f'{SCRAM_MODULE} required username="alice" password="top-secret";'
    settings = SASL | {
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": jaas,
        "ssl.truststore.password": "top-secret",
        "ssl.keystore.key": "-----BEGIN ENCRYPTED PRIVATE KEY-----\ntop-secret\n",
        "ssl.keystore.certificate.chain": PEM,
        "ssl.key.password": "top-secret",
    }
    options = {f"kafka.{name}": value for name, value in settings.items()}
    oauth = client_config(
        SASL
        | {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f'{OAUTH_MODULE} required clientId="me" clientSecret="top-secret";',
            "sasl.oauthbearer.token.endpoint.url": "https://h/token",
        }
    )
    assert oauth.security.sasl is not None
    assert oauth.security.sasl.oauth is not None
    assert oauth.security.sasl.oauth.client_secret == "top-secret"
    with pytest.raises(ConfigError, match="holds a key that is not encrypted, and Spark would show it") as caught:
        sink_options(options | {"kafka.ssl.keystore.key": "-----BEGIN PRIVATE KEY-----\ntop-secret\n"})
    assert "top-secret" not in str(caught.value)
    source, sink = source_options(options | {"subscribe": "t"}, False), sink_options(options)
    for item in (client_config(settings), oauth, source, sink, Settings(settings) | {}, parse_jaas(jaas, "x")):
        assert "top-secret" not in f"{item!r} {item}"
    # pickled as for Spark's workers: no setting is lost, and no secret is shown
    again = pickle.loads(pickle.dumps((source, sink)))  # noqa: S301 - its own
    assert again == (source, sink)
    assert again[0].client["sasl.jaas.config"] == jaas
    assert "top-secret" not in repr(again)


@pytest.mark.parametrize(
    "jaas",
    [
        f"{PLAIN_MODULE} required username=alice password=my s3kr1t=x;",
        f"{PLAIN_MODULE} required username=alice password=my s3kr1t=;",
        f'{PLAIN_MODULE} required username="alice" password="ab" s3kr1t="x";',
        "alice:s3kr1t required username=x password=y;",
        "s3kr1tKrb5LoginModule required;",
    ],
)
def test_no_part_of_a_jaas_string_is_shown_that_may_be_a_password(jaas: str) -> None:
    with pytest.raises(ConfigError, match=r"sasl\.jaas\.config: ") as caught:
        client_config(SASL | {"sasl.mechanism": "PLAIN", "sasl.jaas.config": jaas})
    assert "s3kr1t" not in str(caught.value)


@pytest.mark.parametrize("servers", ["SASL_SSL://alice:s3kr1t@h:9093", "alice:s3kr1t@h:9093", "h:1,x:s3kr1t@h"])
def test_a_password_in_an_address_is_refused_and_not_shown(servers: str) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers has a character @, and is not shown") as caught:
        client_config({"bootstrap.servers": servers})
    assert "s3kr1t" not in str(caught.value)


@pytest.mark.parametrize("rest", ["\nsasl.password=s3kr1t", " password: s3kr1t", "\n'ssl.key.password' = s3kr1t"])
@pytest.mark.parametrize("name", ["acks", "linger.ms", "bootstrap.servers", "security.protocol", "sasl.mechanism"])
def test_a_password_in_the_value_of_another_setting_is_not_shown(name: str, rest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{name} is not shown, as a password or another secret is in its"
    ) as caught:
        client_config(SERVERS | {name: f"PLAIN{rest}"})
    assert "s3kr1t" not in str(caught.value)


def test_a_password_in_a_list_of_servers_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"^bootstrap\.servers is not shown, as a password") as caught:
        client_config({"bootstrap.servers": ["h:9093", "i:9093\nsasl.password=s3kr1t"]})
    assert "s3kr1t" not in str(caught.value)


@pytest.mark.parametrize("line", ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7", "-----BEGIN", "ab/cd+"])
def test_a_line_of_a_key_in_the_place_of_a_name_is_not_shown(line: str) -> None:
    given = Settings(SERVERS | {line: line})
    assert line not in repr(given)
    with pytest.raises(ConfigError, match="each line of PEM but the last ends with a backslash") as caught:
        client_config(given)
    assert line not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["sasl.oauthbearer.config", "ssl.ca.certificate.stores", "ssl.curves.list", "ssl.sigalgs.list", "oauth_cb"]
)
def test_settings_of_librdkafka_that_are_not_supported_have_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {name} is not supported: .*(set|OpenSSL)"):
        client_config(SASL | {name: "x"})
