"""What the request path decided about one request, before any replica has seen it: one immutable value.

The API sends it, ``/v1/explain`` shows it, offline analysis sums it up.
"""

from __future__ import annotations

import msgspec

from gateway.canonical.learning.observation import Observation

__all__ = ["Caller", "Change", "Plan"]


class Caller(msgspec.Struct, frozen=True):
    """Who asks, as authenticated: never taken from the body.

    ``tenant`` is the cache namespace and the statistics label, ``service_class`` the admission class.
    """

    tenant: str
    service_class: str = "default"


class Change(msgspec.Struct, frozen=True):
    """One thing that canonicalization did, in words an operator understands.

    ``step`` is ``text``, ``volatile``, ``documents``, ``order`` or ``layout``; ``what`` a sentence without prompt text.
    """

    step: str
    what: str


class Plan(msgspec.Struct, frozen=True):
    """A rendered, tokenized, keyed and routed prompt.

    ``keys`` are the chained keys of its full blocks under ``root``. ``predicted_cached`` is the number of prompt tokens
    that ``replica_id`` is believed to hold. ``order`` is the document order that was applied (``none`` without
    documents), ``document_ids`` the documents as laid out. ``template`` is the registered template's name or
    ``unregistered``. ``note`` says why nothing was done when nothing was done; None when something was.
    ``observation`` is what may be learned from the request once it is answered, if anything.
    """

    token_ids: list[int]
    root: bytes
    keys: list[bytes]
    replica_id: str
    predicted_cached: int
    template: str
    tenant: str
    order: str
    document_ids: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    note: str | None = None
    use_cache: bool = True
    observation: Observation | None = None
