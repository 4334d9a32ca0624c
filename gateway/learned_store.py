"""What was learned of templates, and decided about it, kept in one local file over a restart.

Constant text is in it, as the operator sees it at ``/admin/templates``, and never a value. It stays on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gateway.canonical.learning.learned import KeptTemplate
from gateway.canonical.learning.learner import TemplateLearner
from gateway.config import HoistMode
from gateway.errors import ConfigError
from gateway.local_file import read_file, replace_file

__all__ = ["SAVE_INTERVAL_S", "LearnedStore"]

SAVE_INTERVAL_S: Final = 60.0
"""So often the file is brought up to date; besides, it is when the gateway stops."""

_FORMAT: Final = 1

_log = structlog.get_logger("headstart.templates")


class _File(msgspec.Struct, frozen=True):
    format: int
    templates: tuple[KeptTemplate, ...]
    decisions: dict[str, HoistMode]


class LearnedStore:
    """Owns the file of what ``learner`` knows, without a ``path`` nothing. Belongs to the event loop.

    One gateway writes a file.
    """

    def __init__(self, path: Path | None, learner: TemplateLearner) -> None:
        """Read the file, if there is one, and let the learner know what it holds.

        Raises:
            ConfigError: the file cannot be used, or its folder is missing.
        """
        self._path: Final = path
        self._learner: Final = learner
        self._saving: Final = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._saved = _read(path) if path is not None else None
        if self._saved is not None:
            learner.restore(self._saved.templates, self._saved.decisions)

    def start(self) -> None:
        """Save from time to time."""
        if self._path is not None:
            self._task = asyncio.create_task(self._save_again_and_again(), name="learned-templates")

    async def stop(self) -> None:
        """Save once more. Safe to call when ``start`` was not."""
        if self._task is not None:
            async with self._saving:  # what is being written must not come after what is written last
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.save()

    async def save(self) -> None:
        """Bring the file up to date. A file that cannot be written is told to the log."""
        if self._path is None:
            return
        async with self._saving:
            content = _File(_FORMAT, self._learner.kept(), self._learner.decisions)
            if content == self._saved:
                return
            try:
                await asyncio.to_thread(replace_file, self._path, content)
            except OSError as error:
                reason = error.strerror or str(error)
                _log.warning("learned templates cannot be kept", path=str(self._path), reason=reason)
            else:
                self._saved = content

    async def _save_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self.save()


def _read(path: Path) -> _File | None:
    file = read_file(path, _File, setting="learned_file")
    if file is None:
        return None
    if file.format != _FORMAT:
        raise ConfigError(f"learned_file: {path} has format {file.format}; this version reads {_FORMAT}.")
    for template in file.templates:
        if not template.is_whole:
            raise ConfigError(f"learned_file: {path} holds a template whose parts do not fit: {template.id[:32]!r}.")
    return file
