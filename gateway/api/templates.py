"""``/v1/templates``: what is registered, and writing and deleting templates while the gateway runs.

Applications see the names and fields that they may use; texts and settings are for the operator, who alone may write.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import Request, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.api.access import is_operator
from gateway.api.decoding import decode_body
from gateway.canonical.templates import Template
from gateway.config import TemplateConfig
from gateway.errors import PayloadTooLargeError, TemplateNotFoundError
from gateway.service import Gateway
from gateway.template_store import TemplateVersion

__all__ = ["create_template", "delete_template", "list_templates", "show_template"]

_MAX_BODY_BYTES: Final = 256 * 1024


class TemplateBody(TemplateConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A template to write: its name, and what a ``[templates.NAME]`` of the configuration can say."""

    name: str


class TemplateRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One template, or one version of it. ``source`` is ``configuration`` or ``api``.

    A template of the configuration has neither versions nor a time of creation (Unix seconds). ``definition``
    is shown to the operator alone.
    """

    name: str
    source: str
    fields: tuple[str, ...]
    version: int | None = None
    versions: tuple[int, ...] = ()
    created: int | None = None
    definition: TemplateConfig | None = None


class TemplateList(msgspec.Struct, frozen=True):
    """All templates by name, each in its last version. ``persistent``: written ones outlast the gateway."""

    data: list[TemplateRow]
    persistent: bool
    object: str = "list"


_body_decoder: Final = msgspec.json.Decoder(TemplateBody)


@get("/v1/templates", sync_to_thread=False)
def list_templates(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> TemplateList:
    """The templates that requests can name or are recognised by."""
    shown = is_operator(request)
    rows = [_configured(template, shown) for template in gateway.path.templates.configured.values()]
    rows += [_written(gateway, name, None, shown) for name in gateway.templates.names()]
    return TemplateList(sorted(rows, key=lambda row: row.name), gateway.templates.persistent)


@get("/v1/templates/{name:str}", sync_to_thread=False)
def show_template(
    gateway: NamedDependency[Gateway], request: Request[Any, Any, Any], name: FromPath[str]
) -> TemplateRow:
    """One template by its name, in its last version, or ``NAME@VERSION``."""
    template = gateway.path.templates.configured.get(name)
    if template is not None:
        return _configured(template, is_operator(request))
    bare, version = _split(name)
    return _written(gateway, bare, version, is_operator(request))


@post("/v1/templates")
async def create_template(gateway: NamedDependency[Gateway], request: Request[Any, Any, Any]) -> TemplateRow:
    """Write a template; one of a name that was written before becomes its next version."""
    data = await request.body()
    if len(data) > _MAX_BODY_BYTES:
        raise PayloadTooLargeError(f"Templates of more than {_MAX_BODY_BYTES} bytes are not taken.")
    body = decode_body(_body_decoder, data)
    config = TemplateConfig(**{field: getattr(body, field) for field in TemplateConfig.__struct_fields__})
    written = await gateway.templates.create(body.name, config)
    return _written(gateway, body.name, written.version, shown=True)


@delete("/v1/templates/{name:str}", status_code=204)
async def delete_template(gateway: NamedDependency[Gateway], name: FromPath[str]) -> None:
    """Delete a written template with all its versions, or the one version of ``NAME@VERSION``."""
    await gateway.templates.delete(*_split(name))


def _split(name: str) -> tuple[str, int | None]:
    """Name and version. Raises ``TemplateNotFoundError`` for a version that is no number."""
    bare, at, version = name.partition("@")
    if not at:
        return bare, None
    if not version.isascii() or not version.isdigit() or len(version) > 9:
        raise TemplateNotFoundError("A version is a number: NAME@VERSION.")
    return bare, int(version)


def _configured(template: Template, shown: bool) -> TemplateRow:
    return TemplateRow(template.name, "configuration", template.fields, definition=template.config if shown else None)


def _written(gateway: Gateway, name: str, version: int | None, shown: bool) -> TemplateRow:
    versions = gateway.templates.versions(name)
    wanted = versions[-1] if version is None else _numbered(versions, name, version)
    return TemplateRow(
        name,
        "api",
        gateway.path.templates.named(f"{name}@{wanted.version}").fields,
        wanted.version,
        tuple(known.version for known in versions),
        wanted.created,
        wanted.config if shown else None,
    )


def _numbered(versions: tuple[TemplateVersion, ...], name: str, number: int) -> TemplateVersion:
    for version in versions:
        if version.version == number:
            return version
    raise TemplateNotFoundError(f"Template {name!r} has no version {number}.")
