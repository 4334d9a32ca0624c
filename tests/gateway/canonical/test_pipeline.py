from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical.pipeline import Canonicalizer, CanonicalPrompt
from gateway.canonical.registry import TemplateRegistry
from gateway.canonical.templates import UNREGISTERED
from gateway.config import CanonicalConfig, TemplateConfig
from gateway.errors import InvalidRequestError
from gateway.schema import ChatMessage, ChatRequest

TEMPLATES = {
    "clock": TemplateConfig("Current time is {time}. Today is {date}. Request {id}.\nAnswer in one sentence."),
    "plain": TemplateConfig("Answer in one sentence."),
    "still": TemplateConfig("For {user}: be kind.", hoist="off", order="preserve"),
}
DOCUMENTS = [{"id": "b", "text": "Second."}, {"id": "a", "title": "A", "text": "First."}]


def canonicalizer(**defaults: Any) -> Canonicalizer:
    config = CanonicalConfig(**defaults)
    return Canonicalizer(config, TemplateRegistry(TEMPLATES, normalize=config.text))


def body(*messages: tuple[str, str], **fields: Any) -> ChatRequest:
    turns = [{"role": role, "content": content} for role, content in messages]
    return msgspec.convert({"model": "m", "messages": turns, **fields}, ChatRequest)


def final(canonical: CanonicalPrompt) -> list[tuple[str, str]]:
    layout = canonical.layout
    return [(message.role, message.content) for message in layout.arrange(layout.documents)]


def clock(time: str, date: str = "2026-09-09", id: str = "1") -> str:
    return f"Current time is {time}. Today is {date}. Request {id}.\nAnswer in one sentence."


def test_l2_volatile_fields_move_behind_the_stable_part_and_stay_visible() -> None:
    first, second = (
        canonicalizer().canonicalize(body(("system", clock(time, id=id)), ("user", "hi")))
        for time, id in (("15:09:20", "1"), ("2026-09-09T15:09:34.123Z", "7c9e6679-7425-40de-944b-e07fc1f90ae7"))
    )
    assert first.template == second.template == "clock"
    assert final(first)[0] == final(second)[0] == ("system", clock(*["(see metadata)"] * 3))
    assert final(first)[1] == ("user", "Metadata: time=15:09:20; date=2026-09-09; id=1\n\nhi")
    assert "2026-09-09T15:09:34.123Z" in final(second)[1][1]
    assert {change.step for change in first.changes} == {"volatile"}
    assert first.note is None


def test_l2_with_the_rule_off_the_text_is_untouched() -> None:
    request = body(("system", clock("15:09:20")), ("user", "hi"), headstart={"hoist": "off"})
    canonical = canonicalizer().canonicalize(request)
    assert final(canonical) == [("system", clock("15:09:20")), ("user", "hi")]
    assert canonical.changes == ()
    assert canonical.template == "clock"
    assert canonical.note is not None


def test_a_request_that_names_template_and_fields_equals_one_that_writes_the_text() -> None:
    written = body(("system", clock("9", "d", "i")), ("user", "Q"), documents=DOCUMENTS)
    named = body(
        ("user", "Q"),
        documents=DOCUMENTS,
        headstart={"template": "clock", "fields": {"id": "i", "date": "d", "time": "9"}},
    )
    assert canonicalizer().canonicalize(written).layout == canonicalizer().canonicalize(named).layout
    for options in (written, named):
        off = canonicalizer(hoist="off").canonicalize(options)
        assert final(off)[0] == ("system", clock("9", "d", "i"))


def test_a_named_template_may_meet_a_system_message_of_its_own_form() -> None:
    request = body(("system", clock("9", "d", "i")), ("user", "Q"), headstart={"template": "clock"})
    assert canonicalizer().canonicalize(request).layout.metadata == "Metadata: time=9; date=d; id=i"


def test_documents_lead_the_last_user_message_and_earlier_turns_stay() -> None:
    turns = (("system", "S"), ("user", "old"), ("assistant", "a"), ("user", "new"))
    canonical = canonicalizer().canonicalize(body(*turns, documents=DOCUMENTS))
    assert final(canonical)[:3] == list(turns[:3])
    assert final(canonical)[3] == ("user", "\n[Document b]\nSecond.\n\n[Document a] A\nFirst.\n\nQuestion: new")


def test_nothing_declared_and_no_documents_leaves_every_byte_and_says_so() -> None:
    turns = [("system", "S"), ("user", "e\u0301 \r\n\t"), ("assistant", "x "), ("user", "\ufeff?\n")]
    canonical = canonicalizer().canonicalize(body(*turns, documents=[]))
    assert final(canonical) == turns
    assert canonical.changes == ()
    assert canonical.template == UNREGISTERED
    assert canonical.note is not None


def test_switches_of_body_template_and_configuration_win_in_this_order() -> None:
    still, hoisted = ("system", "For Ann: be kind."), {"hoist": "declared", "order": "canonical"}
    by_template = canonicalizer().canonicalize(body(still, ("user", "Q"), documents=DOCUMENTS))
    assert (by_template.order, by_template.layout.metadata) == ("preserve", None)
    by_body = canonicalizer().canonicalize(body(still, ("user", "Q"), documents=DOCUMENTS, headstart=hoisted))
    assert (by_body.order, by_body.layout.metadata) == ("canonical", "Metadata: user=Ann")
    by_default = canonicalizer(order="canonical").canonicalize(body(("user", "Q"), documents=DOCUMENTS))
    assert by_default.order == "canonical"


def test_text_normalization_can_be_switched_off() -> None:
    request = body(("system", "S \r\n"), ("user", "Q"))
    assert final(canonicalizer(text=False).canonicalize(request))[0] == ("system", "S \r\n")
    assert final(canonicalizer().canonicalize(request))[0] == ("system", "S")


def test_fields_stay_where_they_are_without_a_user_message_to_carry_them() -> None:
    canonical = canonicalizer().canonicalize(body(("system", clock("9")), ("assistant", "a")))
    assert final(canonical)[0] == ("system", clock("9"))
    assert canonical.note is not None
    assert "user message" in canonical.note


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"headstart": {"template": "nope"}}, "headstart.template"),
        ({"headstart": {"template": "clock", "fields": {"time": "1", "id": "2"}}}, "headstart.fields.date"),
        ({"headstart": {"template": "plain", "fields": {"mood": "2"}}}, "headstart.fields.mood"),
        ({"headstart": {"fields": {"mood": "2"}}}, "headstart.template"),
        ({"documents": [{"text": "x"}, {"title": "y"}]}, "documents[1].text"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        canonicalizer().canonicalize(body(("user", "hi"), **fields))
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"time": "1", "date": "2", "id": "3"}, None])
def test_a_named_template_and_another_system_message_contradict_each_other(fields: dict[str, str] | None) -> None:
    request = body(("system", "S"), ("user", "hi"), headstart={"template": "clock", "fields": fields})
    with pytest.raises(InvalidRequestError) as caught:
        canonicalizer().canonicalize(request)
    assert caught.value.param in ("headstart.fields", "messages[0].content")


def test_documents_need_a_question() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        canonicalizer().canonicalize(body(("system", "S"), documents=DOCUMENTS))
    assert caught.value.param == "documents"


SYSTEM_TEXT = st.one_of(
    st.sampled_from(
        [clock("9"), clock("(see metadata)"), clock("9").replace("\n", " \r\n"), "Answer in one sentence."]
    ),
    st.builds(lambda user: f"For {user}: be kind.", st.text(alphabet="ab :\n\u2028", max_size=6)),
    st.text(alphabet="a \r\n\ufeffe\u0301{}", max_size=12),
)
TEXT = st.text(alphabet="ab \r\n[]<|>é", max_size=12)
TURN = st.one_of(
    st.tuples(st.sampled_from(["user", "assistant"]), TEXT),
    st.tuples(st.sampled_from(["system", "developer"]), SYSTEM_TEXT),
)
DOCUMENT = st.fixed_dictionaries(
    {"id": st.sampled_from(["a", "b", "c", "d"]).map(lambda id: id), "text": st.just("")}
).map(lambda document: document | {"text": f"text of {document['id']}"})
CONVERSATION = st.tuples(
    st.lists(TURN, min_size=1, max_size=5), st.lists(DOCUMENT, max_size=4), st.sampled_from(["off", "suggest"])
)


@given(CONVERSATION)
def test_l7_canonicalizing_is_idempotent_and_keeps_the_number_of_messages(
    conversation: tuple[list[tuple[str, str]], list[dict[str, Any]], str],
) -> None:
    turns, documents, hoist = conversation
    if documents and not any(role == "user" for role, _ in turns):
        documents = []
    once = final(canonicalizer(hoist=hoist).canonicalize(body(*turns, documents=documents)))
    assert len(once) == len(turns)
    twice = final(canonicalizer(hoist=hoist).canonicalize(body(*once)))
    assert twice == once
    assert [turn for turn in turns if turn[0] == "assistant"] == [turn for turn in once if turn[0] == "assistant"]


def test_l7_canonicalizing_gives_the_same_bytes_in_every_process() -> None:
    script = """
import json, sys
import msgspec
from gateway.canonical.pipeline import Canonicalizer
from gateway.canonical.registry import TemplateRegistry
from gateway.config import CanonicalConfig, TemplateConfig
from gateway.schema import ChatRequest
given = json.load(sys.stdin)
templates = {name: TemplateConfig(text) for name, text in given["templates"].items()}
canonical = Canonicalizer(CanonicalConfig(), TemplateRegistry(templates, normalize=True))
for body in given["bodies"]:
    done = canonical.canonicalize(msgspec.convert(body, ChatRequest))
    print(msgspec.json.encode([done.layout.arrange(done.layout.documents), done.layout.tools, done.changes]))
"""
    attributes = {"source": "s", "page": 3, "tags": {"x": 1, "a": 2}}
    documents = [{"text": f"t{n}", **attributes} for n in range(3)]
    tools = [{"function": {"name": name, "parameters": {"b": 1, "a": 2}}} for name in "ba"]
    messages = [{"role": "system", "content": clock("9")}, {"role": "user", "content": "Q"}]
    bodies = [{"model": "m", "messages": messages, "documents": documents, "tools": tools}]
    given = json.dumps({"templates": {name: t.system for name, t in TEMPLATES.items()}, "bodies": bodies})
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            input=given,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(outputs) == 1
    assert "t2" in outputs.pop()


def test_parts_and_plain_text_are_the_same_request() -> None:
    parts = ChatRequest(model="m", messages=[ChatMessage("user", [{"type": "text", "text": "hi"}])])
    assert canonicalizer().canonicalize(parts).layout == canonicalizer().canonicalize(body(("user", "hi"))).layout
