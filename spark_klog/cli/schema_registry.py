"""Options of commands that ask a schema registry: its URL and settings, beside those of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from spark_klog.base.names import OF_REGISTRY
from spark_klog.base.settings import parse_settings
from spark_klog.cli.clusters import ChosenCluster
from spark_klog.cli.output import reading_arguments
from spark_klog.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from spark_klog.schemas.column_format import ColumnFormat
    from spark_klog.schemas.registry.client import RegistrySettings


class ChosenRegistry(NamedTuple):
    """The registry that options name: --schema-registry, -X."""

    url: str | None = None
    texts: Sequence[str] = ()

    @property
    def is_given(self) -> bool:
        return self.url is not None or bool(self.texts)

    def own(self) -> dict[str, str]:
        """The settings of -X; `ConfigError` for those of others."""
        own = parse_settings(self.texts)
        for name in own:
            if not name.startswith(OF_REGISTRY):
                raise ConfigError(
                    f"-X {name}: -X takes {OF_REGISTRY}* settings here; settings of the client go in --command-config"
                )
        return own

    @reading_arguments()
    def settings(self, cluster: ChosenCluster, client: Mapping[str, str]) -> RegistrySettings | None:
        """The registry's settings, also those of the cluster, checked; None without any. `ConfigError`."""
        own = self.own()
        chosen = cluster.registry_settings(self.url, own)
        if not chosen:
            return None
        from spark_klog.schemas.registry.client import RegistrySettings
        from spark_klog.schemas.registry.settings import registry_config

        registry_config(chosen, OF_REGISTRY, client)
        return RegistrySettings.beside(client, chosen)


def check_text(form: ColumnFormat) -> ColumnFormat:
    """The format; `ConfigError` if the text of its schema can't be read."""
    try:
        if form.text is not None:
            _ = form.reader().type
    except SchemaError as error:
        raise ConfigError(f"--{form.column}-schema: {error}") from None
    return form


def registry_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --schema-registry and -X; the function gets them as `registry`."""

    @click.option(
        "--schema-registry", "-r", "url", metavar="URL", help="Default: schema.registry.url of the client settings."
    )
    @click.option(
        "-X", "texts", multiple=True, metavar="schema.registry.NAME=VALUE", help="Of the registry; repeatable."
    )
    @wraps(function)
    def command(*args: Any, url: str | None, texts: Sequence[str], **others: Any) -> Any:
        return function(*args, registry=ChosenRegistry(url, texts), **others)

    return command
