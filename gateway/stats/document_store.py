"""The documents of all gateways, shared through Redis (see ``gateway.stats.store``).

=================================  ======  ========================================================================
``documents:{span}s``              zset    minute, hour or day (Unix time by its length) -> Unix time of its last write
``documents:{span}:{number}``      hash    epoch -> what that life of a gateway has counted in it, as JSON; expires
=================================  ======  ========================================================================

Tenants, ids of documents and numbers only.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from cache_policy.keys import KEY_BYTES
from gateway.stats.batch import Batch, chunks
from gateway.stats.connection import RedisClient
from gateway.stats.distinct import DistinctKeys
from gateway.stats.documents import DOCUMENT_SPANS, DocumentKey, Documents, DocumentSums, Sketch
from gateway.stats.timeline import Span

__all__ = ["DocumentShare"]

_CLOCK_SKEW_S: Final = 120.0
_EXPIRY_MARGIN_S: Final = 3600


class _Stored(msgspec.Struct, frozen=True):
    """One sketch as it is stored. ``kept`` are the keys of its sample, one behind the other."""

    rows: list[tuple[DocumentKey, DocumentSums]]
    other: DocumentSums
    halvings: Annotated[int, msgspec.Meta(ge=0)]
    kept: bytes


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Stored).decode


class DocumentShare:
    """Writes what has changed, and reads what others wrote, every ``period_s``. Owns what is still to be written."""

    def __init__(self, documents: Documents, period_s: float) -> None:
        self._documents: Final = documents
        self._period_s: Final = period_s
        self._unwritten: dict[tuple[Span, int], Sketch] = {}
        self._due = float("-inf")
        self._read_since = float("-inf")

    def write_all(self) -> None:
        """Redis has lost what was written."""
        self._documents.change_all()
        self._due = float("-inf")

    def finish(self) -> None:
        """Have the last exchange write what there is."""
        self._documents.roll()
        self._due = float("-inf")

    async def exchange(self, client: RedisClient, prefix: str, own: str, now: float) -> bool:
        """Write what has changed, read what others changed; False when some of that is not to be understood."""
        if now < self._due:
            return True
        self._documents.roll_if_over()
        for span, number, sketch in self._documents.take_changed():
            self._unwritten[span, number] = sketch
        batch = Batch(client, prefix)
        for (span, number), sketch in self._unwritten.items():
            key = f"documents:{span.name}:{number}"
            batch.pipe.hset(batch.key(key), own, _encode(_stored(sketch)))
            batch.pipe.expireat(batch.key(key), (number + span.keep) * span.seconds + _EXPIRY_MARGIN_S)
            batch.pipe.zadd(batch.key(f"documents:{span.name}s"), {str(number): now})
        for span in DOCUMENT_SPANS:
            oldest = now - span.keep * span.seconds - _EXPIRY_MARGIN_S
            batch.pipe.zremrangebyscore(batch.key(f"documents:{span.name}s"), "-inf", oldest)
        for span in DOCUMENT_SPANS:
            batch.pipe.zrangebyscore(batch.key(f"documents:{span.name}s"), self._read_since, "+inf")
        changed = (await batch.send())[-len(DOCUMENT_SPANS) :]
        self._unwritten = {}
        self._due = now + self._period_s
        readable = True
        for span, numbers in zip(DOCUMENT_SPANS, changed, strict=True):
            readable = await self._read(client, prefix, own, span, [int(number) for number in numbers]) and readable
        self._read_since = now - _CLOCK_SKEW_S
        return readable

    async def _read(self, client: RedisClient, prefix: str, own: str, span: Span, numbers: list[int]) -> bool:
        readable = True
        for chunk in chunks(numbers):
            batch = Batch(client, prefix)
            for number in chunk:
                batch.pipe.hgetall(batch.key(f"documents:{span.name}:{number}"))
            for number, fields in zip(chunk, await batch.send(), strict=True):
                told = [value for epoch, value in fields.items() if epoch != own.encode()]
                sketches = [self._sketch(value) for value in told]
                readable = readable and None not in sketches
                self._documents.set_others(span, number, (sketch for sketch in sketches if sketch is not None))
        return readable

    def _sketch(self, value: bytes) -> Sketch | None:
        try:
            stored = _decode(value)
        except msgspec.MsgspecError:
            return None
        sketch = Sketch(self._documents.size)
        for key, sums in stored.rows:
            sketch.row(key).add(sums)
        sketch.other.add(stored.other)
        kept = (stored.kept[at : at + KEY_BYTES] for at in range(0, len(stored.kept), KEY_BYTES))
        sketch.prefixes.merge(DistinctKeys(min(stored.halvings, 60), kept))
        return sketch


def _stored(sketch: Sketch) -> _Stored:
    sketch.trim()
    return _Stored(list(sketch.rows.items()), sketch.other, sketch.prefixes.halvings, b"".join(sketch.prefixes.kept))
