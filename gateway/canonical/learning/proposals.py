"""What the operator is shown of the learned templates: their constant words, their fields with the evidence."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.canonical.learning.learned import LearnedTemplate
from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.learning.observation import Source
from gateway.canonical.learning.tokens import Shape
from gateway.config import HoistMode
from gateway.errors import TemplateNotFoundError

__all__ = ["FieldProposal", "Proposal", "TemplateProposals"]


class FieldProposal(msgspec.Struct, frozen=True):
    """One field and what was seen of it in the last ``requests`` (half to all of a window).

    ``volatile``: it is moved where hoisting applies; others stay in place, being variants or too long (``name`` is then
    empty). ``distinct`` values were counted, beyond 31 estimated; ``changes`` is how often the value was another one
    than before; ``longest`` is in characters.
    """

    name: str
    volatile: bool
    shape: Shape
    requests: int
    distinct: int
    changes: int
    longest: int


class Proposal(msgspec.Struct, frozen=True):
    """A learned template. The text reads ``literals[0] fields[0] literals[1] …``; no value is in it.

    ``hoist`` is what holds for it, ``decided`` whether the operator has said so for this template. ``requests`` had
    its form since it was learned, in ``sources`` sources (by ``prompt_cache_key``). ``system`` is the text for a
    registered template; None where a field that is not volatile has no place in one.
    """

    id: str
    name: str
    version: int
    tenant: str
    model: str
    sources: int
    hoist: HoistMode
    decided: bool
    requests: int
    literals: tuple[str, ...]
    fields: tuple[FieldProposal, ...]
    system: str | None


class TemplateProposals:
    """The operator's side of a learner: lists what was found, and passes decisions on. Holds nothing of its own.

    ``default`` is the configuration's ``canonical.hoist``.
    """

    def __init__(self, learner: TemplateLearner, default: HoistMode) -> None:
        self.learner: Final = learner
        self.default: Final = default

    def all(self) -> list[Proposal]:
        """The learned templates with a volatile field, those with most requests first.

        Where several sources of a tenant have one form, that is one proposal, with the evidence of the busiest.
        """
        busiest: dict[str, tuple[Source, LearnedTemplate]] = {}
        requests: dict[str, list[int]] = {}
        for source, template in self.learner.templates():
            requests.setdefault(template.id, []).append(template.requests)
            if template.id not in busiest or busiest[template.id][1].requests < template.requests:
                busiest[template.id] = source, template
        proposals = [
            _proposal(source, template, requests[id], self.learner.decision(id), self.default)
            for id, (source, template) in busiest.items()
        ]
        return sorted(proposals, key=lambda proposal: (-proposal.requests, proposal.id))

    def switch(self, id: str, hoist: HoistMode) -> Proposal:
        """Decide about one learned template in all its versions; tells the log, without its text.

        Raises:
            TemplateNotFoundError: there is no learned template with this id, or no longer.
        """
        before = next((proposal for proposal in self.all() if proposal.id == id), None)
        if before is None:
            raise TemplateNotFoundError(f"There is no learned template {id[:32]!r}; GET /admin/templates lists them.")
        self.learner.decide(id, hoist)
        import structlog  # not needed where nothing is decided, and slow to come

        log = structlog.get_logger("headstart.templates")
        log.info("learned template switched", template=id, version=before.version, before=before.hoist, after=hoist)
        return msgspec.structs.replace(before, hoist=hoist, decided=True)


def _proposal(
    source: Source, template: LearnedTemplate, requests: list[int], decision: HoistMode | None, default: HoistMode
) -> Proposal:
    form = template.form
    fields = tuple(
        FieldProposal(name, moved, seen.shape, seen.requests, seen.distinct, seen.changes, seen.longest)
        for name, moved, seen in zip(form.fields, form.moved, template.evidence, strict=True)
    )
    escaped = msgspec.structs.replace(
        form, literals=tuple(literal.replace("{", "{{").replace("}", "}}") for literal in form.literals)
    )
    return Proposal(
        id=template.id,
        name=template.name,
        version=template.version,
        tenant=source.tenant,
        model=source.model,
        sources=len(requests),
        hoist=decision or default,
        decided=decision is not None,
        requests=sum(requests),
        literals=form.literals,
        fields=fields,
        system=escaped.fill([f"{{{name}}}" for name in form.fields]) if all(form.moved) else None,
    )
