"""`klog doctor`: find what keeps klog from working here, and say what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from spark_klog.cli.clusters import cluster_options, cluster_settings, quiet_client
from spark_klog.cli.doctor.checkups import Finding, machine, round_trip, run, way_to


@click.command(
    epilog="""\b
Examples:
  klog doctor                                        this machine
  klog doctor -b broker:9093 --command-config client.properties --no-spark
"""
)
@cluster_options
@click.option("--no-spark", is_flag=True, help="Leave out the round trip through Spark, which starts a JVM.")
@click.pass_context
def doctor(ctx: click.Context, servers: str | None, command_config: Path | None, as_json: bool, no_spark: bool) -> None:
    """Check this machine and, with --bootstrap-server or --cluster, the way to a cluster. Exits with 1 on a finding.

    Checks Python, the Python of Spark's workers, Java, pyspark and the kernel; then DNS, TCP, TLS and Kafka (SASL,
    ApiVersions) of each server, metadata, and the brokers that it names; at last, as it takes up to a minute, rows
    through Spark and a broker of its own.
    """
    quiet_client(ctx)
    settings = cluster_settings(servers, command_config)
    is_well, progress = True, Console(stderr=True, quiet=as_json)
    for stage, findings in _stages(settings, no_spark):
        while True:
            with progress.status(stage):  # on a terminal only
                finding = next(findings, None)
            if finding is None:
                break
            is_well = is_well and not finding.advice
            click.echo(json.dumps(asdict(finding)) if as_json else _lines(finding))
    if not is_well:
        sys.exit(1)


def _stages(settings: dict[str, str], no_spark: bool) -> Iterator[tuple[str, Iterator[Finding]]]:
    """What is checked, for the terminal, and the findings: the cheap ones first."""
    yield "checking this machine", machine()
    if "bootstrap.servers" in settings:
        yield "checking the way to the cluster", way_to(settings)
    if not no_spark:
        check = (run(name, action) for name, action in [("Spark", round_trip)])
        yield "starting Spark, writing and reading rows: this may take a minute", check


def _lines(finding: Finding) -> str:
    mark = "NOT WELL" if finding.advice else "ok"
    line = f"{mark:8}  {finding.check:24} {finding.seconds * 1000:7,.0f} ms  {finding.found}"
    return f"{line}\n{'':10}-> {finding.advice}" if finding.advice else line
