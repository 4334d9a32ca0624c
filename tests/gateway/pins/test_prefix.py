"""The prefix of a pin, against the prompts that requests really have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.canonical.layout import SEPARATOR
from gateway.config import CanonicalConfig, HoistMode, LayoutConfig, PinConfig, TemplateConfig
from gateway.pins.prefix import PrefixReader
from gateway.plan import Caller
from gateway.prompt import PromptRenderer
from gateway.request_path import RequestPath
from gateway.routing.router import Router
from gateway.schema import ChatMessage, ChatRequest
from gateway.stats.cost import PrefillCost

CALLER = Caller("default")
DOCUMENTS = ({"id": "d1", "title": "One", "text": "The cache keeps blocks."}, {"id": "d2", "text": "Each has tokens."})
VALUES = [{"now": "10:00", "user": "Ann"}, {"now": "2025-01-01", "user": "b"}, {"now": "now", "user": "7"}]
TEMPLATES = {
    "support": TemplateConfig("You are helpful. It is {now}, and {user} asks.\nAnswer from the documents only."),
    "own": TemplateConfig(
        "It is {now}. {user} asks.",
        layout=LayoutConfig(document="<doc {id}>\n{text}\n</doc>", question="Asked: {question}"),
    ),
}


def reader_and_path(renderer: PromptRenderer, hoist: HoistMode = "declared") -> tuple[PrefixReader, RequestPath]:
    path = RequestPath(
        model="m",
        secret=b"s",
        canonical=CanonicalConfig(hoist=hoist),
        templates=TEMPLATES,
        renderer=renderer,
        router=Router(lambda _: PrefillCost()),
    )
    return PrefixReader(path, model="m", tools=False), path


def prompts(path: RequestPath, template: str, documents: tuple[dict[str, Any], ...]) -> list[list[int]]:
    """Requests as an application sends them, each recognised by its system text; some with documents behind."""
    return [
        path.tokenize_chat(
            ChatRequest(
                model="m",
                messages=[
                    ChatMessage("system", TEMPLATES[template].system.format(**values)),
                    ChatMessage("user", f"Question {index}: why?"),
                ],
                documents=[*documents, *({"id": f"more{i}", "text": f"More {i}."} for i in range(index))],
            ),
            CALLER,
        )
        for index, values in enumerate(VALUES)
    ]


@pytest.mark.parametrize("kind", ["chatml", "headers"])
@pytest.mark.parametrize("hoist", ["off", "declared"])
@pytest.mark.parametrize("template", list(TEMPLATES))
@pytest.mark.parametrize("documents", [(), DOCUMENTS[:1], DOCUMENTS])
def test_every_request_begins_with_it(
    renderer: Callable[[str], PromptRenderer],
    kind: str,
    hoist: HoistMode,
    template: str,
    documents: tuple[dict[str, Any], ...],
) -> None:
    reader, path = reader_and_path(renderer(kind), hoist)
    shared = reader.read(PinConfig(template, documents, tenant="default")).token_ids
    asked = prompts(path, template, documents)
    assert shared
    assert all(prompt[: len(shared)] == shared for prompt in asked)
    # And it is nearly all that they share: what is behind it is at most a separator, or the beginning of a label.
    common = next(place for place, ids in enumerate(zip(*asked, strict=False)) if len(set(ids)) > 1)
    behind = renderer(kind).decode(asked[0][len(shared) : common])
    assert len(behind) <= len(SEPARATOR + "[Document more") or behind.startswith(SEPARATOR + "Metadata: now="), behind


def test_moved_fields_are_not_in_it_and_those_left_in_place_end_it(renderer: Callable[[str], PromptRenderer]) -> None:
    chatml = renderer("chatml")
    moved = reader_and_path(chatml)[0].read(PinConfig("support", tenant="default"))
    assert "It is (see metadata), and (see metadata) asks.\nAnswer from" in chatml.decode(moved.token_ids)
    left = reader_and_path(chatml, "off")[0].read(PinConfig("support", tenant="default"))
    assert chatml.decode(left.token_ids).endswith(("It is", "It is "))


def test_the_order_of_documents_is_that_of_the_pin(renderer: Callable[[str], PromptRenderer]) -> None:
    chatml = renderer("chatml")
    reader, _ = reader_and_path(chatml)
    text = chatml.decode(reader.read(PinConfig("support", DOCUMENTS[::-1], tenant="default")).token_ids)
    assert 0 < text.index("[Document d2]") < text.index("[Document d1] One\nThe cache keeps blocks.")


def test_two_tenants_never_share_keys(renderer: Callable[[str], PromptRenderer], quiet_replica: Any) -> None:
    reader, _ = reader_and_path(renderer("chatml"))
    info = quiet_replica().info
    chains = []
    for tenant, salt in (("a", None), ("b", None), ("a", "x")):
        wish = PinConfig("support", tenant=tenant, cache_salt=salt)
        chains.append(reader.chain(wish, reader.read(wish), info))
    assert len({chain.keys[0] for chain in chains}) == 3
    assert all(len(chain.token_ids) == 16 * len(chain.keys) for chain in chains)
