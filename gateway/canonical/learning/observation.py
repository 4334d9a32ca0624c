"""What is learned from: the system text of a request, and whose texts it is compared with."""

from __future__ import annotations

import msgspec
import xxhash

__all__ = ["Observation", "Source"]


class Source(msgspec.Struct, frozen=True):
    """Whose texts are compared with each other. ``cache_key`` is the body's ``prompt_cache_key``, as a digest."""

    tenant: str
    model: str
    cache_key: int = 0

    @classmethod
    def of(cls, tenant: str, model: str, prompt_cache_key: str | None) -> Source:
        """The source of a request."""
        return cls(tenant, model, xxhash.xxh3_64_intdigest(prompt_cache_key.encode()) if prompt_cache_key else 0)


class Observation(msgspec.Struct, frozen=True):
    """A system text to learn from, once its request was answered. Lives no longer than its request."""

    source: Source
    text: str
