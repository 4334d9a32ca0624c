"""All pins: those of the configuration, and those made through the API, which one local file keeps.

Texts of pinned documents are the operator's and stay on this machine; nothing of them goes to Redis or into a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gateway.config import PinConfig
from gateway.errors import ConfigError, HeadstartError
from gateway.local_file import read_file, replace_file

__all__ = ["Pin", "PinStore", "pin_id"]

_FORMAT: Final = 1

_canonical_json: Final = msgspec.json.Encoder(order="sorted")

_log = structlog.get_logger("headstart.pins")


class Pin(msgspec.Struct, frozen=True):
    """One pin. ``wish`` has its tenant. ``created`` and ``expires`` are in Unix seconds; None never expires.

    Of a pin of the configuration (``configured``) nothing can be changed, and ``created`` is the gateway's start.
    """

    id: str
    wish: PinConfig
    created: float
    expires: float | None = None
    configured: bool = False


class _File(msgspec.Struct, frozen=True):
    """``secret`` tells under which deployment secret pins by keys were made: under another one keys mean nothing."""

    format: int
    secret: str
    pins: list[Pin]


class PinStore:
    """Owns the pins and their file. Belongs to the event loop.

    Without a ``path`` those of the API last as long as the gateway. A change counts when the file holds it. One gateway
    writes a file; what others write to it while it runs is lost with the next change.
    """

    def __init__(self, path: Path | None, configured: Iterable[Pin], *, secret: bytes) -> None:
        """Read the file, if there is one. ``secret`` is the deployment secret.

        Raises:
            ConfigError: the file cannot be used, or its folder is missing.
        """
        self._path: Final = path
        self._secret: Final = blake2b(secret, digest_size=8, person=b"headstart-pins").hexdigest()
        self._configured: Final = {pin.id: pin for pin in configured}
        self._made: Mapping[str, Pin] = self._read(path) if path is not None else {}
        self._writing: Final = asyncio.Lock()

    @property
    def persistent(self) -> bool:
        """Whether pins made through the API outlast the gateway."""
        return self._path is not None

    def all(self) -> list[Pin]:
        """Every pin: the configuration's, then the others from the oldest on."""
        made = sorted(self._made.values(), key=lambda pin: pin.created)
        return [*self._configured.values(), *(pin for pin in made if pin.id not in self._configured)]

    def get(self, id: str) -> Pin | None:
        """The pin of this id."""
        return self._configured.get(id) or self._made.get(id)

    async def put(self, pin: Pin) -> None:
        """Keep a pin, in place of the one of its id. Raises ``HeadstartError`` when the file cannot be written."""
        async with self._writing:
            await self._change({**self._made, pin.id: pin})

    async def remove(self, ids: Iterable[str]) -> None:
        """Forget pins; raises as ``put``, and nothing has changed then."""
        async with self._writing:
            gone = set(ids)
            await self._change({id: pin for id, pin in self._made.items() if id not in gone})

    async def _change(self, made: Mapping[str, Pin]) -> None:
        if self._path is not None:
            content = _File(_FORMAT, self._secret, sorted(made.values(), key=lambda pin: pin.created))
            try:
                await asyncio.to_thread(replace_file, self._path, content)
            except OSError as error:
                raise HeadstartError(
                    f"The pins' file cannot be written: {error.strerror or error}.", code="storage_error"
                ) from error
        self._made = made

    def _read(self, path: Path) -> dict[str, Pin]:
        file = read_file(path, _File, setting="pins_file")
        if file is None:
            return {}
        if file.format != _FORMAT:
            raise ConfigError(f"pins_file: {path} has format {file.format}; this version reads {_FORMAT}.")
        known = [pin for pin in file.pins if not pin.wish.keys or file.secret == self._secret]
        if lost := len(file.pins) - len(known):
            _log.warning(
                "pins by keys are left out: their keys belong to another deployment secret, set `secret` to keep them",
                pins=lost,
            )
        return {pin.id: pin for pin in known}


def pin_id(wish: PinConfig) -> str:
    """The same for the same wish, whenever and by whom it is made."""
    return "pin-" + blake2b(_canonical_json.encode(wish), digest_size=8).hexdigest()
