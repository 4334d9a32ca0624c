"""Log-probabilities, echoes and the best of several: what comes back, whole and as a stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from engine.scripted import scripted_continuation
from gateway.spelling import TokenSpellings

from .conftest import Answer, Bench, Service

STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def _usage(answer: Answer) -> dict[str, Any]:
    return answer.events[-2]["usage"] if "event-stream" in answer.headers["content-type"] else answer.json["usage"]


def _choices(answer: Answer, n: int = 1) -> list[tuple[str, list[Any]]]:
    """Text and log-probabilities of each choice, the latter one per token, of either route, streamed or not."""
    if "event-stream" not in answer.headers["content-type"]:
        return [(_text(choice), _entries(choice["logprobs"])) for choice in answer.json["choices"]]
    texts, entries = [""] * n, [[] for _ in range(n)]
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += _text(choice)
            entries[choice["index"]] += _entries(choice["logprobs"])
    return list(zip(texts, entries, strict=True))


def _text(choice: dict[str, Any]) -> Any:
    if "text" in choice:
        return choice["text"]
    return choice["message"]["content"] if "message" in choice else choice["delta"].get("content", "")


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return list(zip(*lists, strict=True))


@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_f3_a_chat_tells_of_each_token_streamed_or_not(bench: Bench, top: int | None) -> None:
    fields = {"logprobs": True, "max_tokens": 60} | ({} if top is None else {"top_logprobs": top})

    async def scenario(service: Service) -> None:
        whole = await service.chat(**fields)
        ((text, entries),) = _choices(whole)
        assert len(entries) == whole.json["usage"]["completion_tokens"] == 60
        data = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert data.decode("utf-8", "replace").removesuffix("\ufffd") == text.removesuffix("\ufffd")
        assert any(entry["token"] == "\ufffd" for entry in entries), "no token is part of a character"
        for entry in entries:
            assert len(entry["top_logprobs"]) == (top or 0)
            assert all(math.isfinite(other["logprob"]) for other in entry["top_logprobs"])
            if top:
                likeliest = entry["top_logprobs"][0]
                assert (likeliest["bytes"], likeliest["logprob"]) == (entry["bytes"], entry["logprob"])
        assert _choices(await service.chat(**fields, **STREAM)) == [(text, entries)]

    bench.run(scenario)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_f3_a_completion_tells_of_each_token_streamed_or_not(bench: Bench, count: int) -> None:
    async def scenario(service: Service) -> None:
        whole = await service.complete("one two", logprobs=count, max_tokens=40)
        ((text, entries),) = _choices(whole)
        assert len(entries) == whole.json["usage"]["completion_tokens"] == 40
        for token, logprob, top, offset in entries:
            assert top[token] >= logprob
            assert 1 <= len(top) <= count + 1
            assert "\ufffd" in token or token in text[offset : offset + 1 + len(token)]  # a torn character may end here
        assert _choices(await service.complete("one two", logprobs=count, max_tokens=40, **STREAM)) == [(text, entries)]

    bench.run(scenario)


def test_text_that_is_held_back_does_not_hold_back_its_tokens(bench: Bench) -> None:
    """With a stop string that always may have begun, and one that ends the text within a token."""

    async def scenario(service: Service) -> None:
        ((text, entries),) = _choices(await service.chat(logprobs=True, max_tokens=30))
        for stop in (text[-1] + "never", text[10:14]):
            fields = {"logprobs": True, "max_tokens": 30, "stop": stop}
            whole, stream = await service.chat(**fields), await service.chat(**fields, **STREAM)
            ((stopped, told),) = _choices(whole)
            assert _choices(stream) == [(stopped, told)]
            assert stopped == text.split(stop)[0]
            assert told == entries[: len(told)]
            assert len(told) == _usage(whole)["completion_tokens"] == _usage(stream)["completion_tokens"]

    bench.run(scenario)


def test_every_choice_has_logprobs_and_offsets_of_its_own(bench: Bench) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 5, "logprobs": 2, "max_tokens": 20}

    async def scenario(service: Service) -> None:
        whole = _choices(await service.complete("one", **fields))
        assert [len(entries) for _, entries in whole] == [20] * 3
        assert len({text for text, _ in whole}) == 3
        assert [entries[0][3] for _, entries in whole] == [0] * 3
        assert _choices(await service.complete("one", **fields, **STREAM), 3) == whole

    bench.run(scenario)


@pytest.mark.parametrize("as_ids", [False, True])
def test_f1_an_echo_tells_of_the_prompt_too_cold_and_warm(bench: Bench, as_ids: bool) -> None:
    text = "What a prefix shares is computed once. é漢字 " * 3
    ids = bench.tokenizer.encode(text).ids

    async def scenario(service: Service) -> None:
        prompt = ids if as_ids else text
        plain = await service.complete(prompt, max_tokens=5)
        for fields in ({}, STREAM, {}):
            answer = await service.complete(prompt, echo=True, logprobs=1, max_tokens=5, **fields)
            ((shown, entries),) = _choices(answer)
            assert shown == text + plain.text
            assert len(entries) == len(ids) + 5
            assert entries[0] == ("What", None, None, 0)
            assert [entry[3] for entry in entries[1:]] == sorted(entry[3] for entry in entries[1:])
            assert all(shown.startswith(token, at) for token, _, _, at in entries if "\ufffd" not in token)
            assert _usage(answer)["prompt_tokens"] == len(ids)
            without = await service.complete(prompt, echo=True, max_tokens=5, **fields)
            assert _choices(without) == [(shown, [])]
        assert _choices(await service.complete([prompt], echo=True, max_tokens=5, n=2)) == [(text + plain.text, [])] * 2

    bench.run(scenario)


def test_i8_an_echo_of_nothing_is_the_prompt(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for fields in ({}, STREAM):
            before = service.stats().totals
            answer = await service.complete("What a prefix", max_tokens=0, echo=True, logprobs=0, **fields)
            ((text, entries),) = _choices(answer)
            assert text == "What a prefix"
            assert len(entries) == _usage(answer)["prompt_tokens"] == _usage(answer)["total_tokens"]
            assert _usage(answer)["completion_tokens"] == 0
            last = answer.events[-3] if fields else answer.json
            assert last["choices"][0]["finish_reason"] == "length"
            after = service.stats().totals
            assert (after.requests, after.completion_tokens) == (before.requests + 1, before.completion_tokens)

    bench.run(scenario)


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_f1_prompt_logprobs_have_vllms_shape_cold_and_warm(bench: Bench, route: str) -> None:
    def rows(answer: Answer) -> list[Any]:
        return answer.json["prompt_logprobs"] if route == "chat" else answer.json["choices"][0]["prompt_logprobs"]

    async def scenario(service: Service) -> None:
        ask: Callable[..., Any] = getattr(service, route)
        text = "What a prefix shares. " * 4
        first, second = await ask(text, prompt_logprobs=2), await ask(text, prompt_logprobs=2)
        assert rows(first) == rows(second)
        ids = service.replica.submitted[0].token_ids
        assert len(rows(first)) == len(ids)
        assert rows(first)[0] is None
        for token, row in zip(ids[1:], rows(first)[1:], strict=True):
            assert 2 <= len(row) <= 3
            assert {1, 2, row[str(token)]["rank"]} == {entry["rank"] for entry in row.values()}
            spelled = TokenSpellings(bench.tokenizer).bytes_of(token).decode("utf-8", "replace")
            assert row[str(token)]["decoded_token"] == spelled
        assert "prompt_logprobs" not in (await ask(text)).body.decode()

    bench.run(scenario)


def test_an_echo_and_prompt_logprobs_show_as_many_alternatives_as_each_asks_for(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.complete("one two three", echo=True, logprobs=1, prompt_logprobs=4, max_tokens=1)
        (choice,) = answer.json["choices"]
        assert {len(row) for row in choice["prompt_logprobs"][1:]} <= {4, 5}
        assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}

    bench.run(scenario)


def test_the_best_of_several_are_those_with_the_likeliest_tokens(bench: Bench) -> None:
    fields = {"temperature": 1, "seed": 11, "max_tokens": 12}

    async def scenario(service: Service) -> None:
        everything = await service.complete("one", n=8, logprobs=0, **fields)
        means = [(sum(entry[1] for entry in entries) / 12, text) for text, entries in _choices(everything)]
        ranked = [text for _, text in sorted(means, reverse=True)]
        best = await service.complete("one", n=2, best_of=8, **fields)
        assert [choice["index"] for choice in best.json["choices"]] == [0, 1]
        assert _choices(best) == [(ranked[0], []), (ranked[1], [])]
        assert best.json["usage"] == everything.json["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
        assert best.json["usage"]["completion_tokens"] == 8 * 12
        (told,) = _choices(await service.complete("one", best_of=8, logprobs=3, **fields))
        assert told[0] == ranked[0]
        assert len(told[1]) == 12
        equal = await service.complete("one", n=2, best_of=2, **STREAM, **fields)
        assert equal.status == 200

    bench.run(scenario)


def test_fields_reach_the_engine_in_its_words(bench: Bench) -> None:
    async def sampling(service: Service, route: str, **fields: Any) -> Any:
        await getattr(service, route)("x", **fields)
        return service.replica.submitted[-1].sampling

    async def scenario(service: Service) -> None:
        penalties = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        for route in ("chat", "complete"):
            asked = await sampling(service, route, **penalties, logit_bias={"5": -100, "17": 2.5})
            assert asked.logit_bias == ((5, -100.0), (17, 2.5))
            assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (-2.0, 0.5, 1.1)
            assert (asked.logprobs, asked.prompt_logprobs, asked.beam_width) == (None, None, 0)
        assert (await sampling(service, "chat", logprobs=True)).logprobs == 0
        assert (await sampling(service, "chat", logprobs=True, top_logprobs=7)).logprobs == 7
        assert (await sampling(service, "chat", prompt_logprobs=3)).prompt_logprobs == 3
        assert (await sampling(service, "complete", best_of=2)).logprobs == 0
        asked = await sampling(service, "complete", logprobs=2, echo=True, max_tokens=0)
        assert (asked.logprobs, asked.prompt_logprobs, asked.max_tokens) == (2, 2, 1)

    bench.run(scenario)


def test_beams_are_asked_for_with_vllms_fields(bench: Bench) -> None:
    search = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}

    async def scenario(service: Service) -> None:
        await service.chat(n=3, **search)
        await service.complete("x", n=2, **search)
        await service.complete("x", n=2, best_of=5, stream=False, **search)
        for request, width, n in zip(service.replica.submitted, (3, 2, 5), (3, 2, 2), strict=True):
            sampling = request.sampling
            assert (sampling.beam_width, request.n) == (width, n)
            assert (sampling.length_penalty, sampling.early_stopping) == (0.5, True)

    bench.run(scenario)


def test_a_tiny_temperature_is_greedy(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(3, 30)
        greedy = _choices(await service.complete(prompt, temperature=1e-9, logprobs=1))
        assert greedy == _choices(await service.complete(prompt, temperature=0, logprobs=1))
        assert scripted_continuation(prompt, 8, vocab_size=bench.vocab_size)

    bench.run(scenario)
