"""Templates written through the API: every version of each, kept in one local file.

Their texts are the operator's and stay on this machine; nothing of them goes to Redis or into a log.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.templates import RESERVED_NAMES, Template
from gateway.config import TemplateConfig
from gateway.errors import ConfigError, ConflictError, HeadstartError, InvalidRequestError, TemplateNotFoundError
from gateway.local_file import read_file, replace_file

__all__ = ["MAX_VERSIONS", "TemplateStore", "TemplateVersion"]

MAX_VERSIONS: Final = 1000
"""Versions of all written templates together: each unregistered system text is compared with all of them."""

_FORMAT: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_log = structlog.get_logger("headstart.templates")


class TemplateVersion(msgspec.Struct, frozen=True):
    """One version of a written template. ``created`` is in Unix seconds."""

    version: int
    created: int
    config: TemplateConfig


class _History(msgspec.Struct, frozen=True):
    """The versions of one name, oldest first. A deleted version's number is not given again while the name lives."""

    last_version: int
    versions: tuple[TemplateVersion, ...]


_Histories = Mapping[str, _History]


class _File(msgspec.Struct, frozen=True):
    format: int
    templates: dict[str, _History]


class TemplateStore:
    """Owns the written templates and their file, and publishes them to ``registry``. Belongs to the event loop.

    Without a ``path`` they last as long as the gateway. A write counts when the file holds it, and only then do
    requests see it. One gateway writes a file; what others write to it while it runs is lost with the next write.
    """

    def __init__(self, path: Path | None, registry: TemplateRegistry) -> None:
        """Read the file, if there is one, and publish what it holds.

        Raises:
            ConfigError: the file cannot be used, or its folder is missing.
        """
        self._path: Final = path
        self._registry: Final = registry
        self._writing: Final = asyncio.Lock()
        self._histories: _Histories = _read(path) if path is not None else {}
        registry.publish(self._compiled(self._histories))
        for name in self._histories.keys() & registry.configured.keys():
            _log.warning("a template of the configuration hides the written one of its name", template=name)

    @property
    def persistent(self) -> bool:
        """Whether written templates outlast the gateway."""
        return self._path is not None

    def names(self) -> list[str]:
        """The names of all written templates that are not hidden by the configuration, sorted."""
        return sorted(self._histories.keys() - self._registry.configured.keys())

    def versions(self, name: str) -> tuple[TemplateVersion, ...]:
        """All versions of a written template, oldest first. Raises ``TemplateNotFoundError`` when there is none."""
        history = self._histories.get(name)
        if history is None or name in self._registry.configured:
            raise TemplateNotFoundError(f"There is no written template {name[:64]!r}.")
        return history.versions

    async def create(self, name: str, config: TemplateConfig) -> TemplateVersion:
        """Write the first or next version of ``name``; requests that say the bare name have it from now on.

        Raises:
            InvalidRequestError: the name or the definition cannot be used; ``param`` says which.
            ConflictError: the name belongs to the configuration, or there are too many versions.
            HeadstartError: the file cannot be written; nothing has changed.
        """
        if not _NAME.fullmatch(name) or name in RESERVED_NAMES:
            reserved = " or ".join(map(repr, RESERVED_NAMES))
            raise InvalidRequestError(
                f"name must be 1 to 64 letters, digits, '.', '_' and '-', and not {reserved}.", param="name"
            )
        self._refuse_configured(name)
        try:
            self._registry.compile(name, config)
        except ConfigError as error:
            place, _, reason = error.message.removeprefix(f"templates.{name}.").partition(" ")
            raise InvalidRequestError(f"{place} {reason}", param=place.rstrip(":")) from None
        async with self._writing:
            if sum(len(history.versions) for history in self._histories.values()) >= MAX_VERSIONS:
                raise ConflictError(f"There are {MAX_VERSIONS} versions of templates; delete some of them first.")
            history = self._histories.get(name) or _History(0, ())
            version = TemplateVersion(history.last_version + 1, int(time.time()), config)
            await self._change({**self._histories, name: _History(version.version, (*history.versions, version))})
        _log.info("template written", template=name, version=version.version)
        return version

    async def delete(self, name: str, version: int | None = None) -> None:
        """Delete a written template, or one version of it. Requests that were recognised by it no longer are.

        Raises:
            TemplateNotFoundError: there is no such template or version.
            ConflictError: the name belongs to the configuration.
            HeadstartError: the file cannot be written; nothing has changed.
        """
        self._refuse_configured(name)
        async with self._writing:
            versions = self.versions(name)
            left = () if version is None else tuple(kept for kept in versions if kept.version != version)
            if version is not None and len(left) == len(versions):
                raise TemplateNotFoundError(f"Template {name!r} has no version {version}.")
            histories = {other: history for other, history in self._histories.items() if other != name}
            if left:
                histories[name] = _History(self._histories[name].last_version, left)
            await self._change(histories)
        _log.info("template deleted", template=name, version=version)

    async def _change(self, histories: _Histories) -> None:
        compiled = self._compiled(histories)
        if self._path is not None:
            try:
                await asyncio.to_thread(replace_file, self._path, _File(_FORMAT, dict(sorted(histories.items()))))
            except OSError as error:
                raise HeadstartError(
                    f"The templates' file cannot be written: {error.strerror or error}.", code="storage_error"
                ) from error
        self._histories = histories
        self._registry.publish(compiled)

    def _compiled(self, histories: _Histories) -> list[Template]:
        return [
            self._registry.compile(name, version.config, version.version)
            for name, history in histories.items()
            for version in history.versions
        ]

    def _refuse_configured(self, name: str) -> None:
        if name in self._registry.configured:
            raise ConflictError(
                f"Template {name!r} belongs to the configuration file, which alone can change it; take another name.",
                param="name",
            )


def _read(path: Path) -> _Histories:
    file = read_file(path, _File, setting="templates_file")
    if file is None:
        return {}
    if file.format != _FORMAT:
        raise ConfigError(f"templates_file: {path} has format {file.format}; this version reads {_FORMAT}.")
    return file.templates
