"""Make certificates for tests with the openssl command."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

KEY_PASSWORD = "key-secret"


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass
class Certificates:
    """PEM files. `server` and `client` hold key, certificate and CA; KEY_PASSWORD encrypts the server's key."""

    ca: Path
    server: Path
    client: Path


def make_certificates(folder: Path, *, expired: bool = False) -> Certificates:
    """Make a CA and certificates of a server at 127.0.0.1 and a client CN=reader; the CA is never `expired`."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, ca = folder / "ca.key", folder / "ca.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    _openssl("req", "-x509", *curve, "-nodes", "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=klog tests")
    made = {}
    for name, subject, extra in (
        ("server", "/CN=broker", ("-passout", f"pass:{KEY_PASSWORD}")),
        ("client", "/O=Example, Inc./CN=reader", ("-nodes",)),
    ):
        key, request, certificate = (folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
        _openssl("req", *curve, *extra, "-keyout", key, "-out", request, "-subj", subject)
        extensions = folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        signer = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, "-out", certificate, *signer, "-days", "-1" if expired else "2")
        made[name] = folder / f"{name}.pem"
        made[name].write_text(key.read_text() + certificate.read_text() + ca.read_text())
    return Certificates(ca, made["server"], made["client"])


@dataclass
class Chained:
    """PEM files of a root that has signed two intermediate authorities, of which the first has signed both ends.

    `server` and `client` hold key, certificate and intermediate; the `own_` ones only the certificate.
    """

    root: Path
    intermediate: Path
    other_intermediate: Path
    server: Path
    client: Path
    own_server: Path
    own_client: Path


def make_chained(folder: Path) -> Chained:
    """Make the certificates of a server at 127.0.0.1 and a client, without a key password."""
    folder.mkdir(parents=True, exist_ok=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    def made(name: str, signer: str, extension: str) -> Path:
        key, request, certificate, extensions = (folder / f"{name}.{end}" for end in ("key", "csr", "pem", "ext"))
        _openssl("req", *curve, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions.write_text(f"{extension}\n")
        signed = ("-CA", folder / f"{signer}.pem", "-CAkey", folder / f"{signer}.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, "-out", certificate, *signed, "-extfile", extensions, "-days", "2")
        return certificate

    root = folder / "root.pem"
    _openssl("req", "-x509", *curve, "-keyout", folder / "root.key", "-out", root, "-days", "2", "-subj", "/CN=root")
    intermediate, other = (made(name, "root", "basicConstraints=critical,CA:TRUE") for name in ("first", "second"))
    own, whole = {}, {}
    for name in ("server", "client"):
        own[name] = made(name, "first", "subjectAltName=IP:127.0.0.1")
        whole[name] = folder / f"{name}-chain.pem"
        parts = (folder / f"{name}.key", own[name], intermediate)
        whole[name].write_text("".join(part.read_text() for part in parts))
    return Chained(root, intermediate, other, whole["server"], whole["client"], own["server"], own["client"])


def trusting(ca: Path) -> ssl.SSLContext:
    """A client's context that trusts `ca`.

    From Python 3.13 on, `ssl.create_default_context` rejects the certificates that openssl makes by default.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return context
