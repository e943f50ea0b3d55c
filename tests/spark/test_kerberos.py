"""Spark by GSSAPI with a keytab: batch, stream and write at Apache Kafka, with a KDC of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kafka import HOST
from tests.support.kerberos import Realm, gssapi_path, kerberos_kafka
from tests.support.spark_home import make_spark_home

pytestmark = pytest.mark.peer
ROOT = Path(__file__).parents[2]


def test_write_read_and_stream(module_server_dir: Path, tmp_path: Path) -> None:
    library = gssapi_path()
    (tmp_path / "home").mkdir()
    home = make_spark_home(tmp_path / "home")
    with (
        Realm(module_server_dir / "kdc") as realm,
        kerberos_kafka("4.1.0", module_server_dir / "kafka", realm) as kafka,
    ):
        for topic in ("written", "streamed"):
            kafka.create_topic(topic)
        options = {
            "kafka.bootstrap.servers": f"{HOST}:{kafka.ports['KERBEROS']}",
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "GSSAPI",
            "kafka.sasl.kerberos.keytab": str(realm.keytab("alice")),
            "kafka.sasl.kerberos.principal": "alice",
        }
        path = os.pathsep.join([str(library), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.kerberos_program", str(home), str(tmp_path), json.dumps(options)],
            env={**os.environ, **realm.environment, "PYTHONPATH": path, "SPARK_LOCAL_IP": HOST},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = [str(number) for number in range(20)]
    assert json.loads((tmp_path / "found.json").read_text()) == [wanted, wanted]
