"""The registry of eviction policies. A new one is a file in ``policies`` and a line here."""

from __future__ import annotations

from typing import Final

from cache_policy.policies.base import BlockKey, EvictionPolicy
from cache_policy.policies.fifo import FifoPolicy
from cache_policy.policies.lru import LruPolicy

__all__ = ["POLICY_NAMES", "BlockKey", "EvictionPolicy", "UnknownPolicyError", "create_policy"]

_POLICIES: Final[tuple[type[EvictionPolicy], ...]] = (LruPolicy, FifoPolicy)
_BY_NAME: Final = {policy.name: policy for policy in _POLICIES}

POLICY_NAMES: Final = tuple(_BY_NAME)
"""The policies a pool can run, the default first."""


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists those there are."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown eviction policy {name!r}; known: {', '.join(POLICY_NAMES)}")
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
