"""Keeping one replica's pins in force: its engine is told of them, and what is not there yet is prefilled.

Warming up is for nobody's request in particular, so it never takes a turn from one: it waits until the replica has
nothing to do, goes behind all others in the engine's queue, and is ended by the next request that is sent there. What
it had computed by then stays in the cache, and it goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Container, Mapping, Set
from contextlib import aclosing
from typing import Any, Final, Literal

import msgspec
import structlog

from engine.wire import Sampling
from gateway.errors import HeadstartError
from gateway.pins.prefix import Chain
from gateway.replicas.base import BACKGROUND_PRIORITY, GenerationRequest, Replica, ReplicaState

__all__ = ["PinState", "ReplicaPins", "Target"]

PinState = Literal["waiting", "warming", "resident", "not_resident", "warmed"]
"""``warmed``: it was prefilled by a server that does not tell what it holds."""

_SETTLE_S: Final = 0.1
_POLL_S: Final = 0.05
_POLLS: Final = 20  # then all pins are looked at again
_PATIENCE_S: Final = 10.0
"""After so long without an idle moment it is said that a prefix still waits for one."""

_RETRY_S: Final = 5.0
_MOST_TRIES: Final = 3
"""A prefix whose prefill has failed so often is left to the requests that have it, until the replica starts again."""

_TIMEOUT_S: Final = 300.0

_log = structlog.get_logger("headstart.pins")


class Target(msgspec.Struct, frozen=True):
    """A pin as this replica is to have it: its chain, and for whom its blocks count (see ``engine.wire.Submit``)."""

    chain: Chain
    owner: str = ""
    max_cached_blocks: int = 0


class ReplicaPins:
    """Owns what one replica was told of pins and what was prefilled there. Belongs to the event loop.

    ``held`` gives the keys that it holds, ``in_flight`` how many requests of users are there.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        held: Callable[[], Set[bytes]],
        in_flight: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica: Final = replica
        self.warmed_prefixes = 0
        self.warmed_tokens = 0
        """Prefilled since the gateway started, in prefixes and tokens."""
        self._held: Final = held
        self._in_flight: Final = in_flight
        self._clock: Final = clock
        self._targets: Mapping[str, Target] = {}
        self._changed = asyncio.Event()
        self._applying: Final = asyncio.Lock()
        self._arrived_at = -math.inf
        self._busy_since: float | None = None  # while something waits for an idle moment
        self._current: asyncio.Task[int] | None = None
        self._warming: Chain | None = None
        self._task: asyncio.Task[None] | None = None
        self._forget()

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=f"{self.replica.id}-pins")

    def close(self) -> None:
        """Tell and prefill nothing any more. Safe to repeat."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Close, and wait for the end."""
        self.close()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None

    # --- what happens ------------------------------------------------------------------------------------

    def want(self, targets: Mapping[str, Target], *, restarted: bool = False) -> None:
        """Have these pins, by id, from now on. ``restarted``: the replica knows of none, and its cache is empty."""
        self._targets = targets
        if restarted:
            self._forget()
        elif self._current is not None and self._warming not in [target.chain for target in targets.values()]:
            self._current.cancel()
        self._changed.set()

    def arrived(self) -> None:
        """A user's request goes to this replica: whatever is being prefilled there makes room for it."""
        self._arrived_at = self._clock()
        if self._current is not None:
            self._current.cancel()

    # --- how it stands -----------------------------------------------------------------------------------

    @property
    def pins_blocks(self) -> bool:
        """Whether this replica can be told to keep blocks: our own engines can."""
        info = self.replica.info
        return info is not None and info.num_blocks > 0

    def pinned(self, id: str) -> bool:
        """Whether the engine that serves now was told to keep it."""
        return self.replica.state is ReplicaState.READY and self._targets[id].chain.keys in self._applied

    def resident(self, id: str) -> int | None:
        """Blocks of a pin that are there; None where that is not known."""
        return self._resident(self._targets[id].chain) if self.pins_blocks else None

    def resident_blocks(self) -> int:
        """Blocks of all pins that are there, each once."""
        keys = {key for target in self._targets.values() for key in target.chain.keys}
        return len(keys & self._held())

    def state(self, id: str) -> PinState:
        """How a pin of ``want`` stands here."""
        chain = self._targets[id].chain
        if self.replica.state is not ReplicaState.READY:
            return "waiting"
        if self._current is not None and chain == self._warming:
            return "warming"
        if self.pins_blocks and self._resident(chain) == len(chain.keys):
            return "resident"
        if chain.keys in self._warmed and not self.pins_blocks:
            return "warmed"
        return "waiting" if self._to_be_warmed(chain) else "not_resident"

    def problem(self, id: str) -> str | None:
        """Why a pin is not in force here, or was not prefilled; None when nothing is wrong."""
        chain = self._targets[id].chain
        return self._refusals.get(chain.keys) or self._failures.get(chain.keys) or self._delay(chain)

    # --- inside ------------------------------------------------------------------------------------------

    def _delay(self, chain: Chain) -> str | None:
        waited = 0.0 if self._busy_since is None else self._clock() - self._busy_since
        if waited < _PATIENCE_S or not self._to_be_warmed(chain):
            return None
        return f"not prefilled yet: in {waited:.0f} s the replica had no moment without requests"

    def _forget(self) -> None:
        self._applied: set[tuple[bytes, ...]] = set()
        self._refusals: dict[tuple[bytes, ...], str] = {}
        self._warmed: set[tuple[bytes, ...]] = set()
        self._failures: dict[tuple[bytes, ...], str] = {}
        self._tries: dict[tuple[bytes, ...], int] = {}

    async def _run(self) -> None:
        try:
            while True:
                self._changed.clear()
                await self.apply()
                await self._warm()
                # Not wait_for, which until Python 3.12 may swallow the cancellation that ends this task.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S if self._refusals or self._next_to_warm() else None):
                        await self._changed.wait()
        finally:
            if self._current is not None:
                self._current.cancel()
                await asyncio.wait([self._current])

    async def apply(self) -> None:
        """Tell the engine which chains are pinned, as far as it does not know. What it refuses is tried again later."""
        async with self._applying:
            if not self.pins_blocks or self.replica.state is not ReplicaState.READY:
                return
            applied, refusals = self._applied, self._refusals  # of this life of the engine
            wanted = {target.chain.keys for target in self._targets.values()}
            for keys in refusals.keys() - wanted:
                del refusals[keys]
            gone = [*(applied - wanted)]
            for keys, error in zip(gone, await self._tell("unpin", gone), strict=True):
                if error is None:
                    applied.discard(keys)
            new = [target.chain.keys for target in self._targets.values() if target.chain.keys not in applied]
            for keys, error in zip(new, await self._tell("pin", new), strict=True):
                if error is None:
                    applied.add(keys)
                    refusals.pop(keys, None)
                else:
                    if keys not in refusals:
                        _log.warning("a prefix is not pinned yet", replica=self.replica.id, reason=error)
                    refusals[keys] = error

    async def _tell(self, method: str, chains: list[tuple[bytes, ...]]) -> list[str | None]:
        async def call(keys: tuple[bytes, ...]) -> str | None:
            params: dict[str, Any] = {"keys": [*keys]}
            try:
                await self.replica.call(method, params)
            except HeadstartError as error:
                return error.message
            return None

        return await asyncio.gather(*[call(keys) for keys in chains])

    async def _warm(self) -> None:
        """Prefill what is not there, one prefix at a time."""
        prefixes = tokens = 0
        seconds = 0.0
        failed: set[tuple[bytes, ...]] = set()  # and tried again in the next round
        while not self._changed.is_set() and (target := self._next_to_warm(failed)) is not None:
            if not self._is_idle():
                await self._wait()
                continue  # what was to be prefilled may have come with a request
            begun = self._clock()
            computed = await self._try(target)
            seconds += self._clock() - begun
            if computed is None:
                if target.chain.keys in self._failures:
                    failed.add(target.chain.keys)
                continue
            prefixes += 1
            tokens += computed
        if not self._changed.is_set():  # nothing is left
            self._busy_since = None
        if prefixes:
            self.warmed_prefixes += prefixes
            self.warmed_tokens += tokens
            _log.info(
                "pinned prefixes warmed",
                replica=self.replica.id, prefixes=prefixes, tokens=tokens, seconds=round(seconds, 2),
            )  # fmt: skip

    def _next_to_warm(self, but: Container[tuple[bytes, ...]] = ()) -> Target | None:
        if self.replica.state is not ReplicaState.READY:
            return None
        left = (target for target in self._targets.values() if target.chain.keys not in but)
        return next((target for target in left if self._to_be_warmed(target.chain)), None)

    def _to_be_warmed(self, chain: Chain) -> bool:
        if not chain.token_ids or chain.keys in self._warmed or self._tries.get(chain.keys, 0) >= _MOST_TRIES:
            return False
        return not self.pins_blocks or self._resident(chain) < len(chain.keys)

    def _resident(self, chain: Chain) -> int:
        held = self._held()
        return next((count for count, key in enumerate(chain.keys) if key not in held), len(chain.keys))

    async def _wait(self) -> None:
        """Wait for a moment in which nobody wants anything of the replica, for a second at most."""
        self._busy_since = self._clock() if self._busy_since is None else self._busy_since
        for _ in range(_POLLS):
            await asyncio.sleep(_POLL_S)
            if self._is_idle():
                self._busy_since = None
                return

    def _is_idle(self) -> bool:
        """Whether nobody wants anything of the replica, as far as it and this gateway know."""
        if self._in_flight() or self._clock() - self._arrived_at < _SETTLE_S:
            return False
        load = self.replica.load
        return load is None or load.running + load.waiting == 0

    async def _try(self, target: Target) -> int | None:
        """Prefill one prefix; the tokens that had to be computed, None when it did not come to its end."""
        chain, tries, warmed, failures = target.chain, self._tries, self._warmed, self._failures
        self._warming = chain
        self._current = asyncio.create_task(self._prefill(target), name=f"{self.replica.id}-warm-up")
        await asyncio.wait([self._current])
        task, self._current, self._warming = self._current, None, None
        if task.cancelled():  # for a user's request, or because nobody wants it any more
            return None
        error = task.exception()
        if error is None:
            warmed.add(chain.keys)
            failures.pop(chain.keys, None)
            return task.result()
        # The message of an error of ours carries no prompt text; anything else is named by its type alone.
        failures[chain.keys] = error.message if isinstance(error, HeadstartError) else type(error).__name__
        tries[chain.keys] = tries.get(chain.keys, 0) + 1
        _log.warning("a pinned prefix was not prefilled", replica=self.replica.id, reason=failures[chain.keys])
        return None

    async def _prefill(self, target: Target) -> int:
        chain = target.chain
        request = GenerationRequest(
            chain.token_ids,
            chain.root,
            Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
            priority=BACKGROUND_PRIORITY,
            owner=target.owner,
            max_cached_blocks=target.max_cached_blocks,
        )
        cached = 0
        async with asyncio.timeout(_TIMEOUT_S), aclosing(self.replica.generate(request)) as outputs:
            async for output in outputs:
                cached = output.cached_tokens or cached
        return len(chain.token_ids) - cached
