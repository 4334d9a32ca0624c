"""What the request path decided about one request, before any replica has seen it: one immutable value.

The API sends it, ``/v1/explain`` shows it, offline analysis sums it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from cache_policy.keys import TOKEN_BYTES, token_list
from gateway.attribution.part import Part
from gateway.canonical.learning.observation import Observation
from gateway.canonical.sighting import Sighting
from gateway.config import OrderMode

__all__ = ["Anatomy", "Arm", "Caller", "Change", "Comparison", "OrderDecision", "Plan"]

Anatomy = Callable[[], tuple[Sequence[Part], Sequence[int]]]
"""Takes a prompt apart: what it is made of, and where each part ends, in tokens."""

Arm = Literal["reordered", "preserved"]
"""The side of a hold-out on which a request is."""


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


class OrderDecision(msgspec.Struct, frozen=True):
    """Which order a request's documents take so that its answers suffer no harm (``gateway.quality``).

    ``note`` says why it is not the one that was asked for. ``arm`` is None without a hold-out. ``compared``: the answer
    is to be compared with one in the application's order.
    """

    order: OrderMode
    note: str | None = None
    arm: Arm | None = None
    compared: bool = False


class Comparison(msgspec.Struct, frozen=True):
    """What it takes to compare a reordered request's answer with one in the application's order.

    ``application_prompt`` makes the token ids of the prompt in that order, ``gold`` are acceptable answers.
    """

    application_prompt: Callable[[], list[int]]
    gold: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """A rendered, tokenized, keyed and routed prompt.

    ``tokens`` are its ids (``cache_policy.keys.token_bytes``), ``keys`` the chained keys of its full blocks under
    ``root``. ``predicted_cached`` is the number of prompt tokens that ``replica_id`` is believed to hold. ``order``
    is the document order that was applied (``none`` without documents), ``document_ids`` the documents as laid out.
    ``template`` is the registered template's name or ``unregistered``. ``note`` says why nothing was done when
    nothing was done, or why the documents kept their order. ``held_out``: it is kept from the cache to see what its
    prefill takes. ``anatomy`` is that of a chat's prompt. ``arm`` and ``comparison`` are what the quality gate
    wants of this request, None for most. ``observation`` and ``sighting`` are what may be learned from the request
    once it is answered, if anything.
    """

    tokens: bytes
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
    held_out: bool = False
    anatomy: Anatomy | None = None
    observation: Observation | None = None
    sighting: Sighting | None = None
    arm: Arm | None = None
    comparison: Comparison | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt's ids, made each time they are asked for."""
        return token_list(self.tokens)

    @property
    def length(self) -> int:
        """Of the prompt, in tokens."""
        return len(self.tokens) // TOKEN_BYTES
