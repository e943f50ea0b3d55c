"""Stores of Delta tables: a URI of pyarrow's file systems, or a file system with its keys, as deltalake takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from spark_klog.files.keys import KeyedUri

_GOOGLE = "https://storage.googleapis.com"
_OF_ACCOUNT = ("client_email", "private_key", "private_key_id")


def storage_options(uri: str) -> tuple[str, dict[str, str]]:
    """A URI of pyarrow's file systems as deltalake takes it: without user and query, which become options.

    What the URI does not say is looked for in the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on) by
    deltalake, as by pyarrow.
    """
    if isinstance(uri, KeyedUri):
        return str(uri), keyed_options(uri.filesystem())
    parts = urlsplit(uri)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    user, _, host = parts.netloc.rpartition("@")
    key, _, secret = map(unquote, user.partition(":"))
    if parts.scheme in ("s3", "s3a"):
        return f"s3://{host}{parts.path}", _s3_options(key, secret, query)
    if parts.scheme in ("gs", "gcs"):
        options = {}
        base = f"{query.get('scheme', 'https')}://{query['endpoint_override']}" if "endpoint_override" in query else ""
        if base:
            options = {"google_base_url": base, "allow_http": str(base.startswith("http:")).lower()}
        if key == "anonymous":  # deltalake's option for it is of reads alone
            account = {"gcs_base_url": base or _GOOGLE, "disable_oauth": True, **dict.fromkeys(_OF_ACCOUNT, "")}
            options["google_service_account_key"] = json.dumps(account)
        return f"gs://{host}{parts.path}", options
    if parts.scheme in ("abfs", "abfss") and (key or secret or query):
        return _azure_options(key, secret, host, parts.path, query)
    return uri, {}


def _s3_options(key: str, secret: str, query: Mapping[str, str]) -> dict[str, str]:
    options = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret} if key else {}
    endpoint = query.get("endpoint_override", "")
    if endpoint and "://" not in endpoint:
        endpoint = f"{query.get('scheme', 'https')}://{endpoint}"
    if endpoint:
        options["AWS_ENDPOINT_URL"] = endpoint
    if query.get("region"):
        options["AWS_REGION"] = query["region"]
    if query.get("anonymous", "").lower() in ("true", "1"):
        options["AWS_SKIP_SIGNATURE"] = "true"
    used = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if used and not endpoint:
        options["AWS_ENDPOINT_URL"] = used
    if used.startswith("http:"):
        options["AWS_ALLOW_HTTP"] = "true"
    return options


def _azure_options(user: str, key: str, host: str, path: str, query: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Of CONTAINER[:KEY]@ACCOUNT.dfs..., [:KEY@]ACCOUNT.dfs.../CONTAINER and ACCOUNT:KEY@HOST/CONTAINER."""
    options = {"azure_storage_account_key": key} if key else {}
    if host.endswith((".dfs.core.windows.net", ".blob.core.windows.net")):
        options["azure_storage_account_name"] = host.partition(".")[0]
        container, rest = (user, path) if user else _first(path)
    else:
        is_plain = query.get("enable_tls", "").lower() == "false"
        options["azure_storage_account_name"] = user
        options["azure_storage_endpoint"] = f"{'http' if is_plain else 'https'}://{host}/{user}"
        options["allow_http"] = str(is_plain).lower()
        container, rest = _first(path)
    return f"az://{container}{rest}", options


def _first(path: str) -> tuple[str, str]:
    """The container that a path begins with, and what follows, with its slash."""
    container, slash, rest = path.lstrip("/").partition("/")
    return container, slash + rest


def keyed_options(filesystem: Any) -> dict[str, str]:
    """Options of deltalake with the keys of a pyarrow file system."""
    known = filesystem.__reduce__()[1][0]
    if filesystem.type_name == "abfs":
        return {"azure_storage_account_name": known["account_name"], "azure_storage_sas_key": known["sas_token"]}
    query = {"endpoint_override": known["endpoint_override"], "region": known["region"], "scheme": known["scheme"]}
    options = _s3_options(known["access_key"], known["secret_key"], query)
    return {**options, "AWS_SESSION_TOKEN": known["session_token"]} if known["session_token"] else options
