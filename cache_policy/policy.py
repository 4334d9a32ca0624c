"""The registry of eviction policies. A new one is a file in ``policies`` and a line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cache_policy.policies.adaptive import AdaptivePolicy
from cache_policy.policies.arc import ArcPolicy
from cache_policy.policies.base import BlockKey, EvictionPolicy
from cache_policy.policies.fifo import FifoPolicy
from cache_policy.policies.gdsf import GdsfPolicy
from cache_policy.policies.lfu import LfuPolicy
from cache_policy.policies.lru import LruPolicy
from cache_policy.policies.rlt import RltPolicy
from cache_policy.policies.s3fifo import S3FifoPolicy
from cache_policy.policies.sieve import SievePolicy
from cache_policy.policies.slru import SlruPolicy
from cache_policy.policies.tlru import TlruPolicy
from cache_policy.policies.wtinylfu import WTinyLfuPolicy

__all__ = ["POLICY_NAMES", "BlockKey", "EvictionPolicy", "UnknownPolicyError", "create_policy"]

_POLICIES: Final[tuple[type[EvictionPolicy], ...]] = (
    LruPolicy,
    FifoPolicy,
    LfuPolicy,
    SlruPolicy,
    S3FifoPolicy,
    SievePolicy,
    ArcPolicy,
    WTinyLfuPolicy,
    GdsfPolicy,
    TlruPolicy,
    RltPolicy,
    AdaptivePolicy,
)
_BY_NAME: Final = {policy.name: policy for policy in _POLICIES}

POLICY_NAMES: Final = tuple(_BY_NAME)
"""The policies a pool can run, the default first."""


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists those there are."""

    def __init__(self, name: str, known: Sequence[str] | None = None) -> None:
        """``known`` replaces ``POLICY_NAMES`` where others than a pool's are possible."""
        super().__init__(f"unknown eviction policy {name!r}; known: {', '.join(known or POLICY_NAMES)}")
        self.name = name


def create_policy(name: str, capacity: int) -> EvictionPolicy:
    """A fresh policy for a pool of ``capacity`` blocks.

    Raises:
        UnknownPolicyError: ``name`` is not one of ``POLICY_NAMES``.
        ValueError: ``capacity`` is not positive.
    """
    policy = _BY_NAME.get(name)
    if policy is None:
        raise UnknownPolicyError(name)
    return policy(capacity)
