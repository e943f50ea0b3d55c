"""jobs/batch_load.py where a rename copies file by file, as on object stores, and is killed within it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Load, rows_of
from tests.spark.support import Sent, create_topic, delete_records, produce

pytestmark = pytest.mark.timeout(900)
_SOURCE = Path(__file__).parent / "copying" / "CopyingFileSystem.java"
_RECORDS = 60


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the file system's classes."""
    folder = tmp_path_factory.mktemp("classes")
    jars = Path(pyspark.__file__).parent / "jars"
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", str(folder), str(_SOURCE)], check=True, timeout=120)
    return folder


@pytest.fixture
def load(cluster: EmbeddedCluster, topic: str, server_dir: Path, classes: Path) -> Iterator[Load]:
    create_topic(cluster.bootstrap_servers, topic, 2)
    made = Load(cluster.bootstrap_servers, topic, server_dir / "load")
    made.settings = [
        f"spark.driver.extraClassPath={classes}",
        "spark.hadoop.fs.copying.impl=CopyingFileSystem",
        "spark.hadoop.fs.AbstractFileSystem.copying.impl=CopyingFileSystem$Abstract",
        f"spark.hadoop.copying.stop={server_dir / 'stop'}",
    ]
    yield made
    made.stop()


def test_a_load_that_is_killed_while_its_batch_is_copied(
    cluster: EmbeddedCluster, topic: str, load: Load, server_dir: Path
) -> None:
    servers, stop, output = cluster.bootstrap_servers, server_dir / "stop", f"copying://{load.output}"
    produce(servers, topic, [Sent(b"%d" % number, partition=number % 2) for number in range(_RECORDS)])
    delete_records(servers, topic, {0: 10})  # the checkpoint then says where the first batch starts
    expected = [(topic, 0, offset) for offset in range(10, 30)] + [(topic, 1, offset) for offset in range(30)]
    for copied in (1, 0, -1):  # some of the files are there, none, all without the manifest
        stop.write_text(str(copied))
        assert load.run("--json", output=output).code != 0
        assert not stop.exists(), "the run ended before it came to the rename"
    reported = load.report(output=output)
    assert [(item["topic"], item["partition"], item["records"]) for item in reported] == [
        (topic, 0, 20),
        (topic, 1, 30),
    ]
    assert [row[2:5] for row in rows_of(load.output)] == expected
    assert (load.output / "batch=0" / "_manifest.json").exists()
    assert not load.staging.exists()

    # a batch that nobody of this load has begun is still not touched
    theirs = load.output / "batch=1"
    theirs.mkdir()
    (theirs / "part-0.parquet").write_bytes(b"theirs")
    produce(servers, topic, [Sent(b"more", partition=0)])
    assert "of another load" in load.run("--json", output=output).complaint()
    assert (theirs / "part-0.parquet").read_bytes() == b"theirs"
