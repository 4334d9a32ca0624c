"""The parts of a prompt stand in it one after another, and their ends are where they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.attribution.parts import locate, prompt_parts
from gateway.canonical.pipeline import Canonicalizer
from gateway.canonical.registry import TemplateRegistry
from gateway.config import CanonicalConfig, TemplateConfig
from gateway.prompt import PromptRenderer
from gateway.schema import ChatRequest

RULES = TemplateConfig("Rules of {name}.\nNow: {now}. Be brief.")
DOCUMENTS = [{"id": "a", "title": "A", "text": "Text of a."}, {"id": "b", "text": "Text of b."}]


def body(system: str | None, user: str, **fields: Any) -> ChatRequest:
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": user})
    return msgspec.convert({"model": "m", "messages": messages, **fields}, ChatRequest)


@pytest.fixture(params=["chatml", "headers", "instructions"])
def prompt_renderer(request: pytest.FixtureRequest, renderer: Callable[[str], PromptRenderer]) -> PromptRenderer:
    return renderer(request.param)


def canonicalizer(**settings: Any) -> Canonicalizer:
    config = CanonicalConfig(**settings)
    return Canonicalizer(config, TemplateRegistry({"rules": RULES}, normalize=config.text))


def spans(request: ChatRequest, renderer: PromptRenderer, **settings: Any) -> list[tuple[str, str, str]]:
    """(kind, label, text) of the prompt, cut at the ends of its parts."""
    canonical = canonicalizer(**settings).canonicalize(request)
    layout = canonical.layout
    prompt = renderer.render(layout.arrange(layout.documents), layout.tools)
    parts = prompt_parts(layout, layout.documents, canonical.filled, prompt.text)
    ends = locate(parts, prompt.text)
    assert ends == sorted(ends)
    assert ends[-1] == len(prompt.text)
    ids = renderer.encode_prompt(prompt)
    counts = renderer.begun_before(prompt, ends)
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    return [
        (part.kind, part.label, prompt.text[start:end])
        for part, start, end in zip(parts, [0, *ends], ends, strict=False)
    ]


def test_a_system_text_is_cut_at_its_fields(prompt_renderer: PromptRenderer) -> None:
    found = spans(body("Rules of Ann.\nNow: 10:00. Be brief.", "why?"), prompt_renderer, hoist="off")
    assert [(kind, label) for kind, label, _ in found] == [
        ("system", ""),
        ("value", "name"),
        ("system", ""),
        ("value", "now"),
        ("system", ""),
        ("turn", ""),
    ]
    assert found[0][2].endswith("Rules of ")
    assert [text for _, _, text in found[1:5]] == ["Ann", ".\nNow: ", "10:00", ". Be brief."]


def test_documents_metadata_and_question_are_parts(prompt_renderer: PromptRenderer) -> None:
    found = spans(body("Rules of Ann.\nNow: 10:00. Be brief.", "why?", documents=DOCUMENTS), prompt_renderer)
    assert [kind for kind, _, _ in found] == ["system", "document", "document", "metadata", "question"]
    assert found[1][2].endswith("[Document a] A\nText of a.")
    assert found[2][2].strip() == "[Document b]\nText of b."
    assert found[3][2].strip() == "Metadata: name=Ann; now=10:00"
    assert found[4][2].strip().startswith("Question: why?")


def test_a_text_that_normalization_changes_counts_as_a_whole(renderer: Callable[[str], PromptRenderer]) -> None:
    request = body("Rules of Ann.\r\nNow: 10:00. Be brief.", "why?")
    filled = canonicalizer().canonicalize(request).filled
    layout = canonicalizer(text=False, hoist="off").canonicalize(request).layout
    prompt = renderer("chatml").render(layout.arrange(()), ())
    (system, turn) = prompt_parts(layout, (), filled, prompt.text)
    assert (system.text, system.spelling, system.fixed) == (
        "Rules of Ann.\r\nNow: 10:00. Be brief.",
        "Rules of Ann.\nNow: 10:00. Be brief.",
        "Rules of \0.\nNow: \0. Be brief.",
    )
    assert turn.spelling is None


@pytest.mark.parametrize(
    ("rendered", "kinds"),
    [
        ('<tools>[{"name": "look"}]</tools>The rules.|why?', ["tools", "system", "turn"]),
        ('The rules.<tools>[{"name": "look"}]</tools>|why?', ["system", "tools", "turn"]),
    ],
)
def test_tools_stand_where_the_chat_template_writes_them(rendered: str, kinds: list[str]) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    layout = canonicalizer().canonicalize(body("The rules.", "why?", tools=[tool])).layout
    parts = prompt_parts(layout, (), None, rendered)
    assert [part.kind for part in parts] == kinds
    ends = locate(parts, rendered)
    tools = kinds.index("tools")
    text = rendered[ends[tools - 1] if tools else 0 : ends[tools]]
    assert '"look"' in text
    assert "why?" not in text


def test_a_part_that_the_template_changed_is_left_out_of_account() -> None:
    layout = canonicalizer().canonicalize(body("The rules.", "why?")).layout
    parts = prompt_parts(layout, (), None, "THE RULES.|why?")
    assert locate(parts, "THE RULES.|why?") == [0, 15]


STUFF = TemplateConfig(
    "Use these pieces for {user}.\n----\n{context}\nThat is all.", documents="langchain", order="canonical"
)
PASTED_SYSTEM = "Use these pieces for Ann.\n----\nSecond piece.\n\nFirst piece.\nThat is all."
PASTED_USER = 'Read:\n<document id="b">Second.</document>\n<document id="a">First.</document>\nwhy?'


@pytest.mark.parametrize(
    ("messages", "kinds", "documents"),
    [
        (
            (PASTED_SYSTEM, "why?"),
            ["system", "value", "system", "document", "document", "system", "turn"],
            ["First piece.", "Second piece."],
        ),
        (
            ("Be brief.", PASTED_USER),
            ["system", "turn", "document", "document", "question"],
            ['<document id="b">Second.</document>', '<document id="a">First.</document>'],
        ),
        (
            (f"Rules. {PASTED_USER}", "why?"),
            ["system", "document", "document", "system", "turn"],
            ['<document id="b">Second.</document>', '<document id="a">First.</document>'],
        ),
    ],
)
def test_pasted_documents_are_parts_in_the_order_in_which_they_stand(
    messages: tuple[str, str], kinds: list[str], documents: list[str], renderer: Callable[[str], PromptRenderer]
) -> None:
    canonical = Canonicalizer(CanonicalConfig(hoist="off"), TemplateRegistry({"stuff": STUFF}, normalize=True))
    request = canonical.canonicalize(body(*messages))
    layout, arranged = request.layout, list(request.layout.documents)
    if request.filled is not None:
        arranged.reverse()
    prompt = renderer("chatml").render(layout.arrange(arranged), ())
    parts = prompt_parts(layout, arranged, request.filled, prompt.text)
    assert [part.kind for part in parts] == kinds
    assert [part.text for part in parts if part.kind == "document"] == documents
    ends = locate(parts, prompt.text)
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        assert part.text.strip() in prompt.text[start:end]
