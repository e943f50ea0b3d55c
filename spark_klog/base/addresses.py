"""Addresses of directories: a path or a URI."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from spark_klog.base.extras import require
from spark_klog.errors import ConfigError

#: Two letters at least: C:\ is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
#: As Hadoop's Path reads it, so that Spark means the same folder: %, # and ? are characters of the path.
_FILE = re.compile(r"file:(?://(?:localhost)?(?=/)|(?=/(?!/)))(.*)", re.IGNORECASE | re.DOTALL)
#: Our own option of a URI, which pyarrow does not know.
_SINGLE_WRITER = re.compile(r"(?<=[?&])single_writer=(true|false)(?:&|$)", re.IGNORECASE)
#: Azure's abfss://CONTAINER@ACCOUNT names no user.
_CONTAINER = r"(?!(?:abfs|wasb)s?://[^/\s:@'\"]*@)"
_USER = re.compile(
    rf"(?<![A-Za-z0-9+.-]){_CONTAINER}([A-Za-z][A-Za-z0-9+.-]+:(?://)?)(?:[^/\s'\"]*|[^/\s:'\"]+:[^\s'\"]*)@"
)


#: Secrets in the query of Azure's URIs.
_SIGNATURE = re.compile(r"([?&](?:sig|client_secret)=)[^&\s'\")]+", re.IGNORECASE)


def without_user(text: str) -> str:
    """The text with user, password and signature of its URIs masked, for messages: s3://KEY:SECRET@BUCKET.

    A secret may contain a slash that is not encoded, and the slashes after the scheme may be missing.
    """
    return _SIGNATURE.sub(r"\1***", _USER.sub(r"\1***@", text))


def local_path(address: str) -> str | None:
    """The folder of a path or file:PATH, None for a URI of another kind; ConfigError for an invalid one.

    Nothing is decoded: file:///a%20b is the folder /a%20b, as it is for Spark. ~/ is the user's home, which shells do
    not put in place of it in quotes and after delta:.
    """
    scheme = _SCHEME.match(address)
    if scheme is None:
        if not address:
            raise ConfigError("the URI of the directories is empty: give a path or zookeeper://HOST:PORT")
        return os.path.expanduser(address) if address.startswith("~/") else address
    if scheme[1].lower() != "file":
        return None
    match = _FILE.fullmatch(address)
    if match is None:
        raise ConfigError(f"{without_user(address)!r} is not a local folder: write file:///PATH")
    return match[1]


def is_single_writer(address: str) -> bool:
    """Whether a URI has the option single_writer=true: nobody else writes there, so nothing need keep two apart."""
    option = _SINGLE_WRITER.search(address)
    return option is not None and option[1].lower() == "true"


def filesystem_at(address: str) -> tuple[Any, str]:
    """The pyarrow file system of a path or URI, and the path there.

    `ConfigError` for a URI that pyarrow does not know, OSError if the file system can't be opened.
    """
    require(without_user(address), "pyarrow")
    from pyarrow.fs import FileSystem, LocalFileSystem

    local = local_path(address)
    if local is not None:
        return LocalFileSystem(), local
    try:
        filesystem, path = FileSystem.from_uri(_SINGLE_WRITER.sub("", address).rstrip("?&"))
    except ValueError as error:
        advice = "give a path or a URI of pyarrow's file systems (for a tree also zookeeper://HOST:PORT)"
        if re.match("s3[an]?:", address, re.IGNORECASE):  # Hadoop's names, which jobs on Spark have
            advice = "write s3://BUCKET/FOLDER"
        raise ConfigError(
            f"{without_user(address)!r} names no directory ({without_user(str(error))}): {advice}"
        ) from None
    key = urlsplit(address).netloc.rpartition("@")[0].partition(":")[2]
    if filesystem.type_name == "abfs" and key:  # which pyarrow reads, and then does not use
        from pyarrow.fs import AzureFileSystem

        filesystem = AzureFileSystem(**{**filesystem.__reduce__()[1][0], "account_key": unquote(key)})
    return filesystem, path
