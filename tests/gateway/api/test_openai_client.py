"""The official client, unchanged, over a real socket."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI

from ..conftest import until
from .conftest import MODEL, Bench, Service

MESSAGES = [{"role": "system", "content": "Answer shortly."}, {"role": "user", "content": "What is cached?"}]
DOCUMENTS = [{"id": "b", "title": "B", "text": "Blocks. " * 20}, {"id": "a", "text": "Prefixes. " * 20}]


def _client(service: Service) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=service.url + "/v1", api_key="anything", max_retries=0)


def test_chat_with_documents_streamed_and_not(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            whole = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12, extra_body={"documents": DOCUMENTS}
            )
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 12
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12, extra_body={"documents": DOCUMENTS},
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == whole.choices[0].message.content
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.prompt_tokens == whole.usage.prompt_tokens
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == 16 * ((usage.prompt_tokens - 1) // 16)

    bench.run(scenario)


def test_completions_and_models(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            completion = await client.completions.create(model=MODEL, prompt=bench.tokens(0, 20), max_tokens=5)
            assert completion.usage is not None
            assert completion.usage.total_tokens == 25
            stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
            assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
            models = [model.id async for model in client.models.list()]
            assert models == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL
            raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1)
            assert raw.headers["x-headstart-replica"] == "engine-0"

    bench.run(scenario)


def test_errors_are_the_clients_own(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=17)
            assert wrong.value.param == "n"
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
            )
            await anext(aiter(stream))
            service.replica.lose()
            with pytest.raises(openai.APIError, match="lost"):
                async for _ in stream:
                    pass

    bench.run(scenario)


def test_closing_a_stream_aborts_it(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
            )
            await anext(aiter(stream))
            await stream.close()
            await until(lambda: service.replica.load is not None and service.replica.load.running == 0)
            assert service.stats().totals.aborted == 1

    bench.run(scenario)


def test_logprobs_of_a_chat_streamed_and_not(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            whole = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
            )
            told = whole.choices[0].logprobs
            assert told is not None
            assert told.content is not None
            assert len(told.content) == 12
            assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in told.content)
            data = b"".join(bytes(entry.bytes or ()) for entry in told.content)
            assert data.decode("utf-8", "ignore") in (whole.choices[0].message.content or "").replace("\ufffd", "")
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3, stream=True
            )
            chunks = [chunk.choices[0].logprobs async for chunk in stream]
            assert [entry for logprobs in chunks if logprobs for entry in logprobs.content or ()] == told.content

    bench.run(scenario)


def test_logprobs_echo_and_best_of_completions(bench: Bench) -> None:
    prompt = bench.tokens(0, 20)

    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            for max_tokens in (0, 5):
                whole = await client.completions.create(
                    model=MODEL, prompt=prompt, temperature=0, max_tokens=max_tokens, logprobs=2, echo=True
                )
                told = whole.choices[0].logprobs
                assert told is not None
                assert told.token_logprobs is not None
                assert len(told.token_logprobs) == len(told.text_offset or ()) == 20 + max_tokens
                assert told.token_logprobs[0] is None
                assert whole.choices[0].text.startswith(bench.tokenizer.decode(prompt))
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, temperature=0, max_tokens=5, logprobs=2, echo=True, stream=True
            )
            chunks = [chunk.choices[0].logprobs async for chunk in stream]
            assert [token for logprobs in chunks if logprobs for token in logprobs.tokens or ()] == told.tokens
            best = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, best_of=3, seed=1)
            assert len(best.choices) == 1
            assert best.usage is not None
            assert best.usage.completion_tokens == 15
            with pytest.raises(openai.BadRequestError) as streamed:
                await client.completions.create(model=MODEL, prompt=prompt, best_of=3, stream=True)
            assert streamed.value.param == "best_of"

    bench.run(scenario)


def test_penalties_and_biases_are_taken(bench: Bench) -> None:
    async def scenario(service: Service) -> None:
        async with _client(service) as client:
            await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=2, logit_bias={"7": -100}, presence_penalty=1
            )
            await client.completions.create(
                model=MODEL, prompt="x", max_tokens=2, logit_bias={"7": 3}, frequency_penalty=-0.5
            )
            chat, completion = (request.sampling for request in service.replica.submitted)
            assert (chat.logit_bias, chat.presence_penalty) == (((7, -100.0),), 1.0)
            assert (completion.logit_bias, completion.frequency_penalty) == (((7, 3.0),), -0.5)
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.completions.create(model=MODEL, prompt="x", logit_bias={"100000": 1})
            assert wrong.value.param == "logit_bias"

    bench.run(scenario)
