"""Pins of all gateways, shared through Redis (see ``gateway.stats.store``).

=================  ======  =========================================================================================
``pins``           hash    ``ID VERSION WRITER`` -> the pin as JSON (``SharedPin``), or that it was given up
``pins:changes``   string  counts the writes, so that a gateway reads the pins only when there were any
=================  ======  =========================================================================================

Of one pin the field with the greatest version and writer holds; fields are only ever added, and taken away when a
greater one is there. So two gateways that change the same pin at once lose nothing but the lesser of the two changes,
everyone comes to the same, and a Redis that has lost its data gets it back from whichever gateway knows it.

Ids, block keys, names and numbers only. The texts of documents and tools, and salts, stay where the pin was made: other
gateways keep the blocks by their keys.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from gateway.config import PinConfig
from gateway.pins.control import MAX_PINS, REMEMBER_REMOVED_S, PinControl
from gateway.pins.store import Pin, Stamp
from gateway.stats.batch import Batch
from gateway.stats.connection import RedisClient

__all__ = ["PinShare", "SharedPin"]

_READ_AGAIN_S: Final = 60.0
"""Also when nobody seems to have written: a gateway may have ended between its write and its count."""

_MOST_FIELDS: Final = 4 * MAX_PINS
_FIELD_NAME: Final = re.compile(rb"([!-~]+) (0|[1-9][0-9]{0,14}) ([!-~]*)")
_EXPIRY_MARGIN_S: Final = 60.0

_DocumentId = Annotated[str, Meta(max_length=128)]


class SharedPin(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pin as Redis has it; ``removed`` ones have nothing else. Times are Unix seconds.

    ``keys`` is its chain of block keys (hex), under the deployment secret that ``secret`` tells apart from others: of
    every pin whose prefix cannot be found from ``template`` and ``tenant`` alone. ``by_keys``: it was made by them.
    ``documents`` are ids.
    """

    created: float = 0.0
    expires: float | None = None
    template: str | None = None
    tenant: str | None = None
    documents: Annotated[tuple[_DocumentId | None, ...], Meta(max_length=1000)] = ()
    keys: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=65_536)] = ()
    by_keys: bool = False
    secret: str = ""
    removed: bool = False


class _Field(NamedTuple):
    id: str
    stamp: Stamp


_Known = tuple[Stamp, SharedPin]
_REMOVED: Final = SharedPin(removed=True)
_encode: Final = msgspec.json.Encoder(order="sorted").encode
_decode: Final = msgspec.json.Decoder(SharedPin).decode


class PinShare:
    """Writes this gateway's pins and reads the others'. Owns how far both have come; belongs to the event loop.

    What it reads is handed to ``pins``, which takes it over in its own time: no exchange waits for an engine or a file.
    """

    def __init__(self, pins: PinControl) -> None:
        self._pins: Final = pins
        self._revision = -1
        self._changes: int | None = None
        self._read_at = float("-inf")
        self._claimed: set[str] = set()
        """Pins that this gateway has made its own, as long as they last: two with other keys must not take turns."""

    def write_all(self) -> None:
        """Redis has lost what was written."""
        self._changes = None

    async def exchange(self, client: RedisClient, prefix: str, own: str, now: float) -> bool:
        """Write what is newer here, read what is newer there; False when some of that is not to be understood."""
        batch = Batch(client, prefix)
        batch.pipe.get(batch.key("pins:changes"))
        (counted,) = await batch.send()
        changes = int(counted) if counted is not None and counted.isdigit() else 0
        revision = self._pins.revision
        if changes == self._changes and revision == self._revision and now < self._read_at + _READ_AGAIN_S:
            return True
        batch = Batch(client, prefix)
        batch.pipe.hgetall(batch.key("pins"))
        (fields,) = await batch.send()
        known, unreadable = _parsed(fields)
        holding = _holding(known)
        self._pins.hear(self._news(holding, now))
        written, gone = self._to_write(known, holding, own, now)
        if written or gone:
            batch = Batch(client, prefix)
            if written:
                mapping: dict[Any, Any] = {_name(field): _encode(pin) for field, pin in written.items()}
                batch.pipe.hset(batch.key("pins"), mapping=mapping)
            if gone:
                batch.pipe.hdel(batch.key("pins"), *map(_name, gone))
            batch.pipe.incr(batch.key("pins:changes"))
            *_, counted = await batch.send()
            if counted == changes + 1:  # nobody else has written between
                changes = counted
        self._changes, self._revision, self._read_at = changes, revision, now
        return not unreadable

    def _news(self, holding: Mapping[str, _Known], now: float) -> dict[str, Pin | Stamp]:
        """What holds in Redis and is not over."""
        news: dict[str, Pin | Stamp] = {}
        for id, (stamp, shared) in holding.items():
            if not _is_over(stamp, shared, now):
                news[id] = stamp if shared.removed else self._pin(id, stamp, shared)
        return news

    def _to_write(
        self, fields: Mapping[_Field, SharedPin], holding: Mapping[str, _Known], own: str, now: float
    ) -> tuple[dict[_Field, SharedPin], list[_Field]]:
        """The fields to be set, and those to be taken away."""
        written: dict[_Field, SharedPin] = {}
        least = Stamp()
        pins = self._pins.store.shared
        self._claimed.intersection_update([pin.id for pin in pins])
        for pin in pins:
            shared = self._shared(pin)
            if shared is None or _is_over(pin.stamp, shared, now):
                continue
            stamp, there = holding.get(pin.id, (None, None))
            if stamp is None or pin.stamp > stamp:
                written[_Field(pin.id, pin.stamp)] = shared
            elif pin.stamp == stamp and not pin.borrowed and shared != there:
                # Its template or the model has changed, and its keys with them. One gateway tells them: its writer.
                if stamp.writer == own:
                    written[_Field(pin.id, pin.stamp)] = shared
                elif pin.id not in self._claimed:
                    self._claimed.add(pin.id)
                    claimed = msgspec.structs.replace(pin, stamp=Stamp(stamp.version + 1, own))
                    self._pins.hear({pin.id: claimed})
        for id, stamp in self._pins.store.removed.items():
            if stamp > holding.get(id, (least, None))[0] and not _is_over(stamp, _REMOVED, now):
                written[_Field(id, stamp)] = _REMOVED
        greatest = {id: stamp for id, (stamp, _) in holding.items()} | {field.id: field.stamp for field in written}
        gone = [
            field
            for field, shared in fields.items()
            if field.stamp < greatest[field.id] or _is_over(field.stamp, shared, now - _EXPIRY_MARGIN_S)
        ]
        return written, gone

    def _shared(self, pin: Pin) -> SharedPin | None:
        """A pin as others may know it; None while that cannot be said."""
        wish, secret = pin.wish, self._pins.store.secret_digest
        plain = SharedPin(pin.created, pin.expires, wish.template, wish.tenant)
        if wish.keys and not pin.borrowed:
            return msgspec.structs.replace(plain, keys=wish.keys, by_keys=True, secret=secret)
        if not (pin.borrowed or wish.documents or wish.tools or wish.cache_salt):
            return plain
        keys = pin.keys if pin.borrowed else self._pins.chain_keys(pin)
        documents = tuple(None if (id := document.get("id")) is None else str(id)[:128] for document in wish.documents)
        return msgspec.structs.replace(plain, documents=documents, keys=keys, secret=secret) if keys else None

    def _pin(self, id: str, stamp: Stamp, shared: SharedPin) -> Pin:
        ours = shared.secret == self._pins.store.secret_digest
        documents = tuple({} if each is None else {"id": each} for each in shared.documents)
        wish = PinConfig(shared.template, documents, tenant=shared.tenant)
        if shared.by_keys:
            wish = PinConfig(keys=shared.keys)
        return Pin(
            id,
            wish,
            shared.created,
            shared.expires,
            stamp=stamp,
            borrowed=not ours if shared.by_keys else bool(shared.keys),
            keys=shared.keys if ours and not shared.by_keys else (),
        )


def _parsed(fields: Mapping[bytes, bytes]) -> tuple[dict[_Field, SharedPin], bool]:
    """What can be understood, and whether there was anything that cannot."""
    parsed: dict[_Field, SharedPin] = {}
    for name, value in islice(fields.items(), _MOST_FIELDS):
        if (parts := _FIELD_NAME.fullmatch(name)) is not None:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                parsed[_Field(parts[1].decode(), Stamp(int(parts[2]), parts[3].decode()))] = _decode(value)
    return parsed, len(parsed) < len(fields)


def _holding(fields: Mapping[_Field, SharedPin]) -> dict[str, _Known]:
    """Of each pin the greatest stamp, and what it says."""
    holding: dict[str, _Known] = {}
    for field, shared in fields.items():
        if field.id not in holding or field.stamp > holding[field.id][0]:
            holding[field.id] = field.stamp, shared
    return holding


def _is_over(stamp: Stamp, shared: SharedPin, now: float) -> bool:
    """Whether its time is over, or it was given up so long ago that nobody remembers."""
    if shared.removed:
        return stamp.version < (now - REMEMBER_REMOVED_S) * 1000
    return shared.expires is not None and shared.expires <= now


def _name(field: _Field) -> str:
    return f"{field.id} {field.stamp.version} {field.stamp.writer}"
