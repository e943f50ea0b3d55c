"""Requests to an object store that pyarrow's file systems can't send; obstore does, with their keys and endpoint.

* Create an object only if there is none of its name, so that of several writers exactly one succeeds: S3 and Azure have
  the header `If-None-Match: *` for it, GCS has `x-goog-if-generation-match: 0` (apache/arrow, issue 44281).
* Remove a blob of Azure: pyarrow leases it before, ends the whole process if a request about the lease fails
  (`LeaseGuard::BreakBeforeDeletion` of azurefs.cc), and leaves the lease for 15 s if it is killed. obstore's request is
  a batch of the container's, which not all shared access signatures allow: with these pyarrow goes on doing it.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spark_klog.base.clock import doubled
from spark_klog.base.extras import is_installed, require

#: Name of the metadata that tells who has created an object. Azure's names are letters, digits and "_".
WRITER = "klogwriter"
_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
#: Of one request: content is small.
_CLIENT = {"timeout": "10s", "connect_timeout": "5s"}
_RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=15)}
#: Answers after which the same request would have the same answer; not a timeout, a conflict, too many requests.
_REFUSED = re.compile(r"non-2xx status code: 4(?!08|09|12|29)\d\d")
#: Signatures of Azure are in the query.
_QUERY = re.compile(r"\?[^\s'\")]+")


class StoreRequests:
    """Creates and removes objects in a bucket or container, of which `store` is obstore's.

    An answer may be lost after the store has carried out a conditional put: repeated, by obstore or here, the request
    is refused then. So each object has the id of the call that has created it in its metadata, and a call that is
    refused looks whose the object is.
    """

    def __init__(self, store: Any, seconds: float = _SECONDS) -> None:
        self._store, self._seconds = store, seconds

    def create(self, key: str, content: bytes) -> bool:
        """Create an object; False if another call has created it, this process's or another one's.

        OSError if that is not known within the deadline, or the store has no conditional put. The object may be there
        then, or come to be there later, with `content`; another call for the same key tells.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError

        writer, failures = uuid.uuid4().hex, 0
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                obstore.put(self._store, key, content, attributes={WRITER: writer}, mode="create", use_multipart=False)
                return True
            except (AlreadyExistsError, PreconditionError) as error:  # also if two such requests are under way (409)
                failure: Exception = error
            except (NotSupportedError, NotImplementedError) as error:
                raise no_conditional_put(f"the store ({_reason(error)})") from None
            except (BaseError, OSError) as error:
                failure = error
                if _is_final(error):
                    raise OSError(_reason(error)) from None
            try:
                owner = self._writer_of(key)
            except (BaseError, OSError) as error:
                failure = error
            else:
                if owner is not None:
                    return owner == writer
            failures += 1
            pause = doubled(_FIRST_PAUSE, _LONGEST_PAUSE, failures)
            if time.monotonic() + pause >= deadline:
                raise OSError(f"whether it was created is not known ({_reason(failure)})") from None
            time.sleep(pause)

    def remove(self, key: str) -> None:
        """Remove an object; OSError, FileNotFoundError if there is none. After another error it may be gone."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            raise
        except (
            BaseError,
            OSError,
            TypeError,
        ) as error:  # the latter of a key that others have given a control character
            raise OSError(_reason(error)) from None

    def _writer_of(self, key: str) -> str | None:
        """The id of the call that has created an object: "" of an object of another kind, None without an object."""
        import obstore

        try:
            attributes = obstore.get(self._store, key, options={"head": True}).attributes
        except FileNotFoundError:
            return None
        return str(attributes.get(WRITER, ""))


def no_conditional_put(what: str) -> OSError:
    """The error for a store in which nothing keeps two writers apart."""
    return OSError(
        f"{what} has no conditional put (If-None-Match), so that two runs at once would mix: use a store that has it, "
        "or add single_writer=true to the options of the URI, if no other run writes there at the same time"
    )


def _is_final(error: Exception) -> bool:
    """Whether the store has refused the request for good: nothing was created."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    refused = _REFUSED.search(str(error).partition("\n")[0])
    return refused is not None or isinstance(error, PermissionDeniedError | UnauthenticatedError | FileNotFoundError)


def _reason(error: Exception) -> str:
    return _QUERY.sub("?...", str(error).partition("\n")[0])


def store_requests(filesystem: Any, bucket: str, uri: str, address: str) -> StoreRequests | None:
    """The requests to a bucket of pyarrow's file system that `uri` names; None for one that is no object store.

    `MissingPackage` without obstore; `address` names the folder in it.
    """
    makers: dict[str, Callable[[Mapping[str, Any], str, str], Any]] = {"s3": _s3, "gcs": _gcs, "abfs": _azure}
    make = makers.get(filesystem.type_name)
    if make is None:
        return None
    require(f"{address}: a store in which two runs at once must not mix", "obstore")
    # what pyarrow pickles are the settings that it has found in the URI, the environment and the bucket
    settings: Mapping[str, Any] = filesystem.__reduce__()[1][0]
    return StoreRequests(make(settings, bucket, uri))


def azure_remover(filesystem: Any, container: str, uri: str) -> StoreRequests | None:
    """The requests by which to remove blobs of Azure; None if pyarrow is to do it, as in other stores."""
    if filesystem.type_name != "abfs" or not is_installed("obstore"):
        return None
    settings: Mapping[str, Any] = filesystem.__reduce__()[1][0]
    is_signed = settings["sas_token"] or "sig" in parse_qs(urlsplit(uri).query)
    return None if is_signed else StoreRequests(_azure(settings, container, uri))


def _s3(settings: Mapping[str, Any], bucket: str, uri: str) -> Any:
    from obstore.store import S3Store

    store: Any = S3Store
    client: dict[str, Any] = dict(_CLIENT)
    config: dict[str, Any] = {"region": settings["region"] or "us-east-1"}
    if endpoint := settings["endpoint_override"]:
        endpoint = _with_scheme(endpoint, settings)
        if settings.get("force_virtual_addressing"):
            config["virtual_hosted_style_request"] = True
            endpoint = endpoint.replace("://", f"://{bucket}.", 1)
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint  # the latter also if the environment has another
        client["allow_http"] = endpoint.startswith("http://")
    if authorities := settings.get("tls_ca_file_path"):
        client["root_certificate"] = Path(authorities).read_bytes()
    provider = None
    if settings["anonymous"]:
        config["skip_signature"] = True
    elif key := settings["access_key"]:
        # as a provider, or a session's token in the environment would be added to the key of the URI
        credential = {
            "access_key_id": key,
            "secret_access_key": settings["secret_key"],
            "token": settings["session_token"] or None,
            "expires_at": None,
        }

        def provider() -> dict[str, Any]:
            return credential
    elif "AWS_ACCESS_KEY_ID" not in os.environ and is_installed("boto3"):
        provider = _boto3_provider()
    return store(bucket, config=config, client_options=client, retry_config=_RETRIES, credential_provider=provider)


def _boto3_provider() -> Any:
    """Credentials as the SDK of AWS looks for them, profiles among them; None if it finds none."""
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    return None if session.get_credentials() is None else Boto3CredentialProvider(session)


def _gcs(settings: Mapping[str, Any], bucket: str, uri: str) -> Any:
    from obstore.store import GCSStore

    store: Any = GCSStore
    client: dict[str, Any] = dict(_CLIENT)
    config: dict[str, Any] = {}
    if endpoint := settings["endpoint_override"]:
        config["base_url"] = _with_scheme(endpoint, settings)
        client["allow_http"] = config["base_url"].startswith("http://")
    if settings["anonymous"] or urlsplit(uri).username == "anonymous":  # pyarrow does not tell the latter
        config |= {"skip_signature": True, "bearer_token": "anonymous"}  # of reads; puts need some token
    elif token := settings["access_token"]:
        config["bearer_token"] = token
    return store(bucket, config=config, client_options=client, retry_config=_RETRIES)


def _azure(settings: Mapping[str, Any], bucket: str, uri: str) -> Any:
    from obstore.store import AzureStore

    store: Any = AzureStore
    client: dict[str, Any] = dict(_CLIENT)
    account, authority = settings["account_name"], settings["blob_storage_authority"]
    host = f"{account}{authority}" if authority.startswith(".") else f"{authority}/{account}"
    endpoint = f"{settings['blob_storage_scheme']}://{host}"
    config: dict[str, Any] = {"account_name": account, "endpoint": endpoint}
    client["allow_http"] = endpoint.startswith("http://")
    query = urlsplit(uri).query
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    if key := settings["account_key"]:
        config["account_key"] = key
    elif settings["sas_token"] or "sig" in options:
        config["sas_key"] = settings["sas_token"] or query
    elif options.get("credential_kind") == "anonymous":
        config["skip_signature"] = True
    for name in ("client_id", "client_secret", "tenant_id"):
        if value := settings[name] or options.get(name):
            config[name] = value
    return store(bucket, config=config, client_options=client, retry_config=_RETRIES)


def _with_scheme(endpoint: str, settings: Mapping[str, Any]) -> str:
    return endpoint if "://" in endpoint else f"{settings['scheme']}://{endpoint}"
