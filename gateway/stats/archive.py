"""Adds up the totals of gateways that ended long ago, so that the number of epochs in Redis stays bounded.

An epoch whose writer has been silent for thirty days, or for a day where there are very many of them, is added to the
epoch ``archive`` and deleted. Both happen in one step, which does nothing when the archive or the epoch has changed
since they were read: whoever else tries the same, nothing is counted twice or lost. ``folded`` remembers which epochs
that happened to; a writer that comes back after such a time finds itself there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import structlog
from redis.exceptions import ResponseError

from gateway.stats.connection import RedisClient
from gateway.stats.fleet import ARCHIVE
from gateway.stats.sums import Labels, Sums
from gateway.stats.timeline import Table

__all__ = ["FOLDABLE_AFTER_S", "MOST_EPOCHS", "Archive"]

FOLDABLE_AFTER_S: Final = 24 * 3600.0
"""No epoch is folded before it has been silent for so long."""

MOST_EPOCHS: Final = 200
"""Beyond so many the longest silent ones are folded as soon as they may be."""

_FOLD_AFTER_S: Final = 30 * 24 * 3600.0
_AT_ONCE: Final = 20
_MOST_LABELS: Final = 4096
_FLUSH: Final = b"flush"  # of an epoch the number of its last write, of the archive that of its last change

_FOLD: Final = """
local epochs, totals, archive, folded = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local epoch, silent_since, version, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local score = redis.call('ZSCORE', epochs, epoch)
if not score or tonumber(score) > tonumber(silent_since) then return 0 end
if (redis.call('HGET', archive, 'flush') or '0') ~= version then return 0 end
for i = 5, #ARGV, 2 do redis.call('HSET', archive, ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', archive, 'flush', 1)
redis.call('DEL', totals)
redis.call('ZREM', epochs, epoch)
redis.call('ZADD', epochs, now, 'archive')
redis.call('ZADD', folded, now, epoch)
return 1
"""

_decode_labels: Final = msgspec.json.Decoder(Labels).decode
_decode_sums: Final = msgspec.json.Decoder(Sums).decode
_encode: Final = msgspec.json.encode
_log = structlog.get_logger("headstart.statistics")


class Archive:
    """Folds epochs under ``prefix``. Where the server refuses it once, it is left alone."""

    def __init__(self, prefix: str) -> None:
        self._prefix: Final = prefix
        self._refused = False

    async def fold(self, client: RedisClient, epochs: Mapping[str, float], now: float) -> None:
        """Fold some of ``epochs`` (Unix time of the last write of each), if any are due."""
        if self._refused:
            return
        try:
            for epoch in _due(epochs, now):
                await self._fold_one(client, epoch, now)
        except ResponseError as error:  # scripts are not allowed there
            self._refused = True
            _log.warning("totals of ended gateways are not added up", reason=str(error))

    async def has(self, client: RedisClient, epoch: str, now: float) -> bool:
        """Whether a writer that was silent for long has been folded meanwhile; if not, from now on it cannot be."""
        await client.zadd(self._key("epochs"), {epoch: now})
        if await client.zscore(self._key("folded"), epoch) is None:
            return False
        await client.zrem(self._key("epochs"), epoch)
        return True

    async def _fold_one(self, client: RedisClient, epoch: str, now: float) -> None:
        totals, archive = self._key(f"totals:{epoch}"), self._key(f"totals:{ARCHIVE}")
        ended: dict[Any, Any] = await client.hgetall(totals)
        known: dict[Any, Any] = await client.hgetall(archive)
        ended.pop(_FLUSH, None)
        version = known.pop(_FLUSH, b"0")
        try:
            table, changed = _table(ended), _table(known)
        except msgspec.MsgspecError:
            return  # what is not understood is not added up
        added: Table = {}
        for labels, sums in table.items():
            if labels not in changed and len(changed) >= _MOST_LABELS:
                labels = labels.in_other(of_replica=len(changed) < 2 * _MOST_LABELS)
            added[labels] = changed.setdefault(labels, Sums())
            added[labels].add(sums)
        fields = [part for labels, sums in added.items() for part in (_encode(labels), _encode(sums))]
        keys = self._key("epochs"), totals, archive, self._key("folded")
        await client.eval(_FOLD, len(keys), *keys, epoch, repr(now - FOLDABLE_AFTER_S), version, repr(now), *fields)

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _due(epochs: Mapping[str, float], now: float) -> list[str]:
    """Those to be folded now, the longest silent first."""
    silent = sorted((at, epoch) for epoch, at in epochs.items() if epoch != ARCHIVE and at < now - FOLDABLE_AFTER_S)
    surplus = len(epochs) - MOST_EPOCHS
    due = [epoch for number, (at, epoch) in enumerate(silent) if number < surplus or at < now - _FOLD_AFTER_S]
    return due[:_AT_ONCE]


def _table(fields: Mapping[bytes, bytes]) -> Table:
    return {_decode_labels(key): _decode_sums(value) for key, value in fields.items()}
