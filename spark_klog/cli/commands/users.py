"""`klog users`: edit a broker's users file (`klog.users.file`)."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from spark_klog.base.names import SCRAM_HASHES
from spark_klog.broker.security.config import ANONYMOUS
from spark_klog.broker.security.mechanisms import make_credential
from spark_klog.broker.security.users import check_user_name, read_users, remove_user, set_credentials
from spark_klog.cli.output import reading_arguments, say
from spark_klog.errors import ConfigError
from spark_klog.protocol.tables.security import MAX_ITERATIONS, MIN_ITERATIONS

_file = click.option(
    "--file", "path", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The users file."
)


@click.group()
def users() -> None:
    """Add, list and remove the users of a broker and their SCRAM credentials, in a file."""


@users.command(
    epilog="""\b
Examples:
  klog users add alice --file users.conf              asks for the password
  klog users add alice --file users.conf --password-stdin < password
"""
)
@click.argument("name")
@_file
@click.option(
    "--mechanism",
    "mechanisms",
    multiple=True,
    type=click.Choice(list(SCRAM_HASHES)),
    help="Repeatable; default: both. PLAIN works with either; if they have different passwords, with that of SHA-256.",
)
@click.option(
    "--iterations",
    default=MIN_ITERATIONS,
    show_default=True,
    type=click.IntRange(MIN_ITERATIONS, MAX_ITERATIONS),
    help="Rounds of hashing in the stored credentials: more make guessing passwords slower.",
)
@click.option("--password-stdin", is_flag=True, help="Read the password from a line of stdin.")
def add(name: str, path: Path, mechanisms: tuple[str, ...], iterations: int, password_stdin: bool) -> None:
    """Add a user, or change a user's password. The user's rules in the file stay."""
    with reading_arguments():
        check_user_name(name)
        if name == ANONYMOUS:
            raise ConfigError(f"{ANONYMOUS} stands for clients without authentication, and can't have a password")
        password = sys.stdin.readline().rstrip("\r\n") if password_stdin else _ask()
        if not password or "\0" in password:
            raise ConfigError("the password is empty or contains a NUL")
    chosen = mechanisms or tuple(SCRAM_HASHES)
    others = set_credentials(path, name, {kind: make_credential(kind, password, iterations) for kind in chosen})
    kept = f"; {others[0]} keeps its password: give no --mechanism to change both" if others else ""
    click.echo(f"user {name} has {' and '.join(chosen)} in {path}{kept}")


def _ask() -> str:
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask for the password: give it by --password-stdin")
    password: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    return password


@users.command(
    "list",
    epilog="""\b
Examples:
  klog users list --file users.conf
  klog users list --file users.conf --json | jq -r 'select(.admin).name'
""",
)
@_file
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON per user.")
def list_users(path: Path, as_json: bool) -> None:
    """List names, mechanisms and rules, without credentials."""
    for name, user in sorted(read_users(path).items()):
        rules = {"admin": user.admin, "read": [*user.read], "write": [*user.write]}
        parts = [name, ",".join(user.credentials) or "-"]
        parts += ["admin"] if user.admin else []
        parts += [f"{key}={','.join(named)}" for key in ("read", "write") if (named := getattr(user, key))]
        say(as_json, {"name": name, "mechanisms": [*user.credentials], **rules}, "\t".join(parts))


@users.command(
    epilog="""\b
Examples:
  klog users remove alice --file users.conf
"""
)
@click.argument("name")
@_file
def remove(name: str, path: Path) -> None:
    """Remove a user and its rules."""
    remove_user(path, name)
    click.echo(f"user {name} removed from {path}")
