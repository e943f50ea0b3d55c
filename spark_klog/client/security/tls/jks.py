"""Read Java's own key stores (JKS).

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
from dataclasses import dataclass, field

from spark_klog.errors import ConfigError

JKS_MAGIC = b"\xfe\xed\xfe\xed"
_DIGEST = 20
_PHRASE = b"Mighty Aphrodite"
#: DER of the object id 1.3.6.1.4.1.42.2.17.1.1.
_SUNS_ALGORITHM = bytes.fromhex("060a2b060104012a02110101")
_KEY, _CERTIFICATE = 1, 2
_OCTETS = 0x04


@dataclass
class Jks:
    """The content of a store: trusted certificates, and the first private key (PKCS8) with its chain; all in DER."""

    certificates: list[bytes] = field(default_factory=list)
    key: bytes | None = field(default=None, repr=False)
    chain: list[bytes] = field(default_factory=list)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise ValueError("it ends too early")
        part = self._data[self._position : end]
        self._position = end
        return part

    def number(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def skip_utf(self) -> None:
        self.take(int.from_bytes(self.take(2), "big"))

    def certificate(self, version: int) -> bytes:
        if version > 1:
            self.skip_utf()
        return self.take(self.number())


def read_jks(content: bytes, password: str, place: str, key_password: str = "") -> Jks:
    """Read a store. `key_password` defaults to `password`; without a password the store's integrity is not checked.

    `ConfigError` names `place` if the store is damaged or a password is wrong.
    """
    given = password.encode("utf-16-be")
    if password and not hmac.compare_digest(
        hashlib.sha1(given + _PHRASE + content[:-_DIGEST]).digest(), content[-_DIGEST:]
    ):
        raise ConfigError(f"{place} can't be opened: its password is wrong, or the file is damaged")
    store = Jks()
    reader = _Reader(content[:-_DIGEST])
    try:
        reader.take(len(JKS_MAGIC))
        version, count = reader.number(), reader.number()
        for _ in range(count):
            kind = reader.number()
            reader.skip_utf()
            reader.take(8)
            if kind == _CERTIFICATE:
                store.certificates.append(reader.certificate(version))
                continue
            if kind != _KEY:
                raise ValueError(f"entry of kind {kind}")
            protected = reader.take(reader.number())
            chain = [reader.certificate(version) for _ in range(reader.number())]
            if store.key is None:
                store.key, store.chain = _unprotected(protected, key_password or password, place), chain
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
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
    key = bytes(one ^ other for one, other in zip(hidden, stream, strict=False))
    if not hmac.compare_digest(hashlib.sha1(secret + key).digest(), check):
        raise ConfigError(f"{place}: the key can't be decrypted: check the password of the key")
    return key
