"""Load the client's certificates and keys from PEM, PKCS12 and JKS into an `ssl.SSLContext`.

A file's content decides its type, not its name or `ssl.keystore.type`: keytool writes PKCS12 into files called .jks.
`client_context` loads all of them. `read_jks` reads Java's own key stores (JKS), whose bytes are:

    UINT32 0xFEEDFEED, UINT32 version (1 or 2), UINT32 number of entries
    entry of a key: UINT32 1, UTF alias, INT64 time, UINT32 size and bytes of the protected key,
                    UINT32 number of certificates, the certificates
    entry of a certificate: UINT32 2, UTF alias, INT64 time, the certificate
    20 bytes: SHA-1 of the password in UTF-16BE, "Mighty Aphrodite", and all bytes before

    certificate    UTF type (since version 2), UINT32 size, DER
    protected key  EncryptedPrivateKeyInfo of Sun's algorithm: 20 bytes salt, the key XOR a stream, 20 bytes check;
                   the stream is SHA-1 of password and the 20 bytes before, the check SHA-1 of password and key

UTF is UINT16 size and modified UTF-8. The password of a protected key is the key's, in UTF-16BE.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from spark_klog.errors import ConfigError, DecodeError
from spark_klog.security.config import Source, TlsConfig
from spark_klog.wire.primitives import Reader

JKS_MAGIC = b"\xfe\xed\xfe\xed"
_DIGEST = 20
_PHRASE = b"Mighty Aphrodite"
#: DER of the object id 1.3.6.1.4.1.42.2.17.1.1.
_SUNS_ALGORITHM = bytes.fromhex("060a2b060104012a02110101")
_KEY, _CERTIFICATE = 1, 2
_OCTETS = 0x04
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
        try:
            context.load_verify_locations(cafile=config.revoked.location)
        except OSError as error:
            why = error.strerror or "not PEM"
            raise ConfigError(f"{_place(config.revoked)} is no list of revoked certificates: {why}") from None
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
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
        content = "".join(map(ssl.DER_cert_to_PEM_cert, _store(trust, content, password).certificates)).encode()
    certificates = _blocks(content, "CERTIFICATE")
    if not certificates:
        raise ConfigError(f"{_place(trust)} holds no certificate")
    try:
        context.load_verify_locations(cadata=certificates)
    except ssl.SSLError as error:
        raise ConfigError(f"{_place(trust)} holds a damaged certificate: {error.reason}") from None


def _load_key(context: ssl.SSLContext, config: TlsConfig, chain: Source, key: Source) -> None:
    password = config.key_password or config.store_password
    content = _content(chain)
    if _PEM in content:
        pem = content if key is chain else _content(key) + b"\n" + content
    else:
        store = _store(chain, content, config.store_password, config.key_password)
        if store.key is None:
            raise ConfigError(f"{_place(chain)} holds no private key with its certificate")
        text = ssl.DER_cert_to_PEM_cert(store.key).replace("CERTIFICATE", "PRIVATE KEY")
        pem, password = (text + "".join(map(ssl.DER_cert_to_PEM_cert, store.chain))).encode(), ""
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


def _store(source: Source, content: bytes, password: str, key_password: str = "") -> Store:
    """The content of a JKS or PKCS12 store; `ConfigError` if it is neither."""
    if content[:4] == JKS_MAGIC:
        return read_jks(content, password, _place(source), key_password)
    if content[:1] != bytes([_SEQUENCE]):
        raise ConfigError(f"{_place(source)} must be PEM, PKCS12 or JKS")
    try:
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
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
    chain = [certificate.public_bytes(Encoding.DER) for certificate in (own, *others) if certificate is not None]
    if key is None or own is None:
        return Store(chain)
    return Store(chain, key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()), chain)


@dataclass
class Store:
    """The content of a store: trusted certificates, and the first private key (PKCS8) with its chain; all in DER."""

    certificates: list[bytes] = field(default_factory=list)
    key: bytes | None = field(default=None, repr=False)
    chain: list[bytes] = field(default_factory=list)


def read_jks(content: bytes, password: str, place: str, key_password: str = "") -> Store:
    """Read a store. `key_password` defaults to `password`; without a password the store's integrity is not checked.

    `ConfigError` names `place` if the store is damaged or a password is wrong.
    """
    given = password.encode("utf-16-be")
    if password and not hmac.compare_digest(
        hashlib.sha1(given + _PHRASE + content[:-_DIGEST]).digest(), content[-_DIGEST:]
    ):
        raise ConfigError(f"{place} can't be opened: its password is wrong, or the file is damaged")
    store = Store()
    reader = Reader(content[:-_DIGEST])

    def certificate() -> bytes:
        if version > 1:
            reader.take(reader.int16())
        return bytes(reader.take(reader.int32()))

    try:
        reader.take(len(JKS_MAGIC))
        version, count = reader.int32(), reader.int32()
        for _ in range(count):
            kind = reader.int32()
            reader.take(reader.int16())
            reader.take(8)
            if kind == _CERTIFICATE:
                store.certificates.append(certificate())
                continue
            if kind != _KEY:
                raise DecodeError(f"entry of kind {kind}")
            protected = bytes(reader.take(reader.int32()))
            chain = [certificate() for _ in range(reader.int32())]
            if store.key is None:
                store.key, store.chain = _unprotected(protected, key_password or password, place), chain
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{place} is a damaged JKS store: {error}") from None
    return store


def _unprotected(protected: bytes, password: str, place: str) -> bytes:
    position = protected.find(_SUNS_ALGORITHM)
    if position < 0:
        raise ConfigError(f"{place}: the key is protected by another algorithm than keytool's")
    position = protected.index(bytes([_OCTETS]), position + len(_SUNS_ALGORITHM)) + 1
    size_bytes = protected[position] & 0x7F if protected[position] > 0x7F else 0
    data = protected[position + 1 + size_bytes :]
    secret = password.encode("utf-16-be")
    block, hidden, check = data[:_DIGEST], data[_DIGEST:-_DIGEST], data[-_DIGEST:]
    stream = bytearray()
    while len(stream) < len(hidden):
        block = hashlib.sha1(secret + block).digest()
        stream += block
    key = bytes(hidden_byte ^ stream_byte for hidden_byte, stream_byte in zip(hidden, stream, strict=False))
    if not hmac.compare_digest(hashlib.sha1(secret + key).digest(), check):
        raise ConfigError(f"{place}: the key can't be decrypted: check the password of the key")
    return key
