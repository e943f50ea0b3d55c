"""A folder, local or on one of pyarrow's file systems: list, read, replace at once, create if absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_klog.base.addresses import filesystem_at, local_path, without_user
from spark_klog.errors import KlogError
from spark_klog.files.folder import LocalFolder, reason
from spark_klog.files.keys import KeyedUri

if TYPE_CHECKING:
    from spark_klog.files.arrow import ArrowFolder


def open_folder(address: str, failure: type[KlogError] | None = None) -> LocalFolder | ArrowFolder:
    """The folder at a path or URI; `ConfigError` for a URI that pyarrow does not know, `failure` or OSError."""
    path = local_path(address)
    if path is not None:
        return LocalFolder(path, failure)
    filesystem, base = open_filesystem(address, failure)
    from spark_klog.files.arrow import ArrowFolder

    return ArrowFolder(filesystem, base, without_user(address), failure, address)


def open_filesystem(address: str, failure: type[KlogError] | None = None) -> tuple[Any, str]:
    """The pyarrow file system of a URI, and the path there; errors as of `open_folder`."""
    try:
        return (address.filesystem(), address.path) if isinstance(address, KeyedUri) else filesystem_at(address)
    except OSError as error:
        if failure is None:
            raise
        raise failure(f"{without_user(address)} can't be opened: {reason(error)}") from None
