"""A Kerberos realm: MIT's KDC and tools (from Debian), and the package gssapi, which is built with their headers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from unittest import mock

from tests.support.clients.build import built
from tests.support.packages.registries import download, program
from tests.support.servers.certificates import Certificates
from tests.support.servers.kafka import HOST, Kafka, ServerStartError, Version, free_port
from tests.support.servers.secure_kafka import tls_properties

REALM = "KLOG.TEST"
MODULE = "com.sun.security.auth.module.Krb5LoginModule"
#: Security protocols by listener; the second one needs certificates.
LISTENERS = {"KERBEROS": "SASL_PLAINTEXT", "KERBEROS_TLS": "SASL_SSL"}
_SECONDS = 30.0
_CONF = """[libdefaults]
 default_realm = {realm}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {realm} = {{
  kdc = {host}:{port}
 }}
"""
_KDC_CONF = """[kdcdefaults]
 kdc_ports = ""
 kdc_tcp_listen = {host}:{port}
[realms]
 {realm} = {{
  database_name = {folder}/principals
  key_stash_file = {folder}/stash
  acl_file = {folder}/acl
  max_life = 1h
 }}
"""


def gssapi_path() -> Path:
    """A folder with the package gssapi for this Python; `RegistryUnreachable` if it can't be built."""
    program(("krb5-config",), "libkrb5-dev")
    marker = Path(sys.executable).resolve()

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        quick = ("env", "CFLAGS=-O0 -g0")  # halves the CPU time
        download("gssapi", [*quick, *command, "--target", str(folder), "gssapi"], cwd=folder)

    return built(f"gssapi-{sys.version_info[0]}.{sys.version_info[1]}", [marker], build)


class Realm:
    """A KDC on 127.0.0.1 with principals and keytabs in `folder`; `environment` is for its clients."""

    def __init__(self, folder: Path) -> None:
        self._kdc = program(("krb5kdc",), "krb5-kdc")
        self._admin = program(("kadmin.local",), "krb5-admin-server")
        self._kinit = program(("kinit",), "krb5-user")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.conf = folder / "krb5.conf"
        self._port = free_port()
        kdc_conf = folder / "kdc.conf"
        self.conf.write_text(_CONF.format(realm=REALM, host=HOST, port=self._port))
        kdc_conf.write_text(_KDC_CONF.format(realm=REALM, host=HOST, port=self._port, folder=folder))
        self.environment = {"KRB5_CONFIG": str(self.conf)}
        self._server = self.environment | {"KRB5_KDC_PROFILE": str(kdc_conf)}
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, *command: str, stdin: str = "", **environment: str) -> str:
        done = subprocess.run(
            command,
            env={**os.environ, **self._server, **environment},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def __enter__(self) -> Realm:
        utility = program(("kdb5_util",), "krb5-kdc")
        self._run(utility, "create", "-s", "-r", REALM, "-P", "master")
        with (self.folder / "kdc.log").open("wb") as log:
            command = [self._kdc, "-n", "-r", REALM]
            environment = {**os.environ, **self._server}
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                socket.create_connection((HOST, self._port), 1).close()
                return self
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.stop()
                    raise ServerStartError((self.folder / "kdc.log").read_text()) from None
                time.sleep(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_SECONDS)

    def keytab(self, principal: str) -> Path:
        """Add a principal with a random key; return its keytab."""
        path = self.folder / f"{principal.replace('/', '-')}.keytab"
        self._run(self._admin, "-r", REALM, "-q", f"addprinc -randkey {principal}")
        self._run(self._admin, "-r", REALM, "-q", f"ktadd -k {path} {principal}")
        return path

    def ticket(self, principal: str, keytab: Path) -> Path:
        """Get a ticket for the principal; return the ticket cache."""
        cache = self.folder / f"{principal}.ccache"
        self._run(self._kinit, "-k", "-t", str(keytab), principal, KRB5CCNAME=str(cache))
        return cache


@contextmanager
def kerberos_kafka(
    version: Version, folder: Path, realm: Realm, certificates: Certificates | None = None
) -> Iterator[Kafka]:
    """Start a broker with the additional listener KERBEROS (GSSAPI), and with certificates also KERBEROS_TLS."""
    principal = f"kafka/{HOST}"
    keytab = realm.keytab(principal)
    login = f'{MODULE} required useKeyTab=true storeKey=true keyTab="{keytab}" principal="{principal}@{REALM}";'
    properties: dict[str, object] = {"sasl.enabled.mechanisms": "GSSAPI", "sasl.kerberos.service.name": "kafka"}
    options = f"-Djava.security.krb5.conf={realm.conf}"
    if version == "0.10.2.2":  # it can't configure JAAS per listener
        jaas = realm.folder / "broker.conf"
        jaas.write_text(f"KafkaServer {{\n {login}\n}};\n")
        options += f" -Djava.security.auth.login.config={jaas}"
    else:
        for listener in LISTENERS:
            properties[f"listener.name.{listener.lower()}.gssapi.sasl.jaas.config"] = login
    listeners = dict(LISTENERS)
    if certificates is None:
        del listeners["KERBEROS_TLS"]
    else:
        properties |= tls_properties(certificates, realm.folder)
    kafka = Kafka(version, folder, properties, listeners=listeners)
    with mock.patch.dict(os.environ, {"JAVA_TOOL_OPTIONS": options}):
        kafka.start()
    with kafka:
        yield kafka
