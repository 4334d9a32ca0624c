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
