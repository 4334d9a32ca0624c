"""What the gateway would do with one chat request, and why there: for ``/v1/explain``. Nothing is generated.

It shows the caller's own text alone. Where a prompt leaves an earlier one of the same tenant, only the place is told:
what the other one goes on with is somebody else's.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cache_policy.keys import token_bytes
from gateway.attribution.memory import TokenMemory
from gateway.plan import Change
from gateway.prompt import PromptRenderer
from gateway.request_path import WeighedChat, order_changes
from gateway.routing.placement import Placement

__all__ = ["CandidateExplanation", "Divergence", "Explanation", "explain"]

Reason = Literal["new", "not_resident", "tail"]

_EXCERPT_TOKENS: Final = 16


class Divergence(msgspec.Struct, frozen=True):
    """The first token of the prompt that a replica is not believed to hold, with the prompt's text before and from it.

    ``reason`` is ``new`` when no remembered prompt has this token there: the nearest one is left here.
    ``not_resident``: its block was asked for before, and this replica has evicted it or never had it. ``tail``: all is
    held that can be, which is the full blocks without the last token.
    """

    token: int
    reason: Reason
    text_before: str
    here: str


class CandidateExplanation(msgspec.Struct, frozen=True):
    """The request at one replica. ``documents`` are laid out in this order there, by ``order``.

    ``cached_tokens`` of ``prompt_tokens`` are expected to be there. ``expected_seconds`` is the cost by which replicas
    are compared: until the first token, with the ``waiting_tokens`` that others still have to compute there. ``keys``
    are those of the prompt's full blocks there, in hex: what can be pinned.
    """

    replica: str
    order: str
    documents: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    expected_seconds: float
    in_flight: int
    waiting_tokens: int
    divergence: Divergence
    keys: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True):
    """A chat request up to its replica. ``replica`` is where it would go; the best candidate comes first.

    ``fields`` are those of its template with their values, ``metadata`` the line that carries those that were moved,
    null when none was. ``changes`` are what canonicalization did, ``note`` why it did nothing.
    """

    replica: str
    template: str
    fields: dict[str, str]
    metadata: str | None
    changes: tuple[Change, ...]
    note: str | None
    candidates: tuple[CandidateExplanation, ...]


def explain(
    weighed: WeighedChat, memory: TokenMemory, renderer: PromptRenderer, *, use_cache: bool = True
) -> Explanation:
    """Say what was weighed. ``memory`` holds the prompts that were sent before, each under its key root."""
    canonical, chosen = weighed.canonical, weighed.chosen
    ranked = sorted(
        (placement for placement in weighed.placements if placement is not chosen),
        key=lambda placement: (placement.expected_seconds, placement.candidate.replica_id),
    )
    documents = canonical.layout.documents
    return Explanation(
        replica=chosen.candidate.replica_id,
        template=canonical.template,
        fields=dict(canonical.filled.values) if canonical.filled is not None else {},
        metadata=canonical.layout.metadata,
        changes=(*canonical.changes, *order_changes(weighed)),
        note=weighed.decision.note or canonical.note,
        candidates=tuple(
            CandidateExplanation(
                replica=placement.candidate.replica_id,
                order=placement.mode,
                documents=tuple(documents[index].id for index in placement.order),
                prompt_tokens=placement.length,
                cached_tokens=placement.cached_tokens,
                expected_seconds=placement.expected_seconds,
                in_flight=placement.candidate.in_flight,
                waiting_tokens=placement.candidate.waiting_tokens,
                divergence=_divergence(placement, memory, renderer, use_cache=use_cache),
                keys=tuple(key.hex() for key in placement.keys),
            )
            for placement in (chosen, *ranked)
        ),
    )


def _divergence(placement: Placement, memory: TokenMemory, renderer: PromptRenderer, *, use_cache: bool) -> Divergence:
    ids, size, token = placement.token_ids, placement.candidate.info.block_size, placement.cached_tokens
    common = memory.find(placement.root, token_bytes(ids)).tokens if use_cache else 0
    reason: Reason = "new"
    if token == (len(ids) - 1) // size * size:
        reason = "tail"
    elif common >= token + size:
        reason = "not_resident"
    else:
        token = max(token, common)
    before, after = ids[max(0, token - _EXCERPT_TOKENS) : token], ids[token : token + _EXCERPT_TOKENS]
    return Divergence(token, reason, renderer.decode(before), renderer.decode(after))
