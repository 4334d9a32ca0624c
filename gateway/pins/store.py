"""All pins: those of the configuration, and those made through the API of this gateway or of another that shares them.

One local file keeps the latter two. Texts of pinned documents are the operator's and stay on this machine; nothing of
them goes to Redis or into a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import structlog

from gateway.config import PinConfig
from gateway.errors import ConfigError, HeadstartError
from gateway.local_file import read_file, replace_file

__all__ = ["Pin", "PinStore", "Stamp", "pin_id"]

_FORMAT: Final = 1

_canonical_json: Final = msgspec.json.Encoder(order="sorted")

_log = structlog.get_logger("headstart.pins")


class Stamp(msgspec.Struct, frozen=True, order=True):
    """When a pin was last changed, and by which life of a gateway: of two changes of one pin the greater stamp holds.

    ``version`` is the Unix time in milliseconds, or one more than the version that was changed, whichever is greater.
    """

    version: int = 0
    writer: str = ""


class Pin(msgspec.Struct, frozen=True):
    """One pin. ``wish`` has its tenant. ``created`` and ``expires`` are in Unix seconds; None never expires.

    Of a pin of the configuration (``configured``) nothing can be changed, and ``created`` is the gateway's start.
    ``borrowed`` ones were made at another gateway, which has the texts of their documents and tools: their ``wish`` has
    ids only, and ``keys`` is the chain of block keys (hex) by which they are kept here; none of them where there is no
    telling.
    """

    id: str
    wish: PinConfig
    created: float
    expires: float | None = None
    configured: bool = False
    stamp: Stamp = Stamp()
    borrowed: bool = False
    keys: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True):
    """``secret`` tells under which deployment secret pins by keys were made: under another one keys mean nothing.

    ``removed`` are pins that were given up, so that no other gateway brings them back.
    """

    format: int
    secret: str
    pins: list[Pin]
    removed: dict[str, Stamp] = {}


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
        self.secret_digest: Final = blake2b(secret, digest_size=8, person=b"headstart-pins").hexdigest()
        """Tells deployment secrets apart without telling them."""
        self._configured: Final = {pin.id: pin for pin in configured}
        self._made: Mapping[str, Pin] = {}
        self._removed: Mapping[str, Stamp] = {}
        if path is not None:
            self._read(path)
        self._writing: Final = asyncio.Lock()

    @property
    def persistent(self) -> bool:
        """Whether pins made through the API outlast the gateway."""
        return self._path is not None

    def all(self) -> list[Pin]:
        """Every pin: the configuration's, then the others from the oldest on."""
        made = sorted(self._made.values(), key=lambda pin: pin.created)
        return [*self._configured.values(), *(pin for pin in made if pin.id not in self._configured)]

    @property
    def shared(self) -> list[Pin]:
        """Those that no configuration fixes, in no order."""
        return list(self._made.values())

    @property
    def removed(self) -> Mapping[str, Stamp]:
        """When pins were given up, by id, as long as that is remembered."""
        return self._removed

    def stamp(self, id: str) -> Stamp:
        """When a pin was last changed; the least of all stamps for one that is not known."""
        pin = self._made.get(id)
        return pin.stamp if pin is not None else self._removed.get(id, Stamp())

    def get(self, id: str) -> Pin | None:
        """The pin of this id."""
        return self._configured.get(id) or self._made.get(id)

    async def put(self, *pins: Pin) -> None:
        """Keep pins, in place of those of their ids. Raises ``HeadstartError`` when the file cannot be written."""
        async with self._writing:
            made = {pin.id: pin for pin in pins}
            removed = {id: stamp for id, stamp in self._removed.items() if id not in made}
            await self._change({**self._made, **made}, removed)

    async def remove(self, ids: Iterable[str], removed: Mapping[str, Stamp] = MappingProxyType({})) -> None:
        """Forget pins, and remember of those ``removed`` that they were; raises as ``put``, and nothing has changed."""
        async with self._writing:
            gone = {*ids, *removed}
            left = {id: pin for id, pin in self._made.items() if id not in gone}
            await self._change(left, {**self._removed, **removed})

    async def forget_removed(self, before: int) -> None:
        """Forget what was given up before a version. Raises as ``put``."""
        async with self._writing:
            kept = {id: stamp for id, stamp in self._removed.items() if stamp.version >= before}
            if len(kept) < len(self._removed):
                await self._change(self._made, kept)

    async def _change(self, made: Mapping[str, Pin], removed: Mapping[str, Stamp]) -> None:
        if self._path is not None:
            pins = sorted(made.values(), key=lambda pin: pin.created)
            content = _File(_FORMAT, self.secret_digest, pins, dict(removed))
            try:
                await asyncio.to_thread(replace_file, self._path, content)
            except OSError as error:
                raise HeadstartError(
                    f"The pins' file cannot be written: {error.strerror or error}.", code="storage_error"
                ) from error
        self._made = made
        self._removed = removed

    def _read(self, path: Path) -> None:
        file = read_file(path, _File, setting="pins_file")
        if file is None:
            return
        if file.format != _FORMAT:
            raise ConfigError(f"pins_file: {path} has format {file.format}; this version reads {_FORMAT}.")
        by_keys = [pin for pin in file.pins if pin.wish.keys or pin.borrowed]
        lost = {pin.id for pin in by_keys} if file.secret != self.secret_digest else set()
        if lost:
            _log.warning(
                "pins by keys are left out: their keys belong to another deployment secret, set `secret` to keep them",
                pins=len(lost),
            )
        self._made = {pin.id: pin for pin in file.pins if pin.id not in lost}
        self._removed = file.removed


def pin_id(wish: PinConfig) -> str:
    """The same for the same wish, whenever and by whom it is made."""
    return "pin-" + blake2b(_canonical_json.encode(wish), digest_size=8).hexdigest()
