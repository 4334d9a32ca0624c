"""What another eviction policy or pool size would have hit on this gateway's own traffic, while it happens.

Each replica's requests are followed by ghost caches (``cache_policy.ghosts``) of its own pool's size and of others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from cache_policy.ghosts import MOST_ONE_IN, Ghost, GhostCaches, GhostTally
from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import WhatIfConfig
from gateway.replicas.base import Replica

__all__ = ["Recommendation", "WhatIf", "WhatIfReport", "WhatIfRow"]

WINDOW_MINUTES: Final = 60
_FIRST_ONE_IN: Final = 4
_REGULATED_EVERY_S: Final = 60
_REGULATED_AT_ONCE_AFTER_S: Final = 5
"""So long is waited at least for what following costs, also when it has used up a minute's share already."""

_ENOUGH_REQUESTS: Final = 200
"""With fewer requests in the window nothing is recommended."""

_WORTH_POINTS: Final = 0.01
"""A smaller gain in hit rate is within the error of a sample, and no reason to change anything."""

_MOST_FOLLOWED: Final = 50_000
"""Blocks in all ghost caches together, some 450 bytes each at most, and"""
_MOST_REMEMBERED: Final = 80_000
"""blocks of which is remembered when they were asked for last, some 150 bytes each, up to twice as many: all replicas
together, and altogether less than 64 MB."""

_Pool = tuple[int, int]
"""Blocks, and tokens per block."""

_log = structlog.get_logger("headstart.whatif")


class WhatIfRow(msgspec.Struct, frozen=True):
    """One combination. ``blocks`` over all replicas; rates are fractions of the prompt tokens.

    ``gain`` is the difference in hit rate to the policy and size in force, by the same estimate.
    ``saved_prefill_s`` is what that would have been worth in the window, in seconds of prefill.
    """

    policy: str
    size: float
    blocks: int
    token_hit_rate: float
    gain: float
    saved_prefill_s: float


class Recommendation(msgspec.Struct, frozen=True):
    """What to do, in words. ``policy`` is the one to switch to, None to stay."""

    text: str
    policy: str | None = None
    gain: float = 0.0
    saved_prefill_s: float = 0.0


class WhatIfReport(msgspec.Struct, frozen=True):
    """The last hour. ``sampling_rate`` is the part of the blocks that the ghost caches see.

    ``token_hit_rate`` is what the engines really hit, ``estimated_token_hit_rate`` what their own ghosts say they did:
    how far the two are apart tells how far the other rows can be trusted.
    """

    window_s: int
    requests: int
    prompt_tokens: int
    policy: str
    sampling_rate: float
    cpu_share: float
    token_hit_rate: float
    estimated_token_hit_rate: float
    rows: list[WhatIfRow]
    recommendation: Recommendation


class _Minute:
    """Sums of one minute. Replicas with alike pools share a tally."""

    __slots__ = ("cached_tokens", "minute", "prompt_tokens", "requests", "tallies")

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.tallies: dict[_Pool, GhostTally] = {}


class WhatIf:
    """A ``ReplicaObserver`` that owns the ghost caches of each replica; belongs to the event loop.

    The sampling rate starts at a quarter. It is lowered when following the traffic has cost more than a minute's share
    of a core, or would take more memory than allowed; then the ghosts start over.
    """

    def __init__(
        self,
        config: WhatIfConfig,
        *,
        policy: Callable[[], str],
        seconds: Callable[[str, int], float],
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``policy`` tells the one in force, ``seconds`` what computing so many tokens costs on a replica."""
        self._config: Final = config
        self._policy: Final = policy
        self._seconds: Final = seconds
        self._clock: Final = clock
        self._timer: Final = timer
        self._pools: dict[str, _Pool] = {}
        self._caches: dict[str, GhostCaches] = {}
        self._policies: tuple[str, ...] = ()
        self._combinations: list[tuple[str, float]] = []
        self._minutes: deque[_Minute] = deque(maxlen=WINDOW_MINUTES)
        self._one_in = _FIRST_ONE_IN
        self._spent = 0.0
        self._spent_since = self._clock()
        self._cpu_share = 0.0

    # --- ReplicaObserver ---------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """Follow its pool; after a restart with the same pool the ghosts go on."""
        if info.num_blocks and self._pools.get(replica.id) != (info.num_blocks, info.block_size):
            self._pools[replica.id] = info.num_blocks, info.block_size
            self._start_over()

    def on_down(self, replica: Replica, reason: str) -> None:
        """Its ghosts wait for it."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """Nothing to follow: ghosts decide for themselves."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Nothing to follow."""

    # --- traffic -----------------------------------------------------------------------------------

    def observe(self, replica_id: str, keys: Sequence[bytes], prompt_tokens: int, cached_tokens: int) -> None:
        """Take in one request that a replica has computed: the keys of its full blocks, and what was really hit."""
        if replica_id not in self._pools:
            return
        started = self._timer()
        if self._policy() not in self._policies:
            self._start_over()
        pool = self._pools[replica_id]
        minute = self._minute()
        minute.requests += 1
        minute.prompt_tokens += prompt_tokens
        minute.cached_tokens += cached_tokens
        tally = minute.tallies.get(pool)
        if tally is None:
            tally = minute.tallies[pool] = GhostTally(len(self._combinations))
        # The last token is always computed, and with it the block that it ends.
        self._caches[replica_id].observe(keys, tally, (prompt_tokens - 1) // pool[1])
        self._spent += self._timer() - started
        self._regulate()

    def report(self) -> WhatIfReport:
        """The last hour's figures, and what to make of them."""
        oldest = int(self._clock() // 60) - WINDOW_MINUTES
        minutes = [minute for minute in self._minutes if minute.minute > oldest]
        requests = sum(minute.requests for minute in minutes)
        prompt = sum(minute.prompt_tokens for minute in minutes)
        policy = self._policy()
        rows = self._rows(minutes, prompt, policy)
        in_force = next((row.token_hit_rate for row in rows if row.policy == policy and row.size == 1), 0.0)
        return WhatIfReport(
            window_s=WINDOW_MINUTES * 60,
            requests=requests,
            prompt_tokens=prompt,
            policy=policy,
            sampling_rate=1 / self._one_in,
            cpu_share=self._cpu_share,
            token_hit_rate=sum(minute.cached_tokens for minute in minutes) / prompt if prompt else 0.0,
            estimated_token_hit_rate=in_force,
            rows=rows,
            recommendation=_recommend(rows, policy, requests),
        )

    # --- inside ------------------------------------------------------------------------------------

    def _rows(self, minutes: Sequence[_Minute], prompt: int, policy: str) -> list[WhatIfRow]:
        sums: dict[_Pool, GhostTally] = {}
        for minute in minutes:
            for of_pool, tally in minute.tallies.items():
                sums.setdefault(of_pool, GhostTally(len(self._combinations))).add(tally)
        if not prompt or not sums:
            return []
        hits = [0.0] * len(self._combinations)
        for (_, tokens_per_block), tally in sums.items():
            found = tally.hit_blocks()
            hits = [tokens + blocks * tokens_per_block for tokens, blocks in zip(hits, found, strict=True)]
        rates = dict(zip(self._combinations, (tokens / prompt for tokens in hits), strict=True))
        per_token = self._seconds_per_token()
        pool = sum(blocks for blocks, _ in self._pools.values())
        rows = []
        for (name, size), rate in rates.items():
            gain = rate - rates[policy, 1.0] if (policy, 1.0) in rates else 0.0
            rows.append(WhatIfRow(name, size, round(pool * size), rate, gain, gain * prompt * per_token))
        return rows

    def _seconds_per_token(self) -> float:
        tokens = 512  # a common chunk: the cost of a step is spread over as many as in earnest
        curves = [self._seconds(replica_id, tokens) for replica_id in self._pools]
        return sum(curves) / len(curves) / tokens if curves else 0.0

    def _minute(self) -> _Minute:
        now = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1].minute != now:
            self._minutes.append(_Minute(now))
        return self._minutes[-1]

    def _start_over(self) -> None:
        """New, empty ghosts; what the old ones said of the last hour is not comparable with what these will say."""
        self._policies = tuple(dict.fromkeys((self._policy(), *self._config.policies)))
        self._minutes.clear()
        self._combinations = [(policy, size) for policy in self._policies for size in self._config.sizes]
        total = sum(blocks for blocks, _ in self._pools.values()) * sum(size for _, size in self._combinations)
        while total / self._one_in > _MOST_FOLLOWED and self._one_in < MOST_ONE_IN:
            self._one_in *= 2
        self._caches = {
            replica_id: GhostCaches(
                [Ghost(policy, max(1, round(blocks * size))) for policy, size in self._combinations],
                self._one_in,
                _MOST_REMEMBERED // len(self._pools),
            )
            for replica_id, (blocks, _) in self._pools.items()
        }

    def _regulate(self) -> None:
        """See what following has cost, and follow less when it was too much; soon when it was far too much."""
        elapsed = self._clock() - self._spent_since
        allowed = self._config.cpu_share
        if elapsed < _REGULATED_AT_ONCE_AFTER_S or (
            elapsed < _REGULATED_EVERY_S and self._spent <= allowed * _REGULATED_EVERY_S
        ):
            return
        self._cpu_share, self._spent, self._spent_since = self._spent / elapsed, 0.0, self._clock()
        if self._cpu_share <= allowed or self._one_in == MOST_ONE_IN:
            return
        before = self._one_in
        self._one_in *= 2
        while self._one_in < MOST_ONE_IN and self._cpu_share > allowed * self._one_in / before:
            self._one_in *= 2
        _log.info("ghost caches see fewer blocks", sampling_rate=1 / self._one_in, cpu_share=self._cpu_share)
        self._start_over()


def _recommend(rows: Sequence[WhatIfRow], policy: str, requests: int) -> Recommendation:
    """In words; sizes are mentioned, but only the policy can be switched while it runs."""
    if requests < _ENOUGH_REQUESTS or not rows:
        return Recommendation(
            f"Too early to say: {requests} requests in the last hour, a recommendation needs {_ENOUGH_REQUESTS}."
        )
    best = max((row for row in rows if row.size == 1), key=lambda row: row.gain)
    larger = max(
        (row for row in rows if row.size > 1 and row.policy == best.policy), key=lambda row: row.gain, default=None
    )
    if best.policy != policy and best.gain >= _WORTH_POINTS:
        text = (
            f"Switch from {policy} to {best.policy}: {best.gain:+.1%} of the prompt tokens hit, "
            f"{best.saved_prefill_s:.1f} s of prefill in the last hour."
        )
        chosen = best
    else:
        text = f"Stay with {policy}: no other policy would hit {_WORTH_POINTS:.0%} more of the prompt tokens."
        chosen = None
    reached = best.gain if chosen else 0.0
    if larger is not None and larger.gain - reached >= _WORTH_POINTS:
        text += f" A pool of {larger.blocks:,} blocks would add {larger.gain - reached:.1%}."
    if chosen is None:
        return Recommendation(text)
    return Recommendation(text, chosen.policy, chosen.gain, chosen.saved_prefill_s)
