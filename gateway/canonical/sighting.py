"""What is counted of a request's documents: fingerprints, and among whose requests they are compared."""

from __future__ import annotations

import msgspec

__all__ = ["Scope", "Sighting"]


class Scope(msgspec.Struct, frozen=True, cache_hash=True):
    """Whose requests are counted together: one tenant's of one template, under one ``cache_salt``."""

    tenant: str
    template: str
    salt: str = ""


class Sighting(msgspec.Struct, frozen=True):
    """The documents of one request, as fingerprints in the caller's order."""

    scope: Scope
    documents: tuple[int, ...]
