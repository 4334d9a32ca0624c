"""Simulated prefix caches, which the request path takes for replicas."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from itertools import takewhile
from typing import Final, Protocol

from cache_policy.ghosts import GhostCache
from cache_policy.policies.lru import LruPolicy
from engine.wire import EngineInfo
from gateway.routing.candidate import Candidate

__all__ = ["SimulatedCache", "SimulatedFleet", "parse_size"]

_NUMBER_BYTES: Final = 8
_ANY_LENGTH: Final = 2**31 - 1


def parse_size(text: str) -> int | None:
    """Blocks of a cache; None for ``inf``, one that never forgets. Raises ``ValueError`` for anything else."""
    if text == "inf":
        return None
    blocks = int(text)
    if blocks < 1:
        raise ValueError("a cache has at least 1 block")
    return blocks


class SimulatedCache(Protocol):
    """Keys of a prefix cache without its content."""

    @property
    def resident(self) -> Set[bytes]:
        """The keys held now; follows every request."""
        ...

    def request(self, keys: Sequence[bytes], hit: int = 0) -> int:
        """Ask for the chain of one prompt; return how many of its first blocks were resident. It then holds them all,
        or as many as there is room for. ``hit`` of them are known to be resident.
        """
        ...


class _Endless:
    """A cache that never forgets; about 100 bytes a block."""

    def __init__(self) -> None:
        self.resident: set[bytes] = set()

    def request(self, keys: Sequence[bytes], hit: int = 0) -> int:
        hit += len([*takewhile(self.resident.__contains__, keys[hit:])])
        self.resident.update(keys[hit:])
        return hit


class _LeastRecent:
    """``_Bounded`` under ``lru``, and the same hits, in a tenth of the time.

    Whoever uses a block uses its parent and reports it later, so that the block that was unused for longest never has a
    resident child: neither children nor what is in use have to be counted.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()  # in the order in which they will leave
        self.resident: Set[bytes] = self._held.keys()

    def request(self, keys: Sequence[bytes], hit: int = 0) -> int:
        held = self._held
        hit += len([*takewhile(held.__contains__, keys[hit:])])
        keep, leave = held.move_to_end, held.popitem
        for key in reversed(keys[hit : self._blocks]):  # the first blocks leave last
            held[key] = None
        for key in reversed(keys[:hit]):
            keep(key)
        for _ in range(len(held) - self._blocks):
            leave(last=False)
        return hit


class _Bounded:
    """A cache of so many blocks under one of the engine's policies, with the replay's semantics."""

    def __init__(self, policy: str, blocks: int) -> None:
        self._ghost = GhostCache(policy, blocks)
        self.resident: Set[bytes] = _Numbered(self._ghost.resident)

    def request(self, keys: Sequence[bytes], hit: int = 0) -> int:
        return self._ghost.request([*map(_number, keys)])


def _number(key: bytes) -> int:
    return int.from_bytes(key[:_NUMBER_BYTES], "little")


class _Numbered(Set[bytes]):
    """The keys behind a view of their numbers: tells whether a key is there, and cannot list them."""

    def __init__(self, numbers: Set[int]) -> None:
        self._numbers = numbers

    def __contains__(self, key: object) -> bool:
        return _number(key) in self._numbers  # type: ignore[arg-type]  # a set of bytes is asked for bytes

    def __iter__(self) -> Iterator[bytes]:
        raise TypeError("keys cannot be told from their numbers")

    def __len__(self) -> int:
        return len(self._numbers)


class _Even:
    """Every token costs the same."""

    def seconds(self, tokens: int, context: int) -> float:
        return float(tokens)


def _cache(blocks: int | None, policy: str) -> SimulatedCache:
    if blocks is None:
        return _Endless()
    return _LeastRecent(blocks) if policy == LruPolicy.name else _Bounded(policy, blocks)


class SimulatedFleet:
    """Caches of several sizes side by side, each asked for every request: a ``gateway.request_path.Fleet``.

    Owns its caches. ``sizes`` are in blocks, None for one that never forgets. With ``alike`` all get the same prompts,
    so that requests are only laid out for the first.
    """

    def __init__(
        self, sizes: Sequence[int | None], policy: str, block_size: int, vocab_size: int, *, alike: bool = False
    ) -> None:
        self.caches: Final[Sequence[SimulatedCache]] = [_cache(size, policy) for size in sizes]
        info = EngineInfo(
            model="",
            root="",
            fingerprint="",
            boot_id="",
            max_model_len=_ANY_LENGTH,
            num_blocks=_ANY_LENGTH,
            block_size=block_size,
            dtype="",
            device="",
            vocab_size=vocab_size,
            eos_token_ids=(),
            policy=policy,
            max_batch_tokens=_ANY_LENGTH,
        )
        self._candidates: Final = [
            Candidate(str(index), info, cache.resident, 0, 0, _Even())
            for index, cache in enumerate(self.caches[:1] if alike else self.caches)
        ]

    def candidates(self, avoid: Set[str] = frozenset()) -> list[Candidate]:
        """Those for which requests are laid out, always."""
        return list(self._candidates)
