"""Templates that were learned, in the pipeline: moved under ``apply``, told under ``suggest``, left alone otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.canonical.learning.learner import TemplateLearner
from gateway.canonical.pipeline import Canonicalizer, CanonicalPrompt
from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.templates import UNREGISTERED
from gateway.config import CanonicalConfig, TemplateConfig
from gateway.schema import ChatRequest

SYSTEM = "You are the help desk bot of Initech.\nNow: {now}. Trace: {trace}. Answer from the documents, and cite ids."
STABLE = SYSTEM.replace("{now}", "(see metadata)").replace("{trace}", "(see metadata)")


def body(number: int, system: str = SYSTEM, **fields: Any) -> ChatRequest:
    text = system.format(now=f"2026-03-02 08:00:{number:02}", trace=f"{number:08x}")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Why?"}]
    return msgspec.convert({"model": "m", "messages": messages, **fields}, ChatRequest)


class Stage:
    """A pipeline that has learned ``SYSTEM`` from 20 requests of tenant ``acme``."""

    def __init__(self, **defaults: Any) -> None:
        self.learner = TemplateLearner(salt=7)
        templates = TemplateRegistry({"known": TemplateConfig("Registered at {now}.")}, normalize=True)
        self._canonicalizer = Canonicalizer(CanonicalConfig(**defaults), templates, self.learner)
        for number in range(20):
            self.ask(body(number), learn=True)

    def ask(self, request: ChatRequest, *, learn: bool = False, tenant: str = "acme") -> CanonicalPrompt:
        canonical = self._canonicalizer.canonicalize(request, tenant)
        if learn and canonical.observation is not None:
            self.learner.observe(canonical.observation.source, canonical.observation.text)
        return canonical


def final(canonical: CanonicalPrompt) -> list[str]:
    return [message.content for message in canonical.layout.arrange(canonical.layout.documents)]


def test_learned_fields_move_under_apply_and_stay_visible() -> None:
    stage = Stage(hoist="apply")
    canonical = stage.ask(body(41))
    assert final(canonical) == [STABLE, "Metadata: now=2026-03-02 08:00:41; trace=00000029\n\nWhy?"]
    assert canonical.template.startswith("learned-")
    assert [change.step for change in canonical.changes] == ["volatile"]
    assert canonical.note is None


def test_they_are_told_and_left_in_place_under_suggest() -> None:
    stage = Stage()
    canonical = stage.ask(body(41))
    assert final(canonical)[0] == SYSTEM.format(now="2026-03-02 08:00:41", trace="00000029")
    (change,) = canonical.changes
    assert change.step == "volatile"
    assert "now, trace" in change.what
    assert canonical.note is not None
    assert "suggest" in canonical.note
    assert final(stage.ask(body(41, headstart={"hoist": "apply"})))[0] == STABLE


def test_one_template_is_switched_against_the_default() -> None:
    for default, wanted, moved in (("suggest", "apply", True), ("apply", "off", False), ("apply", "suggest", False)):
        stage = Stage(hoist=default)
        ((_, template),) = stage.learner.templates()
        stage.learner.decide(template.id, wanted)  # type: ignore[arg-type]
        assert (final(stage.ask(body(41)))[0] == STABLE) == moved


@pytest.mark.parametrize("hoist", ["off", "declared"])
def test_nothing_is_looked_for_where_nobody_wants_it(hoist: str) -> None:
    stage = Stage(hoist=hoist)
    assert stage.learner.observed == 0
    assert stage.ask(body(41)).template == UNREGISTERED


def test_registered_templates_go_first_and_are_not_learned() -> None:
    stage = Stage(hoist="apply")
    canonical = stage.ask(body(41, "Registered at {now}."))
    assert (canonical.template, canonical.observation) == ("known", None)


def test_another_tenant_gains_nothing_by_what_was_learned() -> None:
    assert Stage(hoist="apply").ask(body(41), tenant="bolt").template == UNREGISTERED


def test_fields_in_front_of_documents_in_the_system_message_move_and_the_documents_stay_as_they_are() -> None:
    stage = Stage(hoist="apply")
    system = (
        "Answer from the passages, as of {now}. Cite the id of each passage that you have used.\n{documents}\nBe brief."
    )

    def asked(number: int) -> ChatRequest:
        blocks = [f'<document id="kb-{number + n}">\nFact {number * n}.\n\nIt is  so.</document>' for n in range(3)]
        return body(number, system.replace("{documents}", "\n".join(blocks)))

    for number in range(40):
        stage.ask(asked(number), learn=True)
    canonical = stage.ask(asked(41))
    text = asked(41).messages[0].content
    assert isinstance(text, str)
    assert final(canonical)[0] == text.replace("2026-03-02 08:00:41", "(see metadata)")
    assert final(canonical)[1].startswith("Metadata: time=2026-03-02 08:00:41")
    assert [document.id for document in canonical.layout.documents] == ["kb-41", "kb-42", "kb-43"]
    assert canonical.order == "preserve"


def test_asking_teaches_nothing() -> None:
    stage = Stage(hoist="apply")
    for number in range(20):
        stage.ask(body(number, "Another assistant, asked and never answered, at {now}, with {trace}."))
    assert stage.learner.observed == 20
