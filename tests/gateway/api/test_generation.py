"""The two generation routes: their shapes, their counts, their headers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.detokenize import IncrementalDetokenizer
from engine.scripted import scripted_continuation

from .conftest import MODEL, Answer, Bench, Service


def _content(events: list[Any]) -> str:
    """The text of a stream of either kind."""
    choices = [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def test_b1_a_prompt_that_is_cached_whole_is_answered_alike(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answers = [await service.complete(bench.tokens(0, 32)) for _ in range(3)]
        assert [answer.status for answer in answers] == [200] * 3
        assert [answer.cached for answer in answers] == [0, 16, 16]
        assert len({answer.text for answer in answers}) == 1

    bench.run(scenario)


def test_b2_hits_are_exact_at_block_boundaries(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for count in (1, 15, 16, 17, 31, 32, 33, 48, 49):
            runs = [await service.complete(bench.tokens(100 * count, count), max_tokens=4) for _ in range(3)]
            assert [run.cached for run in runs] == [0, 16 * ((count - 1) // 16), 16 * ((count - 1) // 16)]
            assert len({run.text for run in runs}) == 1

    bench.run(scenario)


def test_a_chat_answer_has_openais_shape(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.chat("What is cached?", max_tokens=5)
        body = answer.json
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["model"] == MODEL
        (choice,) = body["choices"]
        assert choice["index"] == 0
        assert choice["finish_reason"] == "length"
        assert choice["message"]["role"] == "assistant"
        usage = body["usage"]
        assert usage["completion_tokens"] == 5
        assert usage["total_tokens"] == usage["prompt_tokens"] + 5

    bench.run(scenario)


def test_a_completion_answers_with_the_engines_text(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(5, 20)
        expected = scripted_continuation(prompt, 8, vocab_size=bench.vocab_size)
        answer = await service.complete(prompt)
        detokenizer = IncrementalDetokenizer(bench.tokenizer)
        text = "".join(detokenizer.push(token)[0] for token in expected) + detokenizer.finish()
        assert answer.text == text
        assert answer.json["object"] == "text_completion"
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert service.replica.submitted[-1].token_ids == prompt

    bench.run(scenario)


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_m3_stream_and_answer_agree(bench: Bench, route: str) -> None:
    async def scenario(service: Service) -> None:
        ask = getattr(service, route)
        prompt = "w " * 50
        cold = await ask(prompt)
        warm = await ask(prompt)
        stream = await ask(prompt, stream=True, stream_options={"include_usage": True})
        assert cold.cached == 0
        assert warm.cached > 0
        assert warm.cached <= warm.json["usage"]["prompt_tokens"] - 1
        *events, last, done = stream.events
        assert done == "[DONE]"
        assert last["choices"] == []
        assert last["usage"] == warm.json["usage"]
        assert all(event["usage"] is None for event in events)
        assert _content(events) == warm.text == cold.text
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert len({event["id"] for event in [*events, last]}) == 1

    bench.run(scenario)


def test_a_stream_without_usage_says_nothing_of_it(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for ask in (service.chat, service.complete):
            answer = await ask("hello", stream=True)
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, done = answer.events
            assert done == "[DONE]"
            assert all("usage" not in event for event in events)
            assert sum(event["choices"][0]["finish_reason"] is not None for event in events) == 1

    bench.run(scenario)


def test_a_chat_stream_names_the_role_first(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        first, *_ = (await service.chat(stream=True)).events
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    bench.run(scenario)


def test_h8_limits_and_ends_are_counted_exactly(bench: Bench) -> None:
    prompt = bench.tokens(0, 24)
    continuation = scripted_continuation(prompt, 20, vocab_size=bench.vocab_size)
    k = next(i for i in range(5, 20) if continuation[i] not in continuation[:i]) + 1
    eos = continuation[k - 1]

    async def finish(service: Service, stream: bool, **fields: Any) -> tuple[str, int]:
        if not stream:
            answer = (await service.complete(prompt, **fields)).json
            assert answer["usage"]["total_tokens"] == answer["usage"]["completion_tokens"] + len(prompt)
            return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, end, usage, _ = (await service.complete(prompt, **fields, **options)).events
        return end["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]

    async def scenario(service: Service) -> None:
        for stream in (False, True):
            for limit in (1, 5, k + 2):
                assert await finish(service, stream, max_tokens=limit, ignore_eos=True) == ("length", limit)
            assert await finish(service, stream, max_tokens=k - 1) == ("length", k - 1)
            assert await finish(service, stream, max_tokens=k) == ("stop", k)
            assert await finish(service, stream, max_tokens=k + 1) == ("stop", k)

    bench.run(scenario, eos_token_ids=[eos])


def test_e8_the_enforced_limit_is_the_announced_one(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        (card,) = (await service.get("/v1/models")).json["data"]
        limit = card["max_model_len"]
        assert limit == 256
        assert card["root"] == str(bench.folder)
        for count in (limit, limit + 1, 10 * limit):
            answer = await service.complete(bench.tokens(0, count))
            assert answer.status == 400
            assert answer.json["error"]["code"] == "context_length_exceeded"
            assert str(limit) in answer.json["error"]["message"]
        long_chat = await service.chat("word " * 10_000)
        assert long_chat.json["error"]["code"] == "context_length_exceeded"
        assert service.replica.submitted == []
        longest = await service.complete(bench.tokens(0, limit - 1), max_tokens=50)
        assert longest.json["usage"]["completion_tokens"] == 1
        assert (await service.complete(bench.tokens(0, 10))).status == 200

    bench.run(scenario, max_model_len=256)


def test_an_answer_may_fill_the_context_and_no_more(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        for fields in ({"max_tokens": None}, {"max_tokens": 10**9}, {"max_tokens": 2**64}):
            answer = await service.chat("hi", ignore_eos=True, **fields)
            assert answer.json["usage"]["total_tokens"] == 128
        assert (await service.complete("hi", max_tokens=None)).json["usage"]["completion_tokens"] == 16
        both = await service.chat("hi", max_tokens=9, max_completion_tokens=3)
        assert both.json["usage"]["completion_tokens"] == 3

    bench.run(scenario, max_model_len=128)


def test_headers_tell_what_was_done(bench: Bench) -> None:
    documents = [{"id": "b", "text": "Second. " * 10}, {"id": "a", "text": "First. " * 10}]

    async def scenario(service: Service) -> None:
        asked = {"documents": documents, "headstart": {"order": "canonical"}}
        cold, warm = await service.chat("Which?", **asked), await service.chat("Which?", stream=True, **asked)
        prompt_tokens = cold.json["usage"]["prompt_tokens"]
        for answer, cached in ((cold, 0), (warm, 16 * ((prompt_tokens - 1) // 16))):
            assert answer.headers["x-headstart-replica"] == "engine-0"
            assert answer.headers["x-headstart-order"] == "canonical"
            assert answer.headers["x-headstart-prompt-tokens"] == str(prompt_tokens)
            assert answer.headers["x-headstart-cached-tokens"] == str(cached)
            assert "x-headstart-note" not in answer.headers
        plain = await service.chat("Which?")
        assert plain.headers["x-headstart-order"] == "none"
        assert plain.headers["x-headstart-note"]

    bench.run(scenario)


def test_a_bypass_neither_reads_nor_fills_the_cache(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(0, 40)
        assert [(await service.complete(prompt, headstart={"bypass": True})).cached for _ in range(2)] == [0, 0]
        assert [(await service.complete(prompt)).cached for _ in range(2)] == [0, 32]

    bench.run(scenario)


def test_a_salt_keeps_prompts_apart(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        prompt = bench.tokens(0, 40)
        cached = [(await service.complete(prompt, cache_salt=salt)).cached for salt in ("a", "b", "a", "b")]
        assert cached == [0, 0, 32, 32]

    bench.run(scenario)


def test_stop_strings_and_seeds_reach_the_engine(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        answer = await service.complete(
            "x", stop=["\n", "END"], seed=-1, temperature=1e-9, top_k=10**9, top_p=0.5, min_p=0.1, min_tokens=2
        )
        assert answer.status == 200
        sampling = service.replica.submitted[-1].sampling
        assert sampling.stop == ("\n", "END")
        assert sampling.temperature == 0.0
        assert (sampling.top_p, sampling.min_p, sampling.min_tokens) == (0.5, 0.1, 2)
        assert sampling.top_k == bench.vocab_size
        assert sampling.seed == 2**63 - 1
        await service.complete("x", temperature=None, stop="s")
        sampling = service.replica.submitted[-1].sampling
        assert (sampling.temperature, sampling.stop, sampling.seed, sampling.top_k) == (1.0, ("s",), None, 0)

    bench.run(scenario)


def _texts(answer: Answer, n: int) -> list[str]:
    """The text of each choice, of an answer or of a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == [*range(n)]
        return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
    assert answer.events[-1] == "[DONE]"
    texts = [""] * n
    ended: list[int] = []
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            assert choice["index"] not in ended
            texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if choice["finish_reason"] is not None:
                ended.append(choice["index"])
    assert sorted(ended) == [*range(n)]
    return texts


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_d4_choices_differ_are_reproducible_and_count_the_prompt_once(bench: Bench, route: str) -> None:
    async def scenario(service: Service) -> None:
        ask = getattr(service, route)
        fields = {"n": 4, "temperature": 1, "seed": 7, "max_tokens": 24}
        prompt = "tell me something about blocks " * 4
        first = await ask(prompt, **fields)
        texts = _texts(first, 4)
        assert len(set(texts)) == 4
        usage = first.json["usage"]
        assert usage["completion_tokens"] == 4 * 24
        assert usage["prompt_tokens"] == int(first.headers["x-headstart-prompt-tokens"])
        assert usage["total_tokens"] == usage["prompt_tokens"] + 96
        warm = await ask(prompt, **fields)
        assert _texts(warm, 4) == texts
        assert 0 < warm.cached < usage["prompt_tokens"]
        await service.replica.call("reset_cache")
        assert _texts(await ask(prompt, **fields), 4) == texts
        streamed = await ask(prompt, **fields, stream=True, stream_options={"include_usage": True})
        assert _texts(streamed, 4) == texts
        assert streamed.events[-2]["usage"]["completion_tokens"] == 96
        alone = await ask(prompt, **{**fields, "n": 1})
        assert _texts(alone, 1) == texts[:1]

    bench.run(scenario)


def test_choices_that_end_at_different_times_are_all_complete(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        fields = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 24}
        texts = _texts(await service.complete("one two", **fields), 3)
        stop = next(text for text in texts[1].split() if all(text not in other for other in (texts[0], texts[2])))
        for stream in (False, True):
            answer = await service.complete("one two", **fields, stop=stop, stream=stream)
            assert _texts(answer, 3) == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]

    bench.run(scenario)


def test_every_request_leaves_one_record_equal_to_its_usage(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        usages = []
        for start in (0, 0, 50):
            usages.append((await service.complete(bench.tokens(start, 40))).json["usage"])
            options = {"stream": True, "stream_options": {"include_usage": True}}
            usages.append((await service.chat("again", **options)).events[-2]["usage"])
        totals = service.stats().totals
        assert totals.requests == len(usages)
        assert totals.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
        assert totals.completion_tokens == sum(usage["completion_tokens"] for usage in usages)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert totals.cached_prompt_tokens == cached > 0
        assert totals.saved_prefill_s > 0

    bench.run(scenario)
