"""The rows of ``gateway.pins.report``, made from what pins are and from how replicas do with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.config import PinConfig
from gateway.pins.ceiling import Admission, Ceiling
from gateway.pins.prefix import Prefix
from gateway.pins.report import PinKind, PinnedReplica, PinRow, ReplicaSummary, overall_state
from gateway.pins.store import Pin
from gateway.pins.upkeep import ReplicaPins

__all__ = ["pin_kind", "pin_row", "replica_summary"]

_REMOTE: Final = "a remote server cannot be told to keep it"
_BORROWED: Final = "kept by its keys: the gateway where it was made has its texts and prefills it there"


def pin_kind(wish: PinConfig) -> PinKind:
    """What a pin is given by."""
    if wish.keys:
        return "keys"
    return "documents" if wish.documents else "template"


def pin_row(
    pin: Pin, prefix: Prefix | str, replicas: Mapping[str, ReplicaPins], admissions: Mapping[str, Admission]
) -> PinRow:
    """A pin whose prefix is known, or why it is not, at the replicas that have been told of it."""
    wish = pin.wish
    rows = {} if isinstance(prefix, str) else _at_replicas(pin, prefix, replicas, admissions)
    states = {row.state for row in rows.values()}
    return PinRow(
        id=pin.id,
        kind=pin_kind(wish),
        source="configuration" if pin.configured else "elsewhere" if pin.borrowed else "api",
        template=wish.template,
        documents=[None if (id := document.get("id")) is None else str(id)[:128] for document in wish.documents],
        tenant=wish.tenant,
        created=pin.created,
        expires=pin.expires,
        tokens=len(prefix.token_ids) or None if isinstance(prefix, Prefix) else None,
        state="not_resident" if isinstance(prefix, str) else overall_state(states),
        problem=prefix if isinstance(prefix, str) else None,
        replicas=rows,
    )


def replica_summary(upkeep: ReplicaPins, admission: Admission | None, ceiling: Ceiling) -> ReplicaSummary:
    """All pins at a replica that keeps blocks."""
    info = upkeep.replica.info
    assert info is not None, "a replica that keeps blocks has said how many it has"
    return ReplicaSummary(
        pinned_blocks=0 if admission is None else admission.blocks,
        resident_blocks=upkeep.resident_blocks(),
        max_blocks=ceiling.blocks(info),
        num_blocks=info.num_blocks,
        warmed_prefixes=upkeep.warmed_prefixes,
        warmed_tokens=upkeep.warmed_tokens,
    )


def _at_replicas(
    pin: Pin, prefix: Prefix, replicas: Mapping[str, ReplicaPins], admissions: Mapping[str, Admission]
) -> dict[str, PinnedReplica]:
    rows = {}
    for id, upkeep in replicas.items():
        info, admission = upkeep.replica.info, admissions.get(id)
        if info is None or admission is None:
            continue
        blocks = len(prefix.keys) or len(prefix.token_ids) // info.block_size
        facts: dict[str, Any] = {
            "tokens": blocks * info.block_size,
            "blocks": blocks,
            "share": blocks / info.num_blocks if info.num_blocks else None,
        }
        if (refused := admission.refused.get(pin.id)) is not None:
            rows[id] = PinnedReplica("not_resident", pinned=False, resident_blocks=None, note=refused, **facts)
            continue
        rows[id] = PinnedReplica(
            state=upkeep.state(pin.id),
            pinned=upkeep.pinned(pin.id),
            resident_blocks=upkeep.resident(pin.id),
            note=upkeep.problem(pin.id) or (_BORROWED if pin.borrowed else None if upkeep.pins_blocks else _REMOTE),
            **facts,
        )
    return rows
