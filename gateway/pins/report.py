"""How pins stand, for ``/admin/pins``, the dashboard and Prometheus."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.pins.upkeep import PinState

__all__ = ["PinKind", "PinReport", "PinRow", "PinnedReplica", "ReplicaSummary", "overall_state"]

PinKind = Literal["template", "documents", "keys"]


class PinnedReplica(msgspec.Struct, frozen=True):
    """One pin at one replica.

    ``pinned``: its engine was told to keep it. Of its ``blocks``, ``resident_blocks`` are there now, null where that is
    not known; they take ``share`` of the pool, null at a server that keeps its pool to itself. ``note`` says in words
    what is not as it should be, or cannot be there.
    """

    state: PinState
    pinned: bool
    tokens: int
    blocks: int
    resident_blocks: int | None
    share: float | None
    note: str | None


class PinRow(msgspec.Struct, frozen=True):
    """One pin. ``documents`` are their ids as given; times are Unix seconds.

    ``source`` is ``configuration``, ``api``, or ``elsewhere`` for one of another gateway whose texts are not here.

    ``tokens`` is what its requests have in common, of which engines keep the full blocks; null for a pin by keys.
    ``state`` is the least advanced of all replicas. ``problem`` is why it is in force nowhere, null when it is.
    """

    id: str
    kind: PinKind
    source: Literal["configuration", "api", "elsewhere"]
    template: str | None
    documents: list[str | None]
    tenant: str | None
    created: float
    expires: float | None
    tokens: int | None
    state: PinState
    problem: str | None
    replicas: dict[str, PinnedReplica]


class ReplicaSummary(msgspec.Struct, frozen=True):
    """All pins at one replica that can keep them: the blocks they take together, resident or not, of ``max_blocks``."""

    pinned_blocks: int
    resident_blocks: int
    max_blocks: int
    num_blocks: int
    warmed_prefixes: int
    warmed_tokens: int


class PinReport(msgspec.Struct, frozen=True):
    """All pins. ``persistent``: those made through the API outlast the gateway."""

    pins: list[PinRow]
    replicas: dict[str, ReplicaSummary]
    max_share: float
    persistent: bool


_LEAST_ADVANCED_FIRST: tuple[PinState, ...] = ("warming", "waiting", "not_resident", "warmed", "resident")


def overall_state(states: set[PinState]) -> PinState:
    """One word for all replicas; ``waiting`` where there is none yet."""
    return next((state for state in _LEAST_ADVANCED_FIRST if state in states), "waiting")
