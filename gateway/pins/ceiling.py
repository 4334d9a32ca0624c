"""Which pins fit a replica: together they take a bounded part of its cache, and of their tenants' quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from engine.wire import EngineInfo
from gateway.pins.prefix import Chain

__all__ = ["Admission", "Ceiling"]


class Admission(msgspec.Struct, frozen=True):
    """Which of some pins fit one replica, by id, and why the others do not. ``blocks`` is what the former take."""

    chains: dict[str, Chain]
    refused: dict[str, str]
    blocks: int


class Ceiling:
    """The most that pins may take. Holds no state.

    ``share`` is the part of a replica's pool, ``quota`` tells of a tenant how many of its blocks are kept there at most
    (0: any number).
    """

    def __init__(self, share: float, quota: Callable[[str], int]) -> None:
        self.share: Final = share
        self._quota: Final = quota

    def blocks(self, info: EngineInfo) -> int:
        """The most blocks that all pins together take there."""
        return int(self.share * info.num_blocks)

    def admit(self, pins: Iterable[tuple[str, str | None, Chain]], info: EngineInfo) -> Admission:
        """Take the pins in turn, given as (id, tenant, chain), as long as they fit. A block of several counts once."""
        most = self.blocks(info)
        taken: set[bytes] = set()
        by_tenant: dict[str, set[bytes]] = {}
        chains: dict[str, Chain] = {}
        refused: dict[str, str] = {}
        for id, tenant, chain in pins:
            own = by_tenant.setdefault(tenant, set()) if tenant is not None else set[bytes]()
            reason = self._why_refused(chain, info, taken, most, own, tenant)
            if reason is not None:
                refused[id] = reason
                continue
            taken.update(chain.keys)
            own.update(chain.keys)
            chains[id] = chain
        return Admission(chains, refused, len(taken) if info.num_blocks else 0)

    def _why_refused(
        self, chain: Chain, info: EngineInfo, taken: set[bytes], most: int, own: set[bytes], tenant: str | None
    ) -> str | None:
        if not chain.keys:
            return f"what its requests have in common is less than one block of {info.block_size} tokens"
        if len(chain.token_ids) >= info.max_model_len:
            return f"it has {len(chain.token_ids)} tokens, prompts at most {info.max_model_len - 1}"
        if not info.num_blocks:  # a remote server keeps its pool to itself
            return None
        wanted = _together(taken, chain)
        if wanted > most:
            return (
                f"all pins together would take {wanted} blocks, {wanted - most} more than the {most} of "
                f"{info.num_blocks} that they may (limits.max_pinned_share = {self.share:g})"
            )
        quota = self._quota(tenant) if tenant is not None else 0
        if quota and (wanted := _together(own, chain)) > quota:
            return (
                f"the pins of tenant {tenant!r} would take {wanted} blocks, {wanted - quota} more than its "
                f"max_cached_blocks of {quota}"
            )
        return None


def _together(taken: set[bytes], chain: Chain) -> int:
    return len(taken) + sum(key not in taken for key in chain.keys)
