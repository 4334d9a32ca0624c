"""Whose blocks are whose, where that is limited: the part of a tenant in the prefix cache."""

from __future__ import annotations

from cache_policy.policy import EvictionPolicy

__all__ = ["Owner"]


class Owner:
    """A tenant that may have at most ``quota`` published blocks, idle and used together. Written by the pool only.

    Its share is run like a small pool of its own: ``policy``, of the kind that rules the whole pool, hears of its idle
    blocks and decides which of them makes room for its next one. It lives as long as it has blocks or requests.
    """

    __slots__ = ("__weakref__", "name", "policy", "quota", "resident")

    def __init__(self, name: str, quota: int, policy: EvictionPolicy) -> None:
        self.name = name
        self.quota = quota
        self.policy = policy
        self.resident = 0  # its published blocks
