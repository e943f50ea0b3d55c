"""Load the client's certificates and keys from PEM, PKCS12 and JKS into an `ssl.SSLContext`.

A file's content decides its type, not its name or `ssl.keystore.type`: keytool writes PKCS12 into files called .jks.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from spark_klog.client.security.settings.config import Source, TlsConfig
from spark_klog.client.security.tls.jks import JKS_MAGIC, read_jks
from spark_klog.errors import ConfigError

_PEM = b"-----BEGIN "
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \1-----", re.DOTALL)
#: The tag of an ASN.1 SEQUENCE, with which PKCS12 begins.
_SEQUENCE = 0x30
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


def client_context(config: TlsConfig) -> ssl.SSLContext:
    """The context for connections, cached until one of its files changes.

    `ConfigError` names the setting if a file is missing, has a wrong format, or its password is wrong.
    """
    sources = (config.trust, config.chain, config.key, config.revoked)
    return _context(config, tuple(_changed(source) for source in sources if source is not None))


def _changed(source: Source) -> tuple[int, int] | None:
    try:
        status = os.stat(source.location) if source.location else None
    except OSError as error:
        raise ConfigError(f"{source.setting}={source.location} can't be read: {error.strerror}") from None
    return status and (status.st_mtime_ns, status.st_ino)


@lru_cache(8)
def _context(config: TlsConfig, changed: tuple[tuple[int, int] | None, ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = config.check_hostname
    context.verify_mode = ssl.CERT_REQUIRED if config.verify else ssl.CERT_NONE
    # as in Java any certificate in the store is trusted, also an intermediate authority or the broker's own
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    versions = sorted(_VERSIONS[name] for name in config.protocols)
    context.minimum_version, context.maximum_version = versions[0], versions[-1]
    if config.ciphers:
        try:
            context.set_ciphers(config.ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"{config.prefix}ssl.cipher.suites: OpenSSL knows none of these; names are OpenSSL's, like "
                "ECDHE-RSA-AES128-GCM-SHA256, joined by colons"
            ) from None
    if config.trust is None:
        context.load_default_certs()
    else:
        _load_trust(context, config.trust, config.trust_password)
    if config.revoked is not None:
        _load_revoked(context, config.revoked)
    if config.chain is not None:
        assert config.key is not None
        _load_key(context, config, config.chain, config.key)
    return context


def _content(source: Source) -> bytes:
    if source.pem:
        return source.pem.encode()
    try:
        return Path(source.location).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source.setting}={source.location} can't be read: {error.strerror}") from None


def _place(source: Source) -> str:
    """A source's name for messages; never its PEM text."""
    return f"{source.setting}={source.location}" if source.location else source.setting


def _load_trust(context: ssl.SSLContext, trust: Source, password: str) -> None:
    if trust.location and Path(trust.location).is_dir():
        context.load_verify_locations(capath=trust.location)
        return
    content = _content(trust)
    if _PEM not in content:
        found = _certificates(trust, content, password)
        content = "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode()
    certificates = _blocks(content, "CERTIFICATE")
    if not certificates:
        raise ConfigError(f"{_place(trust)} holds no certificate")
    try:
        context.load_verify_locations(cadata=certificates)
    except ssl.SSLError as error:
        raise ConfigError(f"{_place(trust)} holds a damaged certificate: {error.reason}") from None


def _load_revoked(context: ssl.SSLContext, revoked: Source) -> None:
    try:
        context.load_verify_locations(cafile=revoked.location)
    except OSError as error:
        raise ConfigError(
            f"{_place(revoked)} is no list of revoked certificates: {error.strerror or 'not PEM'}"
        ) from None
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _load_key(context: ssl.SSLContext, config: TlsConfig, chain: Source, key: Source) -> None:
    password = config.key_password or config.store_password
    content = _content(chain)
    if _PEM in content:
        pem = content if key is chain else _content(key) + b"\n" + content
    else:
        pem, password = _key_and_chain(chain, content, config), ""
    if not _blocks(pem, "CERTIFICATE"):
        raise ConfigError(f"{_place(chain)} holds no certificate")
    if b"PRIVATE KEY-----" not in pem:
        raise ConfigError(f"{_place(key)} holds no private key in PEM")
    try:
        with _as_file(pem) as path:
            # without this, OpenSSL would ask for a password at the terminal
            context.load_cert_chain(path, password=lambda: password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{_place(key)} is not the key of the certificate in {_place(chain)}") from None
        if b"ENCRYPTED" in pem:
            raise ConfigError(
                f"the key in {_place(key)} can't be decrypted: check {config.prefix}ssl.key.password"
            ) from None
        raise ConfigError(f"{_place(key)}: the key or its certificate is damaged: {error.reason}") from None
    except ValueError as error:  # OpenSSL takes at most 1,024 bytes
        setting = "ssl.key.password" if config.key_password else "ssl.keystore.password"
        raise ConfigError(f"{config.prefix}{setting}: {error}; encrypt the key with a shorter one") from None


def _blocks(content: bytes, kind: str) -> str:
    """The PEM blocks of a kind, without the text between them."""
    text = content.decode("latin-1")
    return "\n".join(match[0] for match in _BLOCK.finditer(text) if match[1].endswith(kind))


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path to read the content from. If the system allows it, the file is in memory: keys stay off the disk."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("spark_klog"), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(content)
            file.flush()
            yield file.name


def _certificates(source: Source, content: bytes, password: str) -> list[bytes]:
    """The certificates in a store, in DER."""
    if content[:4] == JKS_MAGIC:
        return read_jks(content, password, _place(source)).certificates
    from cryptography.hazmat.primitives.serialization import Encoding

    _, own, others = _pkcs12(source, content, password)
    return [certificate.public_bytes(Encoding.DER) for certificate in [*others, *([own] if own else [])]]


def _key_and_chain(source: Source, content: bytes, config: TlsConfig) -> bytes:
    """The key and the certificates in a store, as unencrypted PEM."""
    place = _place(source)
    if content[:4] == JKS_MAGIC:
        store = read_jks(content, config.store_password, place, config.key_password)
        if store.key is None:
            raise ConfigError(f"{place} holds no private key")
        key = ssl.DER_cert_to_PEM_cert(store.key).replace("CERTIFICATE", "PRIVATE KEY")
        return (key + "".join(map(ssl.DER_cert_to_PEM_cert, store.chain))).encode()
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private, own, others = _pkcs12(source, content, config.store_password)
    if private is None or own is None:
        raise ConfigError(f"{place} holds no private key with its certificate")
    pem: bytes = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem + b"".join(certificate.public_bytes(Encoding.PEM) for certificate in [own, *others])


def _pkcs12(source: Source, content: bytes, password: str) -> tuple[Any, Any, list[Any]]:
    """The key, its certificate and the other certificates of a PKCS12 store, as objects of `cryptography`."""
    if content[:1] != bytes([_SEQUENCE]):
        raise ConfigError(f"{_place(source)} must be PEM, PKCS12 or JKS")
    try:
        from cryptography.hazmat.primitives.serialization.pkcs12 import load_key_and_certificates
    except ImportError:
        raise ConfigError(
            f"{_place(source)} is PKCS12, which needs the package cryptography: pip install 'spark-klog[pkcs12]', or "
            "convert it: openssl pkcs12 -in STORE -out FILE.pem"
        ) from None
    try:
        key, own, others = load_key_and_certificates(content, password.encode() or None)
    except ValueError:
        raise ConfigError(f"{_place(source)} can't be opened: check its password, or the file is damaged") from None
    return key, own, list(others)
