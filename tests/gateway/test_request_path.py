from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cache_policy.keys import chain_keys
from engine.wire import AllBlocksCleared, BlockRemoved, BlockStored
from gateway.canonical.sighting import Scope
from gateway.canonical.templates import UNREGISTERED
from gateway.config import CanonicalConfig, TemplateConfig
from gateway.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError, ReplicaUnavailable
from gateway.plan import Caller, Plan
from gateway.prompt import PromptRenderer
from gateway.request_path import RequestPath
from gateway.routing.router import Router
from gateway.schema import ChatRequest, CompletionRequest

BLOCK = 16
TENANT = Caller("acme")
TEMPLATES = {
    "clock": TemplateConfig("Today is {date}.\nAnswer from the documents, and name the one you used."),
    "pinned": TemplateConfig("Read them all.", keep_first=1, keep_last=0),
    "stuff": TemplateConfig("It is {now}. Use these:\n\n{context}", documents="langchain", order="cache-aware"),
    "guide": TemplateConfig("Read what is given.", documents="xml", order="cache-aware"),
    "nodes": TemplateConfig("It is {now}. Answer.", documents="llama-index", order="cache-aware"),
}


class Flat:
    def seconds(self, tokens: int, context: int) -> float:
        return tokens * 1e-3


class Stage:
    """A request path over quiet replicas, and what the tests do with it."""

    def __init__(self, renderer: PromptRenderer, *replicas: Any, **canonical: Any) -> None:
        self.renderer = renderer
        self.replicas = {replica.id: replica for replica in replicas}
        self.router = Router(lambda id: Flat())
        for replica in replicas:
            self.router.on_ready(replica, replica.info)
        self.path = RequestPath(
            model="m",
            secret=b"s" * 32,
            canonical=CanonicalConfig(**canonical),
            templates=TEMPLATES,
            renderer=renderer,
            router=self.router,
        )

    def chat(self, caller: Caller = TENANT, **fields: Any) -> Plan:
        given = {"model": "m", "messages": [{"role": "user", "content": "What is cached?"}], **fields}
        return self.path.plan_chat(msgspec.convert(given, ChatRequest), caller)

    def complete(self, prompt: Any, caller: Caller = TENANT, **fields: Any) -> Plan:
        given = {"model": "m", "prompt": prompt, **fields}
        return self.path.plan_completion(msgspec.convert(given, CompletionRequest), caller)

    def computed(self, plan: Plan) -> None:
        """The replica has computed this prompt and keeps all of it."""
        if plan.sighting is not None:
            self.path.popularity.observe(plan.sighting)
        if plan.use_cache:
            self.router.on_events(self.replicas[plan.replica_id], (BlockStored(tuple(plan.keys), None, BLOCK),))


@pytest.fixture
def stage(renderer: Callable[[str], PromptRenderer], quiet_replica: Callable[..., Any]) -> Callable[..., Stage]:
    def make(kind: str = "chatml", replicas: int = 1, **canonical: Any) -> Stage:
        return Stage(renderer(kind), *(quiet_replica(f"engine-{number}") for number in range(replicas)), **canonical)

    return make


def documents(*ids: str) -> list[dict[str, Any]]:
    sentence = "This paragraph tells about {0}, and it is long enough for more than three blocks of tokens. "
    return [{"id": id, "title": f"About {id}", "text": (sentence * 3).format(id).strip()} for id in ids]


def test_a_chat_prompt_in_chatml_has_exactly_the_reference_form(stage: Callable[..., Stage]) -> None:
    one = stage()
    plan = one.chat(
        documents=[{"id": "d1", "title": "One", "text": "First."}, {"id": "d2", "title": "Two", "text": "Second."}],
        headstart={"template": "clock", "fields": {"date": "Monday"}},
    )
    assert one.renderer.decode(plan.token_ids) == (
        "<|im_start|>system\nToday is (see metadata).\n"
        "Answer from the documents, and name the one you used.<|im_end|>\n"
        "<|im_start|>user\n\n[Document d1] One\nFirst.\n\n[Document d2] Two\nSecond."
        "\n\nMetadata: date=Monday\n\nQuestion: What is cached?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert plan.token_ids == one.renderer.encode(one.renderer.decode(plan.token_ids))
    assert (plan.template, plan.tenant, plan.order) == ("clock", "acme", "cache-aware")
    assert plan.document_ids == ("d1", "d2")
    assert plan.note is None


def test_keys_are_the_chain_of_full_blocks_under_the_root(stage: Callable[..., Stage]) -> None:
    plan = stage().chat(documents=documents("a"))
    assert plan.keys == chain_keys(plan.root, plan.token_ids, BLOCK)
    assert len(plan.keys) == len(plan.token_ids) // BLOCK > 0


def test_l5_all_orders_of_the_same_documents_meet_in_one_prompt(stage: Callable[..., Stage]) -> None:
    for order in ("canonical", "cache-aware"):
        one = stage(order=order)
        ids = ("d1", "d2", "d3", "d4")
        system_and_documents: int | None = None
        for permutation in itertools.permutations(ids):
            plan = one.chat(documents=documents(*permutation))
            text = one.renderer.decode(plan.token_ids)
            assert all(f"[Document {id}] About {id}\nThis paragraph tells about {id}," in text for id in ids)
            if system_and_documents is None:
                system_and_documents = len(one.renderer.encode(text[: text.index("\n\nQuestion:")]))
            else:
                assert plan.predicted_cached >= system_and_documents - BLOCK
            one.computed(plan)


def test_l5_all_orders_of_documents_that_are_known_meet_in_one_prompt_by_popularity(
    stage: Callable[..., Stage],
) -> None:
    one = stage(order="popularity")
    for _ in range(32):
        one.computed(one.chat(documents=documents("d3", "d1")))
    orders = {
        one.chat(documents=documents(*permutation)).document_ids
        for permutation in itertools.permutations(("d1", "d2", "d3", "d4"))
    }
    assert orders == {("d1", "d3", "d2", "d4")}


def test_behind_what_is_resident_stands_what_is_popular_with_it(stage: Callable[..., Stage]) -> None:
    one = stage()
    for _ in range(32):
        one.computed(one.chat(documents=documents("x", "c")))
    assert one.chat(documents=documents("a", "c", "x"), cache_salt="other").document_ids == ("a", "c", "x")
    one.router.on_events(one.replicas["engine-0"], (AllBlocksCleared(),))
    one.computed(one.chat(documents=documents("b")))
    plan = one.chat(documents=documents("a", "b", "x", "c"))
    assert plan.document_ids == ("b", "x", "c", "a")
    assert (
        "4 of 4 documents stand at another place; the first 2 lead on engine-0; the rest by popularity snapshot 1"
        in {change.what for change in plan.changes}
    )


def test_the_body_limits_the_order_before_the_template_before_the_defaults(stage: Callable[..., Stage]) -> None:
    one = stage(order="canonical", keep_last=1)
    field = {"template": "pinned", "fields": {}}
    given = documents("d", "c", "b", "a")
    assert one.chat(documents=given).document_ids == ("b", "c", "d", "a")
    assert one.chat(documents=given, headstart=field).document_ids == ("d", "a", "b", "c")
    assert one.chat(documents=given, headstart={**field, "keep_first": 0}).document_ids == ("a", "b", "c", "d")
    displaced = {"max_displacement": 1, "keep_last": 0}
    assert one.chat(documents=given, headstart=displaced).document_ids == ("c", "d", "a", "b")


def test_the_hint_says_in_which_order_the_caller_gave_the_documents(stage: Callable[..., Stage]) -> None:
    one = stage(order="canonical")
    plan = one.chat(documents=documents("b", "a"), headstart={"hint": True})
    assert "\n\nDocuments by relevance: b, a\n\nQuestion:" in one.renderer.decode(plan.token_ids)
    assert "relevance" not in one.renderer.decode(one.chat(documents=documents("b", "a")).token_ids)


def test_only_requests_that_are_ordered_by_it_and_fill_the_cache_are_counted(stage: Callable[..., Stage]) -> None:
    one = stage()
    sighting = one.chat(
        documents=documents("a", "b"), cache_salt="s", headstart={"template": "clock", "fields": {"date": "x"}}
    ).sighting
    assert sighting is not None
    assert sighting.scope == Scope("acme", "clock", "s")
    assert len(set(sighting.documents)) == 2
    assert one.path.popularity.documents == 0, "planning counts nothing"
    for headstart in ({"bypass": True}, {"order": "preserve"}, {"order": "canonical"}):
        assert one.chat(documents=documents("a", "b"), headstart=headstart).sighting is None
    assert one.chat().sighting is None


def test_l5_preserve_keeps_the_callers_order(stage: Callable[..., Stage]) -> None:
    one = stage(order="preserve")
    for permutation in itertools.permutations(("d1", "d2", "d3")):
        plan = one.chat(documents=documents(*permutation))
        assert plan.document_ids == permutation
        one.computed(plan)


@pytest.mark.parametrize("kind", ["chatml", "headers"])
def test_documents_that_are_resident_lead_and_the_rest_stays_in_the_callers_order(
    kind: str, stage: Callable[..., Stage]
) -> None:
    one = stage(kind)
    one.computed(one.chat(documents=documents("x", "c")))
    plan = one.chat(documents=documents("a", "b", "c", "x"))
    assert plan.document_ids == ("x", "c", "a", "b")
    head = one.renderer.decode(plan.token_ids).index("[Document a]")
    assert plan.predicted_cached >= len(one.renderer.encode(one.renderer.decode(plan.token_ids)[:head])) - 2 * BLOCK
    assert "order" in {change.step for change in plan.changes}


def test_a_tokenizer_without_safe_cuts_falls_back_to_sorting_by_id_and_says_so(stage: Callable[..., Stage]) -> None:
    plan = stage("instructions").chat(documents=documents("b", "a"))
    assert (plan.order, plan.document_ids) == ("canonical", ("a", "b"))
    assert any("tokenizer" in change.what for change in plan.changes)


def test_order_and_replica_are_chosen_together(stage: Callable[..., Stage]) -> None:
    two = stage(replicas=2)
    first = two.chat(documents=documents("a", "b"))
    two.computed(first)
    with two.router.dispatch(first):
        busy = two.chat(documents=documents("c", "d"))
    assert busy.replica_id != first.replica_id
    two.computed(busy)
    for ids, expected in ((("b", "a", "d"), first.replica_id), (("a", "d", "c"), busy.replica_id)):
        plan = two.chat(documents=documents(*ids))
        assert plan.replica_id == expected
        assert plan.predicted_cached > 2 * BLOCK


def test_the_prediction_never_counts_the_last_prompt_token(stage: Callable[..., Stage]) -> None:
    one = stage()
    prompt = [100 + number for number in range(4 * BLOCK)]
    one.computed(one.complete(prompt))
    assert one.complete(prompt).predicted_cached == 3 * BLOCK
    assert one.complete([*prompt, 7]).predicted_cached == 4 * BLOCK


@pytest.mark.parametrize("order", ["cache-aware", "preserve"])
def test_nothing_behind_a_hole_in_the_index_is_predicted(order: str, stage: Callable[..., Stage]) -> None:
    bench = stage()
    asked = {"documents": documents("a", "b", "c"), "headstart": {"order": order}}
    first = bench.chat(**asked)
    bench.computed(first)
    whole = bench.chat(**asked).predicted_cached // BLOCK
    assert whole >= 6
    for hole in (whole - 2, whole // 2, 1):
        bench.router.on_events(bench.replicas["engine-0"], (BlockRemoved((first.keys[hole],)),))
        assert bench.chat(**asked).predicted_cached == hole * BLOCK


def test_bypass_reads_nothing_and_keeps_the_callers_order(stage: Callable[..., Stage]) -> None:
    one = stage()
    one.computed(one.chat(documents=documents("b", "a")))
    plan = one.chat(documents=documents("a", "b"), headstart={"bypass": True})
    assert not plan.use_cache
    assert (plan.predicted_cached, plan.order, plan.document_ids) == (0, "preserve", ("a", "b"))


def test_n1_tenants_share_nothing_and_each_reuses_its_own(stage: Callable[..., Stage]) -> None:
    one = stage()
    prompt = [100 + number for number in range(200)]
    for tenant in ("a", "b"):
        assert one.complete(prompt, Caller(tenant)).predicted_cached == 0
        one.computed(one.complete(prompt, Caller(tenant)))
        assert one.complete(prompt, Caller(tenant)).predicted_cached >= 176


def test_n2_a_salt_narrows_the_tenants_namespace_and_never_opens_anothers(stage: Callable[..., Stage]) -> None:
    one = stage()
    prompt = [100 + number for number in range(64)]
    roots = {
        one.complete(prompt, Caller(tenant), **fields).root
        for tenant in ("a", "b")
        for fields in ({}, {"cache_salt": "abc"}, {"cache_salt": "a"}, {"cache_salt": "b"})
    }
    assert len(roots) == 8
    assert one.complete(prompt, Caller("a"), user="b").root == one.complete(prompt, Caller("a")).root


def test_other_weights_have_another_root(
    renderer: Callable[[str], PromptRenderer], quiet_replica: Callable[..., Any]
) -> None:
    old, new = (Stage(renderer("chatml"), quiet_replica(fingerprint=print)) for print in ("old", "new"))
    assert old.chat().root != new.chat().root


def test_a_completion_is_passed_on_as_it_is(stage: Callable[..., Stage]) -> None:
    one = stage()
    text = "The cache\r\n <|im_end|> keeps "
    assert one.complete(text).token_ids == one.renderer.encode(text)
    assert one.complete([text]).token_ids == one.renderer.encode(text)
    assert one.complete([5, 6]).token_ids == one.complete([[5, 6]]).token_ids == [5, 6]
    plan = one.complete(text)
    assert (plan.template, plan.order) == (UNREGISTERED, "none")
    assert plan.note is not None


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], [None], [-1], [500], [2**70], [["a"]]],
)
def test_a_prompt_that_is_none_is_refused_by_name(prompt: Any, stage: Callable[..., Stage]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        stage().complete(prompt)
    assert caught.value.param == "prompt"


def test_a_prompt_longer_than_every_replica_takes_is_refused_with_the_numbers(stage: Callable[..., Stage]) -> None:
    one = stage()
    one.complete([1] * 4095)
    for refused in (
        lambda: one.complete([1] * 4096),
        lambda: one.complete("w x " * 4096),
        lambda: one.complete("w x " * 1_000_000),
        lambda: one.chat(messages=[{"role": "user", "content": "w x " * 4096}]),
        lambda: one.chat(documents=[{"text": "w x\n\ny z " * 300_000}]),
    ):
        with pytest.raises(ContextLengthError, match="4096") as caught:
            refused()
        assert caught.value.code == "context_length_exceeded"


def test_a_chat_prompt_must_leave_room_for_one_token(
    renderer: Callable[[str], PromptRenderer], quiet_replica: Callable[..., Any]
) -> None:
    count = len(Stage(renderer("chatml"), quiet_replica()).chat().token_ids)
    assert Stage(renderer("chatml"), quiet_replica(max_model_len=count + 1)).chat()
    with pytest.raises(ContextLengthError, match=str(count)):
        Stage(renderer("chatml"), quiet_replica(max_model_len=count)).chat()


def test_a_prompt_goes_only_where_it_fits(
    renderer: Callable[[str], PromptRenderer], quiet_replica: Callable[..., Any]
) -> None:
    small, large = quiet_replica("engine-0", max_model_len=256), quiet_replica("engine-1")
    both = Stage(renderer("chatml"), small, large)
    assert both.complete([1] * 300).replica_id == "engine-1"
    assert both.chat(documents=documents("a", "b", "c", "d")).replica_id == "engine-1"


@pytest.mark.parametrize("depth", [400, 900])
def test_i4_nesting_that_could_be_read_but_not_written_is_no_fault_of_ours(
    depth: int, stage: Callable[..., Stage]
) -> None:
    nested: Any = 1
    for _ in range(depth):
        nested = {"a": nested}

    def outcome(frames: int, **fields: Any) -> str:
        if frames:
            return outcome(frames - 1, **fields)
        try:
            stage().chat(**fields)
        except InvalidRequestError as error:
            return error.message
        return "planned"

    for fields in ({"documents": [{"text": "T", "x": nested}]}, {"tools": [{"function": {"name": "f", "x": nested}}]}):
        assert outcome(400, **fields) in ("planned", "The body is nested too deeply.")


def test_another_model_is_not_found(stage: Callable[..., Stage]) -> None:
    for refused in (lambda: stage().chat(model="gpt"), lambda: stage().complete("x", model="gpt")):
        with pytest.raises(ModelNotFoundError) as caught:
            refused()
        assert (caught.value.status, caught.value.param) == (404, "model")


def test_what_the_caller_got_wrong_is_said_even_while_no_replica_is_ready(stage: Callable[..., Stage]) -> None:
    nobody = stage(replicas=0)
    with pytest.raises(InvalidRequestError):
        nobody.chat(documents=[{}])
    with pytest.raises(ReplicaUnavailable):
        nobody.chat()


def test_tokenizing_a_chat_needs_no_replica_and_gives_the_prompts_ids(stage: Callable[..., Stage]) -> None:
    body = msgspec.convert(
        {"model": "m", "messages": [{"role": "user", "content": "What is cached?"}], "documents": documents("a", "b")},
        ChatRequest,
    )
    assert stage(replicas=0).path.tokenize_chat(body, TENANT) == stage().path.plan_chat(body, TENANT).token_ids


def test_changes_and_notes_hold_no_text_of_the_prompt(stage: Callable[..., Stage]) -> None:
    one = stage()
    marked = [{"id": f"ZEBRA-{id}", "text": f"ZEBRA {id}"} for id in "ba"]
    messages = [
        {"role": "system", "content": "Today is ZEBRA. \nAnswer from the documents, and name the one you used."},
        {"role": "user", "content": "ZEBRA?"},
    ]
    for _ in range(2):
        plan = one.chat(messages=messages, documents=[*marked, marked[0]], headstart={"order": "canonical"})
        assert plan.template == "clock"
        assert {change.step for change in plan.changes} == {"text", "volatile", "documents", "order", "layout"}
        assert "ZEBRA" not in repr((plan.changes, plan.note))


PARAGRAPHS = [f"The paragraph about {word} is long enough for three blocks. " * 4 + word for word in ("a", "b", "c")]


def pasted(template: str, chosen: tuple[int, ...], now: str = "9") -> list[dict[str, str]]:
    texts = [PARAGRAPHS[index] for index in chosen]
    if template == "stuff":
        system, user = f"It is {now}. Use these:\n\n" + "\n\n".join(texts), "Which one?"
    elif template == "nodes":
        nodes = [f"id: d{index}\n\n{text}" for index, text in zip(chosen, texts, strict=True)]
        rule = "-" * 21
        system, user = f"It is {now}. Answer.", f"Context:\n{rule}\n" + "\n\n".join(nodes) + f"\n{rule}\nWhich one?"
    else:
        blocks = [f'<document id="d{index}">\n{text}\n</document>' for index, text in zip(chosen, texts, strict=True)]
        system, user = "Read what is given.", "<documents>\n" + "\n".join(blocks) + "\n</documents>\n\nWhich one?"
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


@pytest.mark.parametrize("kind", ["chatml", "headers"])
@pytest.mark.parametrize("template", ["stuff", "guide", "nodes"])
def test_pasted_documents_follow_what_is_cached_where_their_template_says_so(
    kind: str, template: str, stage: Callable[..., Stage]
) -> None:
    one = stage(kind)
    first = one.chat(messages=pasted(template, (1,)))
    assert (first.template, first.order) == (template, "cache-aware")
    one.computed(first)
    second = one.chat(messages=pasted(template, (0, 1, 2), now="10"))
    assert second.document_ids[0] == first.document_ids[0]
    assert second.predicted_cached >= 3 * BLOCK
    text = one.renderer.decode(second.token_ids)
    assert [text.count(paragraph) for paragraph in PARAGRAPHS] == [1, 1, 1]
    assert text.index(PARAGRAPHS[1]) < text.index(PARAGRAPHS[0]) < text.index(PARAGRAPHS[2])
    assert second.token_ids == one.renderer.encode(text)
    assert one.chat(messages=pasted(template, (0, 1, 2)), headstart={"order": "preserve"}).order == "preserve"
