"""`klog schema-registry`: a schema registry over a cluster."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import click

from spark_klog.cli.clusters import ChosenCluster, client_options, servers_option
from spark_klog.cli.output import reading_arguments


@click.command(
    "schema-registry",
    epilog="""\b
Examples:
  klog schema-registry -b broker:9092                       at http://127.0.0.1:8081
  klog schema-registry --cluster prod --listen 0.0.0.0:8081
  curl http://127.0.0.1:8081/subjects
""",
)
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:8081", show_default=True, help="A port alone: 127.0.0.1."
)
@click.option("--topic", default="_schemas", show_default=True, help="The topic with the registry's state.")
@click.option("--stop-with-stdin", is_flag=True, hidden=True, help="Stop when stdin ends, as the parent has exited.")
@servers_option
@client_options
def schema_registry(listen: str, topic: str, stop_with_stdin: bool, cluster: ChosenCluster) -> None:
    """Serve a schema registry, with Confluent's REST API, until SIGTERM or Ctrl-C.

    Its state is the cluster's topic _schemas, which it creates: it takes over from Confluent's registry, and that from
    it. Only one may run at a time. There is no log-in and no encryption: whoever reaches the port may register and
    delete schemas.
    """
    from spark_klog.schema_registry import SchemaRegistry

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with reading_arguments():
        made = SchemaRegistry(cluster.local_settings(), listen, topic)
    with suppress(KeyboardInterrupt), made as registry:
        click.echo(f"klog schema registry ready on {registry.url}")
        if stop_with_stdin:
            while os.read(0, 4096):
                pass
        else:
            while True:
                signal.pause()
