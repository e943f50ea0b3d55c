"""Spark with Hadoop's own S3A file system, which pyspark does not include, on an S3 server on this machine."""

from __future__ import annotations

from pathlib import Path

from tests.support.packages.maven import resolve

#: The release of pyspark's hadoop-client-api.
_HADOOP = "3.5.0"
_SDK = "2.35.4"
_ACCELERATOR = "1.3.1"
#: S3A's dependency is the SDK's bundle of all services, of 600 MB.
_MODULES = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
#: Spark has its own.
_NETTY = ("buffer", "codec", "common", "handler", "resolver", "transport")
_IN_SPARK = ("slf4j", *(f"netty-{part}" for part in _NETTY))


def s3a_jars() -> list[Path]:
    """The jars of S3A and of what it needs of AWS's SDK; downloads them once."""
    alone = (
        f"org.apache.hadoop:hadoop-aws:{_HADOOP}",
        f"software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:{_ACCELERATOR}",
    )
    folders = (
        resolve(f"s3a-{_HADOOP}", alone, dependencies=False),
        resolve(f"s3a-sdk-{_SDK}", tuple(f"software.amazon.awssdk:{module}:{_SDK}" for module in _MODULES)),
    )
    jars = [jar for folder in folders for jar in sorted(folder.glob("*.jar"))]
    return [jar for jar in jars if not jar.name.startswith(_IN_SPARK)]


def s3a_settings(address: str) -> dict[str, str]:
    """Spark's settings for the S3 server at HOST:PORT."""
    options = {
        "endpoint": f"http://{address}",
        "endpoint.region": "us-east-1",
        "access.key": "key",
        "secret.key": "secret",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
    }
    jars = ",".join(map(str, s3a_jars()))
    return {"spark.jars": jars, **{f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()}}
