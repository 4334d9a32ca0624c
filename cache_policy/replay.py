"""Replay a trace against a policy and a cache size. The policy classes are those that the engine runs, unchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from cache_policy.policies.base import BlockKey, EvictionPolicy
from cache_policy.policies.opt import OptPolicy
from cache_policy.policy import POLICY_NAMES, UnknownPolicyError, create_policy
from cache_policy.traces import Trace, TraceError

__all__ = ["REPLAY_POLICY_NAMES", "SEMANTICS", "Replay", "Semantics", "replay"]

Semantics = Literal["prefix", "object"]
SEMANTICS: Final[tuple[Semantics, ...]] = ("prefix", "object")
"""``prefix``: an engine's prefix cache. ``object``: a plain cache of objects, as other simulators have it."""

REPLAY_POLICY_NAMES: Final = (*POLICY_NAMES, OptPolicy.name)
"""The policies that a replay can run: those of an engine, and the optimum, which needs to know the future."""

_PROGRESS_EVERY: Final = 256


class Replay(msgspec.Struct, frozen=True):
    """What a replay counted; ``accesses`` and ``hit_blocks`` are blocks, ``hit_tokens`` those of ``tokens``."""

    requests: int
    accesses: int
    hit_blocks: int
    tokens: int
    hit_tokens: int
    evictions: int

    @property
    def block_hit_rate(self) -> float:
        """Fraction of the blocks asked for that were cached."""
        return self.hit_blocks / self.accesses if self.accesses else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Fraction of the input tokens that were cached."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(
    trace: Trace,
    policy: str,
    capacity: int,
    semantics: Semantics = "prefix",
    progress: Callable[[float], None] | None = None,
) -> Replay:
    """Replay all requests of ``trace``, one after the other, against a cache of ``capacity`` blocks.

    ``prefix``: a request hits the leading blocks that are resident; the rest is allocated in order, every block is
    admitted, and only a block that is not in use and has no resident child is evicted. What does not fit is not kept.
    Uses are reported when the request ends, deepest block first, as the engine's pool does.

    ``object``: every block is looked up by itself, first to last, resident parents or not, and admitted when missed.

    Args:
        trace: what to replay.
        policy: one of ``REPLAY_POLICY_NAMES``.
        capacity: blocks; more than the trace has different ones is a cache that never evicts.
        semantics: see above.
        progress: called with the fraction that is done.

    Raises:
        TraceError: ``prefix`` on a trace whose ids are no prefixes.
        UnknownPolicyError: there is no such policy.
        ValueError: ``capacity`` is not positive.
    """
    if semantics == "prefix" and trace.conflict is not None:
        raise TraceError(trace.conflict)
    upcoming: list[int] | None = None
    if policy == OptPolicy.name:
        upcoming = [0] * trace.unique_blocks
        cache: EvictionPolicy = OptPolicy(capacity, _position(upcoming))
    elif policy in POLICY_NAMES:
        cache = create_policy(policy, capacity)
    else:
        raise UnknownPolicyError(policy, REPLAY_POLICY_NAMES)
    run = _replay_prefixes if semantics == "prefix" else _replay_objects
    return run(trace, cache, upcoming, progress)


def _position(upcoming: list[int]) -> Callable[[BlockKey], int]:
    def next_use(key: BlockKey) -> int:
        assert isinstance(key, int)
        return upcoming[key]

    return next_use


def _replay_prefixes(
    trace: Trace, policy: EvictionPolicy, upcoming: list[int] | None, progress: Callable[[float], None] | None
) -> Replay:
    """The loop of ``prefix`` semantics.

    What makes it fast: blocks are numbered densely, so that all state is in flat arrays; residents are closed under
    parents, so that the length of a hit is found by bisection; the state of a whole chain is in its last block, as
    every other block of it has a resident child; reports run through ``map``; and a policy asks whether a block may
    leave by calling an array's own ``__getitem__``.
    """
    capacity, free, parents, block_size = policy.capacity, policy.capacity, trace.parents, trace.block_size
    resident = bytearray(trace.unique_blocks)
    children = [0] * trace.unique_blocks
    leaf = [False] * trace.unique_blocks  # idle, and without resident children
    parent_of = [None if parent < 0 else parent for parent in parents].__getitem__
    missed = _listener(policy)
    inserted, acquired, touched, removed, victim = (
        policy.inserted,
        policy.acquired,
        policy.touched,
        policy.removed,
        policy.victim,
    )
    evictable = leaf.__getitem__
    hit_blocks = hit_tokens = evictions = 0
    future = None if upcoming is None else _next_requests(trace)
    for number, (ids, length) in enumerate(zip(trace.requests, trace.lengths, strict=True)):
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number / len(trace.requests))
        if future is not None and upcoming is not None:
            for block, position in zip(ids, future[number], strict=True):
                upcoming[block] = position
        hit, end = 0, len(ids)
        while hit < end:
            middle = (hit + end) // 2
            if resident[ids[middle]]:
                hit = middle + 1
            else:
                end = middle
        tail = -1
        known = ids[:hit]
        if hit:
            tail = ids[hit - 1]
            leaf[tail] = False
            _run(map(acquired, known))
            hit_blocks += hit
            hit_tokens += min(hit * block_size, length)
        wanted = ids[hit:capacity]
        count = min(free, len(wanted))  # blocks that get room
        free -= count
        if missed is not None:
            _run(map(missed, wanted[:count]))
        for block in wanted[count:]:
            if missed is not None:
                missed(block)
            out = victim(evictable)
            if out is None:
                break
            removed(out)
            count += 1
            evictions += 1
            resident[out] = 0
            leaf[out] = False
            parent = parents[out]
            if parent >= 0:
                left = children[parent] = children[parent] - 1
                if not left and parent != tail:
                    leaf[parent] = True
        if count:
            if tail >= 0:
                children[tail] += 1
            new = wanted[:count]
            for block in new:
                resident[block] = children[block] = 1
            tail = new[-1]
            children[tail] = 0
            new = new[::-1]
            _run(map(inserted, new, map(parent_of, new), new, range(hit + count - 1, hit - 1, -1)))
        _run(map(touched, reversed(known)))
        if tail >= 0:
            leaf[tail] = not children[tail]
    return Replay(len(trace.requests), trace.accesses, hit_blocks, trace.tokens, hit_tokens, evictions)


def _replay_objects(
    trace: Trace, policy: EvictionPolicy, upcoming: list[int] | None, progress: Callable[[float], None] | None
) -> Replay:
    """The loop of ``object`` semantics."""
    free, block_size = policy.capacity, trace.block_size
    resident = [False] * trace.unique_blocks
    evictable = resident.__getitem__
    missed = _listener(policy)
    inserted, acquired, touched = policy.inserted, policy.acquired, policy.touched
    hit_blocks = hit_tokens = evictions = 0
    future = None if upcoming is None else _next_accesses(trace)
    for number, (ids, length) in enumerate(zip(trace.requests, trace.lengths, strict=True)):
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number / len(trace.requests))
        for place, block in enumerate(ids):
            if future is not None and upcoming is not None:
                upcoming[block] = future[number][place]
            if resident[block]:
                acquired(block)
                touched(block)
                hit_blocks += 1
                hit_tokens += min(block_size, length - block_size * place)
                continue
            if missed is not None:
                missed(block)
            if free:
                free -= 1
            else:
                out = policy.victim(evictable)
                assert out is not None, "nothing is in use between two accesses"
                policy.removed(out)
                evictions += 1
                resident[out] = False
            resident[block] = True
            inserted(block, None, block, 0)
    return Replay(len(trace.requests), trace.accesses, hit_blocks, trace.tokens, hit_tokens, evictions)


def _run(calls: Iterable[None]) -> None:
    """Make all calls of a lazy ``map``, without a loop of our own."""
    deque(calls, maxlen=0)


def _listener(policy: EvictionPolicy) -> Callable[[BlockKey], None] | None:
    """``policy.missed``, None for a policy that does not listen."""
    return None if type(policy).missed is EvictionPolicy.missed else policy.missed


def _next_requests(trace: Trace) -> list[list[int]]:
    """For every block of every request, the index of the next request that has it; of none: their number."""
    ahead = [len(trace.requests)] * trace.unique_blocks
    result: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        ids = trace.requests[number]
        result.append([ahead[block] for block in ids])
        for block in ids:
            ahead[block] = number
    return result[::-1]


def _next_accesses(trace: Trace) -> list[list[int]]:
    """For every access of every request, the position of the next access to its block; of none: their number."""
    position = trace.accesses
    ahead = [position] * trace.unique_blocks
    result: list[list[int]] = []
    for ids in reversed(trace.requests):
        row: list[int] = []
        for block in reversed(ids):
            position -= 1
            row.append(ahead[block])
            ahead[block] = position
        result.append(row[::-1])
    return result[::-1]
