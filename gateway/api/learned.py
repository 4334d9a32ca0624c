"""The operator's view of learned templates: what was found, and the switch for each.

Whoever mounts the routes guards them; they take dependencies named ``proposals`` and ``learned``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.api.decoding import decode_body
from gateway.canonical.learning.learner import MAX_WEIGHT
from gateway.canonical.learning.proposals import Proposal, TemplateProposals
from gateway.config import HoistMode
from gateway.learned_store import LearnedStore

__all__ = ["list_proposals", "switch_proposal"]


class SwitchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do with the fields of one learned template: move them, propose them, or neither."""

    hoist: Literal["apply", "suggest", "off"]


class Learning(msgspec.Struct, frozen=True):
    """What learning has read and holds: ``examined`` of the ``observed`` texts had no form that was known.

    ``held_tokens`` of at most ``max_tokens`` are kept for ``sources``.
    """

    observed: int
    examined: int
    sources: int
    held_tokens: int
    max_tokens: int


class ProposalList(msgspec.Struct, frozen=True):
    """The learned templates. ``hoist`` is the configuration's; learning needs ``suggest`` or ``apply``."""

    hoist: HoistMode
    learning: Learning
    proposals: list[Proposal]


_body_decoder: Final = msgspec.json.Decoder(SwitchBody)


@get("/admin/templates", sync_to_thread=False)
def list_proposals(proposals: NamedDependency[TemplateProposals]) -> ProposalList:
    """Every learned template with its constant words and the evidence for its fields."""
    learner = proposals.learner
    learning = Learning(learner.observed, learner.examined, learner.sources, learner.weight, MAX_WEIGHT)
    return ProposalList(proposals.default, learning, proposals.all())


@post("/admin/templates/{id:str}", status_code=200)
async def switch_proposal(
    proposals: NamedDependency[TemplateProposals],
    learned: NamedDependency[LearnedStore],
    request: Request[Any, Any, Any],
    id: FromPath[str],
) -> Proposal:
    """Decide about one learned template, in all its versions, for as long as what was learned is kept."""
    body = decode_body(_body_decoder, await request.body())
    proposal = proposals.switch(id, body.hoist)
    await learned.save()
    return proposal
