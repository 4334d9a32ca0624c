"""Whatever a body holds: a 400 that names the fault or an answer, never a 500, never a hang."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.wire import Sampling
from gateway.api import models, validation
from gateway.config import Config, TemplateConfig
from gateway.schema import MAX_DOCUMENTS

from .conftest import BASE, MODEL, Answer, Bench, Service, with_limits

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def _raw(service: Service, path: str, body: bytes, **headers: str) -> Answer:
    return await service.ask("POST", path, data=body, headers={"content-type": "application/json"} | headers)


async def _refused(service: Service, answer: Answer, param: str | None = None) -> None:
    """400 in OpenAI's shape, nothing sent to an engine, and the next request is served."""
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert service.replica.submitted == []


async def _still_serves(service: Service) -> None:
    assert (await service.complete("still here")).status == 200


def test_i1_n_and_best_of_are_bounded_before_any_work(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for value in (1_000_000, 2_147_483_648, 0, -1, 1.5, "4", 17):
            await _refused(service, await service.chat(n=value), "n")
            await _refused(service, await service.complete("x", n=value), "n")
            await _refused(service, await service.complete("x", best_of=value), "best_of")
        await _refused(service, await service.complete("x", n=3, best_of=2), "best_of")
        await _refused(service, await service.complete("x", best_of=2, stream=True), "best_of")
        await _still_serves(service)

    bench.run(scenario)


def test_i3_the_body_limit_counts_what_arrives(bench: Bench) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 100_000}).encode()

    async def chunks() -> Any:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    async def scenario(service: Service) -> None:
        for data in (body, chunks()):
            for path in (COMPLETIONS, "/tokenize"):
                answer = await service.ask("POST", path, data=data if data is body else chunks())
                assert answer.status == 413
                assert answer.json["error"]["code"] == "payload_too_large"
        compressed = await _raw(service, COMPLETIONS, b"\x1f\x8b" + bytes(100), **{"content-encoding": "gzip"})
        await _refused(service, compressed)
        await _still_serves(service)

    bench.run(scenario, with_limits(max_body_bytes=10_000))


MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"model": "\xff", "messages": []}',
    b'{"model": "\\ud800", "messages": []}',
    b'{"model": "scripted", "messages": []} x',
    b"[" * 20_000 + b"]" * 20_000,
    b'{"a":' * 1000 + b"1" + b"}" * 1000,
    b'{"model":"scripted","messages":[{"role":"user","content":' + b"[" * 1000 + b"]" * 1000 + b"}]}",
    b'{"model":"scripted","messages":[{"role":"user","content":[{"type":"text","text":'
    + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}]}]}",
]  # fmt: skip


def test_i4_malformed_bodies_are_refused_whatever_their_depth(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for body in MALFORMED:
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
                await _refused(service, await _raw(service, path, body))
        await _still_serves(service)

    bench.run(scenario)


def test_i7_an_empty_or_shapeless_prompt_is_refused(bench: Bench) -> None:
    prompts: list[Any] = ["", [""], [], [[]], [[], [5]], [["x"]], None, {"a": 1}, ["a", "b"], [[1], [2]]]

    async def scenario(service: Service) -> None:
        for prompt in prompts:
            answer = await service.complete(prompt)
            await _refused(service, answer)
            assert answer.json["error"]["param"].startswith("prompt")
        await _still_serves(service)

    bench.run(scenario)


WITHOUT_TEXT: list[tuple[Any, str | None]] = [
    ([], "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "root", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], None),
    ([{"role": "user", "content": [{"type": "text"}]}], None),
    ("x", "messages"),
    (None, "messages"),
]


def test_i7_messages_without_text_are_refused(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for messages, param in WITHOUT_TEXT:
            answer = await service.post(CHAT, {"model": MODEL, "messages": messages})
            await _refused(service, answer, param)
            assert answer.json["error"]["param"].startswith("messages")

    bench.run(scenario)


def test_i7_text_without_ink_is_answered(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for content in ("", " \n", []):
            answer = await service.chat(content if content else [{"role": "user", "content": content}])
            assert answer.status == 200, answer.body

    bench.run(scenario)


def test_i8_token_limits_are_whole_and_positive(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for value in (0, -1, 1.5, "10", True, [], -(2**70)):
            await _refused(service, await service.chat(max_tokens=value), "max_tokens")
            await _refused(service, await service.chat(max_completion_tokens=value), "max_completion_tokens")
            await _refused(service, await service.complete("x", max_tokens=value), "max_tokens")
        for value in (-1, False):
            await _refused(service, await service.complete("x", max_tokens=value, echo=True), "max_tokens")
        await _still_serves(service)

    bench.run(scenario)


OUT_OF_RANGE: list[tuple[str, list[Any]]] = [
    ("temperature", [999_999, -1, 2.1, "hot", "NaN"]),
    ("top_p", [-1, 0, 1.0000001, 2]),
    ("top_k", [-2, 1.5, "x"]),
    ("min_p", [2, -0.1]),
    ("presence_penalty", [-3, 2.1, 1e30, "x"]),
    ("frequency_penalty", [-3, 2.1, 1e30, True]),
    ("repetition_penalty", [0, -3, 1e-30, 1e30]),
    ("prompt_logprobs", [-1, 21, 1_000_000, 1.5, True]),
    ("use_beam_search", [1, "yes"]),
    ("length_penalty", [1e30, -11, "x"]),
    ("early_stopping", ["never", 1]),
    ("min_tokens", [-1, 10**9]),
    ("seed", [1.5, "x"]),
    ("stop", ["", ["a", ""], ["x"] * 17, "x" * 2000, 5, [5]]),
    ("stop_token_ids", [[-1], [10**9], ["x"], 5, [1] * 300]),
    ("stream", ["yes", 1]),
    ("stream_options", [5, {"include_usage": "x"}, {"include_usage": True}]),
    ("cache_salt", ["", "x" * 5000, 5]),
    ("headstart", [5, {"ordr": "x"}, {"order": "x"}, {"hoist": 1}, {"fields": {"a": 1}}]),
]


def test_i9_values_out_of_range_are_refused_by_name(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for field, value in [(field, value) for field, values in OUT_OF_RANGE for value in values]:
            for answer in (await service.chat(**{field: value}), await service.complete("x", **{field: value})):
                await _refused(service, answer)
                assert answer.json["error"]["param"].startswith(field), (value, answer.body)
        await _still_serves(service)

    bench.run(scenario)


_NO_COUNTS: list[Any] = [-1, 1.5, "2", True, [1], {}, -(10**30)]
OPTIONS: list[tuple[str, list[Any], str]] = [
    *[(name, _NO_COUNTS, f"headstart.{name}") for name in ("keep_first", "keep_last", "max_displacement")],
    ("hint", [1, "yes", [True], {}], "headstart.hint"),
    ("order", ["", "random", "Cache-Aware", 1, True, ["canonical"], {}], "headstart.order"),
    ("hoist", ["", "on", 1, True, ["apply"], {}], "headstart.hoist"),
    ("template", ["absent", "", "greet@2", "greet@x", "x" * 5000, "\n"], "headstart.template"),
    ("template", [1, True, ["greet"], {}], "headstart.template"),
    ("fields", [{}, {"user": "Ann"}], "headstart.template"),
    ("fields", [1, "x", ["user"], {"user": 1}, {"user": None}, {"user": ["x"]}], "headstart.fields"),
]
FIELDS: list[dict[str, Any] | None] = [
    None,
    {},
    {"other": "x"},
    {"user": "Ann", "other": "x"},
    {"user": "two\nlines"},
    {"user": "x" * 5000},
]


@pytest.mark.parametrize(("name", "values", "place"), OPTIONS)
def test_i9_nonsense_in_the_headstart_object_is_refused_at_its_place(
    name: str, values: list[Any], place: str, bench: Bench
) -> None:
    async def scenario(service: Service) -> None:
        for value in values:
            answer = await service.chat(headstart={name: value})
            await _refused(service, answer)
            assert answer.json["error"]["param"].startswith(place), (value, answer.body)
        await _still_serves(service)

    bench.run(scenario, _with_template())


@pytest.mark.parametrize("fields", FIELDS)
def test_i9_fields_that_their_template_does_not_declare_are_refused(fields: Any, bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.chat(headstart={"template": "greet", "fields": fields})
        await _refused(service, answer)
        assert answer.json["error"]["param"].startswith("headstart.fields"), answer.body

    bench.run(scenario, _with_template())


@pytest.mark.parametrize("name", ["keep_first", "keep_last", "max_displacement"])
def test_i9_limits_beyond_all_documents_hold_them_all_or_none(name: str, bench: Bench) -> None:
    documents = [{"id": id, "text": "text"} for id in "cab"]

    async def scenario(service: Service) -> None:
        for value in (2**63 - 1, 10**30):
            answer = await service.chat(documents=documents, headstart={"order": "canonical", name: value})
            assert answer.status == 200, answer.body
            prompt = service.gateway.renderer.decode(list(service.replica.submitted[-1].token_ids))
            order = sorted("abc", key=lambda id: prompt.index(f"[Document {id}]"))
            assert order == list("abc" if name == "max_displacement" else "cab")

    bench.run(scenario)


def _with_template() -> Config:
    return msgspec.structs.replace(BASE, templates={"greet": TemplateConfig("Hello {user}.")})


def test_i9_what_is_no_number_in_json_is_refused(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1e999999"):
            body = b'{"model":"scripted","prompt":"x","temperature":' + number + b"}"
            await _refused(service, await _raw(service, COMPLETIONS, body))

    bench.run(scenario)


def test_i10_token_ids_outside_the_vocabulary_are_refused(bench: Bench) -> None:
    prompts: list[Any] = [[10**9], [-1], [1.5], ["a", 1], [True], [2**70], [[10**9]], [bench.vocab_size]]
    biases: list[Any] = [{"10000000": 5}, {"-1": 5}, {"x": 5}, {"5": 1e30}, {"5": -101}, {"5": "x"}, {"5": None}]
    biases += [{key: 5} for key in ("", " 5", "+5", "05", "5.0", "5_0", "\u0665", "5\n", "9" * 5000)]
    biases += [{str(bench.vocab_size): 5}, {str(token): 1 for token in range(5000)}, [5], 5]

    async def scenario(service: Service) -> None:
        for prompt in prompts:
            await _refused(service, await service.complete(prompt), "prompt")
        for bias in biases:
            answer = await service.complete("x", logit_bias=bias)
            await _refused(service, answer)
            assert answer.json["error"]["param"].startswith("logit_bias")
        await _still_serves(service)

    bench.run(scenario)


LOGPROBS: list[tuple[str, dict[str, Any], str]] = [
    *[("chat", {"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, 1_000_000, 1.5, True)],
    ("chat", {"top_logprobs": 5}, "top_logprobs"),
    ("chat", {"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
    ("chat", {"logprobs": 5}, "logprobs"),
    *[("complete", {"logprobs": value}, "logprobs") for value in (-1, 21, 1_000_000, 1.5, True)],
    ("complete", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("chat", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("complete", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
]


def test_f3_how_many_logprobs_may_be_asked_for_is_bounded(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for route, fields, param in LOGPROBS:
            await _refused(service, await getattr(service, route)("x", **fields), param)
        await _still_serves(service)

    bench.run(scenario)


def test_f3_logprobs_of_prompts_are_bounded_over_all_choices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_PROMPT_LOGPROBS", 100)
    prompt = bench.tokens(0, 25)

    async def scenario(service: Service) -> None:
        for fields in ({"prompt_logprobs": 4}, {"prompt_logprobs": 1, "n": 3}):
            await _refused(service, await service.complete(prompt, **fields), "prompt_logprobs")
        await _refused(service, await service.complete(prompt, echo=True, logprobs=4), "logprobs")
        assert (await service.complete(prompt, echo=True, logprobs=3)).status == 200
        assert (await service.complete(prompt, prompt_logprobs=1, n=2)).status == 200

    bench.run(scenario)


UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"response_format": {}}, "response_format"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("complete", {"suffix": "end"}, "suffix"),
]


def test_what_is_not_supported_is_refused_by_name(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for route, fields, param in UNSUPPORTED:
            await _refused(service, await getattr(service, route)("x", **fields), param)

    bench.run(scenario)


def test_neutral_values_of_unsupported_parameters_are_accepted(bench: Bench) -> None:
    neutral = {"n": 1, "length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}
    chat = {"logprobs": False, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto"}
    completion = {"echo": False, "suffix": "", "best_of": 1}

    async def scenario(service: Service) -> None:
        assert (await service.chat(**neutral, **chat)).status == 200
        assert (await service.complete("x", **neutral, **completion)).status == 200
        assert service.replica.submitted[0].sampling == service.replica.submitted[1].sampling == Sampling(8, 0.0)
        unknown = {"foo": {"bar": 1}, "guided_regex": "[", "chat_template": "{% for i in range(9) %}x{% endfor %}"}
        assert (await service.chat(**unknown)).status == 200

    bench.run(scenario)


def test_i6_patterns_for_guided_answers_reach_no_regular_expression(bench: Bench) -> None:
    catastrophic = {"name": "x", "schema": {"type": "string", "pattern": "(a+)+$"}}
    schema = {"type": "json_schema", "json_schema": catastrophic}

    async def scenario(service: Service) -> None:
        await _refused(service, await service.chat("a" * 64, response_format=schema), "response_format")
        text = (await service.chat("a" * 64)).text
        for pattern in ("[", "(a+)+$"):
            # Unknown fields are ignored, as the README says.
            answer = await service.chat("a" * 64, guided_regex=pattern, foo={"bar": 1})
            assert (answer.status, answer.text) == (200, text)
            completion = await service.complete("a" * 64, guided_regex=pattern, structured_outputs={"regex": pattern})
            assert completion.status == 200
        await _still_serves(service)

    bench.run(scenario)


def test_an_unknown_model_is_404(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for answer in (
            await service.chat(model="gpt-4"),
            await service.complete("x", model=""),
            await service.post("/tokenize", {"model": "gpt-4", "prompt": "x"}),
            await service.get("/v1/models/gpt-4"),
        ):
            assert answer.status == 404
            assert answer.json["error"]["code"] == "model_not_found"

    bench.run(scenario)


MISTAKES = [
    ("GET", "/v1", 404),
    ("GET", "/v1/nothing", 404),
    ("GET", CHAT, 405),
    ("PUT", COMPLETIONS, 405),
    ("DELETE", "/health", 405),
    ("GET", "/tokenize", 405),
    ("GET", "/admin/cache/reset", 405),
    ("GET", "/dashboard/static/../../../../etc/passwd", 404),
    ("GET", "/admin/stats?minutes=x", 400),
]


def test_every_error_has_openais_shape(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for method, path, status in MISTAKES:
            answer = await service.ask(method, path)
            assert answer.status == status
            assert answer.json["error"]["message"]
            assert answer.headers["x-request-id"]
            assert status != 405 or answer.headers["allow"]

    bench.run(scenario)


def test_tokenize_and_detokenize_check_their_bodies(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"messages": []}):
            await _refused(service, await service.post("/tokenize", body))
        for body in ({}, {"tokens": [10**9]}, {"tokens": [-1]}, {"tokens": "x"}, {"tokens": [1.5]}):
            await _refused(service, await service.post("/detokenize", body))
        tokens = (await service.post("/tokenize", {"prompt": "What a prefix shares"})).json
        assert tokens["count"] == len(tokens["tokens"]) > 0
        text = (await service.post("/detokenize", {"tokens": tokens["tokens"]})).json["prompt"]
        assert text == "What a prefix shares"
        assert (await service.post("/detokenize", {"tokens": []})).json["prompt"] == ""
        chat = {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"id": "a", "text": "b"}]}
        counted = (await service.post("/tokenize", chat)).json["count"]
        answered = await service.chat("Hi", documents=chat["documents"])
        assert answered.json["usage"]["prompt_tokens"] == counted

    bench.run(scenario)


def test_more_documents_than_any_model_takes_are_refused_unread(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        documents = [{"text": "x"}] * (MAX_DOCUMENTS + 1)
        await _refused(service, await service.chat(documents=documents), "documents")
        body = {"messages": [{"role": "user", "content": "x"}], "documents": documents}
        await _refused(service, await service.post("/tokenize", body), "documents")
        assert (await service.chat(documents=documents[1:])).status == 200  # all of them the same
        await _still_serves(service)

    bench.run(scenario)


def test_a_list_of_ids_that_is_too_long_is_not_looked_through(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for prompt in ([1] * 10_000, [1] * 10_000 + ["x"], [1.5] * 10_000):
            answer = await service.complete(prompt)
            await _refused(service, answer, "prompt")
            assert answer.json["error"]["code"] == "context_length_exceeded"
        await _refused(service, await service.complete([1, "x"]), "prompt")
        await _still_serves(service)

    bench.run(scenario)


def test_large_texts_are_not_tokenized_for_their_own_sake(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_MAX_BODY_BYTES", 1000)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "x" * 1000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1000}]}),
        ("/detokenize", {"tokens": [1] * 1000}),
    ]

    async def scenario(service: Service) -> None:
        for path, body in bodies:
            answer = await service.post(path, body)
            assert answer.status == 413
            assert answer.json["error"]["code"] == "payload_too_large"
        await _still_serves(service)

    bench.run(scenario)
