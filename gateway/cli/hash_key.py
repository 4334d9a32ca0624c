"""``headstart hash-key``: turn an API key into what the configuration keeps of it."""

from __future__ import annotations

import hashlib
import secrets
import sys

import msgspec
import rich_click as click

from gateway.cli.terminal import NOTES, print_json
from gateway.config import ApiKey

__all__ = ["hash_key"]


@click.command("hash-key")
@click.option("--new", is_flag=True, help="Make a new random key; it is shown once.")
@click.option("--tenant", metavar="NAME", help="Whom the key stands for: also print its entry for headstart.toml.")
@click.option("--class", "service_class", metavar="NAME", default="default", show_default=True, help="Service class.")
@click.option("--admin", is_flag=True, help="Print it as the admin key's entry instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hash_key(new: bool, tenant: str | None, service_class: str, admin: bool, as_json: bool) -> None:
    """Print the SHA-256 of an API key, as `[keys]` and `[admin]` of headstart.toml want it.

    The key is read from standard input, or asked for on a terminal without showing it. It is never an argument:
    those end up in the shell's history.
    """
    if admin and tenant is not None:
        raise click.UsageError("--admin and --tenant exclude each other: the admin key belongs to no tenant.")
    if tenant is not None:
        _check_owner(tenant, service_class)
    key = f"hs-{secrets.token_urlsafe(32)}" if new else _read_key()
    digest = hashlib.sha256(key.encode()).hexdigest()
    if as_json:
        print_json({"sha256": digest, **({"key": key} if new else {})})
        return
    if new:
        NOTES.print(f"The key, shown this once: [bold]{key}[/]")
    if admin:
        click.echo(f'[admin]\nkey_sha256 = "{digest}"')
    elif tenant is not None:
        click.echo(f'[keys.{digest}]\ntenant = "{tenant}"\nclass = "{service_class}"')
    else:
        click.echo(digest)


def _check_owner(tenant: str, service_class: str) -> None:
    try:
        msgspec.convert({"tenant": tenant, "class": service_class}, ApiKey)
    except msgspec.ValidationError:
        raise click.UsageError(
            "--tenant takes 1 to 64 letters, digits, dots, underscores and hyphens; it becomes a statistics label."
        ) from None


def _read_key() -> str:
    if sys.stdin.isatty():
        key: str = click.prompt("API key", hide_input=True, confirmation_prompt=True, err=True)
    else:
        key = sys.stdin.readline().rstrip("\r\n")
    if not key or key != key.strip():
        raise click.UsageError("No key: give it on standard input, without blanks around it, or use --new.")
    return key
