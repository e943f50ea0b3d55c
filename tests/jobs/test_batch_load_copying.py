"""jobs/batch_load.py if a rename copies file by file, as on object stores, and is killed within it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from spark_klog.embedded import EmbeddedCluster
from tests.jobs.support import Driver, Load, rows_of
from tests.spark.support import Sent, create_topic, delete_records, produce

pytestmark = pytest.mark.timeout(900)
_SOURCE = Path(__file__).parent / "copying" / "CopyingFileSystem.java"
_RECORDS = 60


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Spark's, for copying:///; a run is killed as CopyingFileSystem.java says while `tmp_path / "stop"` is there."""
    classes = tmp_path / "classes"
    jars = Path(pyspark.__file__).parent / "jars"
    command = ["javac", "-J-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", "-d", str(classes), str(_SOURCE)]
    subprocess.run(command, check=True, timeout=120)
    return [
        f"spark.driver.extraClassPath={classes}",
        "spark.hadoop.fs.copying.impl=CopyingFileSystem",
        "spark.hadoop.fs.AbstractFileSystem.copying.impl=CopyingFileSystem$Abstract",
        f"spark.hadoop.copying.stop={tmp_path / 'stop'}",
    ]


@pytest.fixture
def driver(settings: list[str], server_dir: Path) -> Iterator[Driver]:
    made = Driver(server_dir / "driver", settings)
    yield made
    made.stop()


@pytest.fixture
def load(cluster: EmbeddedCluster, topic: str, server_dir: Path, driver: Driver, settings: list[str]) -> Iterator[Load]:
    create_topic(cluster.bootstrap_servers, topic, 2)
    made = Load(cluster.bootstrap_servers, topic, server_dir / "load", driver, settings)
    yield made
    made.stop()


def test_a_load_that_is_killed_while_its_batch_is_copied(
    cluster: EmbeddedCluster, topic: str, load: Load, driver: Driver, server_dir: Path, tmp_path: Path
) -> None:
    servers, stop = cluster.bootstrap_servers, tmp_path / "stop"
    produce(servers, topic, [Sent(b"%d" % number, partition=number % 2) for number in range(_RECORDS)])
    delete_records(servers, topic, {0: 10})  # the checkpoint then says where the first batch starts
    expected = [(topic, 0, offset) for offset in range(10, 30)] + [(topic, 1, offset) for offset in range(30)]
    stop.write_text("2")
    assert load.submit("--json", output=f"copying://{load.output}").code != 0
    assert not stop.exists(), "the run ended before it came to the rename"
    [staged] = (path for path in load.staging.iterdir() if path.is_dir())
    names = sorted(path.name for path in staged.iterdir())
    assert sorted(path.name for path in (load.output / "batch=0").iterdir()) == names[:2]
    assert len(names) > 2
    # of a run before, which wrote other files
    manifest = json.loads((load.staging / f"{staged.name}.json").read_text())
    (load.staging / "0-0123.json").write_text(json.dumps({**manifest, "files": {"part-0.parquet": 1}}))

    # What a kill before the first file, after the second, and after the last one leaves.
    for copied in (0, 2, len(names)):
        folder = server_dir / f"copied-{copied}"
        shutil.copytree(server_dir / "load", folder)
        again = Load(servers, topic, folder, driver)
        for number, name in enumerate(names):
            there = again.output / "batch=0" / name
            if number < copied:
                shutil.copyfile(again.staging / staged.name / name, there)
            else:
                there.unlink(missing_ok=True)
        output = f"copying://{again.output}"
        reported = again.report(output=output)
        assert [(item["topic"], item["partition"], item["records"]) for item in reported] == [
            (topic, 0, 20),
            (topic, 1, 30),
        ]
        assert [row[2:5] for row in rows_of(again.output)] == expected
        assert (again.output / "batch=0" / "_manifest.json").exists()
        assert not again.staging.exists()
        written = sorted(path.name for path in (again.output / "batch=0").glob("part-*"))
        assert (written == [name for name in names if name.startswith("part-")]) == (copied == len(names))

    # a batch that nobody of this load has begun is still not touched
    theirs = again.output / "batch=1"
    theirs.mkdir()
    (theirs / "part-0.parquet").write_bytes(b"theirs")
    produce(servers, topic, [Sent(b"more", partition=0)])
    assert "belongs to another load" in again.run("--json", output=output).complaint()
    assert (theirs / "part-0.parquet").read_bytes() == b"theirs"
